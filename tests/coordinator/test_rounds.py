"""Studies from their start to their end, over real gRPC with mutual TLS on loopback."""

import logging
import threading
from collections import Counter

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from safetensors.numpy import load_file

from coordinator import study_commands
from coordinator.models import export
from coordinator.studies import page as studies_page
from coordinator.study_answers import StudyReport
from tests.coordinator.conftest import SITES, WAIT_S, Place, on_both, study_document
from tests.coordinator.fake_site import FakeSite, Update, delta
from tools.world import wait_until
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.local import traces
from wardround.local.control import call
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb

SPECS = (TensorSpec("layer.bias", "F32", (2,)), TensorSpec("layer.weight", "F32", (2, 3)))


def expected_model(contributors: list[tuple[str, ...]]) -> list[bytes]:
    """The plain formula: base plus the weighted mean of the deltas, in float64, rounded once a round."""
    model = [np.zeros(2, "<f4"), np.ones((2, 3), "<f4")]
    for number, sites in enumerate(contributors, start=1):
        updates = [delta(site, number, SPECS) for site in sorted(sites)]
        weight = sum(update.num_examples for update in updates)
        for index, tensor in enumerate(model):
            total = np.zeros(tensor.shape)
            for update in updates:
                values = np.frombuffer(update.tensors[index][1], "<f4").reshape(tensor.shape)
                total += update.num_examples * values.astype(np.float64)
            model[index] = (total / weight + tensor).astype("<f4")
    return [tensor.tobytes() for tensor in model]


def model_bytes(place: Place) -> list[bytes]:
    path = place.coordinator.context.blobs.model(place.status()["model_digest"])
    return [load_file(path)[spec.name].tobytes() for spec in SPECS]


def run_to_the_end(place: Place, sites: list[FakeSite]) -> None:
    study = place.create()
    threads = [site.work(study) for site in sites]
    place.ask("start", study=study)
    for thread in threads:
        thread.join(20)
    place.until(lambda status: status["state"] == "finished")


@on_both
def test_a_study_runs_to_its_end_and_its_model_is_the_plain_formula(place: Place) -> None:
    run_to_the_end(place, [place.join(site) for site in SITES])
    status = place.status()
    assert {site: row["rounds_contributed"] for site, row in status["sites"].items()} == {
        site: [1, 2] for site in SITES
    }
    assert status["incomplete"] == []
    assert model_bytes(place) == expected_model([SITES, SITES])


def test_updates_that_come_in_any_order_give_the_same_model(place: Place) -> None:
    sites = place.begin()
    for order in (sites, list(reversed(sites))):
        for site in order:
            assert site.answer(site.next_assignment()).decision == "accepted"
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES, SITES])


def test_an_assignment_reaches_a_waiting_site_when_it_is_made(place: Place) -> None:
    alpha, bravo, charlie = place.begin()
    first = alpha.next_assignment()
    assert (first.round, first.attempt, first.HasField("train")) == (1, 1, True)
    assert first.base.round == 0
    for site in (bravo, charlie):
        site.answer(site.next_assignment())
    alpha.answer(first)
    second = alpha.next_assignment()
    assert (second.round, second.base.round) == (2, 1)


def test_the_best_global_model_has_the_lowest_told_loss_and_is_offered_at_the_end(place: Place) -> None:
    sites = place.begin()
    losses = {2: "0.3", 3: "0.4"}  # the loss that comes with upload r judges model r-1
    for _ in range(3):
        assignments = [site.next_assignment() for site in sites]
        for site, assignment in zip(sites, assignments, strict=True):
            update = delta(site.name, assignment.round, SPECS if assignment.HasField("train") else ())
            loss = losses.get(assignment.round, "0.1")
            site.answer(assignment, type(update)(update.tensors, (("val_loss", loss),)))
    stop = sites[0].next_assignment()
    assert stop.stop.reason == pb.Stop.FINISHED
    assert stop.best.round == 1
    assert place.status()["best"]["val_loss"] == pytest.approx(0.3)
    assert place.coordinator.context.blobs.model(stop.best.digest.hex()).exists()


