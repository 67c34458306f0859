"""The connections to the port of the sites: how many there may be, and who is closed first when they are many.

TLS asks every peer for a certificate, but a connection takes a descriptor from its first moment. So gRPC turns away
what is beyond a number that leaves descriptors for files and the database; and before it comes to that, connections
without a call are closed here, the oldest ones of the address that has the most. A site's stream of events is a call,
so a site that is connected is never among them.
"""

import logging
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from wardround.local.rate_limit import RateLimitedLog

RESERVED = 1024  # descriptors for files, the database and commands; of fewer than twice as many, half
LOOK_S = 0.5
OWN = Path("/proc/self/fd")
Address = tuple[str, int]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """How many connections there may be, and how many of them without a call."""

    connections: int
    strangers: int


def room(descriptors: int | None = None) -> Room:
    """What this process has room for. ``descriptors``: how many it may have open, if not what the system says."""
    most = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = most - min(RESERVED, most // 2)
    return Room(connections, connections // 4)


class Connections:
    """Looks at the connections to ``port``, and closes those without a call while they are too many.

    Args:
        calling: the peers of the calls under way, as gRPC names them.
    """

    def __init__(self, port: int, calling: Callable[[], set[str]], most: Room) -> None:
        self._port = port
        self._calling = calling
        self._most = most
        self._known: dict[
            int, Address | None
        ] = {}  # inode -> the peer, in the order in which they came; None: not ours
        self._log = RateLimitedLog(log)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                open_now = [int(path.name) for path in OWN.iterdir()]
                if len(open_now) > self._most.strangers:
                    self._look(open_now)
            except OSError as error:
                self._log.warning("the connections cannot be looked at now: %s", error.strerror)

    def _look(self, descriptors: list[int]) -> None:
        """Close the connections without a call that are too many."""
        open_now: dict[int, int] = {}  # inode -> descriptor
        for descriptor in descriptors:
            inode = _socket_inode(descriptor)
            if inode is not None:
                open_now[inode] = descriptor
                if inode not in self._known:
                    self._known[inode] = self._peer(descriptor)
        self._known = {inode: peer for inode, peer in self._known.items() if inode in open_now}
        calling = {address for text in self._calling() if (address := _address(text)) is not None}
        strangers = [(inode, peer) for inode, peer in self._known.items() if peer is not None and peer not in calling]
        surplus = len(strangers) - self._most.strangers
        if surplus <= 0:
            return
        crowd = Counter(host for _, (host, _) in strangers)
        closed: Counter[str] = Counter()
        for inode, peer in sorted(strangers, key=lambda one: -crowd[one[1][0]])[:surplus]:  # stable: oldest first
            if _shut(open_now[inode], inode):
                closed[peer[0]] += 1
        (host, count), *_ = closed.most_common(1) or [("", 0)]
        self._log.warning(
            "%d connections without a call: %d were closed, %d of them from %s", len(strangers), closed.total(), count,
            host,
        )  # fmt: skip

    def _peer(self, descriptor: int) -> Address | None:
        """Who is at the other end of a connection to our port; None if it is none."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6) or end.getsockname()[1] != self._port:
                    return None
                host, port = end.getpeername()[:2]
                return _plain(host), port
        except OSError:
            return None  # it listens, or has just closed


def _socket_inode(descriptor: int) -> int | None:
    try:
        kind, _, rest = str((OWN / str(descriptor)).readlink()).partition(":[")
    except OSError:
        return None  # closed since it was listed
    return int(rest[:-1]) if kind == "socket" else None


def _shut(descriptor: int, inode: int) -> bool:
    """End a connection; whoever owns its descriptor hears of it and closes it. False: it was closed meanwhile."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if os.fstat(end.fileno()).st_ino != inode:
                return False
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _address(peer: str) -> Address | None:
    """Host and port of gRPC's name of a peer: ``ipv4:10.0.0.7:51234``, ``ipv6:%5B::1%5D:51234``."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:") if "." in host else host
