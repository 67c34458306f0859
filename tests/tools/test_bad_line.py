"""The bad line of the other tests does what it says."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.bad_line import BadLine
from tools.world import Service, wait_until


@contextmanager
def echo() -> Iterator[str]:
    """The address of somebody who sends back what comes, on each connection until it ends."""

    def serve(end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(65536):
                    end.sendall(data)
            except OSError:
                return  # the line was cut

    def accept() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def received(end: socket.socket, count: int) -> bytes:
    """``count`` bytes, or what came before the connection ended."""
    data = b""
    try:
        while len(data) < count and (more := end.recv(count - len(data))):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_what_goes_over_a_slow_and_late_line_arrives_whole_and_not_before_its_time() -> None:
    payload = random.Random(1).randbytes(100_000)
    with echo() as to, BadLine(to, delay_s=0.1, bytes_a_second=400_000) as line, connect(line.address) as end:
        began = time.monotonic()
        threading.Thread(target=end.sendall, args=(payload,)).start()
        assert received(end, len(payload)) == payload
        assert time.monotonic() - began > 0.2 + len(payload) / 400_000
        whole = {"up": len(payload), "down": len(payload)}
        wait_until(lambda: line.carried == whole, "the line has counted it", 20)


def test_cuts_come_at_bytes_that_follow_from_the_seed() -> None:
    def ends() -> list[int]:
        with echo() as to, BadLine(to, cut_bytes=20_000, seed=3) as line:
            for _ in range(5):
                with connect(line.address) as end:
                    end.settimeout(20)
                    try:
                        while True:
                            end.sendall(bytes(1000))
                            if len(received(end, 1000)) < 1000:
                                break
                    except OSError:
                        pass
            assert (line.connections, line.cuts) == (5, 5)
            return [line.carried["up"] + line.carried["down"]]

    assert ends() == ends()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_nothing_comes_through_a_black_hole_until_it_is_healed(direction: str) -> None:
    with echo() as to, BadLine(to) as line, connect(line.address) as end:
        end.sendall(b"before")
        assert received(end, 6) == b"before"
        line.black_hole(direction)  # type: ignore[arg-type]
        end.sendall(b"within")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(6)
        line.heal()
        end.settimeout(20)
        assert received(end, 6) == b"within"


def test_a_cut_ends_every_connection_and_the_next_one_is_served() -> None:
    with echo() as to, BadLine(to) as line:
        with connect(line.address) as end:
            end.sendall(b"x")
            assert received(end, 1) == b"x"
            line.cut()
            assert received(end, 1) == b""
        wait_until(lambda: len(line) == 0, "the line knows", 20)
        with connect(line.address) as end:
            end.sendall(b"y")
            assert received(end, 1) == b"y"


def test_it_runs_alone(tmp_path: Path) -> None:
    with echo() as to:
        service = Service(tmp_path / "log", "python", "-m", "tools.bad_line", "--to", to, "--delay-s", "0.01")
        address = service.wait_line("ready").removeprefix("ready ")
        with connect(address) as end:
            end.sendall(b"z")
            assert received(end, 1) == b"z"
        assert service.stop() == 0
