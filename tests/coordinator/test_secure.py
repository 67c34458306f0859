"""Studies with secure aggregation over real gRPC: the coordinator's part, at each step and over restarts."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from coordinator.cli.metrics import HEADS, csv_rows, print_metrics
from coordinator.cli.printing import print_status
from coordinator.storage import tables
from coordinator.studies.curves import curves
from coordinator.studies.metrics import metrics_of
from coordinator.studies.page import page
from coordinator.study_answers import StudyReport, StudyStatus
from tests.coordinator.conftest import SITES, Place, refused
from tests.coordinator.fake_site import WAIT_S, delta
from tests.coordinator.secure_site import Member, begun, train, whole_round
from tests.coordinator.test_rounds import SPECS, model_bytes
from wardround.errors import BadData, NeedsPerson
from wardround.records import secure_round
from wardround.records.secure_messages import BlockDigests, BlocksWanted, SumEvidence, Told, blocks_from
from wardround.secure.layout import Blocks
from wardround.secure.opening import Group, OpenedSecrets
from wardround.secure.statements import Keys, Submission, known
from wardround.secure.sums import Evidence
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import secure_pb2


def expected(place: Place, rounds: list[tuple[str, ...]]) -> list[bytes]:
    """The integers' formula without any mask."""
    file = place.coordinator.engine.find("trial")
    assert file is not None
    quantizer = secure_round.layout_of(file.resolved.file, SPECS).quantizer
    model = [np.zeros(2, "<f4"), np.ones((2, 3), "<f4")]
    for number, sites in enumerate(rounds, start=1):
        updates = [delta(site, number, SPECS) for site in sites]
        weight = sum(update.num_examples for update in updates)
        for index, tensor in enumerate(model):
            total = np.zeros(tensor.size, np.uint32)
            for update in updates:
                total += quantizer.quantized(np.frombuffer(update.tensors[index][1], "<f4"), update.num_examples)
            model[index] = (quantizer.mean(total, weight).reshape(tensor.shape) + tensor).astype("<f4")
    return [tensor.tobytes() for tensor in model]


def test_a_study_runs_to_its_end_and_its_model_is_the_sum_of_the_integers(place: Place) -> None:
    members = begun(place)
    for _ in range(3):  # two rounds, and the closing validation
        whole_round(members)
    status = place.until(lambda status: status["state"] == "finished")
    assert {site: row["rounds_contributed"] for site, row in status["sites"].items()} == {s: [1, 2] for s in SITES}
    assert model_bytes(place) == expected(place, [SITES, SITES])
    assert status["best"]["val_loss"] == pytest.approx(min(mean_loss(2), mean_loss(3)), abs=1e-6)


def mean_loss(round_number: int) -> float:
    updates = [delta(site, round_number, SPECS) for site in SITES]
    rows = [update.num_validation for update in updates]
    return float(np.average([float(update.metrics[0][1]) for update in updates], weights=rows))


def test_no_count_and_no_metric_of_one_site_is_in_the_report(place: Place) -> None:
    whole_round(begun(place, rounds=1))
    report = place.ask("report", study="trial")
    place.until(lambda status: status["closing"])
    answers = [row for attempt in report["attempts"] for row in attempt["answers"].values()]
    assert answers
    assert all(not row.get("metrics") and not row.get("num_examples") for row in answers)


