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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wardround.errors import NeedsPerson, Unavailable, UsageProblem
from wardround.local import sockets
from wardround.web.serving import is_loopback, split

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from wardround.web.metrics_server import MetricsServer

UNIX = "unix:"
END_S = 5  # in which the server's thread ends
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
        thread.join(timeout=END_S)
        if address.startswith(UNIX):
            Path(address.removeprefix(UNIX)).unlink(missing_ok=True)


def _listening(
    address: str, registry: "CollectorRegistry", is_ready: Callable[[], bool], *, only_here: bool
) -> "MetricsServer":
    from wardround.web.metrics_server import MetricsServer  # with http.server, which nobody else needs

    if address.startswith(UNIX):
        return MetricsServer(sockets.listen(Path(address.removeprefix(UNIX))), registry, is_ready, any_host=True)
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
    return MetricsServer(listener, registry, is_ready, any_host=not is_loopback(host))


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
