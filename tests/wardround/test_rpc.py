"""Errors across the line, versions, messages."""

import ast
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wardround
from wardround import errors, refusals, rpc
from wardround.errors import BadData, RefusedForGood
from wardround.records.messages import (
    envelope_from,
    envelope_message,
    manifest_from,
    manifest_message,
    manifest_most_bytes,
)
from wardround.signing import dsse
from wardround.tensors.manifests import Entry, Manifest, TensorSpec
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import tensors_pb2

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto/wardround", "coordinator", "site_agent", "fl_algorithms")
CODES = set(pb.RefusalCode.keys())
ENTRIES = st.lists(
    st.builds(
        Entry,
        st.builds(
            TensorSpec,
            st.from_regex(r"\A[A-Za-z0-9_.-]{1,9}\Z"),
            st.sampled_from(["F32", "I64", "BOOL"]),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.sampled_from(["model", "control"]),
        ),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
    ),
    max_size=5,
    unique_by=lambda entry: entry.spec.key,
)


class Failed(grpc.RpcError):  # type: ignore[misc]
    """A call that failed, as the library hands it over."""

    def __init__(self, status: grpc.StatusCode, details: str | None) -> None:
        super().__init__()
        self._status, self._details = status, details

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str | None:
        return self._details


class Context:
    """The end of a call at the coordinator."""

    def abort(self, status: grpc.StatusCode, details: str) -> None:
        raise Failed(status, details)


def across(error: errors.WardroundError) -> errors.WardroundError:
    with pytest.raises(Failed) as caught:
        rpc.abort(Context(), error)  # type: ignore[arg-type]
    return rpc.explain(caught.value, "asking")


KINDS = [*errors.BY_EXIT_CODE.values(), errors.RefusedForGood, errors.Refused]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", sorted(refusals.MEANINGS))
def test_of_an_error_its_code_crosses_and_nothing_else(kind: type[errors.WardroundError], code: str) -> None:
    arrived = across(kind("/var/lib/coordinator.db is `ø`", hint="run:\n`rm -rf /`", code=code))
    meaning = refusals.MEANINGS[code]
    assert (arrived.message, arrived.hint, arrived.code) == (f"asking: {meaning.sentence} ({code})", meaning.hint, code)
    wanted: type[errors.WardroundError] = errors.Refused
    if code in refusals.FOR_GOOD:
        wanted = errors.RefusedForGood
    elif code in refusals.LATER:
        wanted = errors.TryAgain
    assert type(arrived) is wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["", "DECLINED_WITHDRAWN", "REFUSAL_UNSPECIFIED", "NO_CODE", "SITE_REVOKED\nx"])
def test_an_error_that_is_not_for_sites_arrives_as_the_coordinators_trouble(
    kind: type[errors.WardroundError], code: str
) -> None:
    arrived = across(kind("/var/lib/coordinator.db is damaged", hint="restore it", code=code))
    assert type(arrived) is errors.TryAgain
    assert arrived.message == "asking: the coordinator has trouble of its own (COORDINATOR_TROUBLE)"
    assert arrived.code == "COORDINATOR_TROUBLE"
    assert arrived.hint == "nothing is wrong here; its operator's log says why: ask the coordinator's operator"


def test_every_code_that_a_coordinator_may_say_has_a_meaning() -> None:
    own = {code for code in CODES if code.startswith("DECLINED_")} | {"REFUSAL_UNSPECIFIED"}
    assert set(refusals.MEANINGS) == CODES - own
    assert set(refusals.MEANINGS) >= refusals.FOR_GOOD | refusals.LATER
    assert refusals.explained("ROUND_CLOSED") == "the round is closed"
    assert refusals.explained("no code") == ""


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
@pytest.mark.parametrize("details", [None, "", "NO_SUCH_CODE\nx", "failed to connect to all addresses"])
def test_a_failure_without_a_code_is_told_by_the_lines_state(status: grpc.StatusCode, details: str | None) -> None:
    error = rpc.explain(Failed(status, details), "upload")
    if status.name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
        said = f"upload: the connection to the coordinator broke or does not answer ({status.name.lower()})"
        assert (type(error), error.message) == (errors.Unavailable, said)
    elif status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert (type(error), error.message) == (errors.TryAgain, "upload: the coordinator is busy (TOO_BUSY)")
    else:
        assert (type(error), error.code) == (errors.TryAgain, "COORDINATOR_TROUBLE")


@pytest.mark.parametrize("theirs", ["1.4.0", "1.3.9", "1.5.0", "1.5.0rc1", "1.3.0.dev2"])
def test_one_minor_version_apart_works(monkeypatch: pytest.MonkeyPatch, theirs: str) -> None:
    monkeypatch.setattr(rpc, "__version__", "1.4.0")
    rpc.refuse_other_version(theirs, "coordinator")


