"""What became of an upload is known before the next round begins."""

import threading

import pytest

from site_agent.gateway.exit.ledger import Ledger
from tests.site_agent.site_world import STUDY, SiteWorld
from tools.world import wait_until
from wardround.errors import CannotWrite
from wardround.records.ledger.entries import Entry, ReceiptEntry

WAIT_S = 20


def test_the_next_round_begins_once_it_is_known_what_became_of_the_one_that_was_called_off(world: SiteWorld) -> None:
    """Accepted after all: what the trainer learned in it stays."""
    world.ready()
    assert world.trainer is not None
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_whole()
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_for(lambda: len(world.coordinator.inquired) >= 3, "it asks more than once")
    assert [asked["round"] for asked in world.trainer.commands("train")] == [1]
    world.coordinator.hold_uploads.set()
    world.coordinator.wait_receipts(2)
    world.trainer.wait_committed(2)
    told = world.trainer.commands("train", "commit", "discard")
    assert [(one["command"], one["round"]) for one in told] == [
        ("train", 1), ("commit", 1), ("train", 2), ("commit", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("next_is", ["a round", "the end"])
def test_a_receipt_for_which_the_ledger_has_no_room_is_waited_for_before_what_comes_next(
    world: SiteWorld, next_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round closes while its receipt is on the way, and the disk is full: the trainer hears of it all the same."""
    world.ready()
    assert world.trainer is not None
    full = threading.Event()
    full.set()
    refused: list[Entry] = []
    append = Ledger.append

    def no_room(self: Ledger, entry: Entry) -> None:
        if full.is_set() and isinstance(entry, ReceiptEntry):
            refused.append(entry)
            raise CannotWrite("ledger/000001.jsonl: No space left on device")
        append(self, entry)

    monkeypatch.setattr(Ledger, "append", no_room)
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_whole()
    if next_is == "a round":
        world.coordinator.assign(STUDY, 2)
    else:
        world.coordinator.stop_study(STUDY, "FINISHED")
    world.coordinator.wait_for(lambda: world.coordinator.inquired, "it was called off, and is asked about")
    world.coordinator.hold_uploads.set()
    wait_until(lambda: len(refused) >= 3, "the receipt finds no room, again and again", WAIT_S)
    assert not world.trainer.commands("commit", "discard", "finish")
    full.clear()
    world.trainer.wait_asked("commit")
    told = world.trainer.commands("train", "commit", "discard")
    assert [(one["command"], one["round"]) for one in told][:2] == [("train", 1), ("commit", 1)]
    assert not world.trainer.commands("discard")
