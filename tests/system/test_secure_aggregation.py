"""Secure aggregation between four hospitals: real processes over real TLS, killed at random, and the lab's model."""

import random
from pathlib import Path
from typing import Any

import pytest

from tools.evidence_kills import Killer, Tally
from tools.faults import Disturbed, Plan, Template, lab_digest

PLAN = Plan(sites=4, rounds=10, secure=True)
KILLS = 5


@pytest.mark.system
@pytest.mark.chaos
def test_killed_at_random_nobody_opens_a_second_sum_and_every_site_checks_the_labs_model(tmp_path: Path) -> None:
    template, tally = Template(tmp_path, PLAN), Tally()
    (study,) = PLAN.study_names
    with Disturbed(template.copy(), PLAN) as world:
        world.begin()
        killer = Killer(world, random.Random(5), KILLS, tally)
        world.until(study, lambda status: False, act=killer.act)
        assert world.judge(study, {PLAN.rounds: lab_digest(template)}) == []
        lines = {site: list(world.entries(site)) for site in PLAN.names}
    assert tally.total == KILLS
    for entries in lines.values():
        assert all(line["metrics"] == [] and line["num_examples"] == 0 for line in of(entries, "upload"))
        assert len({line["round"] for line in of(entries, "agreed")}) == len(of(entries, "agreed"))
        results = {line["result"] for line in of(entries, "sum_checked")}
        assert "same" in results
        assert results <= {"same", "missed"}  # missed: a round of which this site was told nothing while it was down


def of(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["type"] == kind]


def opened(**changed: Any) -> dict[str, Any]:
    whole = {"type": "opened", "study": "trial-01", "round": 2, "context": "c", "chosen": "x", "self_masks": ["alpha"]}
    return {**whole, "mask_keys": ["bravo"], **changed}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"round": 3, "chosen": "y"}, []),
        ({"chosen": "y"}, ["round 2 of trial-01 was opened twice"]),
        ({"context": "d"}, ["round 2 of trial-01 was opened twice"]),
        ({"mask_keys": ["alpha"]}, ["round 2 of trial-01: both secrets of alpha were opened"]),
    ],
    ids=["one set", "another round", "another set", "another attempt", "both secrets"],
)
def test_what_was_opened_otherwise_is_found_in_the_ledgers(
    other: dict[str, Any], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Disturbed(tmp_path, PLAN)
    ledgers = {"alpha": [opened()], "bravo": [opened(**other)]}
    monkeypatch.setattr(world, "entries", lambda site: iter(ledgers.get(site, [])))
    assert world.opened_otherwise() == said
