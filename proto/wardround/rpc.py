"""gRPC as both sides use it: the channel's settings, errors across a connection, and versions.

Why these settings: a frozen peer is noticed only with ``ping_timeout_ms``, 30 s after its last byte; a server whose
``min_ping_interval_without_data_ms`` is longer than a client's ``keepalive_time_ms`` throws idle clients off; nothing
needs a message larger than a study's offer or a chunk; compression stays off so that the bytes on the wire can be
accounted for. A server gives a handshake 10 s and a connection without a call 5 min.
"""

import json
import re
from typing import Any, NoReturn

import grpc

from wardround import __version__, refusals
from wardround.errors import RefusedForGood, Unavailable, WardroundError
from wardround.v1 import enrolment_pb2, federation_pb2, secure_pb2, summaries_pb2

MAX_MESSAGE = 2 * 1024 * 1024  # one study's offer, or a page of smaller ones
MAX_STRUCTURED = 1024 * 1024  # any other message that is more than a run of bytes
MAX_REQUEST = 1024 * 1024 + 64 * 1024  # a chunk, and what is around it
UPLOAD_WINDOW = 2 * 1024 * 1024  # bytes of an upload under way: 50 Mbit/s at 300 ms, 500 at 30 ms

COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.default_compression_algorithm", 0),
]
SERVER_OPTIONS = [
    *((name, value) for name, value in COMMON_OPTIONS if name != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", MAX_REQUEST),
    ("grpc.max_concurrent_streams", 32),  # on one connection
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),  # or gRPC would hold for each upload as much as a busy machine's line has in flight
    ("grpc.http2.lookahead_bytes", UPLOAD_WINDOW),
]
_LARGER_REPLIES = {"Studies": MAX_MESSAGE, "Watch": MAX_MESSAGE}  # others have at most a chunk, or a manifest
_CONTRACT = tuple(module.DESCRIPTOR for module in (federation_pb2, enrolment_pb2, summaries_pb2, secure_pb2))
_REPLIES = [
    {
        "name": [{"service": f"wardround.v1.{service.name}", "method": method.name}],
        "maxResponseMessageBytes": _LARGER_REPLIES.get(method.name, MAX_REQUEST),
    }
    for described in _CONTRACT
    for service in described.services_by_name.values()
    for method in service.methods
]
CHANNEL_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.service_config", json.dumps({"methodConfig": _REPLIES})),
    ("grpc.enable_retries", 0),  # uploads resume by our own protocol; the library's retry stops silently at 256 KiB
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # in truth how long a connection may take, handshake and all
    ("grpc.max_reconnect_backoff_ms", 10_000),
]

_STATUS: dict[int, grpc.StatusCode] = {
    65: grpc.StatusCode.INVALID_ARGUMENT,
    69: grpc.StatusCode.UNAVAILABLE,
    73: grpc.StatusCode.RESOURCE_EXHAUSTED,
    75: grpc.StatusCode.RESOURCE_EXHAUSTED,
    77: grpc.StatusCode.PERMISSION_DENIED,
    78: grpc.StatusCode.FAILED_PRECONDITION,
}
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def abort(context: grpc.ServicerContext, error: WardroundError) -> NoReturn:
    """End a call with an error: of it the caller gets the code, if it is for sites to know, and nothing else."""
    code = refusals.said_of(error)
    status = _STATUS.get(error.exit_code, grpc.StatusCode.INTERNAL)
    context.abort(grpc.StatusCode.INTERNAL if code == refusals.TROUBLE else status, code)
    raise AssertionError("abort returns never")


def explain(error: grpc.RpcError, doing: str) -> WardroundError:
    """What a failed call means at the site: what ``refusals`` makes of its code, else the connection's state.

    Returns:
        Unavailable, TryAgain, Refused or RefusedForGood: no status and no words make it anything else.
    """
    status, details = error.code(), error.details() or ""
    if details in refusals.MEANINGS:
        return refusals.refused(details, doing)
    if status in _BROKEN:
        return Unavailable(
            f"{doing}: the connection to the coordinator broke or does not answer ({status.name.lower()})"
        )
    return refusals.refused("TOO_BUSY" if status == grpc.StatusCode.RESOURCE_EXHAUSTED else refusals.TROUBLE, doing)


def refuse_other_version(version: str, whose: str) -> None:
    """Two programs one minor version apart work together.

    Raises:
        RefusedForGood: further apart, or not a version; the message names both.
    """
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})[a-z0-9.+-]{0,20}", version)
    ours = re.match(r"(\d+)\.(\d+)\.", __version__)
    assert ours
    if match and match[1] == ours[1] and abs(int(match[2]) - int(ours[2])) <= 1:
        return
    shown = version if match else "of an unknown form"
    raise RefusedForGood(
        f"this is wardround {__version__}, the {whose} is {shown}: they may be one minor version apart",
        hint="update the older one",
        code="VERSION_UNSUPPORTED",
    )


def is_one_field(data: bytes, number: int) -> bool:
    """Whether a serialized message is one field of bytes, with a number under 16, and nothing beside it."""
    if data[:1] != bytes([number << 3 | 2]):
        return False
    length = shift = 0
    for place, byte in enumerate(data[1:6], start=2):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return place + length == len(data)
    return False
