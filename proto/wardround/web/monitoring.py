"""Metrics for Prometheus, health and readiness of a running service: one small HTTP server, only where it is asked for.

    /metrics    what the program's table of metrics lists, and what prometheus-client knows of the process
    /healthz    200 while the process answers
    /readyz     200 while what it is for works, else 503

GET alone, no log-in, nothing is read but the first line and the Host: it listens on this machine, on a Unix socket,
or, at a coordinator, where its operator says. Each metric is computed when it is asked for.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wardround.errors import NeedsPerson, Unavailable, UsageProblem
from wardround.local import sockets
from wardround.web.serving import LOOPBACK, is_loopback, split

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

UNIX = "unix:"
MOST = 8  # requests at one time
REQUEST_S = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metric:
    """One row of a program's table of metrics. A label's values are names or words of a closed list."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


Values = Mapping[tuple[str, ...], float]  # of a metric, by the values of its labels
Families = Callable[[], Iterable[tuple[Metric, Values]]]


@contextlib.contextmanager
def monitored(
    address: str, families: Families, is_ready: Callable[[], bool], *, only_here: bool = False
) -> Iterator[None]:
    """While the block lasts, answer at ``address``: HOST:PORT or unix:PATH; "" for nowhere.

    Args:
        only_here: no address that another machine reaches is taken.

    Raises:
        UsageProblem: it is no address, or one of the network where ``only_here``.
        Unavailable: it cannot listen there.
        NeedsPerson: prometheus-client is not installed.
    """
    if not address:
        yield
        return
    server = _listening(address, _registry(families), is_ready, only_here=only_here)
    thread = threading.Thread(target=server.serve_forever, name="monitoring", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=REQUEST_S)
        if address.startswith(UNIX):
            Path(address.removeprefix(UNIX)).unlink(missing_ok=True)


def _listening(
    address: str, registry: "CollectorRegistry", is_ready: Callable[[], bool], *, only_here: bool
) -> "_Server":
    if address.startswith(UNIX):
        return _Server(sockets.listen(Path(address.removeprefix(UNIX))), registry, is_ready, any_host=True)
    try:
        host, port = split(address)
    except UsageProblem:
        raise UsageProblem(
            f"{address[:80]!r} is no address", hint="as in --metrics 127.0.0.1:9464, or --metrics unix:/run/NAME.sock"
        ) from None
    if only_here and not is_loopback(host):
        raise UsageProblem(
            f"{address[:80]} is not an address of this machine alone: a site listens on no network",
            hint="as in --metrics 127.0.0.1:9464, or --metrics unix:/run/NAME.sock",
        )
    if not is_loopback(host):
        log.warning("metrics are told to whoever reaches %s:%s; they name studies and sites", host, port)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot tell metrics at {address}: {error.strerror}", hint="give another --metrics"
        ) from None
    return _Server(listener, registry, is_ready, any_host=not is_loopback(host))


def _registry(families: Families) -> "CollectorRegistry":
    """What /metrics is made of."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ModuleNotFoundError:
        raise NeedsPerson(
            "metrics need prometheus_client, which is not installed", hint="`pip install 'wardround[metrics]'`"
        ) from None

    class Ours:
        """The program's own."""

        def collect(self) -> Iterator[Any]:
            for metric, values in families():
                kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
                family = kind(metric.name, metric.help, labels=metric.labels)
                for labels, value in values.items():
                    family.add_metric(labels, value)
                yield family

        def describe(self) -> list[Any]:
            """Nothing is asked for before it is wanted."""
            return []

    registry = CollectorRegistry()
    registry.register(Ours())
    ProcessCollector(registry=registry)
    return registry


class _Server(ThreadingHTTPServer):
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
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

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
    server: _Server
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
