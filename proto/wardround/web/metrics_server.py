"""The HTTP server of a running service's metrics: three paths, GET alone, few requests at a time, none for long.

Loaded where metrics are asked for, and only there.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from wardround.web.serving import LOOPBACK

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MOST = 8  # requests at one time
REQUEST_S = 5
log = logging.getLogger(__name__)


class MetricsServer(ThreadingHTTPServer):
    """Answers at ``listener``, a socket that listens. ``any_host``: under whatever name it is asked."""

    daemon_threads = True

    def __init__(
        self, listener: socket.socket, registry: "CollectorRegistry", is_ready: Callable[[], bool], *, any_host: bool
    ) -> None:
        super().__init__(("", 0), _Answering, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.registry, self.is_ready, self.any_host = registry, is_ready, any_host
        self._room = threading.BoundedSemaphore(MOST)

    def get_request(self) -> tuple[socket.socket, Any]:
        """A Unix socket's peer has no address, and the handler wants one."""
        connection, _ = self.socket.accept()
        connection.settimeout(REQUEST_S)
        return connection, ("", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own; one beyond ``MOST`` is dropped."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread began, so none lets the next one in
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Let the next one in when it has ended."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked went away, or was too slow."""
        log.debug("a request for metrics was not answered", exc_info=True)


class _Answering(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version, sys_version = "wardround", ""

    def setup(self) -> None:
        """What is asked must have come whole after ``REQUEST_S``: a byte now and then would keep a place for good."""
        super().setup()
        self._late = threading.Timer(REQUEST_S, self._hang_up)
        self._late.daemon = True
        self._late.start()

    def finish(self) -> None:
        """It is answered, or nothing was asked in time."""
        self._late.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """One of the three."""
        self._late.cancel()
        if not self.server.any_host and not _is_here(self.headers.get("Host", "")):
            self._say(421, "this server is not known under that name\n")
        elif self.path == "/healthz":
            self._say(200, "ok\n")
        elif self.path == "/readyz":
            ready = self.server.is_ready()
            self._say(200 if ready else 503, "ready\n" if ready else "not ready\n")
        elif self.path == "/metrics":
            from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

            try:
                text = generate_latest(self.server.registry)
            except Exception:
                log.exception("metrics cannot be told")
                self._say(500, "metrics cannot be told; the log says why\n")
            else:
                self._say(200, text.decode(), CONTENT_TYPE_PLAIN_0_0_4)
        else:
            self._say(404, "/metrics, /healthz and /readyz are answered\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Who asks for metrics is no event."""

    def _say(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def _is_here(host: str) -> bool:
    """Whether a Host names this machine by itself: a page of another name, turned to this address, does not."""
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).lower() in LOOPBACK
