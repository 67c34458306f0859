"""What a member site may try, or whoever stole its credentials."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator import store
from tests.attacks import crooked
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import delta
from tools.world import World, wait_until
from wardround.v1 import federation_pb2 as pb

HUGE = 1e30


def _crooked_update(federation: crooked.Federation, number: int, *, value: float, count: int) -> Any:
    """The crook answers its assignment with ``value`` everywhere and a told count."""
    site = federation.crook
    assignment = site.next_assignment()
    specs = site.specs("trial") if assignment.HasField("train") else ()
    update = crooked.honest_update(site.name, number, specs)
    for place, spec in enumerate(specs):
        update = update.with_tensor(place, np.full(spec.shape, value))
    return site.answer(assignment, type(update)(update.tensors, update.metrics, count, 25))


@pytest.mark.attack(promise="P11", refused_by="fl_algorithms/server/limits.py")
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_one_site_sets_the_model(world: World, algorithm: str) -> None:
    """One site of five sends 1e30, finite. It set the mean's model; with FedAdam it ended the study for good."""
    with crooked.federation(world, crooked.study_of(algorithm)) as federation:
        for number in (1, 2):
            assert _crooked_update(federation, number, value=HUGE, count=100).decision == "accepted"
            federation.honest_round()
        federation.honest_round()  # the closing validation
        federation.crook.decline(federation.crook.next_assignment(), "DECLINED_TRAINING_FAILED")
        status = wait_until(lambda: _ended(federation), "the study has ended", crooked.WAIT_S)
        assert (status["state"], status["incomplete"]) == ("finished", [crooked.CROOK])
        assert np.abs(federation.model()).max() < 2
        told = federation.ask("report", study="trial")
        for row in told["rounds_closed"]:
            assert row["answers"][crooked.CROOK]["code"] == "TENSOR_NORM"
            assert row["left_out"][crooked.CROOK].startswith("norm 2.828e+30, the limit is ")
            assert row["contributors"] == list(crooked.HONEST)
        assert status["sites"][crooked.CROOK]["rounds_left_out"] == [1, 2]


@pytest.mark.attack(promise="P11", refused_by="coordinator/admission.py")
def test_one_site_sets_the_model__by_a_count(world: World) -> None:
    """2^40 rows, and then as many as the study takes: the rest of the hospitals would count for nothing."""
    with crooked.federation(world, crooked.study_of(rounds=1)) as federation:
        crook = federation.crook
        assignment = crook.next_assignment()
        update = crooked.honest_update(crook.name, 1, crook.specs("trial"))
        numbers = (update.metrics, 2**40, 25)
        refused = crook.send(crook.opening(assignment, type(update)(update.tensors, *numbers)), update.payload)
        assert refused is not None
        assert (refused.decision, refused.code) == ("refused", "COUNT_INVALID")

        most = type(update)(update.tensors, update.metrics, 10_000_000, 25)
        assert crook.answer(assignment, most).decision == "accepted"
        federation.honest_round()
        report = wait_until(lambda: _closed(federation, 1), "round 1 is closed", crooked.WAIT_S)
        (row,) = report["rounds_closed"]
        assert row["capped"] == [crooked.CROOK]
        assert row["shares"] == {**dict.fromkeys(crooked.HONEST, 0.125), crooked.CROOK: 0.5}
        assert report["sites"][crooked.CROOK]["rounds_capped"] == [1]

        updates = {name: crooked.honest_update(name, 1, crook.specs("trial")) for name in crooked.HONEST}
        theirs = np.mean([np.frombuffer(one.payload, "<f4").astype(float) for one in updates.values()], axis=0)
        wanted = [0, 0, 1, 1, 1, 1, 1, 1] + (theirs + np.frombuffer(update.payload, "<f4")) / 2
        assert np.allclose(federation.model(), wanted, atol=1e-7)


@pytest.mark.attack(promise="P11", refused_by="coordinator/admission.py")
def test_one_site_sets_the_model__by_a_count_that_grows(tmp_path: Path) -> None:
    """An honest count in round 1, a thousand times it in round 2."""
    with crooked.place(tmp_path) as place:
        sites = place.begin()
        for site in sites:
            site.answer(site.next_assignment())
        assignment = sites[0].next_assignment()
        update = delta("alpha", 2, sites[0].specs("trial"))
        grown = type(update)(update.tensors, update.metrics, 1000 * update.num_examples, update.num_validation)
        receipt = sites[0].answer(assignment, grown)
        assert (receipt.decision, receipt.code) == ("refused", "COUNT_INVALID")


