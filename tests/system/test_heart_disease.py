"""The main job: four hospitals train FENDA-FL on real patients, and its promises are looked up from outside."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import HEART, lab_run, label_of, sites_of
from tools.world import World

SITES = sites_of(HEART)
STUDY = "heart-disease"
pytestmark = [pytest.mark.system, pytest.mark.data, pytest.mark.chaos]


def federate(state: Path, data: Path) -> tuple[World, dict[str, Any]]:
    world = World(state)
    with world:
        world.start(data, label_of(HEART), SITES)
        study = world.create_study(HEART)
        world.approve(study, SITES)
        world.ask_coordinator("study", "start", study)
        status = world.finish(study)
        for site in SITES:
            world.heard(site, study)
    for site in SITES:
        world.ask_coordinator("receipts", site, "--out", state / f"{site}.receipts.jsonl")
    return world, status


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, heart_data: Path) -> tuple[World, dict[str, Any]]:
    return federate(tmp_path_factory.mktemp("federation"), heart_data)


@pytest.fixture(scope="module")
def lab(heart_data: Path) -> dict[str, Any]:
    """The same study in one process."""
    return lab_run(HEART, heart_data)


def test_every_hospital_contributes_to_every_round(federation: tuple[World, dict[str, Any]]) -> None:
    _, status = federation
    assert status["state"] == "finished"
    assert (status["round"], status["rounds"]) == (15, 15)
    contributed = {site: row["rounds_contributed"] for site, row in status["sites"].items()}
    assert contributed == {site: list(range(1, 16)) for site in SITES}


@pytest.mark.chaos
def test_a_second_federation_and_the_lab_reach_the_same_bits(
    federation: tuple[World, dict[str, Any]], lab: dict[str, Any], heart_data: Path, tmp_path: Path
) -> None:
    _, first = federation
    _, second = federate(tmp_path, heart_data)
    assert first["model_digest"] == second["model_digest"] == lab["digests"][0]


def test_only_the_shared_extractors_tensors_are_in_the_ledgers(federation: tuple[World, dict[str, Any]]) -> None:
    world, _ = federation
    preview = world.site_json(SITES[0], "preview", STUDY)  # the study's, and no site's own
    leaves = {leaf["name"] for leaf in preview["leaves"]}
    assert leaves
    assert all(name.startswith("shared") for name in leaves), leaves
    stays = {stay["name"] for stay in preview["stays"]}
    assert any(name.startswith("private") for name in stays)
    assert any(name.startswith("head") for name in stays)
    for site in SITES:
        lines = [
            json.loads(line) for line in (world.state / site / "ledger" / "000001.jsonl").read_bytes().splitlines()
        ]
        uploads = [line for line in lines if line["type"] == "upload"]
        trained = [line for line in uploads if line["tensors"]]
        assert len(trained) == 15
        assert len(uploads) == 16  # and the closing validation, without tensors
        assert all({tensor["name"] for tensor in line["tensors"]} == leaves for line in trained)


def test_every_ledger_verifies_without_an_unsigned_tail(federation: tuple[World, dict[str, Any]]) -> None:
    world, _ = federation
    for site in SITES:
        verdict = world.site_json(site, "audit", "verify", "--receipts", world.state / f"{site}.receipts.jsonl")
        assert verdict["ok"], verdict
        assert verdict["unsigned_tail"] == 0


def test_the_hospitals_own_best_models_are_useful(federation: tuple[World, dict[str, Any]]) -> None:
    world, _ = federation
    scores = []
    for site in SITES:
        rows = {row["kind"]: row for row in world.site_json(site, "models", "list", STUDY)["checkpoints"]}
        assert set(rows) == {"latest", "best_local"}  # FENDA-FL has no one global model
        assert rows["best_local"]["split"] == "test"
        scores.append(rows["best_local"]["score"])
    assert sum(scores) / len(scores) >= 0.77


def test_predictions_for_a_table_match_the_checkpoints_own_score(
    federation: tuple[World, dict[str, Any]], heart_data: Path, tmp_path: Path
) -> None:
    world, _ = federation
    label = label_of(HEART)
    for site in (SITES[0], SITES[-1]):  # each is a process that imports torch: two of them show it
        table, out = heart_data / site / "test.csv", tmp_path / f"{site}.csv"
        world.ask_site(site, "predict", STUDY, "--checkpoint", "best_local", "--table", table, "--out", out)
        with table.open() as truth, out.open() as said:
            pairs = list(zip(csv.DictReader(truth), csv.DictReader(said), strict=True))
        right = sum(row[label] == prediction["predicted"] for row, prediction in pairs)
        rows = {row["kind"]: row for row in world.site_json(site, "models", "list", STUDY)["checkpoints"]}
        assert right / len(pairs) == pytest.approx(rows["best_local"]["score"])


def test_the_models_have_the_same_scores_as_in_the_lab(
    federation: tuple[World, dict[str, Any]], lab: dict[str, Any]
) -> None:
    world, _ = federation
    scores = lab["scores"]["best_local"]["per_site"]
    for site in SITES:
        rows = {row["kind"]: row for row in world.site_json(site, "models", "list", STUDY)["checkpoints"]}
        assert rows["best_local"]["score"] == pytest.approx(scores[site])
