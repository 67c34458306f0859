"""Updates and changes of the policy that several people must agree to, where a hospital's policy wants it."""

import hashlib
from typing import Any

import pytest

from site_agent import audit
from site_agent.gateway.setup import handler_alone
from tests.site_agent.site_world import DPO, PERSON, STUDY, SiteWorld
from tools import verify_ledger
from wardround.errors import BadData, NeedsPerson, UsageProblem

SECOND = {"name": "head of it", "uid": 1001}
ONE_MORE = {"name": "clinic", "uid": 1002}
TWO_RELEASE = ('updates = "none"', 'updates = "every"\npersons = 2')
TWO_CHANGE = ('updates = "none"', 'updates = "none"\n\n[policy]\npersons = 2')


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def held(world: SiteWorld, edit: tuple[str, str] = TWO_RELEASE) -> str:
    """A running site with an update that waits; its digest."""
    world.join()
    world.offer()
    world.start()
    world.draft(edit)
    world.approve()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("HELD")
    return str(world.command("waiting", study=STUDY, round=1)["update"])


def decide(world: SiteWorld, update: str, person: dict[str, Any], decision: str = "released") -> Any:
    return world.command("decide", study=STUDY, round=1, decision=decision, update=update, by=person)


def put(world: SiteWorld, text: bytes, before: bytes, person: dict[str, Any]) -> str:
    told = world.command("policy", text=text.decode(), before=sha256(before), by=person)
    return str(told["sha256"])


def both_verifiers_agree(world: SiteWorld) -> None:
    world.stop()
    code = audit.verify(world.state.ledger)[1]
    assert verify_ledger.judge(world.state.ledger)[0] == code
    assert code not in (audit.TAMPERED, audit.CANNOT_VERIFY)


def test_one_person_alone_releases_nothing(world: SiteWorld) -> None:
    update = held(world)
    with pytest.raises(NeedsPerson) as waiting:
        decide(world, update, PERSON)
    assert waiting.value.message == (
        "round 1 of `hearts`: released by dpo, 1 of the 2 people that the policy wants; it leaves when all have"
    )
    assert waiting.value.hint == "another person runs `site-agent release hearts --round 1`"
    (endorsed,) = world.lines("endorsed")
    assert (endorsed["update"], endorsed["by"]["name"]) == (update, "dpo")
    shown = world.command("waiting", study=STUDY, round=1)
    assert (shown["persons"], shown["endorsed"]) == (2, ["dpo"])
    assert not world.lines("released")
    assert not world.lines("upload")


def test_the_same_person_does_not_release_for_two(world: SiteWorld) -> None:
    update = held(world)
    with pytest.raises(NeedsPerson):
        decide(world, update, PERSON)
    with pytest.raises(UsageProblem) as refused:
        decide(world, update, {**PERSON, "name": "another name"})
    assert refused.value.message == (
        "another name has released round 1 of `hearts` already; the policy wants 2 different people"
    )
    assert len(world.lines("endorsed")) == 1
    assert not world.lines("upload")


def test_the_second_person_lets_it_leave_and_the_ledger_names_both(world: SiteWorld) -> None:
    update = held(world)
    with pytest.raises(NeedsPerson):
        decide(world, update, PERSON)
    world.restart()
    decide(world, update, SECOND)
    (released,) = world.lines("released")
    assert (released["by"]["name"], [person["name"] for person in released["also_by"]]) == ("head of it", ["dpo"])
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    (upload,) = world.lines("upload")
    assert upload["update"] == update
    both_verifiers_agree(world)


def test_one_person_rejects_what_another_would_have_leave(world: SiteWorld) -> None:
    update = held(world)
    with pytest.raises(NeedsPerson):
        decide(world, update, PERSON)
    decide(world, update, SECOND, "rejected")
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    with pytest.raises(UsageProblem):
        decide(world, update, ONE_MORE)
    assert not world.lines("upload")


