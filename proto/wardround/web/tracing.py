"""Sends the spans of ``wardround.local.traces`` to a collector of OpenTelemetry, where one is named.

To that one address and no other: no proxy of the environment is asked, and no redirect is followed. What the collector
does not take in time is dropped, and no round waits for it.
"""

import contextlib
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

from wardround.errors import NeedsPerson, UsageProblem
from wardround.local import traces
from wardround.web.serving import LOOPBACK

EXPORT_S = 3  # for one batch; the program's end waits no longer
PATH = "/v1/traces"
HINT = "as in --traces http://127.0.0.1:4318"
log = logging.getLogger(__name__)


@contextlib.contextmanager
def traced(collector: str, service: str, *, only_here: bool = False) -> Iterator[None]:
    """While the block lasts, send spans to ``collector``, http://HOST:PORT or https://HOST[:PORT]; "" for nowhere.

    Args:
        service: who tells them.
        only_here: no collector on another machine is taken.

    Raises:
        UsageProblem: it is no such address, or one of the network where ``only_here``.
        NeedsPerson: OpenTelemetry is not installed.
    """
    if not collector:
        yield
        return
    endpoint = _endpoint(collector, only_here=only_here)
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise NeedsPerson(
            "traces need OpenTelemetry, which is not installed", hint="`pip install 'wardround[otel]'`"
        ) from None
    with requests.Session() as session:
        session.trust_env, session.max_redirects = False, 0
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S, session=session))
        with traces.record(processor, service):
            yield


def _endpoint(collector: str, *, only_here: bool) -> str:
    try:
        address = urlsplit(collector)
        host, port = address.hostname or "", address.port
    except ValueError:
        raise UsageProblem(f"{collector[:80]!r} is no address of a collector", hint=HINT) from None
    named = address.scheme in ("http", "https") and host and address.username is None and not address.query
    if not named or (address.scheme == "http" and port is None):
        raise UsageProblem(f"{collector[:80]!r} is no address of a collector", hint=HINT)
    here = host in LOOPBACK or f"[{host}]" in LOOPBACK
    if only_here and not here:
        raise UsageProblem(
            f"{collector[:80]} is not on this machine: a site connects to its coordinator and to no other",
            hint=f"run a collector here, and decide there what it sends on; {HINT}",
        )
    if not here and address.scheme == "http":
        log.warning("spans go to %s:%s unencrypted; they name studies and sites", host, port)
    return collector.rstrip("/") + ("" if address.path.rstrip("/") else PATH)
