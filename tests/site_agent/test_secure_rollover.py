"""What a site has signed stands across a ledger rollover: a new ledger is no new word."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from site_agent import audit
from tests.site_agent.secure_sites import STUDY, SecureSites
from tools import verify_ledger
from wardround.errors import NotPermitted
from wardround.records.ledger.decided import PolicyEntry
from wardround.records.secure_messages import SecureShown, Shown


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SecureSites]:
    world = SecureSites(tmp_path)
    yield world
    world.close()


def roll_over(world: SecureSites, site: str = "bergen") -> None:
    world.hospitals[site] = world.hospitals[site].roll_over()


def both_verify(world: SecureSites, site: str = "bergen") -> tuple[int, int | None]:
    ledger = world.hospitals[site].state.ledger
    verdict, code = audit.verify(ledger)
    assert verify_ledger.judge(ledger)[:2] == (code, verdict.first_bad)
    return code, verdict.first_bad


def test_a_round_goes_on_after_a_rollover_between_its_signature_and_its_opening(world: SecureSites) -> None:
    """The coordinator shows the set again, as it does whenever a site connects: the new ledger gets its line."""
    world.open(1)
    world.upload(1, world.sites)
    world.agree(world.sites)
    roll_over(world)
    world.show("bergen", SecureShown(world.ref, Shown.SET, world.attempt.shown_set()))
    world.show("bergen", SecureShown(world.ref, Shown.SET, world.attempt.shown_set()))
    world.unmask(world.sites)
    hospital = world.hospitals["bergen"]
    assert [line["round"] for line in hospital.lines("agreed")] == [1]
    assert [line["round"] for line in hospital.lines("opened")] == [1]
    assert both_verify(world)[0] != audit.TAMPERED


def test_a_sum_that_was_opened_before_a_rollover_is_checked_after_it(world: SecureSites) -> None:
    world.run(1)
    roll_over(world)
    roll_over(world)
    world.check("bergen", 2)
    (line,) = world.hospitals["bergen"].lines("sum_checked")
    assert (line["round"], line["result"]) == (1, "same")
    for site in ("amsterdam", "charite"):
        world.check(site, 2)
    world.run(2)
    assert [line["round"] for line in world.hospitals["bergen"].lines("agreed")] == [2]
    assert both_verify(world)[0] != audit.TAMPERED


def test_without_the_ledger_before_nothing_is_signed(world: SecureSites) -> None:
    world.run(1)
    roll_over(world)
    hospital = world.hospitals["bergen"]
    (older,) = hospital.state.root.glob("ledger-*")
    older.rename(world.folder / "elsewhere")
    hospital = world.hospitals["bergen"] = hospital.restart()
    found = f"ledger {older.name.removeprefix('ledger-')}, which this one continues, is not beside it"
    with pytest.raises(NotPermitted, match=found) as refused:
        hospital.begin(2)
    assert refused.value.hint == f"put the folder `{older.name}` back beside `ledger`, from the last backup that has it"
    assert not hospital.lines("keys")
    (world.folder / "elsewhere").rename(older)
    hospital = world.hospitals["bergen"] = hospital.restart()
    hospital.begin(2)
    with pytest.raises(NotPermitted, match="the sum of round 1 of `hearts` was not checked"):
        hospital.rounds._refuse_unchecked(hospital.rounds.attempts.load(STUDY))  # type: ignore[arg-type]


def test_two_sets_of_one_round_in_two_ledgers_are_found_by_both_verifiers(world: SecureSites) -> None:
    """As an agent without this rule would have written them."""
    world.run(1)
    first = world.hospitals["bergen"].ledger.pledged.sets()[0][0]
    roll_over(world)
    hospital = world.hospitals["bergen"]
    hospital.ledger.append(PolicyEntry(event="seen", sha256=first.policy_sha256))
    hospital.ledger.append(type(first)(**{**vars(first), "chosen": "cd" * 32, "attempt": 2}))
    hospital.ledger.sign()
    assert both_verify(world) == (audit.TAMPERED, 4)
    (older,) = hospital.state.root.glob("ledger-*")
    older.rename(world.folder / "elsewhere")  # not shown, it says nothing
    assert both_verify(world)[0] != audit.TAMPERED