@pytest.mark.parametrize(
    ("theirs", "shown"),
    [
        ("1.6.0", "1.6.0"),
        ("1.2.9", "1.2.9"),
        ("2.4.0", "2.4.0"),
        ("0.4.0", "0.4.0"),
        ("", "of an unknown form"),
        ("1.4", "of an unknown form"),
        ("1.4.0\n", "of an unknown form"),
        ("1.4.0 \x1b[31m", "of an unknown form"),
        ("1.99999.0", "of an unknown form"),
    ],
)
def test_further_apart_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch, theirs: str, shown: str) -> None:
    monkeypatch.setattr(rpc, "__version__", "1.4.0")
    with pytest.raises(RefusedForGood) as caught:
        rpc.refuse_other_version(theirs, "coordinator")
    assert caught.value.message == (
        f"this is wardround 1.4.0, the coordinator is {shown}: they may be one minor version apart"
    )
    assert caught.value.hint == "update the older one"
    assert caught.value.code == "VERSION_UNSUPPORTED"


def test_our_own_version_works_with_itself() -> None:
    rpc.refuse_other_version(wardround.__version__, "agent")


@given(ENTRIES)
def test_a_manifest_arrives_in_its_order(entries: list[Entry]) -> None:
    manifest = Manifest(tuple(entries))
    sent = tensors_pb2.Manifest.FromString(manifest_message(manifest).SerializeToString())
    assert manifest_from(sent) == manifest
    assert manifest_from(sent).digest() == manifest.digest()


def one_tensor(**changes: object) -> tensors_pb2.Manifest:
    values = {"name": "a", "dtype": "F32", "shape": [2], "encoding": "raw", "bytes": 8, "sha256": bytes(32), **changes}
    message = tensors_pb2.Manifest()
    message.bundles.add(name="model").tensors.add(**values)
    return message


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        pytest.param({"bytes": 9}, "MANIFEST_SHAPE", "`a` says 9 bytes, its shape says 8", id="bytes"),
        pytest.param({"shape": [2**63]}, "MANIFEST_SHAPE", f"`a` has impossible shape [{2**63}]", id="enormous"),
        pytest.param(
            {"shape": [2**63] * 100_000},
            "MANIFEST_SHAPE",
            f"`a` has impossible shape {[2**63] * 16}",
            id="dimensions without end",
        ),
        pytest.param({"dtype": "F8"}, "MANIFEST_DTYPE", "`a` has unknown dtype 'F8'", id="dtype"),
        pytest.param(
            {"name": "../a"},
            "MANIFEST_NAMES",
            "tensor name '../a' is not 1 to 200 of A-Z a-z 0-9 _ . -",
            id="name",
        ),
        pytest.param(
            {"sha256": b"x"}, "MESSAGE_MALFORMED", "`a` has no SHA-256 or an unknown encoding", id="short digest"
        ),
        pytest.param(
            {"encoding": "zip"}, "MESSAGE_MALFORMED", "`a` has no SHA-256 or an unknown encoding", id="encoding"
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, object], code: str, said: str) -> None:
    with pytest.raises(BadData) as caught:
        manifest_from(one_tensor(**changes))
    assert (caught.value.code, caught.value.message) == (code, said)


def test_a_bundle_without_a_name_is_the_model_and_names_one_tensor_once() -> None:
    message = one_tensor()
    message.bundles[0].name = ""
    assert manifest_from(message).entries[0].spec.bundle == "model"
    message.MergeFrom(one_tensor())
    with pytest.raises(BadData, match="`a` stands twice"):
        manifest_from(message)


def test_an_envelope_arrives() -> None:
    envelope = dsse.Envelope("t", b"{}", "ab", b"sig")
    assert envelope_from(envelope_message(envelope)) == envelope


