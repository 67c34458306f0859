"""Connections that do nothing, beside sites that work: `python -m tools.evidence_crowd`.

Two sites train rounds all the time. After some rounds in peace, 1,000 connections come that say nothing, 500 that begin
a handshake and never end it, and 20 upload streams of enrolled sites that never say what they upload. What the
coordinator closes, comes again at once. Then all go away. Measured: the 95th percentile of the rounds' time before,
during and after, and the coordinator's memory, descriptors and threads. Prints a JSON line; exits 1 if the 95th
percentile was more than twice that of the peace, the rounds stopped, or descriptors or memory did not come back.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from tools.faults import Disturbed, Plan, Template, resources
from tools.world import World
from wardround import rpc
from wardround.v1 import federation_pb2_grpc

IDLE, HALF, STALLED = 1000, 500, 20
STALLERS = ("xray", "yankee", "zulu")  # enrolled, in no study
HELLO = bytes.fromhex("1603010200010001fc0303")  # the first bytes of a TLS ClientHello
AGAIN_S = 0.5
WORSE, LEFT_DESCRIPTORS, LEFT_KIB = 2.0, 16, 32 * 1024


@dataclass(frozen=True)
class Stretch:
    """Some rounds in a row. ``most``: the largest values that were seen of the coordinator."""

    name: str
    seconds: tuple[float, ...]
    most: dict[str, int]

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.seconds, n=20, method="inclusive")[-1]


class Crowd:
    """Holds connections and streams open until it is left; what is closed is opened again."""

    def __init__(self, world: Disturbed, address: str, idle: int, half: int, stalled: int) -> None:
        self._counts = {b"": idle, HELLO: half}
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._world = world
        self._address = address
        self._stalled = stalled
        self._leaving = threading.Event()
        self._channels: list[grpc.Channel] = []
        self._loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=self._hold, daemon=True)]
        self.opened = 0
        self.refused_streams = 0

    def __enter__(self) -> Self:
        for number in range(self._stalled):
            site = STALLERS[number % len(STALLERS)]
            if number < len(STALLERS):
                self._channels.append(self._channel(site))
            channel = self._channels[number % len(STALLERS)]
            self._threads.append(threading.Thread(target=self._stall, args=(channel,), daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaving.set()
        self._loop.call_soon_threadsafe(self._stop)
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            thread.join(30)

    def _channel(self, site: str) -> grpc.Channel:
        identity = self._world.state / site / "identity"
        files = [(identity / name).read_bytes() for name in ("authority.pem", "key.pem", "certificate.pem")]
        return grpc.secure_channel(self._address, grpc.ssl_channel_credentials(*files), rpc.CHANNEL_OPTIONS)

    def _stall(self, channel: grpc.Channel) -> None:
        def nothing() -> Iterator[object]:
            self._leaving.wait()
            return
            yield

        stub = federation_pb2_grpc.FederationStub(channel)
        while not self._leaving.is_set():
            try:
                for _ in stub.Upload(nothing()):
                    pass
            except (grpc.RpcError, ValueError):
                self.refused_streams += 1
            self._leaving.wait(AGAIN_S)

    def _hold(self) -> None:
        self._holding = self._loop.create_task(self._hold_all())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._holding)
        self._loop.close()

    def _stop(self) -> None:
        self._holding.cancel()

    async def _hold_all(self) -> None:
        async with asyncio.TaskGroup() as held:
            for words, count in self._counts.items():
                for _ in range(count):
                    held.create_task(self._hold_open(words))

    async def _hold_open(self, words: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                self.opened += 1
                try:
                    writer.write(words)
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(AGAIN_S)


class Rounds:
    """Looks at stretches of rounds of one study."""

    def __init__(self, world: Disturbed) -> None:
        self._world = world
        self._study = world.plan.study_names[0]

    def stretch(self, name: str, count: int) -> Stretch:
        """The next ``count`` rounds, and the most that the coordinator had meanwhile."""
        first = self._world.until(self._study, lambda status: status.round >= 1).round + 1
        most: dict[str, int] = {}

        def watch() -> None:
            for key, value in resources(self._world.pid("coordinator")).items():
                most[key] = max(value, most.get(key, 0))

        self._world.until(self._study, lambda status: status.round >= first + count, act=watch)
        rows = self._world.report(self._study).rounds_closed
        seconds = tuple(row.seconds for row in rows if first <= row.round < first + count and row.seconds is not None)
        return Stretch(name, seconds, most)


def crowded(folder: Path, rounds: int, idle: int, half: int, stalled: int) -> tuple[list[Stretch], dict[str, int], int]:
    """Peace, a crowd and peace again; what the coordinator holds in the end; and how many connections came."""
    plan = Plan(sites=2, rounds=12 * rounds)

    def enrol(world: World) -> None:
        world.serve()
        for site in STALLERS:
            world.join(site)
        assert world.coordinator is not None
        world.coordinator.stop()

    template = Template(folder, plan, prepare=enrol)
    with Disturbed(template.copy(), plan) as world:
        world.begin()
        looks = Rounds(world)
        looks.stretch("warm", max(5, rounds // 4))
        before = looks.stretch("peace", rounds)
        with Crowd(world, template.address, idle, half, stalled) as crowd:
            looks.stretch("coming", max(5, rounds // 4))
            during = looks.stretch("crowd", rounds)
        opened = crowd.opened
        after = looks.stretch("after", rounds)
        deadline = time.monotonic() + 60
        while (left := resources(world.pid("coordinator")))["descriptors"] > before.most["descriptors"] + 4:
            if time.monotonic() > deadline:
                break
            time.sleep(1)
        return [before, during, after], left, opened


def verdict(stretches: list[Stretch], left: dict[str, int]) -> list[str]:
    """What did not hold."""
    before, during, _ = stretches
    wrong = []
    if during.p95 > WORSE * before.p95:
        wrong.append(f"the 95th percentile is {during.p95 / before.p95:.2f} times that in peace")
    if left["descriptors"] > before.most["descriptors"] + LEFT_DESCRIPTORS:
        wrong.append(f"{left['descriptors']} descriptors are left of {before.most['descriptors']} before")
    if left["kib"] > before.most["kib"] + LEFT_KIB:
        wrong.append(f"{left['kib']} KiB are left of {before.most['kib']} before")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_crowd", description=__doc__)
    parser.add_argument("--rounds", type=int, default=80, help="of each stretch")
    parser.add_argument("--idle", type=int, default=IDLE)
    parser.add_argument("--half", type=int, default=HALF)
    parser.add_argument("--stalled", type=int, default=STALLED)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wardround-crowd-") as folder:
        stretches, left, opened = crowded(Path(folder), chosen.rounds, chosen.idle, chosen.half, chosen.stalled)
    wrong = verdict(stretches, left)
    print(json.dumps({
        "evidence": "crowd", "idle": chosen.idle, "half": chosen.half, "stalled": chosen.stalled, "opened": opened,
        "stretches": {
            one.name: {"p95_s": round(one.p95, 3), "median_s": round(statistics.median(one.seconds), 3), **one.most}
            for one in stretches
        }, "left": left, "wrong": wrong,
    }))  # fmt: skip
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
