"""The lab: a whole federation in one process, its scores, and its commands."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_algorithms import registry
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.engine.session import Checkpoint, RoundResult, SiteSession
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.evaluation import interval, student_t, summary
from fl_algorithms.lab.federation import Outcome, limits_summary, manifest, reported_losses, run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData
from tests.fl_algorithms.toys import FENDA, TWO_NETWORKS, session_of, start_of, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile

STUDY = """
[study]
name = "toy"
sites = ["ash", "birch"]
rounds = 2
seed = 5

[task]
name = "tabular"
label = "ill"
classes = ["no", "yes"]
headline = "accuracy"
features = ["u", "v", "w"]

[model]
name = "fenda"

[algorithm]
name = "fenda"

[training]
batch_size = 4
local_steps = 3

[variants.fedavg.model]
name = "mlp"

[variants.fedavg.algorithm]
name = "fedavg"
"""


def federate(study: ResolvedStudy, data: dict[str, SiteData] | None = None) -> Outcome:
    return run_federation(study, task_of(study), data or {site: toy_data(site) for site in study.study.sites})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study file and two hospitals' tables, the second without test rows."""
    (tmp_path / "study.toml").write_text(STUDY)
    for site in ("ash", "birch"):
        data = toy_data(site)
        (tmp_path / site).mkdir()
        assert data.test is not None
        for name, split in (("train", data.train), ("test", data.test)):
            if (site, name) == ("birch", "test"):
                continue
            with (tmp_path / site / f"{name}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["u", "v", "w", "ill"])
                rows = zip(split.x.tolist(), split.y.tolist(), strict=True)
                writer.writerows([*x, ("no", "yes")[y]] for x, y in rows)
    return tmp_path


def lab(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "fedsoup", "two-networks"])
def test_the_same_study_gives_the_same_model_and_another_seed_another(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.METHODS, "two-networks", TWO_NETWORKS)  # type: ignore[arg-type]
    first = federate(toy_study(algorithm))
    assert first.digest == federate(toy_study(algorithm)).digest
    assert first.digest != federate(toy_study(algorithm, seed=6)).digest


def test_a_round_is_the_weighted_mean_of_what_the_sites_would_send() -> None:
    study = toy_study("fedavg", rounds=1)
    data = {"ash": toy_data("ash", rows=30), "birch": toy_data("birch", rows=10)}
    start = start_of(study)["model"]
    sent = {site: session_of(study, site, data[site]).train(1, start_of(study)).uplink["model"] for site in data}
    for name, tensor in federate(study, data).shared.items():
        exact = start[name].double() + (30 * sent["ash"][name].double() + 10 * sent["birch"][name].double()) / 40
        torch.testing.assert_close(tensor, exact.float(), rtol=0, atol=1e-7)


def test_counts_weigh_as_they_are_told() -> None:
    data = {"ash": toy_data("ash", rows=30), "birch": toy_data("birch", rows=10)}
    digests = {counts: federate(toy_study(reported={"counts": counts}), data).digest for counts in ("exact", "uniform")}
    same = {"ash": toy_data("ash", rows=10), "birch": toy_data("birch", rows=10)}
    alike = {counts: federate(toy_study(reported={"counts": counts}), same).digest for counts in ("exact", "uniform")}
    assert digests["exact"] != digests["uniform"]
    assert alike["exact"] == alike["uniform"]


def test_losses_are_told_with_the_studys_digits_and_rows() -> None:
    study = toy_study(reported={"digits": 2, "counts": "bucketed"})
    results = {site: session_of(study, site).train(1, start_of(study)) for site in ("birch", "ash")}
    wanted = [(f"{results[site].metrics['val_loss']:.2g}", 8) for site in ("ash", "birch")]  # 9 rows: the bucket is 8
    assert reported_losses(study, results) == wanted


def test_a_study_that_tells_no_loss_has_no_global_checkpoint() -> None:
    outcome = federate(toy_study(reported={"metrics": ["accuracy"]}))
    assert outcome.best_round is None
    assert all("best_global" not in kinds for kinds in outcome.checkpoints.values())


def test_one_step_of_everyones_whole_table_is_pooled_gradient_descent() -> None:
    study = toy_study(
        "fedavg", {"name": "mlp"}, rounds=1, optimizer="sgd", weight_decay=0, local_steps=1, batch_size=64
    )
    data = {site: toy_data(site, rows=20) for site in study.study.sites}
    start = initial_model(study)
    weight, bias = (start[name].clone().requires_grad_() for name in ("head.weight", "head.bias"))
    x, y = (torch.cat([getattr(data[site].train, part) for site in data]) for part in ("x", "y"))
    loss = torch.nn.functional.binary_cross_entropy_with_logits((x @ weight.T + bias)[:, 0], y.float())
    loss.backward()  # type: ignore[no-untyped-call]
    shared = federate(study, data).shared
    for name, start_value in (("head.weight", weight), ("head.bias", bias)):
        assert start_value.grad is not None
        stepped = start_value.detach() - 0.05 * start_value.grad
        torch.testing.assert_close(shared[name], stepped, rtol=1e-5, atol=1e-6)