def codes_in(source: str) -> set[str]:
    """The literal values of every argument ``code="..."`` (conditional ones too)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "code":
            values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            found |= {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return found


def test_every_code_that_our_source_names_is_in_the_contract() -> None:
    named = {
        (code, path.relative_to(ROOT).as_posix())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for code in codes_in(path.read_text(encoding="utf-8"))
        if code
    }
    assert len(named) > 10
    assert {(code, path) for code, path in named if code not in CODES} == set()


def test_the_search_for_codes_finds_them() -> None:
    assert codes_in('f(code="A"); g(1, code="B" if x else ""); h(code=variable)') == {"A", "B", ""}


def test_no_manifest_is_longer_than_what_its_tensors_can_take() -> None:
    specs = [
        TensorSpec("n" * 200, "BOOL", (1,) * 16, "b" * 40), TensorSpec("x", "F32", (2**20, 2**20)),
        TensorSpec("scalar", "F64", ()), *(TensorSpec(f"layer.{n}.weight", "F32", (64, 3, 7, 7)) for n in range(300)),
    ]  # fmt: skip
    manifest = Manifest(tuple(Entry(spec, "ab" * 32) for spec in specs))
    found = manifest_message(manifest).ByteSize()
    assert found <= manifest_most_bytes(specs) < 2 * found


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 300, 20_000, 3_000_000])
def test_a_message_of_one_field_is_known_from_its_bytes(size: int) -> None:
    data = pb.UploadRequest(chunk=tensors_pb2.Chunk(data=bytes(size))).SerializeToString()
    assert rpc.is_one_field(data, 2)
    assert not rpc.is_one_field(data, 1)
    for other in (b"", data[:1], data + b"\x12\x00", data[:-1], b"\x12" + b"\xff" * 9 + data):
        assert not rpc.is_one_field(other, 2)


def test_a_manifest_of_too_many_tensors_or_bundles_is_refused_before_they_are_looked_at() -> None:
    message = manifest_message(Manifest((Entry(TensorSpec("a", "F32", (1,)), "0" * 64),)))
    assert len(manifest_from(message, 1).entries) == 1
    with pytest.raises(BadData, match="a manifest of 1 tensors or bundles, at most 0 are taken"):
        manifest_from(message, 0)
    with pytest.raises(BadData, match="a manifest of 3 tensors or bundles, at most 2 are taken"):
        manifest_from(tensors_pb2.Manifest(bundles=[tensors_pb2.Bundle()] * 3), 2)


@pytest.mark.parametrize(("method", "most"), [("Declare", rpc.MAX_REQUEST), ("Studies", rpc.MAX_MESSAGE)])
def test_a_reply_is_no_longer_than_its_method_needs(method: str, most: int) -> None:
    """Parsed, a message can be some sixty times as long; and it is parsed before any of our code sees it."""
    size = [most]
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: bytes(size[0]))
    server = grpc.server(ThreadPoolExecutor(1), options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("wardround.v1.Federation", {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", rpc.CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary(f"/wardround.v1.Federation/{method}")
        assert len(call(b"", timeout=20)) == most
        size[0] = most + 1
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=20)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    server.stop(0)


def quicker(options: list[tuple[str, Any]], times: int) -> list[tuple[str, Any]]:
    """The same settings of pings with each time divided."""
    return [(name, value // times if "ping" in name or "keepalive_time" in name else value) for name, value in options]


@contextmanager
def held_call(options: list[tuple[str, Any]]) -> Iterator[Any]:
    """A call on which nothing is said, from a client that pings each second to a server that only answers."""
    gate = threading.Event()

    def silent(messages: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"begun"
        gate.wait(60)

    others = [option for option in options if option[0] != "grpc.keepalive_time_ms"]  # else the two take turns
    server = grpc.server(ThreadPoolExecutor(1), options=[*quicker(others, 20), ("grpc.http2.max_ping_strikes", 1)])
    handler = grpc.method_handlers_generic_handler("s", {"m": grpc.stream_stream_rpc_method_handler(silent)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", quicker(rpc.CHANNEL_OPTIONS, 20)) as channel:
        call = channel.stream_stream("/s/m")(iter(()))
        try:
            assert next(call) == b"begun"
            yield call
        finally:
            gate.set()
            server.stop(0).wait(20)


def test_an_agent_that_waits_for_work_is_not_thrown_off_for_its_pings() -> None:
    """Under another name of the server's setting every connection on which nothing was said ended after some minutes,
    with GOAWAY too_many_pings: gRPC passes over a setting that it does not know."""
    strict = [option for option in rpc.SERVER_OPTIONS if "min_ping_interval" not in option[0]]
    with held_call(rpc.SERVER_OPTIONS) as ours, held_call(strict) as other:
        with pytest.raises(grpc.RpcError, match="Too many pings"):
            next(other)
        assert ours.is_active()


def test_a_frozen_peer_is_noticed_within_35_seconds_by_either_side() -> None:
    for options in map(dict, (rpc.CHANNEL_OPTIONS, rpc.SERVER_OPTIONS)):
        noticed = options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]
        assert noticed <= 35_000
        assert options["grpc.http2.ping_timeout_ms"] <= options["grpc.keepalive_timeout_ms"]
    least = dict(rpc.SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert 2 * least <= dict(rpc.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]
