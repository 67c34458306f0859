"""Many connections to the port of the sites: descriptors stay, and it is not the sites that are closed."""

import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import connections, server
from coordinator.connections import Room, room
from tests.attacks.places import Hung, open_channel, own_pems
from tests.coordinator.conftest import Place
from tools.world import wait_until


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def silent(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Connections that never shake hands."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(count)]


def closed(end: socket.socket) -> bool:
    end.settimeout(0)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_descriptors_are_left_for_files() -> None:
    assert room(8192) == Room(7168, 1792)
    assert room(1024) == Room(512, 128)
    assert room().connections >= 1


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:51234", ("10.0.0.7", 51234)),
        ("ipv6:%5B::1%5D:51234", ("::1", 51234)),
        ("ipv6:[::ffff:10.0.0.7]:1", ("10.0.0.7", 1)),
        ("unix:/run/x", None),
    ],
)
def test_a_peer_is_known_by_its_connection(peer: str, address: Any) -> None:
    assert connections._address(peer) == address


def test_strangers_are_closed_first_the_oldest_of_them_and_the_sites_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "room", lambda: Room(100, 10))
    monkeypatch.setattr(connections, "LOOK_S", 0.05)
    place = Place(tmp_path)
    try:
        (alpha,) = place.begin(sites=["alpha"], rounds=1)
        before = open_descriptors()
        with silent(place.address, 30) as strangers:
            wait_until(lambda: sum(map(closed, strangers)) >= 20, "20 of 30 are closed", 20)
            assert all(closed(end) for end in strangers[:20])
            assert not any(closed(end) for end in strangers[20:])
            assert alpha.answer(alpha.next_assignment()).decision == "accepted"
        with silent(place.address, 300):  # more than there may be
            wait_until(lambda: open_descriptors() < before + 300 + 30, "the coordinator has not one for each", 20)
            assert place.status()["state"] == "running"
            assert "alpha" in place.coordinator.engine.connected()
        assert alpha.answer(alpha.next_assignment()).decision == "accepted"
        place.until(lambda status: status["state"] == "finished")
        wait_until(lambda: open_descriptors() <= before + 3, "descriptors are as before", 20)
    finally:
        place.close()
    said = [record.getMessage() for record in caplog.records if record.name == connections.__name__]
    assert any("connections without a call" in line and "from 127.0.0.1" in line for line in said)


@pytest.mark.chaos
def test_others_are_served_as_fast_beside_500_silent_connections_and_20_stalled_streams(place: Place) -> None:
    alpha, *others = [place.join(name) for name in ("alpha", *(f"stalled-{number}" for number in range(4)))]
    place.create(sites=["alpha"])

    def latencies(count: int) -> list[float]:
        found = []
        for _ in range(count):
            began = time.monotonic()
            alpha.offer("trial")
            found.append(time.monotonic() - began)
        return found

    def p95(values: list[float]) -> float:
        return statistics.quantiles(values, n=20)[-1]

    latencies(50)
    quiet = p95(latencies(300))
    before = open_descriptors(), threading.active_count()
    hung = [Hung(place, own_pems(site), "Federation/Upload", 5) for site in others]
    with silent(place.address, 500):
        wait_until(lambda: len(place.coordinator.calls.all()) >= 20 + 5, "the streams stall", 20)
        crowded = p95(latencies(300))
    for one in hung:
        one.close()
    assert crowded < 2 * quiet + 0.002  # and the clock's grain
    wait_until(lambda: open_descriptors() <= before[0] + 5, "descriptors are as before", 40)


@pytest.mark.chaos
def test_idle_connections_of_a_member_keep_nobody_out(place: Place) -> None:
    alpha, bravo = place.join("alpha"), place.join("bravo")
    place.create(sites=["alpha"])
    before = open_descriptors()
    channels = [open_channel(place, own_pems(bravo)) for _ in range(200)]
    try:
        for channel in channels:
            with pytest.raises(grpc.RpcError):
                channel.unary_unary("/wardround.v1.Federation/Nothing")(b"", timeout=20)  # type: ignore[arg-type]  # the stubs want a serializer
        assert alpha.offer("trial").study == "trial"
    finally:
        for channel in channels:
            channel.close()
    wait_until(lambda: open_descriptors() <= before + 5, "descriptors are as before", 40)
