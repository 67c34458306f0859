"""The evaluation protocol on toy hospitals, each number derived again by hand."""

import json
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest
import torch

from fl_algorithms.engine.beside import Session, session_at
from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab import federation
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.protocol import LocalGlobal, Matrix, every_row, held_out, mean, measure
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.sharpness import extreme_eigenvalue
from fl_algorithms.lab.tent import with_batch_statistics
from fl_algorithms.methods.settings import FineTuning
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Split
from tests.fl_algorithms.toys import FENDA, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.schema import check

THREE = ["ash", "birch", "cedar"]
NORMED: dict[str, Any] = {"name": "mlp", "hidden": [5], "norm": "batch"}


def patients(study: ResolvedStudy, **sizes: int) -> dict[str, SiteData]:
    return {site: toy_data(site, rows=sizes.get(site, 22)) for site in study.study.sites}


def federate(study: ResolvedStudy, data: dict[str, SiteData] | None = None) -> Outcome:
    return run_federation(study, task_of(study), data or patients(study))


def measured(study: ResolvedStudy, data: dict[str, SiteData] | None = None, **asked: Any) -> dict[str, Any]:
    data = data or patients(study)
    found = measure(study, task_of(study), data, federate(study, data), Protocol(**asked))
    assert json.loads(json.dumps(found, allow_nan=False)) == found  # plain JSON
    return found


def accuracy(study: ResolvedStudy, tensors: Any, split: Split) -> float:
    """The share of rows whose likeliest class is theirs."""
    probabilities = Restored(study, task_of(study), tensors).probabilities(split.x)
    return fmean(int(row.argmax()) == int(y) for row, y in zip(probabilities, split.y, strict=True))


def test_nothing_asked_is_nothing_measured() -> None:
    assert measured(toy_study()) == {}


# The matrix


def test_silo_is_the_matrix_trace_over_n_and_client_j_a_rows_mean() -> None:
    study = toy_study("silo", sites=THREE)
    data = patients(study)
    outcome = federate(study, data)
    for kind, found in measured(study, data, matrix=True)["matrix"]["kinds"].items():
        m = found["matrix"]["accuracy"]
        silo = {site: outcome.checkpoints[site][kind].score for site in THREE}
        assert {site: m[site][site] for site in THREE} == silo  # Client j's own column is Silo_j
        assert found["diagonal"]["accuracy"] == pytest.approx(sum(m[site][site] for site in THREE) / 3)
        for j in THREE:
            tensors = outcome.checkpoints[j][kind].tensors
            by_hand = {i: accuracy(study, tensors, held_out(data[i])) for i in THREE}
            assert m[j] == pytest.approx(by_hand)
            assert found["rows"]["accuracy"][j] == pytest.approx(sum(by_hand.values()) / 3)
        others = [fmean(m[j][i] for i in THREE if i != j) for j in THREE]
        assert found["ood"]["accuracy"] == pytest.approx(fmean(others))


def test_the_models_of_a_personal_method_differ_on_the_same_rows_and_a_global_one_does_not() -> None:
    for algorithm, same in (("fedavg", True), ("silo", False)):
        data = patients(toy_study(algorithm, sites=THREE))
        m = measured(toy_study(algorithm, sites=THREE), data, matrix=True)["matrix"]["kinds"]["latest"]["matrix"]["auc"]
        assert all(m["ash"] == m[j] for j in THREE) is same


def test_a_federation_of_one_site_with_the_same_steps_has_silos_matrix() -> None:
    options: dict[str, Any] = {"sites": ["ash"], "rounds": 3, "init_private": "common"}
    federated, alone = (
        measured(toy_study(algorithm, FENDA, **options), matrix=True)["matrix"]["kinds"]
        for algorithm in ("fedavg", "silo")
    )
    for name in (
        "accuracy",
        "auc",
        "balanced_accuracy",
        "macro_f1",
    ):  # the networks differ by roundings
        assert federated["latest"]["matrix"][name] == alone["latest"]["matrix"][name]
    assert federated["latest"]["matrix"]["brier"]["ash"] == pytest.approx(alone["latest"]["matrix"]["brier"]["ash"])
    assert set(alone["latest"]["ood"].values()) == {None}


