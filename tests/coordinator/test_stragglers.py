"""Sites that are slow: named to the operator, waited for as the study says, and never left out in silence."""

import threading
from typing import Any

import pytest

from coordinator.cli.printing import print_status
from coordinator.study_answers import StudyStatus
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import delta
from tests.coordinator.test_rounds import SPECS
from wardround.v1 import federation_pb2 as pb

PAIR = {"sites": ["alpha", "bravo"], "quorum": 1}


def shown(place: Place, capsys: pytest.CaptureFixture[str]) -> str:
    print_status(StudyStatus.from_document(place.status()))
    return capsys.readouterr().out


def test_a_site_that_is_always_late_is_named_to_the_operator(
    place: Place, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    alpha, _ = place.begin(**PAIR, rounds=5, round_deadline_s=2)
    for number in range(1, 4):
        alpha.answer(alpha.next_assignment())
        place.until(lambda status, number=number: status["round"] > number)
        said = "site bravo did not answer in time in any of its last 3 rounds" in caplog.text
        assert said == (number == 3)
    status = place.status()
    assert status["sites"]["bravo"]["rounds_late"] == [1, 2, 3]
    assert status["sites"]["bravo"]["always_late"]
    assert not status["sites"]["alpha"]["always_late"]
    text = shown(place, capsys)
    assert "did not answer in time: bravo in rounds 1, 2, 3" in text
    assert "always late: bravo, in each of its last rounds; ask its people why" in text
    assert "the round ends when all have answered, or at 20" in text


def test_an_update_that_is_on_its_way_at_the_deadline_counts_where_the_study_says_so(place: Place) -> None:
    alpha, bravo = place.begin(**PAIR, round_deadline_s=3, late_updates="finish")
    alpha.answer(alpha.next_assignment())
    assignment = bravo.next_assignment()
    update = delta("bravo", 1, SPECS)
    opening = bravo.opening(assignment, update)
    moved = threading.Event()

    def requests() -> Any:
        yield pb.UploadRequest(open=opening)
        moved.wait(20)
        yield pb.UploadRequest(chunk=pb_chunk(update.payload))
        yield pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=bytes.fromhex(update.manifest.digest())))

    call = bravo.federation.Upload(requests(), timeout=20)
    assert next(call).offset == 0
    before = place.status()["deadline"]
    place.until(lambda status: status["deadline"] != before)  # it is past, and the round waits
    moved.set()
    assert [reply.WhichOneof("kind") for reply in call][-1] == "receipt"
    status = place.until(lambda status: status["round"] == 2)
    assert status["sites"]["bravo"]["rounds_contributed"] == [1]


def pb_chunk(data: bytes) -> Any:
    return pb.UploadRequest(chunk={"offset": 0, "data": data}).chunk


def test_a_site_that_expects_to_be_late_says_so_before_the_deadline(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha, bravo = place.begin(**PAIR, round_deadline_s=60)
    assignment = bravo.next_assignment()
    bravo.declare("trial", pb.TRAINING, round=assignment.round, attempt=assignment.attempt, estimate_s=600)
    status = place.until(lambda status: status["sites"]["bravo"]["expected"] is not None)
    assert status["sites"]["bravo"]["expects_to_be_late"]
    assert "expects to be late: bravo, which expects to have trained at 20" in shown(place, capsys)
    bravo.answer(assignment)
    alpha.answer(alpha.next_assignment())
    status = place.until(lambda status: status["round"] == 2)
    assert status["sites"]["bravo"]["expected"] is None
    assert not status["sites"]["bravo"]["expects_to_be_late"]