def test_a_federation_of_one_site_is_that_site_alone() -> None:
    options: dict[str, Any] = {"sites": ["ash"], "rounds": 3, "init_private": "common"}
    federated, alone = (federate(toy_study(algorithm, FENDA, **options)) for algorithm in ("fedavg", "silo"))
    mine, theirs = (outcome.checkpoints["ash"]["latest"].tensors for outcome in (federated, alone))
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_every_site_ends_with_the_same_global_model_and_its_own_best() -> None:
    outcome = federate(toy_study("fedavg", rounds=5))
    ash, birch = (outcome.checkpoints[site] for site in ("ash", "birch"))
    assert set(ash) == {"latest", "best_local", "best_global"}
    for kind in ("latest", "best_global"):
        for name, tensor in ash[kind].tensors.items():
            assert torch.equal(tensor, birch[kind].tensors[name])
    assert ash["latest"].round == 5
    assert ash["best_global"].round == outcome.best_round
    for name, tensor in ash["latest"].tensors.items():
        assert torch.equal(tensor, outcome.shared[name])


def test_a_personal_method_has_no_global_checkpoint_and_private_parts_that_differ() -> None:
    outcome = federate(toy_study("fenda"))
    ash, birch = (outcome.checkpoints[site] for site in ("ash", "birch"))
    assert set(ash) == {"latest", "best_local"}
    assert torch.equal(
        ash["latest"].tensors["shared_extractor.layers.0.weight"],
        birch["latest"].tensors["shared_extractor.layers.0.weight"],
    )
    assert not torch.equal(ash["latest"].tensors["head.weight"], birch["latest"].tensors["head.weight"])


def test_training_alone_shares_nothing() -> None:
    outcome = federate(toy_study("silo"))
    assert outcome.digest is None
    assert outcome.shared == {}


# Scores


def test_the_interval_is_students() -> None:
    values = [0.70, 0.72, 0.71, 0.75, 0.69]
    found = interval(values)
    mean = sum(values) / 5
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / 4)
    assert found.mean == pytest.approx(mean)
    assert found.sd == pytest.approx(sd)
    assert found.ci95 == pytest.approx(2.776 * sd / math.sqrt(5), rel=1e-3)  # t(0.975, 4), from a table
    assert student_t(19) == pytest.approx(2.093, rel=1e-3)


def test_one_run_has_no_interval() -> None:
    assert (interval([0.7]).mean, interval([0.7]).ci95) == (0.7, None)


def checkpoint(score: float | None) -> Checkpoint:
    return Checkpoint("latest", 1, {}, score, "auc", "test", 0.5, {"auc": score})


def test_sites_count_alike_then_runs_do() -> None:
    runs = [{"a": {"latest": checkpoint(0.5)}, "b": {"latest": checkpoint(0.7)}}] * 2
    runs = [*runs, {"a": {"latest": checkpoint(0.8)}, "b": {"latest": checkpoint(1.0)}}]
    row = summary(runs)["latest"]
    assert row["mean"] == pytest.approx((0.6 + 0.6 + 0.9) / 3)
    assert row["per_seed"] == pytest.approx([0.6, 0.6, 0.9])
    assert row["per_site"] == {"a": pytest.approx(0.6), "b": pytest.approx(0.8)}
    assert summary(runs)["best_global"] is None


def test_an_undefined_score_is_left_out_of_the_mean_and_said() -> None:
    row = summary([{"a": {"latest": checkpoint(None)}, "b": {"latest": checkpoint(0.7)}}])["latest"]
    assert (row["mean"], row["per_site"], row["undefined_at"]) == (0.7, {"a": None, "b": 0.7}, ["a"])


# Commands


def test_run_prints_one_object_for_scripts(folder: Path) -> None:
    done = lab("run", folder / "study.toml", "--data", folder, "--seeds", 2, "--json")
    said = json.loads(done.stdout)
    assert (said["method"], said["seeds"], len(said["digests"])) == ("fenda", [5, 6], 2)
    assert said["digests"][0] != said["digests"][1]
    assert said["device"] == "cpu"
    assert said["scores"]["best_global"] is None
    assert set(said["scores"]["latest"]["per_site"]) == {"ash", "birch"}
    assert said["scores"]["latest"]["split"] == "test/validation"  # the second hospital has no test rows
    assert said["scores"]["latest"]["ci95"] >= 0
    assert "seed 6, 2 rounds (2 of 2 seeds)" in done.stderr


def test_run_prints_a_table_for_people(folder: Path) -> None:
    done = lab("run", folder / "study.toml", "--data", folder, "--set", "algorithm.name=fedavg")
    for word in ("fedavg", "best_global", "ash", "birch", "mean", "shared model", "study"):
        assert word in done.stdout


def test_run_shows_the_fine_tuned_checkpoint_where_the_study_tunes(folder: Path) -> None:
    words = ["run", folder / "study.toml", "--data", folder, "--set", "algorithm.name=fedavg"]
    assert "fine_tuned" not in lab(*words).stdout
    assert "fine_tuned" in lab(*words, "--set", "algorithm.fine_tuning.steps=2").stdout