def test_a_site_that_only_evaluates_is_in_no_model_and_chooses_none(place: Place) -> None:
    alpha, bravo, charlie = place.begin(roles={"charlie": "evaluate"})
    for number in (1, 2, 3):
        for site in (alpha, bravo, charlie):
            assignment = site.next_assignment()
            assert assignment.HasField("validate") == (site is charlie or number == 3)
            if site is charlie:
                told = (("val_loss", "0.001" if number == 1 else "9"),)  # were it heard, model 0 would be the best
                receipt = site.answer(assignment, Update((), told, 0, 7))
                assert (receipt.decision, receipt.code) == ("accepted", "")
            else:
                update = delta(site.name, number, SPECS if number < 3 else ())
                loss = ("val_loss", "0.5" if number < 3 else "0.4")
                site.answer(assignment, Update(update.tensors, (loss,), update.num_examples, 5))
    status = place.until(lambda status: status["state"] == "finished")
    assert model_bytes(place) == expected_model([("alpha", "bravo"), ("alpha", "bravo")])
    assert status["best"] | {"digest": ""} == {"round": 2, "val_loss": pytest.approx(0.4), "digest": ""}
    assert status["incomplete"] == []
    judged = status["sites"]["charlie"]
    assert (judged["evaluates"], judged["rounds_evaluated"], judged["rounds_contributed"]) == (True, [1, 2, 3], [])
    assert judged["absences"] == {}
    assert not judged["rounds_late"]
    told = place.ask("report", study="trial")
    assert told["quorum"] == 2
    assert [row["val_loss"] for row in told["attempts"]] == [pytest.approx(value) for value in (0.5, 0.5, 0.4)]
    assert told["attempts"][0]["answers"]["charlie"]["metrics"] == {"val_loss": "0.001"}
    report = StudyReport.from_document(told)
    page = studies_page.page(report)
    assert "2 of 2 sites in every one" in page
    assert "evaluates: 3 times" in page
    assert "quorum 2 of 2 sites, and 1 that only evaluates" in page
    card = export.card_of(report, "best", 2, status["best"]["digest"], "", "")
    assert card.evaluators == ("charlie",)
    assert all(row.absent == () for row in card.lineage)
    assert "charlie: evaluates; nothing was trained there" in export.page(card)


@pytest.mark.parametrize(
    ("update", "code"),
    [
        (delta("charlie", 1, SPECS), "MANIFEST_NAMES"),
        (Update((), (("val_loss", "0.5"),), 13, 7), "COUNT_INVALID"),
        (Update((), (("age", "71"),), 0, 7), "METRICS_UNDECLARED"),
    ],
    ids=["tensors", "rows trained", "another number"],
)
def test_a_site_that_only_evaluates_sends_no_tensor_and_no_other_number(
    place: Place, update: Update, code: str
) -> None:
    *_, charlie = place.begin(roles={"charlie": "evaluate"})
    receipt = charlie.answer(charlie.next_assignment(), update)
    assert (receipt.decision, receipt.code) == ("refused", code)
    assert list((place.state.blobs / "uploads").iterdir()) == []


def test_spooled_updates_are_gone_when_the_rounds_model_is_durable(place: Place) -> None:
    run_to_the_end(place, [place.join(site) for site in SITES])
    assert list((place.state.blobs / "uploads").iterdir()) == []
    kept = {path.name.removesuffix(".safetensors") for path in (place.state.blobs / "models").iterdir()}
    study = place.coordinator.engine.find("trial")
    assert study is not None
    assert kept == study.models


def test_a_site_that_sends_nan_is_refused_by_name_of_tensor_and_the_round_goes_on(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2, rounds=1)
    bad = delta("alpha", 1, SPECS).with_tensor(1, np.full((2, 3), np.nan))
    receipt = alpha.answer(alpha.next_assignment(), bad)
    assert (receipt.decision, receipt.code, receipt.tensor) == ("refused", "TENSOR_NOT_FINITE", "layer.weight")
    for site in (bravo, charlie):
        site.answer(site.next_assignment())
    status = place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([("bravo", "charlie")])
    assert status["sites"]["alpha"]["rounds_contributed"] == []
    told = place.ask("report", study="trial")
    assert told["attempts"][0]["answers"]["alpha"]["tensor"] == "layer.weight"


