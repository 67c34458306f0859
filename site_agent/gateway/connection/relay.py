"""A relay that an auditor runs between a site and the coordinator: it forwards bytes without keys, and counts them.

It cannot read what it forwards, for TLS ends at the coordinator. Its count is an independent number for
`site-agent audit reconcile`. The network leads the site's traffic through it: the coordinator's name resolves to it on
the site's machine, or the site's firewall sends the connection there.
"""

import json
import logging
import socket
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from site_agent.state.directory import now_text
from wardround.errors import Unavailable, UsageProblem
from wardround.local import durable
from wardround.local.event import Latch, set_by_signals
from wardround.local.sockets import accepted

PIECE = 256 * 1024
CONNECT_S = 10
MAX_OPEN = 64  # connections forwarded at a time; a site has one or two
log = logging.getLogger(__name__)


@dataclass
class ProxiedConnection:
    """One connection that was forwarded. ``up``: bytes from the site; ``down``: bytes to it; times RFC 3339, UTC."""

    number: int
    opened: str
    closed: str | None = None
    up: int = 0
    down: int = 0


@dataclass
class Relay:
    """Listens, forwards every connection to one target, and counts, until ``close``.

    Args:
        listen: "HOST:PORT"; port 0 takes a free one.
        to: "HOST:PORT" of the coordinator.
        count: where the count is written, after each connection and at the end; None: nowhere.

    Raises:
        UsageProblem: an address is no HOST:PORT.
        Unavailable: nobody can listen there.
    """

    listen: str
    to: str
    count: Path | None = None
    began: str = field(default_factory=now_text)
    connections: list[ProxiedConnection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._closing = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._target = address(self.to)
        host, port = address(self.listen)
        try:
            self._listener = socket.create_server((host, port), family=_family(host), reuse_port=False)
        except OSError as error:
            raise Unavailable(f"nobody can listen at {self.listen} ({error.strerror})") from None
        self.address = "{}:{}".format(f"[{host}]" if ":" in host else host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._acceptor.start()

    def document(self) -> dict[str, Any]:
        """The count: of each connection, and in all."""
        with self._lock:
            return {
                "relay": 1,
                "to": self.to,
                "began": self.began,
                "until": now_text(),
                "up": sum(connection.up for connection in self.connections),
                "down": sum(connection.down for connection in self.connections),
                "connections": [asdict(connection) for connection in self.connections],
            }

    def close(self) -> None:
        """Stop listening, break what is open, write the count."""
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            for end in self._open:
                _shut(end, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._write()

    def _accept(self) -> None:
        for site in accepted(self._listener, lambda: self._closing):
            with self._lock:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                if len(self._threads) >= MAX_OPEN:
                    log.warning("%d connections are forwarded here; one more is turned away", len(self._threads))
                    site.close()
                    continue
                connection = ProxiedConnection(len(self.connections) + 1, now_text())
                self.connections.append(connection)
                thread = threading.Thread(target=self._forward, args=(site, connection), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, site: socket.socket, connection: ProxiedConnection) -> None:
        """Forward one connection, from its first byte to its last."""
        with site:
            try:
                with socket.create_connection(self._target, timeout=CONNECT_S) as coordinator:
                    coordinator.settimeout(None)
                    with self._lock:
                        self._open |= {site, coordinator}
                    down = threading.Thread(
                        target=self._pump, args=(coordinator, site, connection, "down"), daemon=True
                    )
                    down.start()
                    self._pump(site, coordinator, connection, "up")
                    down.join()
                    with self._lock:
                        self._open -= {site, coordinator}
            except OSError as error:
                log.warning("the coordinator at %s cannot be reached (%s)", self.to, error.strerror or error)
        connection.closed = now_text()
        self._write()

    def _pump(self, source: socket.socket, sink: socket.socket, connection: ProxiedConnection, direction: str) -> None:
        """Forward bytes in one direction until one end is gone.

        A byte counts when it has been received here, whether or not it is delivered.
        """
        piece = memoryview(bytearray(PIECE))
        try:
            while taken := source.recv_into(piece):
                with self._lock:
                    setattr(connection, direction, getattr(connection, direction) + taken)
                sink.sendall(piece[:taken])
        except OSError:
            _shut(source, socket.SHUT_RD)  # the other end is gone: whoever sends here hears of it
        _shut(sink, socket.SHUT_WR)

    def _write(self) -> None:
        if self.count is not None:
            with self._lock:
                durable.write_file(self.count, json.dumps(self.document(), indent=1).encode() + b"\n")


def serve(listen: str, to: str, count: Path | None) -> Relay:
    """Relay until SIGTERM or SIGINT; prints `ready HOST:PORT`. Returns the closed relay."""
    with set_by_signals(Latch()) as stop:
        relay = Relay(listen, to, count)
        print(f"ready {relay.address}", flush=True)
        stop.wait()
        relay.close()
    return relay


def address(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "[ADDRESS]:PORT"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageProblem(f"{text[:80]!r} is no HOST:PORT", hint="for instance 127.0.0.1:8443")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _shut(end: socket.socket, how: int) -> None:
    try:
        end.shutdown(how)
    except OSError:
        pass  # it is closed already
