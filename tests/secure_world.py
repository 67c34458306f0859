"""A federation in memory for secure aggregation: sites with disks, a coordinator, and a network that may be anything.

Every step of every party is taken three times, as crashes allow: computed and lost before it was durable, computed and
kept, and computed again from what was kept. States live as JSON text between two steps.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wardround.errors import TryAgain
from wardround.secure import coordinator, documents, shamir, shares, site
from wardround.secure.keys import MASK_KEY, SELF_MASK, commitment, public_of
from wardround.secure.layout import Blocks, Layout, Numbers, digests, masked
from wardround.secure.opening import OpenedSecrets
from wardround.secure.policy import Pledges, Policy
from wardround.secure.quantizing import U32, Quantizer
from wardround.secure.rules import Rules
from wardround.secure.site import Party, SiteRound
from wardround.secure.statements import Context, Opened, Roster
from wardround.secure.sums import Summing, Unmasking
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import TensorSpec

NAMES = ("amsterdam", "bergen", "charite", "dublin", "evora", "florence", "ghent", "helsinki", "izmir", "jena")
SPECS = (TensorSpec("fc.weight", "F32", (2, 3)), TensorSpec("fc.bias", "F32", (2,)))
Made = TypeVar("Made")


@lru_cache
def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))


@lru_cache
def public(name: str) -> bytes:
    return key_of(name).public_key().public_bytes_raw()


@dataclass
class Disk:
    """What a site has made durable, as text."""

    state: str = ""
    pledges: str = "[]"

    def round(self) -> SiteRound:
        return documents.site_from_document(json.loads(self.state))

    def signed(self) -> Pledges:
        return documents.pledges_from_document(json.loads(self.pledges))

    def keep(self, state: SiteRound, pledges: Pledges | None = None) -> None:
        self.state = json.dumps(documents.site_document(state))
        if pledges is not None:
            self.pledges = json.dumps(documents.pledges_document(pledges))

    def copy(self) -> "Disk":
        return Disk(self.state, self.pledges)


@dataclass
class World:
    """n sites and what each trained. ``vectors``: the masked vectors that the coordinator holds."""

    n: int
    threshold: int | None = None
    colluding: int = 1
    seed: int = 0
    crashes: bool = True
    disks: dict[str, Disk] = field(default_factory=dict)
    vectors: dict[str, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = NAMES[: self.n]
        self.rules = Rules.of(self.n, self.threshold, self.colluding)
        self.roster = Roster.of({name: public(name) for name in self.sites})
        self.layout = Layout.of(Quantizer(self.n, 4.0, 1000), SPECS, {"val_loss": 100.0}, 1000)
        self.context = Context("fed", "ab" * 32, self.roster.digest, 1, 1, "cd" * 32, self.layout.digest)
        chance = np.random.default_rng(self.seed)
        self.tensors = {
            name: {spec.key: chance.uniform(-4, 4, int(np.prod(spec.shape))).astype(np.float32) for spec in SPECS}
            for name in self.sites
        }
        self.weights = {name: int(chance.integers(1, 1000)) for name in self.sites}
        self.losses = {name: (float(chance.uniform(0, 3)), int(chance.integers(1, 100))) for name in self.sites}
        self.policy = Policy(frozenset(self.roster.fingerprint(name) for name in self.sites), self.colluding + 2, 2)
        if self.colluding > 1:
            self.policy = replace(self.policy, min_known=self.colluding + 1)
        self.parties = {name: Party(name, key_of(name), self.roster, self.rules, self.policy) for name in self.sites}
        self.disks = {name: Disk() for name in self.sites}
        self.attempt = coordinator.Attempt(self.context, self.roster, self.rules)

    # One step of one site each: what it sends.

    def begin(self, name: str, root: bytes = b"") -> Envelope:
        root = root or bytes([self.seed % 256]) + name.encode().ljust(31, b".")
        state, envelope = site.begin(self.parties[name], self.context, root)
        self.disks[name].keep(state)
        return envelope

    def shares(self, name: str, shown: Iterable[Envelope]) -> dict[str, bytes]:
        shown = tuple(shown)
        return self._taken(name, lambda state: site.shares(self.parties[name], state, shown), alike=False)

    def join(self, name: str, received: Mapping[str, bytes]) -> None:
        self._taken(name, lambda state: (site.join(self.parties[name], state, received), None))

    def submit(self, name: str) -> Envelope:
        vector = self.masked(name)
        self.vectors[name] = vector
        return self._taken(name, lambda state: site.submit(self.parties[name], state, digests(vector)))

    def masked(self, name: str, tensors: Mapping[str, np.ndarray] | None = None) -> list[bytes]:
        held = self.tensors[name] if tensors is None else tensors
        own = self.layout.numbers(self.weights[name], {"val_loss": self.losses[name]})
        masks = site.masks(self.parties[name], self.disks[name].round())
        read = lambda key, start, count: held[key][start : start + count]  # noqa: E731
        return list(masked(self.layout, read, self.weights[name], own, masks))

    def agree(self, name: str, shown: Iterable[Envelope]) -> Envelope:
        shown, disk, party = tuple(shown), self.disks[name], self.parties[name]
        state, pledges, envelope = site.agree(party, disk.round(), shown, disk.signed())  # and lost
        disk.keep(state, pledges)
        state, again, repeated = site.agree(party, disk.round(), shown, disk.signed())
        assert (again, repeated) == (pledges, envelope)
        disk.keep(state, again)
        return repeated

    def open(self, name: str, shown: Iterable[Envelope]) -> Envelope:
        shown = tuple(shown)
        return self._taken(name, lambda state: site.open_(self.parties[name], state, shown))

    def _taken(self, name: str, step: Callable[[SiteRound], tuple[SiteRound, Made]], *, alike: bool = True) -> Made:
        disk = self.disks[name]
        if self.crashes:
            step(disk.round())  # lost before it was durable
        state, message = step(disk.round())
        disk.keep(state)
        if self.crashes:  # kept, and the message lost
            state, again = step(disk.round())
            assert state == disk.round()
            assert not alike or again == message
            message = again
        return message

    # The coordinator, which is restarted before each message.

    def tell(self, step: Callable[..., coordinator.Attempt], *message: object) -> None:
        self.attempt = step(self.reloaded(), *message)

    def reloaded(self) -> coordinator.Attempt:
        if not self.crashes:
            return self.attempt
        return documents.attempt_from_document(json.loads(json.dumps(documents.attempt_document(self.attempt))))

    # A whole round, in which each site is there until its step.

    def run(self, steps: Mapping[str, int] | None = None) -> str:
        """How far the round comes where site s takes the first ``steps[s]`` of five steps: keys, shares, vector,
        agreement, opening. One of: void, waits, opened.
        """
        there = {name: 5 if steps is None else steps.get(name, 5) for name in self.sites}
        try:
            for name in self._until(there, 1):
                self.tell(coordinator.keys, name, self.begin(name))
            self.tell(coordinator.close_keys)
            for name in self._until(there, 2):
                self.tell(coordinator.shares, name, self.shares(name, self.attempt.shown_keys()))
            self.tell(coordinator.close_shares)
            for name in self._until(there, 3):
                self.join(name, self.attempt.shares_for(name))
                self.tell(coordinator.submission, name, self.submit(name))
            self.tell(coordinator.choose)
        except TryAgain:
            return "void"
        self.finish(self._until(there, 4), self._until(there, 5))
        return "opened" if self.is_open() else "waits"

    def finish(self, agreeing: Iterable[str], opening: Iterable[str]) -> None:
        """From the chosen set on, with these sites."""
        for name in agreeing:
            if name not in self.attempt.group:
                continue
            if not self.disks[name].round().group:
                self.join(name, self.attempt.shares_for(name))
            self.tell(coordinator.agreement, name, self.agree(name, self.attempt.shown_set()))
        if not self.attempt.is_agreed:
            return
        for name in opening:
            if name in self.attempt.agreements:
                self.tell(coordinator.opening, name, self.open(name, self.attempt.shown_agreements()))

    def _until(self, there: Mapping[str, int], step: int) -> list[str]:
        return [name for name in self.sites if there[name] >= step]

    def is_open(self) -> bool:
        try:
            coordinator.unmasking(self.attempt)
        except TryAgain:
            return False
        return True

    def opened(self) -> OpenedSecrets:
        return coordinator.unmasking(self.attempt)[0]

    def sum(self) -> tuple[U32, Numbers]:
        """What the coordinator adds up."""
        chosen = self.attempt.chosen
        summing = Summing(self.layout, Unmasking.of(self.opened(), self.attempt.members, chosen))
        blocks = [summing.tensors(i, [self.vectors[s][i] for s in chosen]) for i in range(self.layout.blocks)]
        return np.concatenate(blocks), summing.numbers([self.vectors[s][-1] for s in chosen])

    def true_sum(self, sites: Iterable[str]) -> list[int]:
        """By integers of Python, without a ring or a mask."""
        total = [0] * self.layout.elements
        for name in sites:
            flat = [float(v) for spec in SPECS for v in self.tensors[name][spec.key]]
            for place, value in enumerate(flat):
                total[place] += round(value * self.weights[name] * 2.0**self.layout.quantizer.bits)
        return total

    def refuse_wrong_sum(self, sites: Iterable[str]) -> None:
        sites = tuple(sites)
        total, numbers = self.sum()
        assert total.view(np.int32).tolist() == self.true_sum(sites)
        assert numbers.weight == sum(self.weights[name] for name in sites)
        rows = sum(self.losses[name][1] for name in sites)
        mean = sum(self.losses[name][0] * self.losses[name][1] for name in sites) / rows
        assert abs(numbers.metrics["val_loss"] - mean) < 1e-6

    def blocks(self, name: str) -> Blocks:
        return digests(self.vectors[name])


@dataclass(frozen=True)
class Leak:
    """One share that the coordinator has: of which secret of whom, by whom."""

    kind: str
    owner: str
    holder: str
    share: str


def leaks(opened: Opened) -> list[Leak]:
    """What an opening says."""
    found = [Leak(SELF_MASK, owner, opened.site, share) for owner, share in opened.self_masks.items()]
    return found + [Leak(MASK_KEY, owner, opened.site, share) for owner, share in opened.mask_keys.items()]


def leaks_of(world: World, name: str) -> list[Leak]:
    """All that a colluding site holds of the others, of both kinds."""
    state, found = world.disks[name].round(), []
    group = state.members
    for owner in group.sites:
        share = shares.open_share(state.secrets, group.of(name), group.of(owner), state.received[owner])
        found.append(Leak(SELF_MASK, owner, name, share.self_mask.hex()))
        found.append(Leak(MASK_KEY, owner, name, share.mask_key.hex()))
    return found


def laid_open(world: World, found: Iterable[Leak]) -> list[str]:
    """The sites of which so many shares give both secrets: their vectors are plain to whoever has them."""
    group, found = world.attempt.members, set(found)
    fits = {
        SELF_MASK: lambda secret, keys: commitment(secret, world.context.digest) == keys.self_mask,
        MASK_KEY: lambda secret, keys: public_of(secret) == keys.mask_key,
    }

    def has(kind: str, owner: str) -> bool:
        held = {
            world.roster.point(one.holder): bytes.fromhex(one.share)
            for one in found
            if (one.kind, one.owner) == (kind, owner)
        }
        some = itertools.combinations(held, world.rules.threshold)
        return any(fits[kind](shamir.combine({x: held[x] for x in points}), group.of(owner)) for points in some)

    return [name for name in group.sites if has(SELF_MASK, name) and has(MASK_KEY, name)]


def until_vectors(world: World, steps: Mapping[str, int] | None = None) -> World:
    """All have sent their vectors, but those whose steps are fewer than three; no set is chosen."""
    for name in world.sites:
        world.tell(coordinator.keys, name, world.begin(name))
    world.tell(coordinator.close_keys)
    for name in world.sites:
        world.tell(coordinator.shares, name, world.shares(name, world.attempt.shown_keys()))
    world.tell(coordinator.close_shares)
    for name in world.sites:
        world.join(name, world.attempt.shares_for(name))
        if steps is None or steps.get(name, 5) >= 3:
            world.tell(coordinator.submission, name, world.submit(name))
    return world


def submissions_of(world: World, names: Iterable[str]) -> tuple[Envelope, ...]:
    return tuple(world.attempt.submissions[name] for name in names)