def test_a_decline_is_an_answer_and_its_code_is_told(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2)
    alpha.decline(alpha.next_assignment(), "DECLINED_DATA_CHANGED")
    assert place.status()["sites"]["alpha"] | {"rounds_contributed": []} == {
        "state": "declined", "code": "DECLINED_DATA_CHANGED", "ready": True, "rounds_contributed": [],
        "rounds_left_out": [], "rounds_capped": [], "rounds_late": [], "always_late": False, "expected": None,
        "expects_to_be_late": False, "evaluates": False, "rounds_evaluated": [],
        "connected": True, "fit": None, "seconds": None, "slow": False, "absences": {},
        "attempts_spent": False,
    }  # fmt: skip
    for site in (bravo, charlie):
        site.answer(site.next_assignment())
    assert alpha.next_assignment().round == 2


def test_a_study_whose_sites_all_decline_pauses_after_a_second_attempt_and_start_goes_on(place: Place) -> None:
    (alpha,) = place.begin(sites=["alpha"])
    for attempt in (1, 2):
        assignment = alpha.next_assignment()
        assert assignment.attempt == attempt
        alpha.decline(assignment, "DECLINED_TRAINING_FAILED")
    assert alpha.next_assignment().stop.reason == pb.Stop.PAUSED
    assert place.status()["state"] == "paused"
    place.ask("start", study="trial")
    again = alpha.next_assignment()
    assert (again.round, again.attempt) == (1, 3)
    assert alpha.answer(again).decision == "accepted"


def test_a_veto_pauses_the_study_by_name_and_start_goes_on_without_that_site(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2)
    for site in (alpha, bravo):
        site.answer(site.next_assignment())
    charlie.decline(charlie.next_assignment(), "DECLINED_VETO")
    assert alpha.next_assignment().stop.reason == pb.Stop.PAUSED
    status = place.status()
    assert (status["state"], status["sites"]["charlie"]["code"]) == ("paused", "DECLINED_VETO")
    assert status["why"].startswith("site `charlie` vetoes the model of round 0: ")
    charlie.next_assignment()
    place.ask("start", study="trial")
    charlie.decline(charlie.next_assignment(), "DECLINED_VETO")
    assert place.until(lambda status: status["round"] == 2)["sites"]["charlie"]["rounds_contributed"] == []


@on_both
def test_the_deadline_closes_a_round_with_quorum_and_the_late_update_is_refused(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2, round_deadline_s=3)
    late = charlie.next_assignment()
    for site in (alpha, bravo):
        site.answer(site.next_assignment())
    status = place.until(lambda status: status["round"] == 2)
    assert status["sites"]["charlie"]["rounds_contributed"] == []
    assert charlie.send(charlie.opening(late, delta("charlie", 1, SPECS)), b"").code == "ROUND_CLOSED"  # type: ignore[union-attr]


def test_a_site_that_withdraws_is_waited_for_no_longer(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2)
    for site in (alpha, bravo):
        site.answer(site.next_assignment())
    charlie.declare("trial", pb.WITHDRAWN)
    status = place.until(lambda status: status["round"] == 2)
    assert status["sites"]["charlie"]["state"] == "absent"


def test_a_site_that_connects_again_gets_its_open_assignment_again(place: Place) -> None:
    alpha, *_ = place.begin()
    first = alpha.next_assignment()
    alpha.unwatch()
    alpha.watch()
    assert alpha.next_assignment() == first
    alpha.answer(first)
    alpha.unwatch()
    alpha.watch()
    assert alpha.next_event("offer").study == "trial"
    assert alpha.events.empty()


def test_a_site_that_was_away_at_the_end_hears_of_it_when_it_is_back(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2, rounds=1, round_deadline_s=3)
    charlie.unwatch()
    for _ in range(2):
        for site in (alpha, bravo):
            site.answer(site.next_assignment())
    place.until(lambda status: status["state"] == "finished")
    charlie.watch()
    assert charlie.next_assignment().stop.reason == pb.Stop.FINISHED
    assert place.status()["incomplete"] == ["charlie"]


def test_a_second_stream_of_a_site_ends_the_first(place: Place) -> None:
    alpha = place.join("alpha")
    place.create()
    alpha.next_event("offer")  # so the first stream is there
    first = alpha.events
    alpha.watch()
    assert first.get(timeout=20) is None
    assert alpha.next_event("offer").study == "trial"


