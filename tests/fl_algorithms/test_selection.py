"""No hospital is worse off: training alone beside the federation, and the choice among a site's models."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_algorithms.engine.beside import joined, members_of, session_at
from fl_algorithms.engine.partition import describe, task_of
from fl_algorithms.engine.selection import Judged, Kept, candidates, choose, restored, selected
from fl_algorithms.engine.session import SessionState
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.toys import FENDA, start_of, toy_data, toy_study

BOTH = {"alone": True, "selection": "hedged"}


def federation(study: ResolvedStudy) -> Outcome:
    return run_federation(study, task_of(study), {site: toy_data(site) for site in study.study.sites})


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "ditto"])
def test_training_alone_costs_the_federation_no_bit_and_is_what_silo_trains(algorithm: str) -> None:
    plain, beside = toy_study(algorithm), toy_study(algorithm, checkpoints={"alone": True})
    one, other = federation(plain), federation(beside)
    assert one.digest == other.digest
    for site, kinds in one.checkpoints.items():
        for kind, checkpoint in kinds.items():
            assert same_bits(checkpoint.tensors, other.checkpoints[site][kind].tensors)
        assert other.checkpoints[site].keys() - kinds.keys() == {"alone"}
    model = FENDA if algorithm == "fenda" else None
    start = {"init_private": "common"} if algorithm == "ditto" else {}
    silo = federation(toy_study("silo", model, **start))
    for site, kinds in other.checkpoints.items():
        best, alone = silo.checkpoints[site]["best_local"], kinds["alone"]
        assert same_bits(members_of(alone.tensors)["alone"], best.tensors)
        assert (alone.score, alone.val_loss, alone.round) == (best.score, best.val_loss, best.round)


def test_a_site_that_trains_alone_too_goes_on_after_a_restart_with_the_same_bits() -> None:
    study = toy_study("ditto", checkpoints={"alone": True})
    base, task, data = start_of(study), task_of(study), toy_data("ash")
    going, stopped = (session_at(study, "ash", task, data) for _ in range(2))
    for number in (1, 2, 3):
        one = going.train(number, base)
        state = stopped.export_state()
        state = SessionState(state.tensors, json.loads(json.dumps(state.meta)))
        stopped = session_at(study, "ash", task, data, state)
        other = stopped.train(number, base)
        assert [found.kind for found in one.checkpoints] == [found.kind for found in other.checkpoints]
        for mine, theirs in zip(one.checkpoints, other.checkpoints, strict=True):
            assert same_bits(mine.tensors, theirs.tensors)
    kept = {key.removeprefix("private/").replace("/private/", "/") for key in going.export_state().tensors}
    described = {tensor.name.replace("/", "..") for tensor in describe(study, "ash").private}
    assert {key.replace("/", "..") for key in kept if "optimizer/" not in key} <= described


def test_what_is_trained_alone_is_described_as_staying() -> None:
    beside = describe(toy_study(checkpoints={"alone": True}), "ash").private
    assert {tensor.why for tensor in beside} == {"trained beside the federation"}
    assert all(tensor.name.startswith("alone/") for tensor in beside)


def judged(*members: str, losses: list[float]) -> Judged:
    return Judged(members, torch.tensor(losses, dtype=torch.float64))


def test_the_safest_that_is_not_clearly_behind_is_chosen_and_the_reason_said() -> None:
    hedge = judged("best_global", "alone", losses=[0.5, 0.7, 0.6, 0.4])
    near = judged("best_local", losses=[0.6, 0.3, 0.6, 0.6])  # .025 better, with a standard error of .1315
    choice, why = choose([hedge, near])
    assert choice is hedge
    assert why == (
        "best_global and alone: validation loss 0.55; the lowest is 0.525 of best_local, and the difference, 0.025, is "
        "within two standard errors, 0.26"
    )
    far = judged("alone", losses=[0.1, 0.3, 0.2, 0.05])
    choice, why = choose([hedge, near, far])
    assert choice is far
    assert why == (
        "alone: validation loss 0.1625, the lowest; all that is safer is behind by more than two standard errors"
    )
    assert choose([far])[0] is far


@pytest.mark.parametrize("seed", range(5))
def test_the_hedge_is_never_further_off_than_the_mean_of_both(seed: int) -> None:
    """Whatever both say: the losses of two classes are convex in the logits."""
    study = toy_study("fedavg", checkpoints={"alone": True})
    data, task = toy_data("ash", seed=seed), task_of(study)
    kinds = run_federation(study, task, {"ash": data, "birch": toy_data("birch", seed=seed)}).checkpoints["ash"]
    models = {"best_local": kinds["best_local"].tensors, **members_of(kinds["alone"].tensors)}
    losses = [
        float(task.loss(restored(study.at("ash"), task, joined(some)).logits(data.validation.x), data.validation.y))
        for some in (models, *({kind: tensors} for kind, tensors in models.items()))
    ]
    assert losses[0] <= (losses[1] + losses[2]) / 2 + 1e-6


@pytest.mark.parametrize(
    "losses", [[[0.5], [0.1]], [[float("nan")] * 3, [float("inf")] * 3]], ids=["one row", "no number"]
)
def test_where_nothing_can_be_told_the_safest_is_chosen(losses: list[list[float]]) -> None:
    choice, why = choose([judged("best_local", losses=losses[0]), judged("alone", losses=losses[1])])
    assert choice.name == "best_local"
    assert why == "best_local: too few validation rows, or no finite loss on them, to choose by"


def test_a_candidate_whose_loss_is_no_number_is_never_chosen() -> None:
    broken = judged("best_global", losses=[float("nan"), 0.1, 0.1])
    assert choose([broken, judged("alone", losses=[0.9, 0.8, 0.9])])[0].name == "alone"


def test_the_candidates_are_the_sites_models_and_each_with_what_it_trained_alone() -> None:
    assert list(candidates(("best_global", "best_local", "latest", "alone"))) == [
        ("best_global", "alone"), ("best_local", "alone"), ("best_global",), ("best_local",), ("latest",), ("alone",),
    ]  # fmt: skip
    assert list(candidates(("best_local", "latest"))) == [("best_local",), ("latest",)]


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "ditto", "fedbabu", "fedsm"])
def test_each_site_ends_with_a_model_that_it_selected_and_that_can_be_asked(algorithm: str) -> None:
    study = toy_study(algorithm, checkpoints=BOTH)
    for site, kinds in federation(study).checkpoints.items():
        chosen, data, task = kinds["selected"], toy_data(site), task_of(study)
        members = members_of(chosen.tensors)
        assert chosen.why.startswith(" and ".join(members))
        model = restored(study.at(site), task, chosen.tensors)
        wanted = torch.stack(
            [restored(study.at(site), task, joined({kind: own})).logits(data.test.x) for kind, own in members.items()]
        ).mean(dim=0)
        assert data.test is not None
        assert torch.equal(model.logits(data.test.x), wanted)
        assert torch.equal(model.probabilities(data.test.x), task.probabilities(wanted))
        assert chosen.scores == task.metrics(wanted, data.test.y)
        for kind, own in members.items():
            assert same_bits(own, members_of(kinds[kind].tensors).get(kind, kinds[kind].tensors))


def test_the_choice_looks_at_no_test_row() -> None:
    study = toy_study("fedavg", checkpoints=BOTH)
    kinds, data, task = federation(study).checkpoints["ash"], toy_data("ash"), task_of(study)
    models = {kind: Kept(found.round, found.tensors) for kind, found in kinds.items() if kind != "selected"}
    assert data.test is not None
    turned = replace(data, test=replace(data.test, y=1 - data.test.y))
    one, other = (selected(study.at("ash"), task, rows, models) for rows in (data, turned))
    assert one.why == other.why
    assert same_bits(one.tensors, other.tensors)
    assert one.score != other.score


@pytest.mark.parametrize("checkpoints", [{}, {"alone": True}, {"selection": "hedged"}])
def test_what_a_study_did_not_ask_for_is_not_kept(checkpoints: dict[str, Any]) -> None:
    kinds = federation(toy_study("fedavg", checkpoints=checkpoints)).checkpoints["ash"].keys()
    assert ("alone" in kinds) == bool(checkpoints.get("alone"))
    assert ("selected" in kinds) == ("selection" in checkpoints)
