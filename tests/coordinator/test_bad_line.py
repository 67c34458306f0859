"""A bad line between a site and the coordinator: what is sent goes on where it broke, and a deaf peer is noticed."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.updates.receive import ACK_BYTES
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.upload import UploadTry
from tests.attacks.places import open_channel, own_pems
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite, Update, delta
from tools.bad_line import BadLine, Direction
from tools.world import wait_until
from wardround import __version__
from wardround.errors import Unavailable
from wardround.records.assignment import ModelRef
from wardround.records.messages import envelope_message
from wardround.records.update import UploadHeader
from wardround.tensors.files import file_header
from wardround.tensors.manifests import Manifest, PayloadHasher, TensorSpec
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import federation_pb2_grpc

MIB = 1 << 20
DEAF: dict[str, tuple[Direction, ...]] = {"up": ("up",), "down": ("down",), "both": ("up", "down")}
SPECS = (TensorSpec("w", "F32", (24 * MIB // 4,)),)


class Hospital:
    """One enrolled site's end of the line, with the agent's own connection over it."""

    def __init__(self, place: Place, folder: Path) -> None:
        place.initial.write_bytes(file_header(SPECS) + bytes(SPECS[0].bytes))
        (self.site,) = place.begin(sites=["alpha"])
        self.assignment = self.site.next_assignment()
        self.update: Update = delta("alpha", 1, SPECS)
        self.payload = folder / "payload.safetensors"
        self.payload.write_bytes(file_header(SPECS) + self.update.payload)
        self.header = UploadHeader.from_message(self.site.opening(self.assignment, self.update))

    def connection(self, line: BadLine) -> Connection:
        authority, certificate, key = own_pems(self.site)
        return Connection(line.address, authority, key, certificate, site="alpha")

    def upload(self, line: BadLine, between: Callable[[int], None] = lambda tries: None) -> list[int]:
        """Send the update as often as it breaks, each time as an agent that was started anew. The bytes of each try."""
        tries: list[int] = []
        while True:
            sent, connection = UploadTry(), self.connection(line)
            try:
                envelope = connection.upload(self.header, self.payload, sent, Interrupt())
            except Unavailable:
                continue
            finally:
                connection.close()
                tries.append(sent.payload_bytes)
                between(len(tries))
            self.site.take(envelope_message(envelope))
            return tries


@pytest.mark.parametrize("restart", [False, True], ids=["the line", "the coordinator too"])
def test_of_an_upload_that_breaks_at_most_8_mib_are_sent_again(place: Place, tmp_path: Path, restart: bool) -> None:
    hospital = Hospital(place, tmp_path)
    with BadLine(place.address, cut_bytes=8 * MIB, seed=7) as line:
        tries = hospital.upload(line, lambda count: place.restart() if restart and count < 3 else None)
    assert hospital.site.receipts[-1].decision == "accepted"
    cuts = len(tries) - 1
    assert cuts >= 2
    assert sum(tries) - len(hospital.update.payload) <= cuts * ACK_BYTES
    assert ACK_BYTES == 8 * MIB


def test_a_download_that_breaks_goes_on_at_the_last_byte_that_came(place: Place, tmp_path: Path) -> None:
    hospital = Hospital(place, tmp_path)
    model = ModelRef(0, hospital.assignment.base.digest.hex())
    came, tries = bytearray(), 0
    with BadLine(place.address, cut_bytes=6 * MIB, seed=11) as line:
        while len(came) < SPECS[0].bytes:
            connection, tries = hospital.connection(line), tries + 1
            try:
                for part in connection.download("trial", 1, model, len(came), Interrupt()):
                    if not isinstance(part, Manifest):
                        assert part[0] == len(came)
                        came += part[1]
            except Unavailable:
                pass
            finally:
                connection.close()
        again = line.carried["down"] - len(came)
    hasher = PayloadHasher(SPECS)
    hasher.update(bytes(came))
    assert hasher.manifest().digest() == model.digest
    assert tries >= 3
    assert again <= tries * 8 * MIB


@pytest.mark.chaos
def test_a_peer_that_is_not_heard_any_more_is_noticed_within_35_seconds_on_both_sides(
    place: Place, tmp_path: Path
) -> None:
    """Whichever direction is deaf, with nothing under way and in the middle of an upload and a download. All of them
    wait at the same time."""
    hospital = Hospital(place, tmp_path)
    hospital.site.unwatch()
    sites = {direction: place.join(direction) for direction in ("up", "down", "both")}
    lines = {name: BadLine(place.address) for name in sites}
    moving = {name: BadLine(place.address, bytes_a_second=4 * MIB) for name in ("upload", "download")}
    channels = {name: open_channel(place, own_pems(site), lines[name].address) for name, site in sites.items()}
    ended: dict[str, float] = {}
    threads = [threading.Thread(target=moved, args=(hospital, name, line, ended)) for name, line in moving.items()]
    engine = place.coordinator.engine
    try:
        calls = {name: watching(channels[name], place, sites[name]) for name in sites}
        for thread in threads:
            thread.start()
        for line in moving.values():
            wait_until(partial(carries, line, 2 * MIB), "bytes move", 20)
        began = time.monotonic()
        moving["upload"].black_hole("down")
        moving["download"].black_hole("up")
        for name, call in calls.items():
            call.add_done_callback(partial(missed, ended, name))
            lines[name].black_hole(*DEAF[name])
        wait_until(lambda: not engine.connected() and not place.coordinator.calls.of("alpha"), "all are missed", 36)
        wait_until(lambda: len(ended) == 5, "each misses the coordinator", 36 - (time.monotonic() - began))
        assert max(ended.values()) - began <= 35
        for line in lines.values():
            line.heal()
        again = [watching(channels[name], place, sites[name]) for name in sites]
        assert engine.connected() == set(sites)
        for call in again:
            call.cancel()
    finally:
        for channel in channels.values():
            channel.close()
        for line in (*lines.values(), *moving.values()):
            line.close()
        for thread in threads:
            thread.join(20)


def carries(line: BadLine, more_than: int) -> bool:
    return sum(line.carried.values()) > more_than


def missed(ended: dict[str, float], name: str, call: object) -> None:
    """A call ended."""
    ended.setdefault(name, time.monotonic())


def moved(hospital: Hospital, name: str, line: BadLine, ended: dict[str, float]) -> None:
    """An upload or a download over a line that breaks on the way, and when its site noticed."""
    connection = hospital.connection(line)
    try:
        if name == "upload":
            connection.upload(hospital.header, hospital.payload, UploadTry(), Interrupt())
        else:
            model = ModelRef(0, hospital.assignment.base.digest.hex())
            for _ in connection.download("trial", 1, model, 0, Interrupt()):
                pass
    except Unavailable:
        missed(ended, name, connection)
    finally:
        connection.close()


def watching(channel: grpc.Channel, place: Place, site: FakeSite) -> Any:
    """A site's stream of events over a channel; the one that it had ends."""
    before = {call.context.peer() for call in place.coordinator.calls.of(site.name)}
    stub = federation_pb2_grpc.FederationStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Watch(pb.WatchRequest(agent_version=__version__), wait_for_ready=True)

    def came() -> bool:
        now = {one.context.peer() for one in place.coordinator.calls.of(site.name) if one.method == "Watch"}
        return bool(now) and not now & before and site.name in place.coordinator.engine.connected()

    wait_until(came, f"{site.name} watches over the line", 20)
    return call
