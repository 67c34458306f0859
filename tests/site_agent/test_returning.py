"""A coordinator that was restored from an older copy: the site gives back the receipts that it lost, and goes on."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from site_agent import audit
from site_agent.gateway.exit import returning
from tests.site_agent.site_world import STUDY, SiteWorld, document
from tools import verify_ledger
from tools.world import wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SiteWorld]:
    world = SiteWorld(tmp_path)
    world.coordinator.says_last_receipt = True
    try:
        yield world
    finally:
        world.close()


def is_settled(world: SiteWorld, round_: int) -> bool:
    """Whether the receipt of a round is in the ledger, and the trainer has heard of it."""
    journal = world.state.journal(STUDY)
    return (journal.round, journal.applied) == (round_, True) and journal.decision != ""


def after_a_restore(world: SiteWorld, rounds: int, known: int) -> None:
    """A site with receipts of ``rounds`` rounds connects to a coordinator that knows ``known`` of them."""
    world.ready()
    for round_ in range(1, rounds + 1):
        world.coordinator.assign(STUDY, round_)
        world.coordinator.wait_receipts(round_)
        wait_until(partial(is_settled, world, round_), "decided", 20)
    world.coordinator.stop()
    world.coordinator.restore(known)
    world.coordinator.start()
    world.coordinator.wait_connected()


@pytest.mark.parametrize("known", [0, 2])
def test_lost_receipts_go_back_and_the_next_update_follows_from_them(
    world: SiteWorld, known: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended with 78: "the coordinator has seen another ledger", and only a new directory helped."""
    monkeypatch.setattr(returning, "PAGE", 2)
    after_a_restore(world, 3, known)
    assert len(world.coordinator.chain) == 3
    assert world.coordinator.returned == ([2, 1] if known == 0 else [1])
    assert f"the coordinator was restored from an older copy: it has back the {3 - known} receipts" in caplog.text
    world.coordinator.offer(document(title="once more"), world.another_model(0), revision=2)
    wait_until(lambda: world.state.offer(STUDY).revision == 2, "the new revision is kept", 20)
    world.approve()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    wait_until(lambda: world.state.journal(STUDY).decision and world.state.journal(STUDY).revision == 2, "decided", 20)
    world.stop()
    assert audit.verify(world.state.ledger)[1] == audit.CONSISTENT
    assert verify_ledger.judge(world.state.ledger)[0] == audit.CONSISTENT
    assert [row["method"] for line in world.lines("control") for row in line["methods"]].count("Return") == 1


def test_a_coordinator_that_lost_nothing_or_says_nothing_is_given_nothing(world: SiteWorld) -> None:
    after_a_restore(world, 1, 1)
    assert world.coordinator.returned == []


def test_a_coordinator_that_takes_nothing_back_is_not_asked_for_ever(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    wait_until(lambda: is_settled(world, 1), "decided", 20)
    world.coordinator.stop()
    world.coordinator.restore(0)
    world.coordinator._take_back = lambda envelope: None  # type: ignore[method-assign]
    world.coordinator.start()
    world.coordinator.wait_connected()
    assert world.coordinator.returned == [1]


def test_a_study_that_is_listed_no_longer_is_over_until_the_coordinator_says_another_word(world: SiteWorld) -> None:
    world.ready()
    kept = world.coordinator.offers.pop(STUDY)
    world.restart()
    world.coordinator.wait_connected()
    wait_until(lambda: world.state.offer(STUDY).state == "stopped", "it is over", 20)
    world.coordinator.offers[STUDY] = kept
    world.restart()
    wait_until(lambda: world.state.offer(STUDY).state == kept.state, "it goes on", 20)
