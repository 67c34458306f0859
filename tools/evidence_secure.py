"""What secure aggregation costs: bytes, processor seconds and memory of one site and of the coordinator, for one round.

    python -m tools.evidence_secure                        # 3, 8, 16 and 50 sites; 608 B, a ResNet-18, 1 GiB
    python -m tools.evidence_secure --sites 8 --elements 11700000

One site's whole part is measured, and the coordinator's, with the code of ``wardround.secure`` and without a network.
The other sites of a crowd send what the measured one sent: for time and bytes it does not matter. Of the plain
round, one hash of the update is shown, which each side computes anyway.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wardround.secure import coordinator, site
from wardround.secure.layout import BLOCK, ELEMENTS, Blocks, Layout, masked
from wardround.secure.policy import Pledges, Policy
from wardround.secure.quantizing import Quantizer
from wardround.secure.rules import Rules
from wardround.secure.site import Party
from wardround.secure.statements import Context, Roster
from wardround.secure.sums import Summing, Unmasking
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import TensorSpec

CROWDS = (3, 8, 16, 50)
SIZES = (152, 11_700_000, 2**28)
HEAD = (
    "| sites | update | bytes beside it, per site | site | coordinator | of this, one plain hash | memory of the site |"
)
Made = TypeVar("Made")


@dataclass
class Cost:
    """Processor seconds of one site and of the coordinator, and bytes that one site sends and receives beside y."""

    site_s: float = 0.0
    coordinator_s: float = 0.0
    hash_s: float = 0.0
    beside: int = 0
    peak: int = 0

    def at_site(self, step: Callable[[], Made]) -> Made:
        begun = time.process_time()
        made = step()
        self.site_s += time.process_time() - begun
        return made

    def at_coordinator(self, step: Callable[[], Made]) -> Made:
        begun = time.process_time()
        made = step()
        self.coordinator_s += time.process_time() - begun
        return made


def measure(sites: int, elements: int) -> Cost:
    """One round of ``sites`` sites; the last one by name drops out after the shares, where the threshold lets it."""
    cost, names = Cost(), [f"site-{place:03}" for place in range(sites)]
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    roster = Roster.of({name: key.public_key().public_bytes_raw() for name, key in keys.items()})
    rules = Rules.of(sites, None, 1)
    policy = Policy(frozenset(roster.fingerprint(name) for name in names))
    parties = {name: Party(name, keys[name], roster, rules, policy) for name in names}
    layout = Layout.of(Quantizer(sites, 1.0, 1000), [TensorSpec("w", "F32", (elements,))], {"val_loss": 10.0}, 1000)
    context = Context("fed", "0" * 64, roster.digest, 1, 1, "0" * 64, layout.digest)
    attempt, me = coordinator.Attempt(context, roster, rules), names[0]
    there = names if rules.threshold == sites else names[:-1]
    states = {}
    for name in names:
        states[name], envelope = _of(cost, name == me, lambda n=name: site.begin(parties[n], context, os.urandom(32)))
        attempt = cost.at_coordinator(lambda a=attempt, n=name, e=envelope: coordinator.keys(a, n, e))
        cost.beside += _size(envelope) * (2 if name == me else 1)  # sent, and shown to it as everyone's are
    attempt = cost.at_coordinator(lambda a=attempt: coordinator.close_keys(a))
    shown = attempt.shown_keys()
    for name in names:
        states[name], dealt = _of(cost, name == me, lambda n=name: site.shares(parties[n], states[n], shown))
        attempt = cost.at_coordinator(lambda a=attempt, n=name, d=dealt: coordinator.shares(a, n, d))
    cost.beside += 2 * sum(map(len, dealt.values()))
    attempt = cost.at_coordinator(lambda a=attempt: coordinator.close_shares(a))
    for name in there:
        received = attempt.shares_for(name)
        states[name] = _of(cost, name == me, lambda n=name, r=received: site.join(parties[n], states[n], r))
    blocks = cost.at_site(lambda: _vector(layout, site.masks(parties[me], states[me])))
    for name in there:
        states[name], envelope = _of(cost, name == me, lambda n=name: site.submit(parties[n], states[n], blocks))
        attempt = cost.at_coordinator(lambda a=attempt, n=name, e=envelope: coordinator.submission(a, n, e))
        cost.beside += _size(envelope) * (2 if name == me else 1)
    attempt = cost.at_coordinator(lambda a=attempt: coordinator.choose(a))
    chosen, empty = attempt.shown_set(), Pledges()
    for name in there:
        states[name], _, envelope = _of(
            cost, name == me, lambda n=name: site.agree(parties[n], states[n], chosen, empty)
        )
        attempt = cost.at_coordinator(lambda a=attempt, n=name, e=envelope: coordinator.agreement(a, n, e))
        cost.beside += _size(envelope) * (2 if name == me else 1)
    agreements = attempt.shown_agreements()
    for name in there[: rules.threshold]:
        states[name], envelope = _of(cost, name == me, lambda n=name: site.open_(parties[n], states[n], agreements))
        attempt = cost.at_coordinator(lambda a=attempt, n=name, e=envelope: coordinator.opening(a, n, e))
    cost.beside += _size(envelope)
    cost.at_coordinator(lambda: _sum(layout, attempt))
    begun = time.process_time()
    digest, some = hashlib.sha256(), bytes(BLOCK)
    for _ in range(layout.blocks):
        digest.update(some)
    cost.hash_s = (time.process_time() - begun) * min(1.0, elements * 4 / (layout.blocks * BLOCK))
    cost.peak = peak()
    return cost


def peak() -> int:
    """Bytes that this process had in memory at most, since its program was started."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _of(cost: Cost, measured: bool, step: Callable[[], Made]) -> Made:
    return cost.at_site(step) if measured else step()


