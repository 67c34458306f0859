"""A bad line between the sites and their coordinator: slow, late, cut at any byte, or deaf in one direction.

A proxy of bytes for tests and measurements, in a thread of this process or alone:

    with BadLine("127.0.0.1:8443", delay_s=0.3, bytes_a_second=200_000, cut_bytes=4 << 20) as line:
        ...                                   # the sites connect to line.address
        line.black_hole("up")                 # nothing reaches the coordinator any more, and nobody is told
        line.heal()

    python -m tools.bad_line --listen 127.0.0.1:8443 --to 127.0.0.1:9443 --delay-s 0.3 --cut-bytes 4194304 --seed 1

A site checks that the coordinator's certificate is for the address that it connects to. So a coordinator behind a line
is made with the line's address, and listens elsewhere: ``coordinator init --address LINE`` and ``serve --listen TO``.

Each connection has the whole rate and its own cuts, drawn from the seed in the order in which connections come.
Nothing is reordered and no byte is changed. What is sent into a black hole arrives when it is healed, as TCP would send
it again; that an end has closed is not heard through one either.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

PIECE = 4096
BUFFER = 16 * 1024  # of the kernel's on a line with a rate, so that what waits there does not count as delivered
LATE_S = 0.1  # by which this program may be late on a busy machine, and make it good
MAX_PIECES = 1024  # on their way in one direction of a connection
CONNECT_S = 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing says so at once, and throws away what was not delivered
Direction = Literal["up", "down"]  # to the coordinator, to the site


class Cut(Exception):
    """A connection ends here."""


@dataclass(eq=False)
class Link:
    """One connection over the line. ``left``: bytes until it is cut, of both directions together."""

    near: socket.socket
    far: socket.socket
    left: float

    def cut(self) -> None:
        """Break it; both ends hear of it at once."""
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class BadLine:
    """A line to ``to`` that listens from its making until ``close``.

    Args:
        to: HOST:PORT of the coordinator.
        listen: HOST:PORT; port 0 takes a free one.
        delay_s: how much later each byte arrives, in each direction. May be set while the line is in use.
        bytes_a_second: of each direction of each connection; None: as fast as it goes.
        cut_bytes: after how many bytes a connection is cut in the mean, drawn for each; None: never. May be set.

    Attributes:
        carried: bytes delivered in each direction.
        connections, cuts: how many there were.
    """

    to: str
    listen: str = "127.0.0.1:0"
    delay_s: float = 0.0
    bytes_a_second: float | None = None
    cut_bytes: float | None = None
    seed: int = 0
    carried: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    connections: int = 0
    cuts: int = 0
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._links: set[Link] = set()
        self._loop = asyncio.new_event_loop()
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.heal_now()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound_buffers(self._listener)
        self._listener.bind(_pair(self.listen))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        host, _ = _pair(self.listen)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="bad line", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and break what is open."""
        self._call(self._stop)
        self._thread.join(20)
        self._listener.close()

    def cut(self) -> None:
        """Break every connection now."""
        self._call(self._cut_all)

    def black_hole(self, *directions: Direction) -> None:
        """Deliver nothing in these directions until ``heal``; nobody is told."""
        for direction in directions:
            self._call(self._open[direction].clear)

    def heal(self) -> None:
        """Deliver again, what waited too."""
        self._call(self.heal_now)

    def heal_now(self) -> None:
        """``heal``, for the line's own thread."""
        for opened in self._open.values():
            opened.set()

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._links)

    def _call(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def acted() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(acted)
        done.wait(20)

    def _run(self) -> None:
        self._serving = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    def _stop(self) -> None:
        self.heal_now()
        self._serving.cancel()

    def _cut_all(self) -> None:
        self.cuts += len(self._links)
        for link in self._links:
            link.cut()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as links:
            try:
                while True:
                    near, _ = await self._loop.sock_accept(self._listener)
                    links.create_task(self._forward(near))
            finally:
                for link in self._links:
                    link.cut()

    async def _forward(self, near: socket.socket) -> None:
        far = socket.socket()
        with near, far:
            self._bound_buffers(far)
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = self._draw.expovariate(1 / self.cut_bytes) if self.cut_bytes else float("inf")
            link = Link(near, far, left)
            self.connections += 1
            self._links.add(link)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._loop.sock_connect(far, _pair(self.to))
                await _all(self._carry(link, "up", near, far), self._carry(link, "down", far, near))
            except Cut:
                self.cuts += 1
                link.cut()
            except OSError:
                link.cut()
            finally:
                self._links.discard(link)

    async def _carry(self, link: Link, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        """One direction of a connection, from its first byte until its source closes."""
        under_way: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(MAX_PIECES)
        await _all(self._take(source, under_way), self._deliver(link, direction, under_way, sink))

    async def _take(self, source: socket.socket, under_way: asyncio.Queue[tuple[float, bytes | OSError]]) -> None:
        """Read no faster than the line is, and say of each piece when it is to arrive."""
        free_at = self._loop.time()  # when the line has room again
        data: bytes | OSError = b"-"
        while data and not isinstance(data, OSError):
            try:
                data = await self._loop.sock_recv(source, PIECE)
            except OSError as error:
                data = error
            if self.bytes_a_second is not None and isinstance(data, bytes):
                free_at = max(free_at, self._loop.time() - LATE_S) + len(data) / self.bytes_a_second
                await asyncio.sleep(max(0.0, free_at - self._loop.time()))
            await under_way.put((self._loop.time() + self.delay_s, data))

    async def _deliver(
        self,
        link: Link,
        direction: Direction,
        under_way: asyncio.Queue[tuple[float, bytes | OSError]],
        sink: socket.socket,
    ) -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._open[direction].wait()
            if isinstance(data, OSError):
                raise data
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            data = data[: int(min(link.left, len(data)))]
            link.left -= len(data)
            await self._loop.sock_sendall(sink, data)
            self.carried[direction] += len(data)
            if link.left < 1:
                raise Cut

    def _bound_buffers(self, end: socket.socket) -> None:
        if self.bytes_a_second is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


async def _all(*acts: Coroutine[Any, Any, None]) -> None:
    """Run them until all have ended; the first that fails ends the others, and its error is raised."""
    tasks = [asyncio.create_task(act) for act in acts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def _until_signaled() -> Iterator[threading.Event]:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    yield ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--bytes-a-second", type=float)
    parser.add_argument("--cut-bytes", type=float, help="the mean number of bytes until a connection is cut")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with _until_signaled() as ended, BadLine(**vars(options)) as line:
        print(f"ready {line.address}", flush=True)
        while not ended.wait(1):
            pass
    print(
        f"{line.connections} connections, {line.cuts} cut, {line.carried['up']} bytes up, {line.carried['down']} down"
    )


if __name__ == "__main__":
    main()
