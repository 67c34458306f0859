"""A coordinator that may do anything, and members that help it, against secure aggregation. Each test is one attack.

What such a coordinator has is everything that was ever sent to it, and all that the colluding members hold.
``laid_open`` says of whom it then has both secrets: whose vector is plain. The attacks run over a simulated network.
"""

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tests.secure_world import NAMES, World, key_of, laid_open, leaks, leaks_of, public, submissions_of, until_vectors
from wardround.errors import BadData, NotPermitted, TryAgain, WardroundError
from wardround.secure import coordinator, shamir, site
from wardround.secure.keys import SELF_MASK, Secrets, agreed, commitment, derive, public_of
from wardround.secure.layout import TENSORS, digests
from wardround.secure.opening import Group, OpenedSecrets, combined, own_masks, remaining
from wardround.secure.policy import Pledges, Policy
from wardround.secure.rules import Rules
from wardround.secure.statements import Agreement, Context, Keys, Opened, Roster, Submission, read, set_digest, signed
from wardround.secure.sums import Evidence
from wardround.signing.dsse import Envelope

# The list of the design, in its order


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/statements.py")
def test_overlapping_lists_cannot_be_asked_for_nor_written() -> None:
    """A site computes both lists from the set that it signed: nobody tells it whose shares to open."""
    world = until_vectors(World(4))
    world.tell(coordinator.choose)
    agreements = [world.agree(name, world.attempt.shown_set()) for name in world.sites]
    opened = read(Opened, world.open("bergen", agreements), world.roster)
    assert opened.self_masks.keys() & opened.mask_keys.keys() == set()
    with pytest.raises(BadData) as error:
        replace(opened, mask_keys={"charite": "00" * 32})
    assert error.value.message == "shares of both kinds of site `charite`, which would lay its vector open"
    with pytest.raises(BadData, match="shares of both kinds"):
        Opened.from_document({**opened.document(), "mask_keys": {"charite": "00" * 32}})


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
def test_two_sets_for_two_sites_are_never_both_signed_by_the_threshold() -> None:
    """Of seven sites two collude, as many as the threshold stands: whichever honest ones are shown which set."""
    world = until_vectors(World(7, colluding=2))
    t, bad, honest = world.rules.threshold, world.sites[:2], world.sites[2:]
    first, second = NAMES[:6], (*NAMES[:5], NAMES[6])
    group = world.attempt.members.digest
    before = {name: disk.copy() for name, disk in world.disks.items()}
    for shown_first in range(len(honest) + 1):
        world.disks = {name: disk.copy() for name, disk in before.items()}
        agreements: dict[tuple[str, ...], list[Envelope]] = {first: [], second: []}
        for chosen, signatures in agreements.items():
            digest = set_digest(group, [read(Submission, one, world.roster) for one in submissions_of(world, chosen)])
            signatures += [
                signed(Agreement(world.context.digest, group, name, digest), key_of(name)) for name in bad
            ]  # they sign whatever is wanted
        for place, name in enumerate(honest):
            chosen = first if place < shown_first else second
            if name in chosen:
                agreements[chosen].append(world.agree(name, submissions_of(world, chosen)))
        assert sum(len(signatures) >= t for signatures in agreements.values()) <= 1
        found = [leak for name in bad for leak in leaks_of(world, name)]
        for name, signatures in itertools.product(honest, agreements.values()):
            try:
                found += leaks(read(Opened, world.open(name, signatures), world.roster))
            except WardroundError:
                continue
        assert laid_open(world, found) == []


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/site.py")
def test_a_set_without_me_is_not_signed_by_me() -> None:
    """A set that leaves out one site which has sent its vector, shown to that site."""
    world = until_vectors(World(4))
    with pytest.raises(NotPermitted) as error:
        world.agree("dublin", submissions_of(world, NAMES[:3]))
    assert error.value.message == "the set does not hold this site's vector as it sent it"
    assert error.value.code == "DECLINED_POLICY"
    assert world.disks["dublin"].signed() == Pledges()


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/statements.py")
def test_a_set_with_another_vector_of_mine_is_not_signed_by_anybody() -> None:
    """A coordinator cannot put a vector into a site's place: each is signed by its site."""
    world = until_vectors(World(4))
    own = read(Submission, world.attempt.submissions["bergen"], world.roster)
    forged = signed(replace(own, blocks="ee" * 32), key_of("coordinator"))
    shown = [*submissions_of(world, ("amsterdam", "charite", "dublin")), forged]
    for name in world.sites:
        with pytest.raises(BadData, match="signed by key"):
            world.agree(name, shown)


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
def test_a_set_with_too_few_known_peers_is_not_signed() -> None:
    """A set of the right size, of too few hospitals whose keys people have compared."""
    world = until_vectors(World(8))
    world.policy = Policy(world.policy.known, min_sites=3, min_known=7)
    world.parties["bergen"] = replace(world.parties["bergen"], policy=world.policy)
    with pytest.raises(NotPermitted) as error:
        world.agree("bergen", submissions_of(world, NAMES[:7]))
    assert error.value.message == "a set with 6 sites that people here know, the policy wants 7"


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/statements.py")
def test_a_key_that_is_not_the_rosters_is_refused() -> None:
    """The coordinator in the middle: it gives out keys of its own as those of a site."""
    world = World(4)
    shown = [world.begin(name) for name in world.sites]
    real = read(Keys, shown[1], world.roster)
    mine = Secrets(b"coordinator".ljust(32, b"."), world.context.digest)
    fake = replace(real, mask_key=public_of(mine.mask_key), share_key=public_of(mine.share_key))
    for envelope in (signed(fake, key_of("coordinator")), replace(shown[1], payload=signed(fake, key_of("x")).payload)):
        with pytest.raises(BadData, match=r"signed by key|does not verify"):
            world.shares("amsterdam", [shown[0], envelope, *shown[2:]])
    assert world.disks["amsterdam"].round().peers == ()


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/site.py")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"round": 2}, "round"),
        ({"attempt": 2}, "attempt"),
        ({"study": "ef" * 32}, "study"),
        ({"federation": "other"}, "federation"),
    ],
)
def test_a_replayed_key_of_an_older_round_is_refused(change: dict[str, object], field: str) -> None:
    """The keys of another round, attempt, study or federation, signed as they are."""
    world = World(4)
    old = world.begin("bergen")
    world.context = replace(world.context, **change)  # type: ignore[arg-type]
    shown = [world.begin(name) for name in world.sites]
    with pytest.raises(BadData) as error:
        world.shares("amsterdam", [shown[0], old, *shown[2:]])
    assert error.value.message == f"the keys of site `bergen` are for another {field}"
    with pytest.raises(BadData, match=f"are for another {field}"):
        coordinator.keys(coordinator.Attempt(world.context, world.roster, world.rules), "bergen", old)


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/shares.py")
def test_shares_swapped_between_receivers_are_no_shares() -> None:
    """The coordinator carries the shares: it gives them to others, as others', damaged, or cut."""
    world = World(4)
    for name in world.sites:
        world.tell(coordinator.keys, name, world.begin(name))
    world.tell(coordinator.close_keys)
    for name in world.sites:
        world.tell(coordinator.shares, name, world.shares(name, world.attempt.shown_keys()))
    world.tell(coordinator.close_shares)
    mine, others = world.attempt.shares_for("amsterdam"), world.attempt.shares_for("bergen")
    swaps = {
        "of another receiver": {**mine, "charite": others["charite"]},
        "of another dealer": {**mine, "charite": mine["dublin"]},
        "damaged": {**mine, "charite": mine["charite"][:-1] + bytes([mine["charite"][-1] ^ 1])},
        "cut": {**mine, "charite": mine["charite"][:-1]},
    }
    for received in swaps.values():
        with pytest.raises(BadData) as error:
            world.join("amsterdam", received)
        assert error.value.message == "what came as the share of site `charite` for this one is not that"
    assert world.disks["amsterdam"].round().group == ()


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
def test_ghost_members_that_nobody_knows_count_as_colluding() -> None:
    """Of ten members six are inventions, which sign every set: two sets could be opened, though each holds hospitals
    that people know.
    """
    real, ghosts = NAMES[:4], tuple(f"ghost-{place}" for place in range(6))
    roster, rules = Roster.of({name: public(name) for name in (*real, *ghosts)}), Rules.of(10, None, 1)
    known = frozenset(roster.fingerprint(name) for name in real)
    with pytest.raises(NotPermitted) as error:
        Policy(known).refuse_roster(roster, "amsterdam", rules)
    assert error.value.message == (
        "a threshold of 7 of 10 sites stands 3 that may work with the coordinator, and here are 7; nobody here knows "
        "`ghost-0`, `ghost-1`, `ghost-2`, `ghost-3`, `ghost-4`, `ghost-5`"
    )
    assert error.value.hint == "compare the fingerprints of their keys by telephone"
    everybody = frozenset(roster.fingerprint(name) for name in roster.sites)
    Policy(everybody).refuse_roster(roster, "amsterdam", rules)


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/site.py")
def test_a_site_that_was_given_another_model_is_noticed_before_it_trains() -> None:
    """Pasquini et al. 2021: a site with a crafted model. Each states the model that it was given, and signs that."""
    world = World(4)
    shown = [world.begin(name) for name in world.sites]
    common, world.context = world.context, replace(world.context, base="ee" * 32)
    odd = world.begin("bergen")
    world.context = common
    with pytest.raises(NotPermitted) as error:
        world.shares("amsterdam", [shown[0], odd, *shown[2:]])
    assert error.value.message == (
        "site `bergen` states that it was given another model in this round than this site was"
    )
    assert error.value.code == "DECLINED_MODEL_MISMATCH"
    with pytest.raises(NotPermitted, match="given another model in this round"):  # and the other way round
        site.shares(world.parties["bergen"], world.disks["bergen"].round(), [shown[0], odd, *shown[2:]])


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/opening.py")
def test_masks_of_sites_with_other_models_do_not_cancel() -> None:
    """Even if a site did not look: the seed is bound to the model."""
    world = until_vectors(World(3))
    state = world.disks["bergen"].round()
    odd = replace(world.context, base="ee" * 32)
    group = state.members
    mine = own_masks(state.secrets, "bergen", group, TENSORS)
    others = own_masks(state.secrets, "bergen", Group(odd, group.members), TENSORS)
    assert not {one.seed for one in mine} & {one.seed for one in others}


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/rules.py")
def test_a_lower_threshold_or_another_roster_is_another_study() -> None:
    """Both are in digests that every statement names, and the rules refuse a low threshold by themselves."""
    with pytest.raises(BadData, match="a threshold of 2 of 4 sites does not stand 1 that collude"):
        Rules(4, 2, 1)
    world = World(4)
    weak = replace(world.parties["bergen"], rules=World(4, threshold=3).rules)
    other = Context(**{**world.context.document(), "roster": World(3).roster.digest})  # type: ignore[arg-type]
    with pytest.raises(BadData, match="of another roster than this site consented to"):
        site.begin(weak, other, b"r" * 32)


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/site.py")
def test_a_second_opening_after_a_restart_from_an_old_backup_gives_nothing() -> None:
    """A site that was put back signs twice. It is one of those that may: the others' signatures do not suffice."""
    world = until_vectors(World(4))
    backup = world.disks["bergen"].copy()  # before it signed anything
    world.tell(coordinator.choose)
    first = [world.agree(name, world.attempt.shown_set()) for name in world.sites]
    found = [leak for name in world.sites for leak in leaks(read(Opened, world.open(name, first), world.roster))]
    world.disks["bergen"] = backup
    without = submissions_of(world, ("amsterdam", "bergen", "charite"))
    again = {"bergen": world.agree("bergen", without)}
    for name in ("amsterdam", "charite", "dublin"):
        with pytest.raises(NotPermitted):
            again[name] = world.agree(name, without)
    with pytest.raises(NotPermitted, match="1 sites have signed the set, and 3 are needed"):
        world.open("bergen", again.values())
    assert laid_open(world, [*found, *leaks_of(world, "bergen")]) == []


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/sums.py")
def test_one_altered_block_is_found_by_everyone_who_looks_at_it() -> None:
    """A block of one site's vector, the list of its digests, or an opened secret is another."""
    world = until_vectors(World(4))
    world.tell(coordinator.choose)
    world.finish(world.sites, world.sites)
    shown = {name: (world.blocks(name), world.vectors[name][0]) for name in world.sites}
    evidence = Evidence(world.layout, world.attempt.members, world.attempt.submitted, world.opened())
    total = evidence.block(0, shown)
    assert total.view(np.int32).tolist() == world.true_sum(world.sites)
    last = {name: (world.blocks(name), world.vectors[name][1]) for name in world.sites}
    assert evidence.numbers(last).weight == sum(world.weights.values())

    altered = bytes([shown["bergen"][1][0] ^ 1]) + shown["bergen"][1][1:]
    other = digests([altered, world.vectors["bergen"][1]])
    for lie, message in (
        ((shown["bergen"][0], altered), "block 0 of site `bergen` is not what it had signed"),
        ((other, altered), "the blocks' digests of site `bergen` are not what it had signed"),
    ):
        with pytest.raises(BadData) as error:
            evidence.block(0, {**shown, "bergen": lie})
        assert error.value.message == message
    with pytest.raises(BadData, match="block 0 of site `dublin` was not shown"):
        evidence.block(0, {k: v for k, v in shown.items() if k != "dublin"})
    with pytest.raises(BadData, match="block 1 of site `amsterdam` is not what it had signed"):
        evidence.numbers(shown)
    for opened in (
        replace(evidence.opened, self_masks={**evidence.opened.self_masks, "bergen": bytes(32)}),
        OpenedSecrets({k: v for k, v in evidence.opened.self_masks.items() if k != "bergen"}, {"bergen": bytes(32)}),
    ):
        with pytest.raises(BadData, match="what was opened"):
            replace(evidence, opened=opened).block(0, shown)


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/masking.py")
def test_the_coordinator_sees_nothing_of_a_vector_and_a_planted_number_is_found_without_masks() -> None:
    """A planted number is looked for in all that was sent; without masks it is there."""
    world = World(4)
    planted = np.float32(0.123456)
    world.tensors["bergen"]["fc.bias"][:] = planted
    world.weights["bergen"] = 100
    until_vectors(world)
    clear = world.layout.quantizer.quantized(np.array([planted], np.float32), 100).tobytes()
    plain = world.layout.quantized(lambda k, s, c: world.tensors["bergen"][k][s : s + c], 100, 0, 8).tobytes()
    assert clear in plain  # so the search works
    world.tell(coordinator.choose)
    world.finish(world.sites, world.sites)
    seen = b"".join(b"".join(vector) for vector in world.vectors.values())
    assert clear not in seen


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/opening.py")
@pytest.mark.parametrize("gone", [None, "bergen"])
def test_a_member_with_all_that_is_shown_learns_the_sum_of_the_others_and_no_more(gone: str | None) -> None:
    """Every member sees the vectors, what was opened, and knows its own masks. Of two others' vectors a mask is left
    that neither it nor the coordinator has: the one of those two.
    """
    world = World(4)
    world.run(None if gone is None else {gone: 2})
    if not world.is_open():
        world.finish(world.attempt.group, world.attempt.group)
    chosen, group, opened = world.attempt.chosen, world.attempt.members, world.opened()
    me = "amsterdam"
    secrets = world.disks[me].round().secrets
    left: dict[str, set[bytes]] = {}
    for name in chosen:
        if name == me:
            continue
        theirs = own_masks(world.disks[name].round().secrets, name, group, TENSORS)
        known = {mask.seed for mask in own_masks(secrets, me, group, TENSORS)}
        known |= {mask.seed for mask in remaining(opened, group, chosen, TENSORS)}
        left[name] = {mask.seed for mask in theirs} - known
    others = len(chosen) - 1
    assert all(len(seeds) == others - 1 for seeds in left.values())
    assert all(left[a] & left[b] for a, b in itertools.combinations(left, 2))


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/site.py")
def test_one_vector_is_masked_once_and_another_under_the_same_masks_is_not_sent() -> None:
    """A site that trained again has another vector; the difference of both would have no mask."""
    world = until_vectors(World(4))
    other = {key: values + np.float32(0.5) for key, values in world.tensors["bergen"].items()}
    other = {key: np.clip(values, -4, 4) for key, values in other.items()}
    vector = world.masked("bergen", other)
    with pytest.raises(NotPermitted) as error:
        site.submit(world.parties["bergen"], world.disks["bergen"].round(), digests(vector))
    assert error.value.message == "another vector than before under the same masks is not sent"


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
def test_a_round_from_the_same_model_is_not_agreed_upon_again_with_another_set() -> None:
    """A coordinator that keeps a round's sum to itself, says that it failed, and asks again without one site: the two
    sums would differ by what that site sent. Signing once for a model stops it, once for a round would not.
    """
    world = World(4)
    world.run()
    pledges = {name: world.disks[name].signed() for name in world.sites}
    world.context = replace(world.context, round=2)
    world.attempt = coordinator.Attempt(world.context, world.roster, world.rules)
    until_vectors(world, {"dublin": 2})
    world.tell(coordinator.choose)
    for name in ("amsterdam", "bergen", "charite"):
        with pytest.raises(NotPermitted, match="which began with the same model as round 2"):
            site.agree(world.parties[name], world.disks[name].round(), world.attempt.shown_set(), pledges[name])


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/site.py")
def test_different_groups_shown_to_different_sites_are_never_opened() -> None:
    """A relay that leaves messages out: the group is in every seed and in every signature."""
    world = World(4)
    for name in world.sites:
        world.tell(coordinator.keys, name, world.begin(name))
    world.tell(coordinator.close_keys)
    for name in world.sites:
        world.tell(coordinator.shares, name, world.shares(name, world.attempt.shown_keys()))
    world.tell(coordinator.close_shares)
    for name in world.sites:
        received = world.attempt.shares_for(name)
        if name == "amsterdam":
            del received["dublin"]
        world.join(name, received)
    groups = {world.disks[name].round().members.digest for name in world.sites}
    assert len(groups) == 2
    envelopes = [world.submit(name) for name in world.sites]
    for name in world.sites:
        with pytest.raises(BadData, match=r"is of another round or group|is not in this round's group"):
            world.agree(name, envelopes)


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/opening.py")
def test_a_member_that_deals_wrong_shares_stops_the_round_and_lays_nothing_open() -> None:
    """Availability is not defended against a member: the round waits, and says whose secret it waits for."""
    world = World(4)
    for name in world.sites:
        world.tell(coordinator.keys, name, world.begin(name))
    world.tell(coordinator.close_keys)
    for name in world.sites:
        shares = world.shares(name, world.attempt.shown_keys())
        if name == "dublin":
            state = world.disks[name].round()
            keys = {one.site: one for one in state.peers}
            wrong = Secrets(b"another root, other coefficients"[:32], world.context.digest)
            object.__setattr__(wrong, "context", "other coefficients")
            shares = dealt_with(state.secrets, wrong, keys, world)
        world.tell(coordinator.shares, name, shares)
    world.tell(coordinator.close_shares)
    for name in world.sites:
        world.join(name, world.attempt.shares_for(name))
        world.tell(coordinator.submission, name, world.submit(name))
    world.tell(coordinator.choose)
    world.finish(world.sites, world.sites)
    with pytest.raises(TryAgain, match="do not give what site `dublin` had signed"):
        coordinator.unmasking(world.attempt)
    openings = [read(Opened, one, world.roster) for one in world.attempt.openings.values()]
    assert laid_open(world, [leak for one in openings for leak in leaks(one)]) == []


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/secure/opening.py")
def test_one_member_that_opens_wrong_shares_keeps_no_sum_closed() -> None:
    """The first of sixteen by name gives wrong shares. All sixteen have opened, eleven are enough, and the two thousand
    choices of eleven that were tried had this one in each."""
    names = [f"site-{number:02d}" for number in range(16)]
    roster = Roster.of({name: public(name) for name in names})
    rules, context = Rules.of(16, None, 1), Context("fed", "ab" * 32, roster.digest, 1, 1, "cd" * 32, "ef" * 32)
    secrets = {name: Secrets(name.encode().ljust(32, b"."), context.digest) for name in names}
    group = Group(context, tuple(
        Keys(context, name, "ab" * 32, "ab" * 32, commitment(one.self_mask, context.digest))
        for name, one in secrets.items()
    ))  # fmt: skip

    def share(owner: str, holder: str) -> str:
        own = secrets[owner]
        coefficients = own.coefficients(SELF_MASK, rules.threshold)
        return shamir.share(own.self_mask, coefficients, roster.point(holder)).hex()

    openings = [
        Opened(context.digest, "cd" * 32, holder, {owner: share(owner, holder) for owner in names}, {})
        for holder in names
    ]
    for liars in (["site-00"], ["site-00", "site-07"]):
        for place, one in enumerate(openings):
            if one.site in liars:
                openings[place] = replace(one, self_masks=dict.fromkeys(names, "00" * 32))
        found, wrong = combined(openings, group, names, roster, rules.threshold)
        assert found.self_masks == {name: one.self_mask for name, one in secrets.items()}
        assert list(wrong) == liars


