"""The counting relay: transparent for TLS, exact in what it counts, and a clean end."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from site_agent.gateway.connection import relay as relays
from site_agent.gateway.connection.relay import Relay, address
from tests.site_agent.site_world import STUDY, SiteWorld
from wardround.errors import Unavailable, UsageProblem
from wardround.signing import canonical

WAIT_S = 20


class Echo:
    """A server that sends everything back, and closes when the other side does."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                while data := client.recv(65536):
                    client.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


def said_back(to: str, data: bytes) -> bytes:
    host, _, port = to.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as client:
        sender = threading.Thread(target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR)))
        sender.start()
        back = b"".join(iter(lambda: client.recv(65536), b""))
        sender.join()
    return back


def test_every_byte_passes_unchanged_and_is_counted(echo: Echo, tmp_path: Path) -> None:
    relay = Relay("127.0.0.1:0", echo.address, tmp_path / "count.json")
    data = bytes(range(256)) * 4096
    assert said_back(relay.address, data) == data
    assert said_back(relay.address, b"once more") == b"once more"
    relay.close()
    count = json.loads((tmp_path / "count.json").read_bytes())
    assert (count["up"], count["down"]) == (len(data) + 9, len(data) + 9)
    assert [(one["up"], one["down"]) for one in count["connections"]] == [(len(data),) * 2, (9, 9)]
    assert all(one["closed"] for one in count["connections"])


def test_a_coordinator_that_is_away_ends_the_connection_and_nothing_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"127.0.0.1:{free.getsockname()[1]}"
    relay = Relay("127.0.0.1:0", gone)
    for _ in range(2):
        host, _, port = relay.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as client:
            assert client.recv(1) == b""
    relay.close()
    assert relay.document()["up"] == 0


def test_an_address_that_is_none_and_a_port_that_is_taken_are_named(echo: Echo) -> None:
    assert address("[::1]:80") == ("::1", 80)
    for wrong in ("coordinator", ":8443", "host:port", "host:70000"):
        with pytest.raises(UsageProblem, match="is no HOST:PORT"):
            address(wrong)
    with pytest.raises(Unavailable, match=f"nobody can listen at {echo.address}"):
        Relay(echo.address, echo.address)


def test_the_command_says_ready_and_writes_its_count_when_it_is_told_to_end(echo: Echo, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "site_agent.cli.main",
        "audit",
        "relay",
        "--listen",
        "127.0.0.1:0",
        "--to",
        echo.address,
    ]
    count = tmp_path / "count.json"
    with subprocess.Popen([*line, "--count", str(count)], stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        word, at = relay.stdout.readline().split()
        assert word == "ready"
        assert said_back(at, b"x" * 1000) == b"x" * 1000
        relay.send_signal(signal.SIGTERM)
        said, _ = relay.communicate(timeout=WAIT_S)
    assert relay.returncode == 0
    assert said == "1000 bytes up, 1000 down, 1 connections\n"
    assert json.loads(count.read_bytes())["up"] == 1000


def test_an_agent_works_through_it_and_the_coordinator_sees_its_certificate(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path)
    try:
        world.join()
        world.offer()
        relay = Relay("127.0.0.1:0", world.coordinator.address)
        site = world.state.site_file
        site.write_bytes(canonical.dumps({**json.loads(site.read_bytes()), "address": relay.address}))
        agent = world.start()
        world.command("refresh")
        assert [offer.study for offer in world.state.offers()] == [STUDY]
        agent.stop()
        world.agent = None
        relay.close()
        assert relay.document()["up"] > 1000
    finally:
        world.close()


def test_connections_that_pass_at_a_time_are_bounded(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays, "MAX_OPEN", 1)
    relay = Relay("127.0.0.1:0", echo.address)
    host, port = relay.address.split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as first:
        first.sendall(b"x")
        assert first.recv(1) == b"x"
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as second:
            assert second.recv(1) == b""
    assert "1 connections are forwarded here; one more is turned away" in caplog.text
    relay.close()
    assert len(relay.connections) == 1