def test_a_site_without_test_rows_is_judged_on_its_validation_rows_and_that_is_said() -> None:
    study = toy_study()
    data = {"ash": toy_data("ash"), "birch": toy_data("birch", test=False)}
    found = measured(study, data, matrix=True)["matrix"]
    assert found["splits"] == {"ash": "test", "birch": "validation"}
    tensors = federate(study, data).checkpoints["ash"]["latest"].tensors
    by_hand = accuracy(study, tensors, data["birch"].validation)
    assert found["kinds"]["latest"]["matrix"]["accuracy"]["ash"]["birch"] == pytest.approx(by_hand)


def test_an_undefined_score_is_left_out_of_every_mean() -> None:
    assert mean([0.5, None, 0.7]) == pytest.approx(0.6)
    assert mean([None, None]) is None
    matrix = Matrix({"auc": {"a": {"a": None, "b": 0.5}, "b": {"a": 0.8, "b": 0.9}}})
    assert (matrix.diagonal("auc"), matrix.rows("auc")) == (0.9, {"a": 0.5, "b": pytest.approx(0.85)})
    assert matrix.ood("auc") == pytest.approx(0.65)


# Checkpoints


def test_latest_global_and_local_are_one_model_while_validation_loss_falls() -> None:
    options: dict[str, Any] = {"learning_rate": 0.002, "checkpoints": {"loss_reduction": "sample_mean"}}
    runs = [federate(toy_study(rounds=rounds, **options)) for rounds in (1, 2, 3, 4)]
    for site in ("ash", "birch"):
        losses = [run.checkpoints[site]["latest"].val_loss or 0.0 for run in runs]
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4
        kinds = runs[-1].checkpoints[site]
        assert set(kinds) == {"latest", "best_local", "best_global"}
        for checkpoint in kinds.values():
            assert (checkpoint.round, checkpoint.scores) == (4, kinds["latest"].scores)
            assert all(
                torch.equal(checkpoint.tensors[name], kinds["latest"].tensors[name]) for name in checkpoint.tensors
            )


@pytest.mark.parametrize("seed", range(4))
def test_the_global_checkpoint_is_never_worse_than_the_latest_in_weighted_validation_loss(seed: int) -> None:
    study = toy_study(rounds=6, learning_rate=0.5, seed=seed, reported={"digits": 9})
    data = patients(study)
    checkpoints = federate(study, data).checkpoints
    weighted = {
        kind: sum(len(data[site].validation) * (checkpoints[site][kind].val_loss or 0.0) for site in data)
        for kind in ("best_global", "latest")
    }
    assert weighted["best_global"] <= weighted["latest"] * (1 + 1e-8)


# Local and global tests


def sized(**rows: int) -> dict[str, SiteData]:
    """Sites with so many test rows; each row's first number is its own."""
    data, start = {}, 0
    for site, n in rows.items():
        x = torch.zeros(n, 3)
        x[:, 0] = torch.arange(start, start + n)
        start += n
        data[site] = replace(toy_data(site), test=Split(x, torch.zeros(n, dtype=torch.int64)))
    return data


@pytest.mark.parametrize(
    ("rows", "each"),
    [
        ({"ash": 20, "birch": 20, "cedar": 20, "dell": 20}, 4),  # 16 for everyone, 16 for each alone
        ({"ash": 104, "birch": 89, "cedar": 16, "dell": 45}, 8),  # 63.5 / 5 is 13; half of 16 is 8
        ({"ash": 2, "birch": 9}, 1),
        ({"ash": 1, "birch": 9}, 0),
    ],
)
def test_everyones_rows_are_as_many_of_each_site_and_nobodys_own(rows: dict[str, int], each: int) -> None:
    study, data = toy_study(sites=list(rows)), sized(**rows)
    drawn, again = LocalGlobal.draw(study, data), LocalGlobal.draw(study, data)
    own = {site: set(split.x[:, 0].tolist()) for site, split in drawn.own.items()}
    assert {site: len(split) for site, split in drawn.own.items()} == {site: n - each for site, n in rows.items()}
    if each == 0:
        assert drawn.everyone is None
        return
    assert drawn.everyone is not None
    assert again.everyone is not None
    everyone = set(drawn.everyone.x[:, 0].tolist())
    assert torch.equal(drawn.everyone.x, again.everyone.x)
    assert len(everyone) == each * len(rows)
    assert everyone.isdisjoint(set.union(*own.values()))
    assert len(everyone | set.union(*own.values())) == sum(rows.values())