def dealt_with(secrets: Secrets, wrong: Secrets, keys: Mapping[str, Keys], world: World) -> dict[str, bytes]:
    """Ciphertexts that open, and hold shares of something else."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    from wardround.signing import canonical

    found = {}
    for place, (receiver, peer) in enumerate(sorted(keys.items())):
        common = agreed(secrets.share_key, peer.share_key)
        cipher = ChaCha20Poly1305(derive(common, "share", world.context.digest, "dublin", receiver))
        bound = canonical.dumps([world.context.document(), "dublin", receiver])
        found[receiver] = bytes(12) + cipher.encrypt(bytes(12), bytes([place + 1]) * 64, bound)
    return found


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_coordinator_asks_in_whatever_order_no_site_is_laid_open(seed: int) -> None:
    """Random sets, random signatures from a colluding member, random restarts from random backups of that member."""
    chance = random.Random(seed)
    world = until_vectors(World(5, colluding=1, seed=seed))
    bad = chance.choice(world.sites)
    honest = [name for name in world.sites if name != bad]
    group = world.attempt.members.digest
    agreements: dict[str, list[Envelope]] = {}
    openings: list[Opened] = []
    for _ in range(60):
        chosen = sorted(chance.sample(world.sites, chance.randint(3, 5)))
        shown = submissions_of(world, chosen)
        digest = set_digest(group, [read(Submission, one, world.roster) for one in shown])
        pool = agreements.setdefault(digest, [signed(Agreement(world.context.digest, group, bad, digest), key_of(bad))])
        name = chance.choice(honest)
        try:
            pool.append(world.agree(name, shown))
        except WardroundError:
            pass
        for other in honest:
            unique = list({one.payload: one for one in pool}.values())
            try:
                openings.append(read(Opened, world.open(other, unique), world.roster))
            except WardroundError:
                continue
    found = [leak for one in openings for leak in leaks(one)]
    assert laid_open(world, [*found, *leaks_of(world, bad)]) == []