def test_a_setting_changes_the_study_and_its_digest(folder: Path) -> None:
    runs = [
        json.loads(lab("run", folder / "study.toml", "--data", folder, "--json", *extra).stdout)
        for extra in ((), ("--set", "training.learning_rate=0.5"))
    ]
    assert runs[0]["study_digest"] != runs[1]["study_digest"]
    assert runs[0]["digests"] != runs[1]["digests"]


def test_alone_trains_the_variants_own_network_without_sharing(folder: Path) -> None:
    said = json.loads(
        lab("run", folder / "study.toml", "--data", folder, "--variant", "fedavg", "--alone", "--json").stdout
    )
    assert (said["method"], said["model"], said["digests"]) == ("silo", "mlp", [None])


def test_init_writes_the_tensors_of_the_labs_first_round(folder: Path) -> None:
    out = folder / "initial.safetensors"
    done = lab("init", folder / "study.toml", "--out", out)
    study = resolve(StudyFile.model_validate(_tables(folder)))
    with TensorFile(out) as file:
        assert file.specs == describe(study, "ash").upload
        digest = file.manifest().digest()
    assert digest == manifest(initial_model(study), describe(study, "ash").upload).digest()
    assert f"digest {digest}" in done.stderr
    run = json.loads(lab("run", folder / "study.toml", "--data", folder, "--json").stdout)
    assert run["study_digest"] == study.digest(digest)
    assert run["study_digest"] in done.stderr


def test_init_refuses_a_method_that_no_coordinator_runs(folder: Path) -> None:
    with pytest.raises(BadData) as refusal:
        lab("init", folder / "study.toml", "--set", "algorithm.name=silo", "--out", folder / "initial.safetensors")
    assert refusal.value.message == "study.toml: algorithm `silo` runs only in the lab"
    assert not (folder / "initial.safetensors").exists()


def test_other_tools_read_the_initial_file(folder: Path) -> None:
    from safetensors.torch import load_file

    out = folder / "initial.safetensors"
    lab("init", folder / "study.toml", "--out", out)
    study = resolve(StudyFile.model_validate(_tables(folder)))
    read = load_file(out)
    assert read.keys() == initial_model(study).keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in initial_model(study).items())


def test_a_site_without_a_table_is_named(folder: Path) -> None:
    study = resolve(StudyFile.model_validate(_tables(folder)))
    (folder / "birch" / "train.csv").unlink()
    with pytest.raises(BadData) as refusal:
        load_sites(study, task_of(study), folder)
    table = folder / "birch" / "train.csv"
    assert refusal.value.message == f"{folder} has no table for site `birch`: {table} does not exist"
    assert refusal.value.hint == (
        "one folder for each site, with train.csv and test.csv; `fl-lab data --help` makes examples"
    )


def _tables(folder: Path) -> dict[str, Any]:
    import tomllib

    tables = tomllib.loads((folder / "study.toml").read_text())
    tables.pop("variants")
    return tables


def test_the_lab_holds_the_studys_limits_and_says_whom_they_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One site's update a million times too large, as wrong units make it, and one with most of the rows."""
    sites = ("ash", "birch", "cedar", "douglas")
    tables = toy_study("fedavg").file.model_dump()
    tables["study"] |= {"sites": sites, "quorum": 3, "rounds": 2}
    study = resolve(StudyFile.model_validate(tables))
    data = {site: toy_data(site, rows=400 if site == "ash" else 22) for site in sites}
    honest = federate(study, data)
    assert limits_summary(honest.accounts) == ["site ash counted for less than its rows in 2 of 2 rounds"]
    assert honest.digest != federate(study.changed(limits={"max_weight": 1.0}), data).digest

    real = SiteSession.train

    def in_other_units(session: SiteSession, number: int, *given: Any, **more: Any) -> RoundResult:
        result = real(session, number, *given, **more)
        if session._context.site != "birch" or number != 2:
            return result
        large = {bundle: {name: 1e6 * one for name, one in part.items()} for bundle, part in result.uplink.items()}
        return replace(result, uplink=large)

    monkeypatch.setattr(SiteSession, "train", in_other_units)
    said = limits_summary(federate(study, data).accounts)
    assert said[0].startswith("site birch is not in round 2's model: norm ")
    all_needed = study.changed(study={"quorum": 4})
    with pytest.raises(BadData) as refusal:
        federate(all_needed, data)
    assert refusal.value.message.startswith(
        "round 2: only 3 of the 4 updates that it needs are within the study's limits: site birch: norm "
    )
    assert refusal.value.hint == (
        "a coordinator would pause here: look at the site's data, or raise `norm_multiple` in [limits]"
    )


def test_a_loss_beyond_its_range_is_told_as_the_bound_so_that_a_site_that_diverges_goes_on() -> None:
    study = toy_study("fedavg")
    result = RoundResult({}, 22, 9, {"val_loss": 3e7}, ())
    assert reported_losses(study, {"ash": result}) == [("1e+06", 9)]