def test_local_and_global_are_means_over_the_sites_models() -> None:
    study = toy_study("silo", sites=THREE)
    data = patients(study)
    found = measured(study, data, matrix=True)["matrix"]["kinds"]["best_local"]
    drawn, models = LocalGlobal.draw(study, data), federate(study, data).checkpoints
    assert drawn.everyone is not None
    local = [accuracy(study, models[site]["best_local"].tensors, drawn.own[site]) for site in THREE]
    everyone = [accuracy(study, models[site]["best_local"].tensors, drawn.everyone) for site in THREE]
    assert found["local"]["accuracy"] == pytest.approx(fmean(local))
    assert found["global"]["accuracy"] == pytest.approx(fmean(everyone))


def test_without_rows_for_everyone_there_is_no_global_score() -> None:
    study = toy_study()
    found = measured(study, sized(ash=1, birch=9), matrix=True)["matrix"]["kinds"]["latest"]
    assert set(found["global"].values()) == {None}
    assert found["local"]["accuracy"] is not None


# Personalisation


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_each_amount_is_a_tuned_copy_of_the_checkpoint(unit: str) -> None:
    study = toy_study("fenda", learning_rate=0.3)
    data = patients(study)
    found = measured(study, data, personalisation=[1, 7], personalisation_unit=unit)["personalisation"]
    outcome, drawn = federate(study, data), LocalGlobal.draw(study, data)
    assert set(found) == {"latest", "best_local"}
    for kind, levels in found.items():
        assert list(levels) == ["0", "1", "7"]
        for amount, scores in levels.items():
            local = []
            for site, session in outcome.sessions.items():
                tensors = outcome.checkpoints[site][kind].tensors
                if amount != "0":
                    tensors = session.tuned(tensors, FineTuning.model_validate({unit: int(amount)}))
                local.append(accuracy(study, tensors, drawn.own[site]))
            assert scores["local"]["accuracy"] == pytest.approx(fmean(local))
        assert len({json.dumps(scores) for scores in levels.values()}) > 1  # tuning changed something


# Unseen sites


def test_a_site_left_out_contributes_no_step_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    study = toy_study(sites=THREE, quorum=3)
    data = patients(study, birch=40)
    outcome = federate(study, data)
    trained: list[tuple[str, ...]] = []

    def watched(study: ResolvedStudy, site: str, *rest: Any, **options: Any) -> Session:
        trained.append((site, *study.study.sites))
        return session_at(study, site, *rest, **options)

    monkeypatch.setattr(federation, "session_at", watched)
    found = measure(study, task_of(study), data, outcome, Protocol(leave_one_out=True))["leave_one_out"]
    for unseen in THREE:
        others = [site for site in THREE if site != unseen]
        assert [sites for site, *sites in trained if unseen not in sites] == [others, others]
        alone = federate(toy_study(sites=others), {site: data[site] for site in others})
        assert found["sites"][unseen]["digest"] == alone.digest
        rows = every_row(data[unseen])
        assert found["sites"][unseen]["rows"] == len(rows) == (40 if unseen == "birch" else 22) + 9 + 12
        for kind, scores in found["sites"][unseen]["kinds"].items():
            by_hand = [accuracy(study, kinds[kind].tensors, rows) for kinds in alone.checkpoints.values()]
            assert scores["accuracy"] == pytest.approx(fmean(by_hand))
    means = [found["sites"][unseen]["kinds"]["latest"]["accuracy"] for unseen in THREE]
    assert found["mean"]["latest"]["accuracy"] == pytest.approx(fmean(means))
    assert found["batch_statistics"] is False


def test_the_only_site_cannot_be_left_out() -> None:
    with pytest.raises(BadData, match="one site, `ash`"):
        measured(toy_study(sites=["ash"]), leave_one_out=True)