def test_what_one_person_released_waits_again_once_the_policy_wants_two(world: SiteWorld) -> None:
    """One person released it while the agent did not run; it must not leave by that."""
    update = held(world, ('updates = "none"', 'updates = "every"'))
    world.stop()
    with handler_alone(world.state) as (handler, _interrupt):
        handler.releases.decide(STUDY, 1, "released", update, DPO)
    world.draft(TWO_RELEASE)
    world.coordinator.declared.clear()
    world.start()
    world.coordinator.wait_declared("READY")
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("HELD")
    assert world.command("waiting", study=STUDY, round=1)["endorsed"] == ["dpo"]
    assert not world.lines("upload")
    decide(world, update, SECOND)
    world.coordinator.wait_receipts(1)
    assert [line["by"]["name"] for line in world.lines("released")] == ["dpo", "head of it"]


def test_two_people_to_release_and_nobody_who_is_asked_is_no_policy(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    world.draft(('updates = "none"', 'updates = "none"\npersons = 2'))
    with pytest.raises(BadData, match='`persons` 2 counts nothing while `updates` is "none": nobody is asked'):
        world.approve()


def two_for_the_policy(world: SiteWorld) -> bytes:
    """A running site whose policy two people must agree to change, and whose study is approved."""
    world.join()
    world.offer()
    world.start()
    world.draft(TWO_CHANGE)
    world.approve()
    return world.state.policy.read_bytes()


def test_one_person_alone_changes_no_policy(world: SiteWorld) -> None:
    before = two_for_the_policy(world)
    after = before.replace(b'updates = "none"', b'updates = "every"')
    with pytest.raises(NeedsPerson) as waiting:
        put(world, after, before, PERSON)
    assert waiting.value.message == (
        f"policy {sha256(after)[:12]}…: agreed to by dpo, 1 of the 2 people that the policy in force wants; what is in "
        "force stays"
    )
    assert waiting.value.hint == "another person runs `site-agent policy agree`"
    assert world.state.policy.read_bytes() == before
    with pytest.raises(UsageProblem) as refused:
        put(world, after, before, PERSON)
    assert refused.value.message == (
        f"dpo has agreed to policy {sha256(after)[:12]}… already; the policy wants 2 different people"
    )
    shown = world.command("proposed")
    assert (shown["sha256"], shown["before"], shown["by"]) == (sha256(after), sha256(before), ["dpo"])
    assert shown["changes"] == ["release.updates: none before, every now"]


def test_the_second_person_puts_the_policy_in_force_and_the_ledger_names_both(world: SiteWorld) -> None:
    before = two_for_the_policy(world)
    after = before.replace(b"persons = 2", b"persons = 1")  # to want one person takes two
    with pytest.raises(NeedsPerson):
        put(world, after, before, PERSON)
    world.restart()
    assert put(world, after, before, SECOND) == sha256(after)
    assert world.state.policy.read_bytes() == after
    (proposal,) = world.lines("proposal")
    assert (proposal["event"], proposal["policy_sha256"], proposal["by"]["name"]) == (
        "proposed",
        sha256(after),
        "dpo",
    )
    changed = world.lines("policy")[-1]
    assert (changed["event"], changed["by"]["name"], [person["name"] for person in changed["also_by"]]) == (
        "changed",
        "head of it",
        ["dpo"],
    )
    assert world.lines("policy")[0]["persons"] == 2
    assert put(world, before, after, PERSON) == sha256(before)  # and now one is enough
    both_verifiers_agree(world)


def test_a_policy_changed_by_hand_lets_nothing_leave_where_two_must_agree(world: SiteWorld) -> None:
    before = two_for_the_policy(world)
    world.state.policy.write_bytes(before.replace(b"persons = 2", b"persons = 1"))
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    (blocked,) = world.lines("blocked")
    assert blocked["rule"] == (
        f"{world.state.policy} was changed by hand, and the policy in force wants 2 different people to change it: "
        "nothing leaves"
    )
    assert not world.lines("upload")
    world.state.policy.unlink()  # nor does a new file in its place
    world.restart()
    with pytest.raises(NeedsPerson):
        world.approve()
    assert world.lines("policy")[-1]["event"] == "seen"
    world.state.policy.write_bytes(before)  # what they agreed to
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_receipts(1)
    both_verifiers_agree(world)


def test_a_change_that_waits_is_taken_back_or_overtaken_by_another(world: SiteWorld) -> None:
    before = two_for_the_policy(world)
    one, other = (before.replace(b'"none"', word) for word in (b'"every"', b'"first"'))
    with pytest.raises(NeedsPerson):
        put(world, one, before, PERSON)
    with pytest.raises(UsageProblem, match="this change of the policy does not wait for a person any more"):
        world.command("take_back_policy", sha256=sha256(other), by=SECOND)
    world.command("take_back_policy", sha256=sha256(one), by=SECOND)
    assert world.command("proposed")["sha256"] == ""
    with pytest.raises(NeedsPerson, match="agreed to by head of it, 1 of the 2"):  # what was taken back is no half
        put(world, one, before, SECOND)
    with pytest.raises(NeedsPerson, match="agreed to by dpo, 1 of the 2"):
        put(world, other, before, PERSON)
    assert world.command("proposed")["sha256"] == sha256(other)
    assert [line["event"] for line in world.lines("proposal")] == ["proposed", "taken back", "proposed", "proposed"]
    assert world.state.policy.read_bytes() == before


def wants(world: SiteWorld, persons: int, updates: str = "every") -> None:
    """Another number of people is in force, from the next decision on."""
    text = f'updates = "{updates}"' + (f"\npersons = {persons}" if persons > 1 else "")
    world.draft(('updates = "none"', text))


def asked_again(world: SiteWorld, declared: str) -> None:
    """The round is asked once more, and the agent says of its update what is ``declared``."""
    world.coordinator.declared.clear()
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared(declared)


def test_one_person_who_releases_twice_is_one_whatever_the_policy_wanted_in_between(world: SiteWorld) -> None:
    """Two, one, two: one person releases under each of the first. Two lines of one person counted as two people."""
    update = held(world)
    with pytest.raises(NeedsPerson):
        decide(world, update, PERSON)
    assert world.agent is not None
    world.agent.stop()
    wants(world, 1)
    with handler_alone(world.state) as (handler, _interrupt):
        handler.releases.decide(STUDY, 1, "released", update, DPO)
    wants(world, 2)
    asked_again(world, "HELD")
    assert world.command("waiting", study=STUDY, round=1)["endorsed"] == ["dpo"]
    assert not world.lines("upload")
    decide(world, update, SECOND)
    world.coordinator.wait_receipts(1)
    both_verifiers_agree(world)


def test_a_lower_number_lets_nothing_leave_until_somebody_releases_once_more(world: SiteWorld) -> None:
    """Two of three had released it when the policy came to want two: a third person had to be found."""
    update = held(world, ('updates = "none"', 'updates = "every"\npersons = 3'))
    for person in (PERSON, SECOND):
        with pytest.raises(NeedsPerson):
            decide(world, update, person)
    wants(world, 2)
    asked_again(world, "HELD")
    assert not world.lines("upload")
    decide(world, update, PERSON)
    (released,) = world.lines("released")
    assert (released["by"]["name"], [person["name"] for person in released["also_by"]]) == ("dpo", ["head of it"])
    world.coordinator.wait_receipts(1)
    both_verifiers_agree(world)


def test_what_one_person_released_is_still_the_first_update_once_the_policy_wants_two(world: SiteWorld) -> None:
    """With `updates = "first"`, the update's own release made it no first one any more, and it left by one person."""
    update = held(world, ('updates = "none"', 'updates = "first"'))
    assert world.agent is not None
    world.agent.stop()
    with handler_alone(world.state) as (handler, _interrupt):
        handler.releases.decide(STUDY, 1, "released", update, DPO)
    wants(world, 2, "first")
    asked_again(world, "HELD")
    assert not world.lines("upload")
    decide(world, update, SECOND)
    world.coordinator.wait_receipts(1)


def test_a_higher_number_holds_up_the_next_update_and_the_first_number_lets_it_go(world: SiteWorld) -> None:
    update = held(world, ('updates = "none"', 'updates = "every"'))
    assert world.agent is not None
    world.agent.stop()
    with handler_alone(world.state) as (handler, _interrupt):
        handler.releases.decide(STUDY, 1, "released", update, DPO)
    wants(world, 2)
    asked_again(world, "HELD")
    wants(world, 1)  # what one person released under a policy that wanted one leaves under one that wants one
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert len(world.lines("released")) == 1
