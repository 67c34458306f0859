"""Spans of rounds: what they tell and what not, where they go, and that without a collector there are none."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from wardround.errors import NeedsPerson, UsageProblem
from wardround.local import traces
from wardround.web.tracing import traced


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    with traces.record(SimpleSpanProcessor(exporter), "test"):
        yield exporter


def test_a_site_and_its_steps_are_below_the_round_and_end_with_it(spans: InMemorySpanExporter) -> None:
    traces.begin(traces.ROUND, "hearts", 3)
    traces.begin("offered", "hearts", 3, "alpha")
    traces.begin("offered", "hearts", 3, "bravo")
    with traces.span("download", "hearts", 3, "alpha"):
        pass
    with traces.span("download", "lungs", 3, "alpha"):
        pass
    traces.end("hearts", 3, "alpha", "accepted")
    traces.end("hearts", 3, outcome="closed")
    traces.end("hearts", 3, outcome="closed")  # said again, it changes nothing
    download, other, alpha, bravo, whole = spans.get_finished_spans()
    assert (alpha.name, bravo.name, whole.name) == ("offered", "offered", "round")
    assert download.parent == alpha.context
    assert alpha.parent == bravo.parent == whole.context
    assert whole.parent is other.parent is None
    assert dict(alpha.attributes or {}) == {
        "wardround.study": "hearts", "wardround.round": 3, "wardround.site": "alpha", "wardround.outcome": "accepted",
    }  # fmt: skip


def test_a_step_that_fails_says_that_and_not_why(spans: InMemorySpanExporter) -> None:
    with pytest.raises(NeedsPerson), traces.round_here("hearts", 1), traces.step("check"):
        raise NeedsPerson("/srv/patients.csv has 17 rows")
    with traces.step("check"):  # of no round: nobody is told
        pass
    check, whole = spans.get_finished_spans()
    assert check.parent == whole.context
    for span in (check, whole):
        assert dict(span.attributes or {}) == {
            "wardround.study": "hearts", "wardround.round": 1, "wardround.outcome": "failed"
        }  # fmt: skip
        assert not span.events
        assert span.status.description is None


def test_without_a_collector_nothing_is_imported_and_no_span_is_made() -> None:
    code = (
        "import sys\nfrom wardround.local import traces\nfrom wardround.web.tracing import traced\n"
        "with traced('', 'test'), traces.round_here('s', 1), traces.step('x'), traces.span('y', 's', 1, 'a'):\n"
        "    traces.begin('round', 's', 1)\n    traces.end('s', 1)\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('opentelemetry', 'requests')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


def test_spans_go_to_the_collector_that_was_named_past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        with traced(address, "site", only_here=True), traces.round_here("hearts", 2), traces.step("train"):
            pass
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    ((path, body),) = got
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces"
    assert [(pair.key, pair.value.string_value) for pair in resource.resource.attributes] == [("service.name", "site")]
    assert [span.name for span in resource.scope_spans[0].spans] == ["train", "round"]


@pytest.mark.parametrize(
    "address", ["127.0.0.1:4318", "http://127.0.0.1", "ftp://127.0.0.1:1", "http://a:x", "http://u:p@127.0.0.1:4318"]
)
def test_what_is_no_address_of_a_collector_is_refused(address: str) -> None:
    with pytest.raises(UsageProblem, match="is no address of a collector"), traced(address, "test"):
        pass


def test_a_site_tells_spans_on_its_own_machine_alone() -> None:
    with (
        pytest.raises(UsageProblem, match="is not on this machine: a site connects to its coordinator and to no other"),
        traced("https://collector.example.org", "test", only_here=True),
    ):
        pass


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(NeedsPerson, match="traces need OpenTelemetry") as refused, traced("http://[::1]:1", "test"):
        pass
    assert refused.value.hint == "`pip install 'wardround[otel]'`"
