"""Rounds in which parties are killed at random, messages are lost, and the coordinator goes on when it likes."""

import random
from dataclasses import dataclass, field, replace

import pytest

from tests.secure_world import Leak, World, laid_open, leaks
from wardround.errors import NotPermitted, TryAgain
from wardround.secure import coordinator, site
from wardround.secure.layout import digests
from wardround.secure.statements import Opened, read

ATTEMPTS = 4


@dataclass
class Storm:
    """One round of a world, until it is opened or its attempts are spent. Every message is lost with some chance, and
    every step is cut off before or after it was durable with some chance.
    """

    world: World
    chance: random.Random
    kills: int = 0
    seen: list[Leak] = field(default_factory=list)  # by the coordinator
    gone: set[str] = field(default_factory=set)  # for ever

    def run(self) -> bool:
        for number in range(1, ATTEMPTS + 1):
            self._begin(number)
            if self._attempt():
                return True
            if self.world.attempt.chosen:
                return False  # a set was chosen, and no other is in this round
        return False

    def _begin(self, number: int) -> None:
        world = self.world
        world.context = replace(world.context, attempt=number)
        world.attempt = coordinator.Attempt(world.context, world.roster, world.rules)
        for disk in world.disks.values():
            disk.state = ""

    def _attempt(self) -> bool:
        patience = self.chance.uniform(0.02, 0.6)  # the smaller, the longer the coordinator waits for stragglers
        for _ in range(100 * self.world.n):
            name = self.chance.choice(self.world.sites)
            if self.chance.random() < patience / self.world.n:
                self._close()
            elif name not in self.gone:
                self._act(name)
            if self.chance.random() < 0.002:
                self.gone.add(name)
            if len(self.world.attempt.openings) >= self.world.rules.threshold and self.world.is_open():
                return True
        return False

    def _close(self) -> None:
        for step in (coordinator.close_keys, coordinator.close_shares, coordinator.choose):
            try:
                self.world.attempt = step(self.world.reloaded())
            except TryAgain:
                return

    def _killed(self) -> bool:
        dead = self.chance.random() < 0.25
        self.kills += dead
        return dead

    def _act(self, name: str) -> None:
        """The next thing that ``name`` would do, by what it has on its disk and what the coordinator shows."""
        world, attempt = self.world, self.world.attempt
        party, disk = world.parties[name], world.disks[name]
        if not disk.state:
            root = self.chance.randbytes(32)
            state, message = site.begin(party, world.context, root)
            if not self._killed():  # before it was durable: then another root is drawn next time
                disk.keep(state)
                self._send(coordinator.keys, name, message)
            return
        state = disk.round()
        try:
            if name not in attempt.keys:
                self._send(coordinator.keys, name, site.begin(party, world.context, state.root)[1])
            elif name in attempt.peers and name not in attempt.dealt:
                after, shares = site.shares(party, state, attempt.shown_keys())
                self._kept(name, after, coordinator.shares, shares)
            elif name in attempt.group and name not in attempt.submissions and not attempt.chosen:
                joined = site.join(party, state, attempt.shares_for(name))
                disk.keep(joined)
                vector = world.masked(name)
                world.vectors[name] = vector
                after, message = site.submit(party, disk.round(), digests(vector))
                self._kept(name, after, coordinator.submission, message)
            elif attempt.chosen and name in attempt.group and name not in attempt.agreements:
                joined = site.join(party, state, attempt.shares_for(name))
                after, pledges, message = site.agree(party, joined, attempt.shown_set(), disk.signed())
                if not self._killed():
                    disk.keep(after, pledges)
                    self._send(coordinator.agreement, name, message)
            elif attempt.is_agreed and name in attempt.agreements and name not in attempt.openings:
                after, message = site.open_(party, state, attempt.shown_agreements())
                self.seen += leaks(read(Opened, message, world.roster))
                self._kept(name, after, coordinator.opening, message)
        except NotPermitted:
            return  # it sent a vector that came too late, and signs no set without it

    def _kept(self, name: str, state: site.SiteRound, step: object, message: object) -> None:
        if self._killed():
            return
        self.world.disks[name].keep(state)
        self._send(step, name, message)

    def _send(self, step: object, name: str, message: object) -> None:
        if self._killed():  # durable, and the message is lost
            return
        try:
            self.world.attempt = step(self.world.reloaded(), name, message)  # type: ignore[operator]
        except TryAgain:
            return  # too late for this attempt


def storms(seeds: range) -> tuple[int, int, int]:
    """Kills, rounds that were opened, rounds that were not: of none is a site laid open, and every sum is exact."""
    kills = opened = 0
    for seed in seeds:
        chance = random.Random(seed)
        storm = Storm(World(chance.randint(3, 6), seed=seed, crashes=False), chance)
        ended = storm.run()
        world = storm.world
        if ended:
            world.refuse_wrong_sum(world.attempt.chosen)
        if world.attempt.group:
            assert laid_open(world, storm.seen) == []
        assert all(len(disk.signed().signed) <= 1 for disk in world.disks.values())
        kills, opened = kills + storm.kills, opened + ended
    return kills, opened, len(seeds) - opened


def test_parties_killed_at_random_give_the_exact_sum_or_none() -> None:
    kills, opened, _ = storms(range(12))
    assert kills > 150
    assert opened >= 8


@pytest.mark.chaos
def test_thousands_of_kills_never_lay_a_site_open() -> None:
    kills, opened, _ = storms(range(100, 260))
    assert kills > 2000
    assert opened > 120