def test_the_metrics_of_each_model_are_those_of_the_sum_and_of_no_site(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    members = begun(place)
    for _ in range(3):
        whole_round(members)
    place.until(lambda status: status["state"] == "finished")
    report = StudyReport.model_validate(place.ask("report", study="trial"))
    reported = metrics_of(report)
    assert (reported.sums_alone, reported.reported) == (True, ())
    assert [(one.model, one.sites) for one in reported.means] == [(0, 3), (1, 3), (2, 3)]
    assert [value for _, value in reported.mean_curve("val_loss")] == pytest.approx(
        [mean_loss(number) for number in (1, 2, 3)], abs=1e-6
    )
    print_metrics(reported, ("val_loss",))
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "trial, revision 1: sums over 3 hospitals of each model; model 0 is the initial one"
    assert [line.split()[:3] for line in rows if line.strip().startswith("sum")] == [["sum", "of", "3"]]
    assert last.endswith("with secure aggregation none knows more")
    print_metrics(reported, ("val_loss",), every=True)
    assert f"{mean_loss(1):.4g}" in capsys.readouterr().out
    cells = [dict(zip(HEADS, row, strict=True)) for row in csv_rows(reported, reported.metrics)]
    assert [(row["site"], row["model"], row["round"], row["closing"], row["rows"]) for row in cells] == [
        ("sum of 3", "0", "1", "no", ""), ("sum of 3", "1", "2", "no", ""), ("sum of 3", "2", "3", "yes", "")
    ]  # fmt: skip
    assert set(curves(report, reported).series) == {"mean/val_loss"}
    shown = page(report, reported)
    assert "With secure aggregation that is all that is known: nobody knows one site&#39;s." in shown
    for site in SITES:
        for number in (1, 2, 3):
            own = delta(site, number, SPECS).metrics[0][1]
            assert own not in shown + json.dumps(reported.document())


STEPS: list[tuple[str, Callable[[Member], object]]] = [
    ("keys", lambda member: member.begin(member.fake.next_assignment())),
    ("shares", Member.deal),
    ("joined", Member.join),
    ("vectors", Member.upload),
    ("agreement", Member.agree),
    ("opening", Member.open),
]


@pytest.mark.parametrize("killed", [name for name, _ in STEPS])
def test_the_coordinator_restarts_into_the_same_step(place: Place, killed: str) -> None:
    members = begun(place, rounds=1)
    for name, step in STEPS:
        step(members[0])
        if name == killed:
            place.restart()
            for member in members:
                member.fake.watch_again()
        for member in members[1:]:
            step(member)
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected(place, [SITES])


def test_a_site_that_sends_no_vector_is_left_out_of_the_sum_and_its_masks_are_taken_out(place: Place) -> None:
    sites = ("alpha", "bravo", "charlie", "dora")
    members = begun(place, rounds=1, sites=list(sites), quorum=3, round_deadline_s=4)
    for name, step in STEPS:
        for member in members if name in ("keys", "shares", "joined") else members[:3]:
            step(member)
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected(place, [sites[:3]])


def test_an_attempt_with_too_few_keys_is_void_and_the_round_is_asked_again(place: Place) -> None:
    members = begun(place, rounds=1, round_deadline_s=3)
    for member in members[:2]:
        member.begin(member.fake.next_assignment())
    place.until(lambda status: status["attempt"] == 2)
    members[2].fake.next_assignment()  # of the attempt that is void
    whole_round(members)
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected(place, [SITES])


def test_a_chosen_set_waits_beyond_the_deadline_and_over_a_pause(place: Place) -> None:
    members = begun(place, rounds=1, round_deadline_s=3)
    train(members)
    members[0].agree()
    with place.coordinator.context.store.read() as session:
        assert session.query(tables.SecureAttempt).count() == 1
    members[1].fake.decline(members[1].assignment, "DECLINED_POLICY")
    status = place.until(lambda status: status["state"] == "paused")
    assert "bravo (DECLINED_POLICY)" in status["why"]
    place.restart()
    for member in members:
        member.fake.watch_again()
        member.fake.declare("trial")
    place.ask("start", study="trial")
    for member in members:
        member.agree()
    for member in members:
        member.open()
    place.until(lambda status: status["closing"])
    assert place.ask("report", study="trial")["attempts"][0]["attempt"] == 1
    assert model_bytes(place) == expected(place, [SITES])


def evidence_of(member: Member, round_number: int) -> tuple[SumEvidence, Evidence]:
    request = secure_pb2.EvidenceRequest(study="trial", revision=1, round=round_number)
    shown = SumEvidence.from_message(member.stub.Evidence(request, timeout=WAIT_S))
    group = Group(member.state.context, tuple(known(Keys, one) for one in shown.keys))
    submissions = tuple(known(Submission, one) for one in shown.submissions)
    opened = OpenedSecrets(shown.self_masks, shown.mask_keys)
    return shown, Evidence(member.layout, group, submissions, opened)


def blocks_of(member: Member, round_number: int, site: str, index: int) -> tuple[Blocks, bytes]:
    request = BlocksWanted("trial", 1, round_number, site, (index,)).to_message()
    first, block = (blocks_from(reply) for reply in member.stub.Blocks(request, timeout=WAIT_S))
    assert isinstance(first, BlockDigests)
    assert not isinstance(block, BlockDigests)
    return Blocks(first.digests), block.data


def test_a_member_checks_the_sum_until_the_next_round_has_closed(place: Place) -> None:
    members = begun(place)
    whole_round(members)
    place.until(lambda status: status["round"] == 2)
    shown, evidence = evidence_of(members[0], 1)
    assert shown.model == place.status()["model_digest"]
    vectors = {site: blocks_of(members[0], 1, site, 0) for site in SITES}
    numbers = evidence.numbers({site: blocks_of(members[0], 1, site, evidence.layout.blocks) for site in SITES})
    updates = [delta(site, 1, SPECS) for site in SITES]
    assert numbers.weight == sum(update.num_examples for update in updates)
    total = evidence.layout.quantizer.mean(evidence.block(0, vectors), numbers.weight)
    assert (total + np.array([0] * 2 + [1] * 6, "<f4")).astype("<f4").tobytes() == b"".join(model_bytes(place))
    blocks, data = vectors["alpha"]
    altered = {**vectors, "alpha": (blocks, bytes([data[0] ^ 1]) + data[1:])}
    with pytest.raises(BadData, match="block 0 of site `alpha`"):
        evidence.block(0, altered)
    whole_round(members)
    place.until(lambda status: status["closing"])
    with refused("ROUND_CLOSED"):
        evidence_of(members[0], 1)
    evidence_of(members[1], 2)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"num_examples": 10}, "COUNT_INVALID"),
        ({"num_validation": 10}, "COUNT_INVALID"),
        ({"metrics": [pb.Metric(name="val_loss", value="0.5")]}, "METRICS_UNDECLARED"),
        ({"submission": None}, "PAYLOAD_DIGEST"),
    ],
)
def test_an_upload_with_a_number_in_clear_or_without_its_signed_digest_is_refused(
    place: Place, changed: dict[str, object], code: str
) -> None:
    members = begun(place, rounds=1)
    for _, step in STEPS[:3]:
        for member in members:
            step(member)
    receipt = members[0].upload(**changed)
    assert (receipt.decision, receipt.code) == ("refused", code)


