"""Spans of a round: which step of it took how long, for OpenTelemetry. ``wardround.web.tracing`` sends them.

A span has a name of a step, a study, a round, at a coordinator a site, a time, and how it ended in a word of a closed
list. No value, no path and no error's text is in it, and none of another program: a site's spans begin at
the site, and nothing of them goes to the coordinator. Until ``record`` nothing is imported and nothing is kept.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

FAILED = "failed"  # how a step ends that raises
ROUND = "round"
_here = threading.local()  # .round: (study, round) that this thread is at, at a site


class _Traces:
    """The spans that are open, by study, round and site; the last "" for the round itself."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._open: dict[tuple[str, int, str], Span] = {}
        self._lock = threading.Lock()

    def started(self, name: str, study: str, round_: int, site: str) -> "Span":
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        with self._lock:
            above = self._open.get((study, round_, site)) or self._open.get((study, round_, ""))
        told: dict[str, str | int] = {"wardround.study": study, "wardround.round": round_}
        if site:
            told["wardround.site"] = site
        context = Context() if above is None else set_span_in_context(above, Context())
        return self._tracer.start_span(name, context, attributes=told)

    def begin(self, name: str, study: str, round_: int, site: str) -> None:
        self.end(study, round_, site, "")
        span = self.started(name, study, round_, site)
        with self._lock:
            self._open[study, round_, site] = span

    def end(self, study: str, round_: int, site: str, outcome: str) -> None:
        with self._lock:
            keys = [(study, round_, site)] if site else [key for key in self._open if key[:2] == (study, round_)]
            ended = [self._open.pop(key) for key in sorted(keys, reverse=True) if key in self._open]
        for span in ended:  # the round's own last
            _end(span, outcome)


_traces: _Traces | None = None


@contextlib.contextmanager
def record(processor: "SpanProcessor", service: str) -> Iterator[None]:
    """While the block lasts, this process's spans go to ``processor``. ``service``: who tells them."""
    global _traces
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    _traces = _Traces(provider.get_tracer("wardround"))
    try:
        yield
    finally:
        _traces = None
        provider.shutdown()


def begin(name: str, study: str, round_: int, site: str = "") -> None:
    """Begin the span of a round, or of a site in it, that another call ends; one that was open ends."""
    if _traces is not None:
        _traces.begin(name, study, round_, site)


def end(study: str, round_: int, site: str = "", outcome: str = "") -> None:
    """End it; that of a round, with those of its sites. ``outcome``: a word of a closed list."""
    if _traces is not None:
        _traces.end(study, round_, site, outcome)


@contextlib.contextmanager
def span(name: str, study: str, round_: int, site: str = "") -> Iterator[None]:
    """A step of a round while the block lasts, below the span that is open for it."""
    if _traces is None:
        yield
        return
    made = _traces.started(name, study, round_, site)
    outcome = FAILED
    try:
        yield
        outcome = ""
    except GeneratorExit:  # who read this stream has what it wanted, or went away: that is not ours to judge
        outcome = ""
        raise
    finally:
        _end(made, outcome)


@contextlib.contextmanager
def round_here(study: str, round_: int) -> Iterator[None]:
    """The span of a round that this thread is at; what ``step`` tells meanwhile is below it."""
    if _traces is None:
        yield
        return
    begin(ROUND, study, round_)
    _here.round = study, round_
    outcome = FAILED
    try:
        yield
        outcome = ""
    finally:
        _here.round = None
        end(study, round_, outcome=outcome)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """A step of the round that this thread is at; of none, nothing is told."""
    at = getattr(_here, "round", None)
    with span(name, *at) if at is not None else contextlib.nullcontext():
        yield


def _end(span: "Span", outcome: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    if outcome:
        span.set_attribute("wardround.outcome", str(outcome))
    if outcome == FAILED:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