@pytest.mark.attack(promise="P11", refused_by="coordinator/admission.py")
@pytest.mark.parametrize("loss", ["1e+308", "-1e+300", "-1e-05", "1.001e+06"])
def test_val_loss_of_1e308(tmp_path: Path, loss: str) -> None:
    """Two such losses raised inside the engine, at every restart again; a very low one stayed the best for good."""
    with crooked.place(tmp_path) as place:
        alpha, bravo, charlie = place.begin(quorum=1)
        for site in (alpha, bravo, charlie):  # of round 1 the loss judges the initial model, which does not compete
            site.answer(site.next_assignment())
        for site in (alpha, bravo):
            assignment = site.next_assignment()
            update = delta(site.name, 2, site.specs("trial"))
            receipt = site.answer(assignment, type(update)(update.tensors, (("val_loss", loss),)))
            assert (receipt.decision, receipt.code) == ("refused", "METRICS_UNDECLARED")
        charlie.answer(charlie.next_assignment())
        place.until(lambda status: status["closing"])
        best = place.status()["best"]
        assert best["round"] == 1
        assert 0 < best["val_loss"] < 1


def _losses_that_no_float_can_hold(place: Place) -> None:
    with place.coordinator.parts.store.write() as records:
        for row in records.all(store.uploads, study="trial"):
            records.change(store.uploads, {"id": row["id"]}, metrics=json.dumps([["val_loss", "2.2e+307"]]))


def _no_metrics_at_all(place: Place) -> None:
    with place.coordinator.parts.store.write() as records:
        records.change(store.uploads, {"study": "trial"}, metrics="[[")


def _a_life_of_other_types(place: Place) -> None:
    _change_study(place, lambda row: row["life"].replace('"deadline": ', '"deadline": "soon", "x": '))


def _no_life_at_all(place: Place) -> None:
    _change_study(place, lambda row: row["life"][:-20])


def _change_study(place: Place, edit: Callable[[Any], str]) -> None:
    with place.coordinator.parts.store.write() as records:
        row = records.get(store.studies, name="trial")
        records.change(store.studies, {"name": "trial"}, life=edit(row))


@pytest.mark.attack(promise="P11", refused_by="coordinator/engine.py")
@pytest.mark.parametrize(
    "poison", [_losses_that_no_float_can_hold, _no_metrics_at_all, _a_life_of_other_types, _no_life_at_all]
)
def test_val_loss_of_1e308__and_the_other_study_finishes(tmp_path: Path, poison: Callable[[Place], None]) -> None:
    """Whatever stands in one study's rows, and however often the service is started with them, another study ends."""
    with crooked.place(tmp_path) as place:
        sites = place.begin(sites=["alpha", "bravo", "delta"], rounds=3)
        for site in sites:
            site.answer(site.next_assignment())
        pending = [site.next_assignment() for site in sites]
        for place_of in (0, 2):
            sites[place_of].answer(pending[place_of])
        poison(place)
        for _ in range(2):
            place.restart()
        with suppress(grpc.RpcError):  # the last answer of a round that is then judged by the rows as they are
            sites[1].answer(pending[1])
        place.restart()
        assert not place.failures
        place.create(name="other", sites=["charlie", "echo"], rounds=1)
        for name in ("charlie", "echo"):
            place.join(name).work("other")
        place.ask("start", study="other")
        place.until(lambda status: status["state"] == "finished", "other")
        assert not place.failures


@pytest.mark.attack(promise="P11", refused_by="coordinator/engine.py")
def test_val_loss_of_1e308__a_fault_in_one_study_pauses_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any exception while one study's round is judged: that study pauses with a reason, and goes on when mended."""
    from coordinator.roster import Study

    honest = Study.judged

    def failing(study: Study, *given: Any) -> Study:
        if study.name == "trial":
            raise OverflowError("intermediate overflow in fsum")
        return honest(study, *given)

    with crooked.place(tmp_path) as place:
        monkeypatch.setattr(Study, "judged", failing)
        sites = place.begin(rounds=1)
        for site in sites:
            site.answer(site.next_assignment())
        status = place.until(lambda status: status["state"] == "paused")
        assert status["why"] == "the coordinator failed at it: OverflowError; its log says more"
        assert {site.next_assignment().stop.reason for site in sites} == {pb.Stop.PAUSED}
        place.create(name="other", rounds=1)
        threads = [site.work("other") for site in sites]
        place.ask("start", study="other")
        place.until(lambda status: status["state"] == "finished", "other")
        for thread in threads:
            thread.join(crooked.WAIT_S)
        place.restart()
        assert not place.failures
        assert place.status()["state"] == "paused"
        monkeypatch.undo()
        place.ask("start", study="trial")  # every update has its receipt: nobody is asked again
        assert place.until(lambda status: status["closing"])["sites"]["alpha"]["rounds_contributed"] == [1]


def _ended(federation: crooked.Federation) -> Any:
    status = federation.ask("status", study="trial")
    return status if status["state"] not in ("waiting", "running") else None


def _closed(federation: crooked.Federation, count: int) -> Any:
    report = federation.ask("report", study="trial")
    return report if len(report["rounds_closed"]) >= count else None
