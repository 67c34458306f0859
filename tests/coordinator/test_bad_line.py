"""A bad line between a site and the coordinator: what is sent goes on where it broke, and a deaf peer is noticed."""

import time
from collections.abc import Callable
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
from tools.bad_line import BadLine
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
def test_a_peer_that_is_not_heard_any_more_is_noticed_within_35_seconds_on_both_sides(place: Place) -> None:
    """Whichever direction is deaf. The three wait at the same time."""
    sites = {direction: place.join(direction) for direction in ("up", "down", "both")}
    lines = {direction: BadLine(place.address) for direction in sites}
    channels = {name: open_channel(place, own_pems(site), lines[name].address) for name, site in sites.items()}
    ended: dict[str, float] = {}
    try:
        calls = {name: watching(channels[name], place, sites[name]) for name in sites}
        for name, call in calls.items():
            call.add_done_callback(lambda _, name=name: ended.setdefault(name, time.monotonic()))
            lines[name].black_hole(*(("up", "down") if name == "both" else (name,)))
        began = time.monotonic()
        engine = place.coordinator.engine
        wait_until(lambda: not engine.connected(), "the coordinator misses the three", 36)
        wait_until(lambda: len(ended) == 3, "each site misses the coordinator", 36 - (time.monotonic() - began))
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
        for line in lines.values():
            line.close()


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