def test_rows_and_times_in_clear_are_refused(place: Place) -> None:
    members = begun(place, rounds=1)
    site, assignment = members[0].fake, members[0].fake.next_assignment()
    with refused("COUNT_INVALID"):
        site.declare("trial", pb.FITS, rows=10)
    with refused("COUNT_INVALID"):
        site.declare("trial", pb.TRAINING, round=assignment.round, attempt=1, estimate_s=60)
    site.declare("trial", pb.FITS)


def test_what_another_site_signed_and_what_comes_too_late_is_refused(place: Place) -> None:
    members = begun(place, rounds=1)
    alpha, bravo, _ = members
    for member in members[:2]:
        member.begin(member.fake.next_assignment())
    with refused("MESSAGE_MALFORMED"):
        alpha.tell(Told.KEYS, bravo.keys)
    alpha.tell(Told.KEYS, alpha.keys)  # the same again changes nothing
    members[2].begin(members[2].fake.next_assignment())
    for _, step in STEPS[1:]:
        for member in members:
            step(member)
    place.until(lambda status: status["closing"])
    with refused("ROUND_CLOSED"):
        alpha.tell(Told.KEYS, alpha.keys)


def test_the_status_says_in_which_step_a_round_is_and_who_is_awaited(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    members = begun(place, rounds=1)
    said = []
    for _, step in (*STEPS[:3], *STEPS[3:5]):
        for member in members[:-1]:
            step(member)
        print_status(StudyStatus.model_validate(place.status()))
        said.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("secure")))
        step(members[-1])
    assert [line.removeprefix("secure aggregation: ") for line in said] == [
        "the sites tell their keys; not yet: charlie",
        "the sites deal shares of their masks; not yet: charlie",
        "the sites train, and send masked vectors; not yet: alpha, bravo, charlie",
        "the sites train, and send masked vectors; not yet: charlie",
        "the set is chosen, and its sites sign it; it waits until enough have; not yet: charlie",
    ]
    print_status(StudyStatus.model_validate(place.status()))
    assert "enough sites have signed the set, and open its sum" in capsys.readouterr().out


def test_a_study_whose_site_has_not_enrolled_is_not_created(place: Place) -> None:
    place.join("alpha")
    with pytest.raises(NeedsPerson, match="bravo, charlie have not enrolled"):
        place.create(secure_aggregation={"range": 8.0})
