"""Who took part and who did not: what an operator is told of it, from a study's rounds and its state alone."""

import json

import pytest

from coordinator.cli import studies
from coordinator.cli.printing import print_status
from coordinator.storage import tables
from coordinator.studies import participation
from coordinator.studies.participation import (
    absences,
    attempts_left,
    attempts_spent,
    reasons,
    slow_sites,
    usual_seconds,
)
from coordinator.studies.state import Answer, Kind, Phase, Round, StudyState
from coordinator.study_answers import StudyStatus
from fl_algorithms.server.limits import Account
from tests.coordinator.conftest import Place

SITES = ("alpha", "bravo", "charlie")


def row(number: int, answers: dict[str, tuple[str, str]], outcome: str = "closed", **changes: object) -> tables.Round:
    """A closed attempt. ``answers``: site -> kind and code; who is not in it did not answer."""
    account = json.dumps(Account(left_out=changes.pop("left_out", {})).document())  # type: ignore[arg-type]
    kept = {site: [kind, code, ""] for site, (kind, code) in answers.items()}
    return tables.Round(**{
        "study": "trial", "revision": 1, "number": number, "attempt": 1, "closing": False, "base": "",
        "asked": json.dumps(SITES), "opened_s": 0.0, "closed_s": 1.0, "outcome": outcome,
        "answers": json.dumps(kept), "account": account, **changes,
    })  # fmt: skip


def told(rounds: list[tables.Round]) -> dict[str, list[tuple[int, str, str]]]:
    return {
        site: [(absence.round, absence.why, absence.code) for absence in found]
        for site, found in absences(rounds).items()
    }


def test_each_way_of_not_being_in_a_model_is_named_by_its_code() -> None:
    rounds = [
        row(1, {"alpha": ("accepted", ""), "bravo": ("declined", "DECLINED_DATA_CHANGED")}),
        row(2, {"alpha": ("accepted", ""), "bravo": ("refused", "TENSOR_NORM"), "charlie": ("withdrawn", "WITHDRAWN")}),
        row(3, dict.fromkeys(SITES, ("accepted", "")), left_out={"charlie": "its norm is beyond the limit"}),
        row(4, {"alpha": ("left_out", "TENSOR_NOT_FINITE"), "bravo": ("accepted", ""), "charlie": ("accepted", "")}),
    ]
    assert told(rounds) == {
        "alpha": [(4, "left_out", "TENSOR_NOT_FINITE")],
        "bravo": [(1, "declined", "DECLINED_DATA_CHANGED"), (2, "refused", "TENSOR_NORM")],
        "charlie": [(1, "late", ""), (2, "withdrawn", "WITHDRAWN"), (3, "left_out", "TENSOR_NORM")],
    }


def test_what_waits_for_another_attempt_or_was_never_a_round_is_no_absence() -> None:
    accepted = dict.fromkeys(SITES, ("accepted", ""))
    rounds = [
        row(1, {"alpha": ("accepted", ""), "bravo": ("accepted", "")}, "failed"),
        row(1, accepted, attempt=2),
        row(2, {}, "stopped"),
        row(2, {}, closing=True),
        row(3, {}, closed_s=None, outcome=None),
    ]
    assert told(rounds) == {"charlie": [(1, "late", "")]}


def test_reasons_count_what_happened_again() -> None:
    rounds = [row(number, {"alpha": ("declined", "DECLINED_POLICY")}) for number in (1, 2)] + [row(3, {})]
    assert reasons(absences(rounds)["alpha"]) == {"declined DECLINED_POLICY": 2, "late": 1}


def state(attempt: int, *, is_open: bool, phase: Phase = Phase.RUNNING, **answers: Kind) -> StudyState:
    """Round 3 in its ``attempt``, open or failed."""
    given = {site: Answer(kind) for site, kind in answers.items()}
    current = Round(3, attempt, SITES, given, deadline=60)
    return StudyState(phase, models=2, round=current if is_open else None, last=None if is_open else current)


@pytest.mark.parametrize(
    ("present", "left", "spent"),
    [
        pytest.param(StudyState(), 8, set(), id="no round yet"),
        pytest.param(state(1, is_open=True), 7, set(), id="the first is open"),
        pytest.param(state(8, is_open=True), 0, set(), id="the last is open, and can be answered"),
        pytest.param(
            state(8, is_open=False, phase=Phase.PAUSED, alpha=Kind.ACCEPTED), 0, {"bravo", "charlie"}, id="it failed"
        ),
        pytest.param(
            state(9, is_open=True, alpha=Kind.ACCEPTED, bravo=Kind.DECLINED), 0, {"bravo", "charlie"}, id="one beyond"
        ),
        pytest.param(state(8, is_open=False, phase=Phase.STOPPED), 0, set(), id="it has ended"),
    ],
)
def test_a_site_whose_attempts_are_spent_is_known(present: StudyState, left: int, spent: set[str]) -> None:
    assert (attempts_left(present), attempts_spent(present)) == (left, spent)


def test_a_round_that_closed_begins_with_all_its_attempts() -> None:
    closed = Round(2, 8, SITES, {}, deadline=60)
    assert attempts_left(StudyState(Phase.RUNNING, models=2, last=closed)) == 8


def test_a_site_is_slow_that_takes_more_than_twice_as_long_as_the_others() -> None:
    seconds = usual_seconds({"alpha": (60, 50, 70), "bravo": (55,), "charlie": (50, 400, 200), "delta": ()})
    assert seconds == {"alpha": 60, "bravo": 55, "charlie": 200}
    assert slow_sites(seconds) == {"charlie"}
    assert slow_sites({"alpha": 60, "bravo": 130}) == {"bravo"}
    assert slow_sites({"alpha": 0.1, "bravo": 3.0}) == frozenset()  # nobody waits for that
    assert slow_sites({"alpha": 500}) == frozenset()


def test_a_site_whose_attempts_are_spent_is_named_with_the_way_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(participation, "ATTEMPTS_APPROVED", 2)
    alpha, bravo = place.begin(sites=["alpha", "bravo"])
    alpha.answer(alpha.next_assignment())
    for _ in range(2):  # after which the study pauses, and a third attempt would be beyond what was approved
        bravo.decline(bravo.next_assignment(), "DECLINED_RESOURCES")
    status = StudyStatus.from_document(place.until(lambda status: status["state"] == "paused"))
    assert status.attempts_left == 0
    assert [name for name, site in status.sites.items() if site.attempts_spent] == ["bravo"]
    print_status(status)
    said = capsys.readouterr().out
    assert "consents spent: bravo approved 8 attempts at a round, and decline more\n" in said
    assert "`coordinator study renew trial` begins a new revision, which each site approves" in said
    assert "not in the model: bravo: declined DECLINED_RESOURCES, 2 times" in said
    studies._say_state(status)
    assert "bravo: the attempts at round 1 that were approved are spent" in capsys.readouterr().err