def test_where_norms_are_private_an_unseen_site_takes_its_rows_statistics_and_that_is_said() -> None:
    study = toy_study("fedbn", NORMED, sites=THREE, batch_size=11)
    data = patients(study)
    found = measured(study, data, leave_one_out=True)["leave_one_out"]
    assert found["batch_statistics"] is True
    fewer = toy_study("fedbn", NORMED, sites=["ash", "birch"], batch_size=11)
    task, rows = task_of(fewer), every_row(data["cedar"])
    by_hand = []
    for kinds in federate(fewer, {site: data[site] for site in fewer.study.sites}).checkpoints.values():
        model = Restored(fewer, task, kinds["latest"].tensors)
        normed = with_batch_statistics(model.networks)["model"]
        by_hand.append(task.metrics(normed(rows.x), rows.y)["accuracy"])
    assert found["sites"]["cedar"]["kinds"]["latest"]["accuracy"] == pytest.approx(mean(by_hand))


@pytest.mark.parametrize(
    ("algorithm", "missing"), [("fedavg", False), ("silo", False), ("ditto", False), ("lgfedavg", True)]
)
def test_norms_are_missing_only_where_they_stay_of_a_network_that_is_shared(algorithm: str, missing: bool) -> None:
    found = measured(toy_study(algorithm, NORMED, batch_size=11, rounds=1), leave_one_out=True)
    assert found["leave_one_out"]["batch_statistics"] is missing


# Tent and sharpness


def test_tent_without_a_step_scores_batch_statistics() -> None:
    study = toy_study("fedavg", NORMED, batch_size=11)
    data = patients(study)
    found = measured(study, data, tent=True, tent_learning_rate=0.0, tent_batch=100)["tent"]["latest"]
    task, drawn = task_of(study), LocalGlobal.draw(study, data)
    local = []
    for site, kinds in federate(study, data).checkpoints.items():
        networks = with_batch_statistics(Restored(study, task, kinds["latest"].tensors).networks)
        local.append(task.metrics(networks["model"](drawn.own[site].x), drawn.own[site].y)["accuracy"])
    assert found["local"]["accuracy"] == pytest.approx(mean(local))


def test_tent_with_steps_answers_otherwise_and_needs_norms() -> None:
    study = toy_study("fedavg", NORMED, batch_size=11)
    still, moving = (
        measured(study, tent=True, tent_batch=3, tent_learning_rate=rate)["tent"]["latest"] for rate in (0.0, 1.0)
    )
    assert still != moving
    with pytest.raises(BadData, match="the study's network has none"):
        measured(toy_study(), tent=True)


def test_sharpness_is_the_sites_median_of_the_batches_median() -> None:
    study = toy_study("silo", sites=THREE, rounds=1)
    data = patients(study)
    found = measured(study, data, sharpness=True)["sharpness"]["latest"]
    assert found["median"] == median(found["sites"].values())
    task = task_of(study)
    model = Restored(study, task, federate(study, data).checkpoints["ash"]["latest"].tensors)
    network = model.networks["model"]
    generator = torch.Generator().manual_seed(stream_seed(study.study.seed, "ash", 0, "protocol.sharpness"))
    eigenvalues = []
    for start in range(0, 22, 4):
        x, y = (part[start : start + 4] for part in (data["ash"].train.x, data["ash"].train.y))
        loss = task.losses(network(x), y).mean()
        eigenvalues.append(extreme_eigenvalue(loss, list(network.parameters()), generator))
    assert found["sites"]["ash"] == pytest.approx(median(eigenvalues), rel=1e-5)


# Settings


def test_amounts_of_tuning_must_rise_and_keys_be_known() -> None:
    for wrong in ([7, 1], [1, 1]):
        with pytest.raises(BadData, match="does not rise"):
            check(Protocol, {"personalisation": wrong}, "suite.toml", "protocol")
    with pytest.raises(BadData, match="unknown key `matrx`"):
        check(Protocol, {"matrx": True}, "suite.toml", "protocol")


def test_central_training_has_no_models_to_compare() -> None:
    study = toy_study()
    outcome = replace(federate(study), sessions={})
    with pytest.raises(BadData, match="site `ash` trained no model here"):
        measure(study, task_of(study), patients(study), outcome, Protocol(matrix=True))
