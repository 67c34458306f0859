"""The protocol of secure aggregation over a simulated network: sums, dropouts, restarts, and what each side refuses.

Attacks stand in tests/attacks/test_secure_aggregation.py.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.secure_world import NAMES, Disk, World, key_of, laid_open, leaks_of, submissions_of, until_vectors
from wardround.errors import BadData, NotPermitted, TryAgain, WardroundError
from wardround.secure import coordinator, documents, site
from wardround.secure.keys import MASK_KEY
from wardround.secure.opening import TRIES, combined
from wardround.secure.policy import Pledge, Pledges, Policy
from wardround.secure.statements import Agreement, Context, Keys, Opened, Roster, read, signed
from wardround.secure.sums import Summing, Unmasking, chance_to_miss
from wardround.signing.dsse import Envelope

STEPS = 6  # a site takes the first 0 to 5 of: keys, shares, vector, agreement, opening


@pytest.mark.parametrize("n", [3, 4, 8])
def test_the_sum_is_exact_though_every_party_is_restarted_before_every_message(n: int) -> None:
    """Each step is computed and lost, computed and kept, and computed again from what was kept."""
    world = World(n, seed=n)
    assert world.run() == "opened"
    world.refuse_wrong_sum(world.sites)


def patterns(n: int, *, each: bool) -> Iterator[tuple[int, ...]]:
    """How far each site comes; or how many come how far, dealt out at random: by their names alone do sites differ."""
    if each:
        yield from itertools.product(range(STEPS), repeat=n)
        return
    chance = random.Random(n)
    for many in itertools.combinations_with_replacement(range(STEPS), n):
        yield tuple(chance.sample(many, n))


def expected(world: World, fates: tuple[int, ...]) -> tuple[str, list[str]]:
    """The outcome by counting alone, and the set."""
    t = world.rules.threshold
    reached = {step: [s for s, fate in zip(world.sites, fates, strict=True) if fate >= step] for step in range(STEPS)}
    if any(len(reached[step]) < t for step in (1, 2, 3)):
        return "void", []
    return ("opened" if len(reached[5]) >= t else "waits"), reached[3]


def every_dropout(n: int, *, each: bool = False) -> int:
    """Each pattern: its outcome is the expected one, its sum exact; what waits is opened once all are back."""
    count = 0
    for fates in patterns(n, each=each):
        world = World(n, seed=count, crashes=False)
        outcome, chosen = expected(world, fates)
        assert world.run(dict(zip(world.sites, fates, strict=True))) == outcome, fates
        if outcome != "void":
            assert list(world.attempt.chosen) == chosen
            if outcome == "waits":
                world.finish(world.attempt.group, world.attempt.group)
            world.refuse_wrong_sum(chosen)
        count += 1
    return count


@pytest.mark.parametrize(("n", "runs", "each"), [(3, 216, True), (4, 126, False)])
def test_every_pattern_of_dropouts_gives_the_exact_sum_or_none(n: int, runs: int, each: bool) -> None:
    assert every_dropout(n, each=each) == runs


@pytest.mark.chaos
@pytest.mark.parametrize(("n", "runs"), [(5, 252), (6, 462), (7, 792)])
def test_every_pattern_of_dropouts_of_more_sites_gives_the_exact_sum_or_none(n: int, runs: int) -> None:
    assert every_dropout(n) == runs


def test_a_site_that_sent_no_vector_may_help_to_agree_and_to_open_and_then_sends_none() -> None:
    world = World(4, seed=1)
    assert world.run({"bergen": 2, "charite": 3}) == "waits"
    world.finish(["bergen"], ["amsterdam", "bergen", "dublin"])
    world.refuse_wrong_sum(["amsterdam", "charite", "dublin"])
    with pytest.raises(NotPermitted, match="a set was signed without this site's vector; it is not sent any more"):
        world.submit("bergen")


def test_a_round_that_was_not_agreed_is_done_again_with_fresh_keys() -> None:
    world = World(4, seed=2)
    assert world.run({"bergen": 2, "charite": 2}) == "void"
    first = {name: world.vectors[name] for name in ("amsterdam", "dublin")}
    world.context = replace(world.context, attempt=2)
    world.attempt = coordinator.Attempt(world.context, world.roster, world.rules)
    assert world.run() == "opened"
    world.refuse_wrong_sum(world.sites)
    assert all(world.vectors[name] != vector for name, vector in first.items())


def test_a_higher_threshold_of_all_sites_means_that_no_sum_is_ever_without_one() -> None:
    world = World(4, threshold=4, colluding=2)
    assert world.run({"dublin": 2}) == "void"
    assert World(4, threshold=4, colluding=2).run() == "opened"


def test_wrong_shares_are_found_by_what_their_owner_had_signed_and_their_giver_is_named() -> None:
    world = World(5, seed=3)
    world.run({"evora": 2})
    openings = [read(Opened, envelope, world.roster) for envelope in world.attempt.openings.values()]
    liar = openings[1]
    openings[1] = replace(liar, self_masks={**liar.self_masks, "amsterdam": "00" * 32})
    group, chosen = world.attempt.members, world.attempt.chosen
    with pytest.raises(TryAgain) as error:
        combined(openings, group, chosen, world.roster, world.rules.threshold)
    assert error.value.message == "the shares of 4 sites do not give what site `amsterdam` had signed"
    assert (
        error.value.hint
        == "some gave wrong ones, or it dealt wrong ones: the round cannot be opened before more sites do"
    )
    world.finish(["evora"], ["evora"])  # a fifth site helps
    more = [*openings, read(Opened, world.attempt.openings["evora"], world.roster)]
    found, wrong = combined(more, group, chosen, world.roster, world.rules.threshold)
    assert wrong == (liar.site,)
    assert found == world.opened()
    assert TRIES >= 5


def test_secrets_are_gone_when_the_round_is_over() -> None:
    world = World(3)
    world.run()
    state = site.over(world.disks["bergen"].round())
    assert (state.root, dict(state.received)) == (b"", {})
    with pytest.raises(BadData, match="the secrets of this round are erased"):
        site.open_(world.parties["bergen"], state, world.attempt.shown_agreements())


# What is refused, each with its sentence


def refused(kind: type[WardroundError], step: Callable[[], object]) -> str:
    with pytest.raises(kind) as error:
        step()
    return error.value.message


def until_keys(n: int = 4) -> World:
    world = World(n)
    for name in world.sites:
        world.tell(coordinator.keys, name, world.begin(name))
    world.tell(coordinator.close_keys)
    return world


def until_group(n: int = 4) -> World:
    world = until_keys(n)
    for name in world.sites:
        world.tell(coordinator.shares, name, world.shares(name, world.attempt.shown_keys()))
    world.tell(coordinator.close_shares)
    for name in world.sites:
        world.join(name, world.attempt.shares_for(name))
    return world


def test_what_a_site_refuses_of_keys() -> None:
    world = until_keys()
    shown = list(world.attempt.shown_keys())
    without = shown[1:]
    assert (
        refused(NotPermitted, lambda: world.shares("amsterdam", without))
        == "this site is not among those whose keys count in this attempt"
    )
    assert (
        refused(NotPermitted, lambda: world.shares("amsterdam", shown[:2]))
        == "keys of 2 sites, and 3 are needed to open anything"
    )
    assert (
        refused(BadData, lambda: world.shares("amsterdam", [*shown, shown[1]]))
        == "two statements of one site, where one is wanted"
    )
    world.shares("amsterdam", shown)
    assert (
        refused(NotPermitted, lambda: world.shares("amsterdam", shown[:3]))
        == "other keys than those that were shown before in this attempt"
    )


def test_what_a_site_refuses_of_groups() -> None:
    world = until_group()
    received = world.attempt.shares_for("amsterdam")
    few = {name: received[name] for name in ("amsterdam", "bergen")}
    fresh = replace(world.disks["amsterdam"].round(), group=(), received={})
    party = world.parties["amsterdam"]
    assert (
        refused(NotPermitted, lambda: site.join(party, fresh, few))
        == "a group of 2 sites; it holds this one, and at least 3"
    )
    assert (
        refused(BadData, lambda: site.join(party, fresh, {**received, "zurich": b""}))
        == "a share of a site whose keys were not shown"
    )
    three = {name: received[name] for name in ("amsterdam", "bergen", "charite")}
    assert (
        refused(NotPermitted, lambda: world.join("amsterdam", three))
        == "another group than the one before in this attempt"
    )
    assert refused(NotPermitted, lambda: site.masks(party, fresh)) == "this site has no group in this attempt"


def test_what_the_coordinator_refuses() -> None:
    world = until_group()
    attempt = world.attempt
    assert refused(BadData, lambda: coordinator.keys(attempt, "bergen", attempt.keys["charite"])) == (
        "site `bergen` sends what site `charite` signed"
    )
    late = coordinator.Attempt(world.context, world.roster, world.rules)
    for name in world.sites[:3]:
        late = coordinator.keys(late, name, attempt.keys[name])
    late = coordinator.close_keys(late)
    assert refused(TryAgain, lambda: coordinator.keys(late, "dublin", attempt.keys["dublin"])) == (
        "what site `dublin` sends came too late for this attempt"
    )
    assert refused(BadData, lambda: coordinator.shares(late, "dublin", {})) == "site `dublin` is not in this attempt"
    assert refused(BadData, lambda: coordinator.shares(late, "bergen", {})) == (
        "the shares of site `bergen` are not one for each of 3 sites"
    )
    assert refused(TryAgain, lambda: coordinator.close_shares(late)) == "0 sites have dealt shares, and 3 are needed"
    other = world.begin("bergen", b"another root".ljust(32, b"."))
    assert refused(BadData, lambda: coordinator.keys(attempt, "bergen", other)) == (
        "site `bergen` says another thing than the first time"
    )


def test_what_is_of_another_set_or_group_is_refused() -> None:
    world, other = World(4, seed=1), World(4, seed=2)
    world.run()
    other.context = replace(other.context, attempt=2)
    other.attempt = replace(other.attempt, context=other.context)
    other.run()
    attempt, theirs = world.attempt, other.attempt
    assert refused(BadData, lambda: coordinator.submission(attempt, "bergen", theirs.submissions["bergen"])) == (
        "what site `bergen` submitted is of another round or group"
    )
    assert refused(BadData, lambda: coordinator.agreement(attempt, "bergen", theirs.agreements["bergen"])) == (
        "what site `bergen` signed is another set"
    )
    assert refused(BadData, lambda: coordinator.opening(attempt, "bergen", theirs.openings["bergen"])) == (
        "what site `bergen` opened is not of this set"
    )
    assert refused(BadData, lambda: world.open("bergen", theirs.shown_agreements())) == (
        "what site `amsterdam` signed is of another round or group"
    )
    assert refused(BadData, lambda: coordinator.keys(attempt, "bergen", attempt.openings["bergen"])).startswith(
        "signed as 'application/vnd.wardround.secure-opened"
    )


def test_a_set_is_opened_after_the_threshold_of_signatures_alone() -> None:
    world = until_group()
    for name in world.sites:
        world.tell(coordinator.submission, name, world.submit(name))
    world.tell(coordinator.choose)
    assert refused(NotPermitted, lambda: world.open("bergen", [])) == "this site has signed no set of this attempt"
    agreements = [world.agree(name, world.attempt.shown_set()) for name in world.sites]
    assert refused(NotPermitted, lambda: world.open("bergen", agreements[:2])) == (
        "2 sites have signed the set, and 3 are needed"
    )
    state = world.disks["bergen"].round()
    other = Agreement(state.context.digest, state.members.digest, "dublin", "00" * 32)
    odd = [*agreements[:3], signed(other, key_of("dublin"))]
    assert refused(NotPermitted, lambda: world.open("bergen", odd)) == "sites have signed other sets than this one has"
    world.open("bergen", agreements[:3])


# Policy and pledges


def test_a_policy_in_which_somebody_may_stand_alone_is_refused() -> None:
    for numbers in ((2, 2, 1), (3, 1, 1), (3, 2, 0), (3, 2, 2)):
        with pytest.raises(BadData, match="leave a sum in which somebody stands alone"):
            Policy(frozenset(), *numbers)


def test_a_policy_wants_enough_sites_in_a_set_and_enough_that_people_know() -> None:
    world = World(7)
    policy = replace(world.policy, min_sites=6)
    with pytest.raises(NotPermitted, match="a set of 5 sites, at least 6 are summed"):
        policy.refuse_set(world.roster, "amsterdam", NAMES[:5], world.rules)
    known = frozenset(world.roster.fingerprint(name) for name in NAMES[1:4])
    policy = Policy(known, min_sites=3, min_known=3)
    policy.refuse_set(world.roster, "amsterdam", NAMES[:5], world.rules)
    with pytest.raises(NotPermitted, match="a set with 2 sites that people here know, the policy wants 3"):
        policy.refuse_set(world.roster, "amsterdam", ("amsterdam", *NAMES[2:6]), world.rules)


def test_one_set_is_signed_for_a_round_and_sets_of_the_same_sites_for_a_model() -> None:
    one = Pledge("study", 3, "base", "context", "set", ("a", "b", "c"))
    pledges = Pledges().plus(one)
    assert pledges.plus(one) == pledges
    with pytest.raises(NotPermitted, match="signed another set for round 3 and signs no second one"):
        pledges.plus(replace(one, context="second attempt"))
    with pytest.raises(NotPermitted) as error:
        pledges.plus(replace(one, round=4, chosen="other", sites=("a", "b", "d")))
    assert "round 3, which began with the same model as round 4" in error.value.message
    assert error.value.hint.endswith("else people begin a new revision")
    assert len(pledges.plus(replace(one, round=4, chosen="other")).signed) == 2  # of the same sites
    assert len(pledges.plus(replace(one, round=4, base="next")).signed) == 2
    assert len(pledges.plus(replace(one, study="new revision")).signed) == 2
    with pytest.raises(NotPermitted) as error:
        pledges.plus(replace(one, study="ab" * 32, round=1, sites=("a", "b", "d")))
    assert "a set of other sites for round 3 of the study with digest study…, which began" in error.value.message
    assert error.value.hint == "with other sites, a study begins with a model of its own: another `seed`"


def test_a_site_takes_part_in_a_roster_with_its_own_key_alone() -> None:
    world = World(4)
    with pytest.raises(NotPermitted, match="the roster has another key for `bergen` than its own"):
        replace(world.parties["bergen"], key=key_of("somebody else"))
    with pytest.raises(BadData, match="site `zurich` is not in the study's roster"):
        replace(world.parties["bergen"], site="zurich")
    with pytest.raises(BadData, match="rules for 5 sites, and a roster of 4"):
        replace(world.parties["bergen"], rules=World(5).rules)
    with pytest.raises(BadData, match="of another roster than this site consented to"):
        site.begin(world.parties["bergen"], replace(world.context, roster="00" * 32), b"r" * 32)
    with pytest.raises(BadData, match="each site once, in order, with a key of its own"):
        Roster((("a", b"k" * 32), ("b", b"k" * 32)))


# Records


def test_every_statement_and_state_comes_back_from_its_document() -> None:
    world = World(4, seed=9)
    world.run({"dublin": 2})
    attempt = world.attempt
    assert documents.attempt_from_document(json.loads(json.dumps(documents.attempt_document(attempt)))) == attempt
    state = world.disks["bergen"].round()
    assert documents.site_from_document(json.loads(json.dumps(documents.site_document(state)))) == state
    pledges = world.disks["bergen"].signed()
    assert len(pledges.signed) == 1
    for kind, envelopes in ((Keys, attempt.keys), (Opened, attempt.openings)):
        for envelope in envelopes.values():
            statement = read(kind, envelope, world.roster)
            assert signed(statement, key_of(statement.site)) == envelope


@pytest.mark.parametrize("damage", [{}, {"context": 1}, None, [], {"signed": "no"}])
def test_a_damaged_document_is_said_to_be_one(damage: object) -> None:
    with pytest.raises(BadData, match=r"the state of a round of secure aggregation is damaged|not the context"):
        documents.site_from_document(damage)
    with pytest.raises(BadData, match=r"the state of an attempt of secure aggregation is damaged|not the context"):
        documents.attempt_from_document(damage)
    if damage not in ([], {}):
        with pytest.raises(BadData, match="the list of the sets that were signed is damaged"):
            documents.pledges_from_document(damage)


@pytest.mark.parametrize(
    "change", [{"site": ""}, {"mask_key": "AB" * 32}, {"more": 1}, {"context": {}}, {"self_mask": "00"}, {"site": 1}]
)
def test_a_statement_in_another_form_is_refused(change: dict[str, object]) -> None:
    world = World(3)
    keys = read(Keys, world.begin("bergen"), world.roster)
    with pytest.raises(BadData, match=r"a statement of keys|not the context"):
        Keys.from_document({**keys.document(), **change})


def test_a_signature_by_another_than_the_named_site_is_refused() -> None:
    world = World(3)
    keys = read(Keys, world.begin("bergen"), world.roster)
    forged = signed(replace(keys, site="charite"), key_of("bergen"))
    with pytest.raises(BadData, match="wanted"):
        read(Keys, forged, world.roster)
    torn = signed(keys, key_of("bergen"))
    with pytest.raises(BadData, match="does not verify"):
        read(Keys, Envelope(torn.payload_type, torn.payload, torn.keyid, bytes(64)), world.roster)


def test_a_context_names_the_first_field_in_which_another_differs() -> None:
    context = World(3).context
    assert context.differs(context) == ""
    assert context.differs(replace(context, round=2)) == "round"
    with pytest.raises(BadData, match="not the context of a round"):
        Context.from_document({**context.document(), "round": 0})


# What the tests and the promise rest on


def test_the_search_for_both_secrets_of_a_site_finds_them_where_they_are() -> None:
    """So that its silence in the attacks means something: with the threshold of colluding sites all is plain."""
    world = until_vectors(World(4))
    three = [leak for name in NAMES[:3] for leak in leaks_of(world, name)]
    assert laid_open(world, three) == list(world.sites)
    assert laid_open(world, [leak for leak in three if leak.holder != "bergen"]) == []
    assert laid_open(world, [leak for leak in three if leak.kind == MASK_KEY]) == []


def test_two_sites_put_back_are_more_than_four_stand_and_the_arithmetic_says_so() -> None:
    """The limit of the promise, as the page has it: with two of four put back, a second set is signed by three."""
    world = until_vectors(World(4))
    assert world.rules.most == 1
    backups = {name: world.disks[name].copy() for name in ("amsterdam", "bergen")}
    one, other = ("amsterdam", "bergen", "charite"), ("amsterdam", "bergen", "dublin")
    signers = {name for name in one if world.agree(name, submissions_of(world, one))}
    world.disks |= backups
    again = {name for name in other if world.agree(name, submissions_of(world, other))}
    assert (len(signers), len(again)) == (3, 3)


def test_how_likely_samples_find_an_altered_block_is_what_the_page_says() -> None:
    """A ResNet-18 has 45 blocks. Four random ones miss one altered block 91 times of 100; of eight members, 47."""
    assert chance_to_miss(45, 1, 4) == pytest.approx(41 / 45)
    assert chance_to_miss(45, 1, 4, members=8) == pytest.approx((41 / 45) ** 8)
    assert chance_to_miss(45, 1, 45) == 0
    drawn, chance = 0, random.Random(1)
    for _ in range(4000):
        drawn += 17 not in chance.sample(range(45), 4)
    assert drawn / 4000 == pytest.approx(41 / 45, abs=0.02)


def test_the_vectors_without_what_was_opened_give_no_sum() -> None:
    world = until_vectors(World(3))
    total = np.zeros(world.layout.elements, np.uint32)
    for name in world.sites:
        total += np.frombuffer(world.vectors[name][0], "<u4")
    assert not set(total.view(np.int32).tolist()) & set(world.true_sum(world.sites))
    nothing = Summing(world.layout, Unmasking((), ()))
    assert nothing.tensors(0, [world.vectors[name][0] for name in world.sites]).tolist() == total.tolist()
    with pytest.raises(BadData, match="a block of 4 bytes, it has 32"):
        nothing.tensors(0, [b"abcd"])
    with pytest.raises(BadData, match="there is no block 1: the vectors have 1"):
        nothing.tensors(1, [])


def test_a_disk_holds_no_secret_once_the_round_is_over() -> None:
    world, disk = World(3), Disk()
    world.run()
    disk.keep(site.over(world.disks["bergen"].round()))
    secrets = world.disks["bergen"].round().secrets
    for secret in (secrets.root, secrets.mask_key, secrets.share_key, secrets.self_mask):
        assert secret.hex() not in disk.state