def _size(envelope: Envelope) -> int:
    return len(envelope.payload) + len(envelope.signature) + len(envelope.keyid)


def _vector(layout: Layout, masks: dict[str, list[object]]) -> Blocks:
    """Quantized, masked and hashed, a block at a time."""
    values = np.random.default_rng(1).uniform(-1, 1, ELEMENTS).astype(np.float32)

    def block(key: str, start: int, count: int) -> np.ndarray:
        return values[:count]

    own = layout.numbers(100, {"val_loss": (1.0, 20)})
    return Blocks(tuple(hashlib.sha256(one).hexdigest() for one in masked(layout, block, 100, own, masks)))  # type: ignore[arg-type]


def _sum(layout: Layout, attempt: coordinator.Attempt) -> None:
    opened, _ = coordinator.unmasking(attempt)
    summing = Summing(layout, Unmasking.of(opened, attempt.members, attempt.chosen))
    block = os.urandom(BLOCK)
    for index in range(layout.blocks):
        size = 4 * min(ELEMENTS, layout.elements - index * ELEMENTS)
        summing.tensors(index, [block[:size]] * len(attempt.chosen))


def row(sites: int, elements: int, cost: Cost) -> str:
    size = f"{elements * 4} B" if elements < 1000 else f"{elements * 4 / 2**20:,.1f} MiB"
    share = f"{cost.beside:,} B ({cost.beside / (elements * 4):.2%})" if elements > 1000 else f"{cost.beside:,} B"
    return (
        f"| {sites} | {size} | {share} | {cost.site_s:.2f} s | {cost.coordinator_s:.2f} s | {cost.hash_s:.2f} s | "
        f"{cost.peak / 2**20:.0f} MiB |"
    )


def rows(crowds: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[str]:
    """Each in a process of its own, so that memory is that of one."""
    for elements in sizes:
        for sites in crowds:
            command = [sys.executable, "-m", "tools.evidence_secure", "--one", str(sites), str(elements)]
            yield subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="*", default=CROWDS)
    parser.add_argument("--elements", type=int, nargs="*", default=SIZES)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(row(*asked.one, measure(*asked.one)))
        return
    print(HEAD)
    print("|" + "---|" * HEAD.count(" | ") + "---|")
    for line in rows(tuple(asked.sites), tuple(asked.elements)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
