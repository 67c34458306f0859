"""The journal's steps that last as long as the power, and what makes good what a loss of power takes of them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from site_agent.state import codec
from site_agent.state.directory import Journal, SiteState
from tests.site_agent.site_world import STUDY, SiteWorld
from tools.world import wait_until
from wardround.errors import NeedsPerson
from wardround.local import durable


@pytest.fixture
def state(tmp_path: Path) -> SiteState:
    durable.make_folder(tmp_path / "journal")
    return SiteState(tmp_path)


def rounds_told(world: SiteWorld) -> list[int]:
    """The rounds of which the trainer heard that they were accepted, as often as it heard it."""
    return [request["round"] for request in world.trainer.commands("commit")]


def is_told(world: SiteWorld, round_: int) -> bool:
    journal = world.state.journal(STUDY)
    return (journal.round, journal.phase, journal.applied) == (round_, "decided", True)


def do_round(world: SiteWorld, round_: int) -> None:
    world.coordinator.assign(STUDY, round_)
    world.coordinator.wait_receipts(round_)
    wait_until(partial(is_told, world, round_), f"the trainer heard of round {round_}", 60)


def test_a_step_counts_until_a_later_one_is_fsynced(state: SiteState) -> None:
    state.save_journal(Journal(STUDY, round=1), "nothing")  # before anything is fsynced
    assert state.journal(STUDY).round == 1
    state.save_journal(Journal(STUDY, round=2))
    assert state.journal(STUDY).round == 2
    for round_ in (3, 4):
        state.save_journal(Journal(STUDY, round=round_), "nothing")
        assert state.journal(STUDY).round == round_
    older = (state.root / "journal" / f"{STUDY}.now").read_bytes()
    state.save_journal(Journal(STUDY, round=5), "content")
    assert state.journal(STUDY).round == 5
    (state.root / "journal" / f"{STUDY}.now").write_bytes(older)  # its removal may be lost with the power
    assert state.journal(STUDY).round == 5


def test_a_step_is_written_over_the_one_before_it_and_may_be_shorter(state: SiteState) -> None:
    """A file of its own for each would be most of what a step costs."""
    path = state.root / "journal" / f"{STUDY}.now"
    state.save_journal(Journal(STUDY, round=1, phase="training", own_loss="0.123456789"), "nothing")
    first = path.stat().st_ino
    state.save_journal(Journal(STUDY, round=2), "nothing")
    assert state.journal(STUDY) == Journal(STUDY, round=2)
    state.save_journal(Journal(STUDY, round=3), "content")
    assert state.journal(STUDY) == Journal(STUDY, round=3)
    state.save_journal(Journal(STUDY, round=4, own_loss="0.1"), "nothing")
    assert state.journal(STUDY) == Journal(STUDY, round=4, own_loss="0.1")
    assert path.stat().st_ino == first


def test_a_step_counts_no_more_once_a_later_one_was_kept_though_both_have_the_same_words(state: SiteState) -> None:
    state.save_journal(Journal(STUDY, round=1), "content")
    state.save_journal(Journal(STUDY, round=2), "nothing")
    state.save_journal(Journal(STUDY, round=1), "content")
    assert state.journal(STUDY) == Journal(STUDY, round=1)


def test_a_step_that_is_just_being_written_over_another_is_read_whole(
    state: SiteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save_journal(Journal(STUDY, round=1))
    state.save_journal(Journal(STUDY, round=2), "nothing")
    read, looks = codec.content, []

    def early(path: Path, kind: type[Any]) -> bytes:
        data = read(path, kind)
        looks.append(path.suffix)
        return data[:-9] if looks.count(".now") == 1 else data

    monkeypatch.setattr(codec, "content", early)
    assert state.journal(STUDY).round == 2


def test_a_step_that_a_loss_of_power_tore_anywhere_is_passed_over(state: SiteState) -> None:
    state.save_journal(Journal(STUDY, round=1))
    state.save_journal(Journal(STUDY, round=2), "nothing")
    path = state.root / "journal" / f"{STUDY}.now"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert state.journal(STUDY).round == 1
        path.write_bytes(whole[:length] + bytes(len(whole) - length))
        assert state.journal(STUDY).round == 1
    path.write_bytes(whole)
    assert state.journal(STUDY).round == 2


def test_after_a_loss_of_power_the_ledger_says_what_was_decided_and_the_trainer_hears_it_again(
    world: SiteWorld,
) -> None:
    world.ready()
    for round_ in (1, 2):
        do_round(world, round_)
    world.stop()
    (world.state.root / "journal" / f"{STUDY}.now").unlink()
    journal = world.state.journal(STUDY)
    assert (journal.round, journal.phase, journal.decision) == (2, "uploading", "")
    world.start()
    wait_until(partial(is_told, world, 2), "the trainer heard it again", 60)
    assert rounds_told(world) == [1, 2, 2]
    world.coordinator.wait_connected()
    do_round(world, 3)
    assert rounds_told(world) == [1, 2, 2, 3]
    assert len(world.lines("upload")) == 3


def test_an_agent_that_starts_anew_reminds_the_trainer_before_the_next_round(world: SiteWorld) -> None:
    """The trainer's word for it lasts as long as the power, and so may the journal's."""
    world.ready()
    do_round(world, 1)
    assert world.state.journal(STUDY).untold == 1
    world.restart()
    world.coordinator.wait_connected()
    do_round(world, 2)
    assert rounds_told(world) == [1, 1, 2]
    do_round(world, 3)
    assert rounds_told(world) == [1, 1, 2, 3]


def test_a_trainer_that_has_nothing_any_more_to_be_reminded_of_begins_with_what_there_is(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A person removed its folder: as before, the study goes on there from its beginning."""
    world.ready()
    do_round(world, 1)
    kept, told = world.trainer._commit, list[int]()

    def commit(request: dict[str, Any]) -> Any:
        told.append(request["round"])
        if told == [1]:
            raise NeedsPerson("index.json is missing or damaged", hint="restore that folder from a backup")
        return kept(request)

    monkeypatch.setattr(world.trainer, "_commit", commit)
    world.restart()
    world.coordinator.wait_connected()
    do_round(world, 2)
    assert told == [1, 2]
    assert 'the trainer says: "index.json is missing or damaged"' in caplog.text