def test_the_operator_stops_a_study_and_the_sites_hear_it(place: Place) -> None:
    alpha, *_ = place.begin()
    assignment = alpha.next_assignment()
    assert place.ask("stop", study="trial")["state"] == "stopped"
    assert alpha.next_assignment().stop.reason == pb.Stop.STOPPED
    assert alpha.send(alpha.opening(assignment, delta("alpha", 1, SPECS)), b"").code == "STUDY_NOT_RUNNING"  # type: ignore[union-attr]
    with pytest.raises(NeedsPerson, match="study `trial` is stopped: it cannot be started again"):
        place.ask("start", study="trial")


def test_updates_whose_mean_no_float32_can_hold_pause_the_study_and_name_who_was_left_out(place: Place) -> None:
    """Every site sends the largest float32: none stands out, and all are needed. A new start asks again."""
    sites = place.begin()
    huge = np.finfo("<f4").max
    for site in sites:  # once, with the 1 of the initial model, is not beyond it
        site.answer(site.next_assignment(), delta(site.name, 1, SPECS).with_tensor(1, np.full((2, 3), huge)))
    for site in [*sites, sites[0]]:  # the two others' updates are kept for the second attempt
        update = delta(site.name, 2, SPECS).with_tensor(1, np.full((2, 3), huge))
        assert site.answer(site.next_assignment(), update).decision == "accepted"
    status = place.until(lambda status: status["state"] == "paused")
    assert status["why"].startswith("round 2 cannot be averaged: site alpha: norm 8.335e+38, the largest of a sum in ")
    assert status["why"].endswith("which `layer.weight` would be beyond float32, though each update is finite")
    assert (status["round"], status["sites"]["alpha"]["state"]) == (2, "left_out")
    place.ask("start", study="trial")
    again = sites[0].next_assignment()
    assert again.stop.reason == pb.Stop.PAUSED
    assert sites[0].next_assignment().attempt == 3


def test_the_same_content_is_the_same_study_and_new_content_a_new_revision(place: Place) -> None:
    alpha = place.join("alpha")
    place.create()
    first = alpha.next_event("offer")
    again = place.ask("create", document=study_document(), initial=str(place.initial))
    assert (again["new"], again["revision"], again["study_digest"]) == (False, 1, first.digest.hex())
    place.create(title="better")
    second = alpha.next_event("offer")
    assert (second.revision, second.study) == (2, "trial")
    assert second.digest != first.digest
    with pytest.raises(grpc.RpcError, match="REVISION_CHANGED"):
        alpha.declare("trial", revision=1, digest=first.digest)


def test_a_running_study_is_not_replaced(place: Place) -> None:
    place.begin()
    with pytest.raises(NeedsPerson, match="study `trial` is running, and this is another revision of it"):
        place.create(title="better")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "holds no tensors: nothing would be shared"),
        ({"w": np.zeros(2)}, "`w` is F64, shared tensors are F32"),
        ({"w": np.array([np.inf], "<f4")}, "`w` is not finite"),
    ],
)
def test_an_initial_model_that_cannot_be_shared_is_refused(
    place: Place, tensors: dict[str, np.ndarray], said: str
) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, place.initial)
    with pytest.raises(BadData, match=said):
        place.create()


def test_follow_tells_how_a_study_goes_and_ends_with_it(place: Place) -> None:
    sites = [place.join(site) for site in SITES]
    study = place.create()
    seen: list[dict[str, object]] = []
    request = {"command": "follow", "study": study}
    follower = threading.Thread(target=lambda: call(place.state.control, request, seen.append, timeout_s=20))
    follower.start()
    threads = [site.work(study) for site in sites]
    place.ask("start", study=study)
    for thread in [*threads, follower]:
        thread.join(20)
    assert [seen[0]["state"], seen[-1]["state"]] == ["created", "finished"]
    rounds = [status["round"] for status in seen]  # changes that come together are told as one
    assert (rounds, rounds[0], rounds[-1]) == (sorted(rounds, key=str), 0, 2)


