"""Approval by several people, where a hospital's policy wants it: one alone puts nothing in force."""

from typing import Any

import pytest

from site_agent import audit
from site_agent.gateway.consent.preview import Preview
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld
from tools import verify_ledger
from wardround.errors import NeedsPerson, UsageProblem

SECOND = {"name": "head of it", "uid": 1001}
TWO = ('updates = "none"', 'updates = "none"\n\n[approval]\npersons = 2')


def offered(world: SiteWorld, *edits: tuple[str, str]) -> None:
    """A running site whose policy wants two people."""
    world.join()
    world.offer()
    world.start()
    world.draft(*(edits or (TWO,)))


def approve(world: SiteWorld, person: dict[str, Any]) -> Any:
    return world.command("approve", study=STUDY, data="patients", digest=world.shown(), by=person)


def test_one_person_alone_puts_nothing_in_force(world: SiteWorld) -> None:
    offered(world)
    with pytest.raises(NeedsPerson) as waiting:
        approve(world, PERSON)
    assert waiting.value.message == (
        "study `hearts`: approved by dpo, 1 of the 2 people that the policy wants; nothing leaves before all have"
    )
    assert waiting.value.hint == "another person runs `site-agent approve hearts --data patients`"
    assert world.state.consent(STUDY) is None
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_NOT_APPROVED")
    assert not world.lines("upload")


def test_the_second_person_puts_it_in_force_and_the_ledger_names_both(world: SiteWorld) -> None:
    offered(world)
    with pytest.raises(NeedsPerson):
        approve(world, PERSON)
    world.restart()
    assert approve(world, SECOND)["study_digest"] == world.digest
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert [person.name for person in consent.people] == ["dpo", "head of it"]
    assert world.state.endorsement(STUDY) is None
    endorsed, approved = world.lines("consent")
    assert (endorsed["event"], endorsed["by"]["name"], endorsed.get("also_by")) == ("endorsed", "dpo", None)
    assert (approved["event"], approved["by"]["name"]) == ("approved", "head of it")
    assert [person["name"] for person in approved["also_by"]] == ["dpo"]
    assert approved["consent_sha256"] == consent.digest
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.stop()
    assert verify_ledger.judge(world.state.ledger)[0] == audit.verify(world.state.ledger)[1] != audit.TAMPERED


def test_the_same_person_is_not_two(world: SiteWorld) -> None:
    offered(world)
    with pytest.raises(NeedsPerson):
        approve(world, PERSON)
    with pytest.raises(UsageProblem) as refused:
        approve(world, {**PERSON, "name": "another name"})
    assert refused.value.message == (
        "another name has approved study `hearts` already; the policy wants 2 different people"
    )
    assert world.state.consent(STUDY) is None


def test_what_was_endorsed_of_another_account_does_not_count(world: SiteWorld) -> None:
    offered(world)
    with pytest.raises(NeedsPerson):
        approve(world, PERSON)
    world.draft(TWO, ("bytes_per_round = ", "bytes_per_round = 1"))  # another policy: another account
    with pytest.raises(NeedsPerson, match="1 of the 2 people"):
        approve(world, SECOND)
    endorsement = world.state.endorsement(STUDY)
    assert endorsement is not None
    assert [person.name for person in endorsement.by] == ["head of it"]


def test_a_consent_of_one_person_sends_nothing_once_the_policy_wants_two(world: SiteWorld) -> None:
    world.ready()
    world.draft(TWO)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert not world.lines("upload")
    (blocked,) = world.lines("blocked")
    assert (blocked["what"], blocked["rule"]) == ("1 person approved", "approval.persons: 2")


def test_a_withdrawal_forgets_who_endorsed_before(world: SiteWorld) -> None:
    offered(world)
    with pytest.raises(NeedsPerson):
        approve(world, PERSON)
    approve(world, SECOND)
    world.command("withdraw", study=STUDY, by=SECOND)
    with pytest.raises(NeedsPerson, match="1 of the 2 people"):
        approve(world, SECOND)


def test_what_was_endorsed_can_be_taken_back_and_counts_no_more(world: SiteWorld) -> None:
    """An approval that was taken back is no half of a later one."""
    offered(world)
    with pytest.raises(NeedsPerson):
        approve(world, PERSON)
    assert world.command("withdraw", study=STUDY, by=SECOND) == {"reported": True}
    assert world.state.endorsement(STUDY) is None
    taken_back = world.lines("consent")[-1]
    assert (taken_back["event"], taken_back["by"]["name"]) == ("taken back", "head of it")
    assert [person["name"] for person in taken_back["also_by"]] == ["dpo"]
    with pytest.raises(NeedsPerson, match="1 of the 2 people"):
        approve(world, SECOND)
    assert world.state.consent(STUDY) is None
    world.command("withdraw", study=STUDY, by=SECOND)
    with pytest.raises(UsageProblem, match="is not approved here"):
        world.command("withdraw", study=STUDY, by=SECOND)
    world.stop()
    assert verify_ledger.judge(world.state.ledger)[0] == audit.verify(world.state.ledger)[1] != audit.TAMPERED


def test_the_account_says_how_many_people_the_policy_wants(world: SiteWorld) -> None:
    offered(world)
    shown = Preview.from_document(world.command("preview", study=STUDY, data="patients"))
    assert shown.account.lines["policy.approval.persons"] == "2"
