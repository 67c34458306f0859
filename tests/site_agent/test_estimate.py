"""A site that trains for long says how long it will still take, rarely and roughly."""

import json

import pytest

from site_agent.gateway.estimate import Estimate
from tests.site_agent.site_world import STUDY, SiteWorld
from wardround.records.trainer import Progress
from wardround.v1 import federation_pb2 as pb


class Training:
    """A round of 100 steps, and what was told of it."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.told: list[int] = []
        self.estimate = Estimate(self.told.append, clock=lambda: self.time)

    def at(self, seconds: float, step: int) -> None:
        self.time = 1000.0 + seconds
        self.estimate.note(Progress(step=step, steps=100))


def test_it_is_told_once_as_one_of_few_lengths() -> None:
    training = Training()
    for step in range(1, 101):
        training.at(10 * step, step)
    assert training.told == [24 * 60]  # at 30 s, 3 steps: 970 s are left


def test_a_short_round_tells_nothing() -> None:
    training = Training()
    for step in range(1, 101):
        training.at(0.29 * step, step)
    assert training.told == []


def test_training_that_becomes_much_slower_is_told_again() -> None:
    training = Training()
    training.at(60, 50)
    training.at(300, 60)
    assert training.told == [60, 240]


def test_a_coordinator_hears_of_it_and_the_ledger_has_it(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("site_agent.gateway.estimate.FIRST_S", 0.0)
    world.ready()
    assert world.trainer is not None
    world.trainer.progress = [Progress(step=1, steps=2)]
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    (declared,) = [said for said in world.coordinator.declared if said.status == pb.TRAINING]
    assert (declared.round, declared.estimate_s) == (1, 60)
    (line,) = [line for line in world.lines("declare") if line["standing"] == "training"]
    assert line["estimate_s"] == 60
    assert json.dumps(line)