def test_when_the_service_goes_down_sites_get_a_goodbye_and_followers_are_told(place: Place) -> None:
    alpha = place.join("alpha")
    place.create()
    alpha.next_event("offer")  # it is connected now
    failures: list[Unavailable] = []

    def follow() -> None:
        try:
            call(place.state.control, {"command": "follow", "study": "trial"}, lambda item: asked.set(), timeout_s=20)
        except Unavailable as error:
            failures.append(error)

    asked = threading.Event()
    follower = threading.Thread(target=follow)
    follower.start()
    assert asked.wait(20)
    place.restart()
    follower.join(20)
    assert failures[0].message == "the service is shutting down; the study goes on when it runs again"
    assert alpha.next_event("goodbye") is not None


def test_sites_are_told_in_one_word(place: Place) -> None:
    def states() -> dict[str, str]:
        return {row["site"]: row["state"] for row in place.ask("sites")["sites"]}

    place.invite("delta")
    alpha = place.join("alpha")
    place.create()
    alpha.next_event("offer")
    assert states() == {"alpha": "connected", "delta": "invited"}
    alpha.declare("trial")
    assert states()["alpha"] == "ready"
    alpha.unwatch()
    place.coordinator.engine.call(lambda: None)
    place.ask("revoke", site="alpha")
    assert states()["alpha"] == "revoked"


def test_following_a_study_costs_less_than_the_study(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status was made and sent for each answer of each site: more than half of the rounds that it watched."""
    monkeypatch.setattr(study_commands, "REST", 1e9)
    monkeypatch.setattr(study_commands, "MAX_REST_S", 0.5)
    sites = place.begin(rounds=1)
    told: list[str] = []
    administered = place.coordinator.administration.studies
    follower = threading.Thread(target=lambda: administered.follow("trial", lambda status: told.append(status.state)))
    follower.start()
    wait_until(lambda: told, "it follows", 20)
    streams = place.coordinator.engine._streams
    for _ in range(1000):
        place.coordinator.engine.call(lambda: streams.tell_followers("trial"))
    for site in (*sites, *sites):  # the round, and the validation after it
        site.answer(site.next_assignment())
    follower.join(20)
    assert told[-1] == "finished"
    assert len(told) < 20


def test_a_rounds_spans_name_study_round_and_site_and_nothing_else(place: Place) -> None:
    spans = InMemorySpanExporter()
    with traces.record(SimpleSpanProcessor(spans), "coordinator"):
        run_to_the_end(place, [place.join(site) for site in SITES])
        ended = lambda: Counter(span.name for span in spans.get_finished_spans())  # noqa: E731
        wait_until(lambda: ended()["round"] == 3 and ended()["upload"] == 9, "the spans of three rounds", WAIT_S)
    keys = {"wardround.study", "wardround.round", "wardround.site", "wardround.outcome"}
    found = [span.attributes or {} for span in spans.get_finished_spans()]
    assert {key for row in found for key in row} == keys
    assert {row.get("wardround.outcome") for row in found} <= {None, "accepted", "closed"}
    first = [span for span in spans.get_finished_spans() if (span.attributes or {})["wardround.round"] == 1]
    steps = Counter(span.name for span in first)
    assert steps == {"round": 1, "offered": 3, "download": 3, "upload": 3, "admission": 3, "aggregation": 1}
    (whole,) = (span.context for span in first if span.name == "round")
    asked = {(span.attributes or {})["wardround.site"]: span.context for span in first if span.name == "offered"}
    for span in first:
        site = (span.attributes or {}).get("wardround.site")
        if span.name in ("offered", "aggregation"):
            assert span.parent == whole
        elif site is not None:
            assert span.parent == asked[site]


def test_the_log_calls_the_round_after_the_last_the_closing_round(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It was "round 2" of a study of one round."""
    caplog.set_level(logging.INFO, "coordinator.studies.engine")
    sites = place.begin(rounds=1)
    for _ in ("the round", "the closing round"):
        for site in sites:
            site.answer(site.next_assignment())
    place.until(lambda status: status["state"] == "finished")
    wait_until(lambda: "trial: finished" in [record.getMessage() for record in caplog.records], "it says so", WAIT_S)
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if line.startswith("trial: ") and "attempt" in line] == [
        "trial: round 1, attempt 1: alpha, bravo, charlie", "trial: round 1, attempt 1: closed",
        "trial: closing round, attempt 1: alpha, bravo, charlie", "trial: closing round, attempt 1: closed",
    ]  # fmt: skip
