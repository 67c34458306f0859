"""The calls under way: whose each one is, how many a peer may have, and how long it may keep the coordinator waiting.

To gRPC every method takes a stream of bytes, whatever the contract says of it (on the wire that is the same). So the
peer is authenticated from its connection before a message is waited for, and a message's length is checked before it
is parsed.

A worker thread stands behind each call from its first moment, so the number of calls is bounded before the first
message is waited for. gRPC has no time limit for a message that does not come; one thread here keeps the time and
cancels what is late. To its peer, a call that was canceled looks like a broken connection, and may be made again.
"""

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from coordinator.members.certificate_status import CertificateStatus, Peer
from wardround.errors import BadData, NotPermitted, TryAgain
from wardround.signing.certificates import Name

SMALL_MESSAGE = 8 * 1024
SLOWEST = 4096  # bytes a second, for the part of a first message beyond a small one
MAX_CALLS = 8  # of one peer at a time; a working site has two or three
MAX_BOOTSTRAP_CALLS = 64  # of all unused invitations together
MAX_LEFT = 32  # answered calls of one peer whose answer has not arrived yet
CHECK_S = 60  # how often the certificates of silent calls are checked
LARGE_MESSAGE = 128 * 1024  # bytes; parsed, a message can be some sixty times as long
log = logging.getLogger(__name__)
Method = Callable[..., Any]
M = TypeVar("M", bound=Message)
_one_at_a_time = threading.Lock()  # large messages are parsed one after the other


@dataclass(frozen=True)
class Bounds:
    """How long a peer may keep the coordinator waiting, and how often it may call.

    Attributes:
        first_message_s: time for a small first message; a longer one has more, by ``SLOWEST``.
        rate_bytes, rate_s: an upload must move so many bytes in each ``rate_s`` seconds; each reply is read in them.
        burst, calls_a_second: of one peer. A site makes three or four calls a round, and a tiny round takes 50 ms.
        left_s: how long an answer may be on its way after its worker is free.
    """

    first_message_s: float = 5
    rate_bytes: int = 512 * 1024
    rate_s: float = 300
    burst: int = 2000
    calls_a_second: float = 100
    left_s: float = 300


DEFAULT = Bounds()


@dataclass(eq=False)
class Call:
    """One call of one peer, and the deadline of what the peer owes now."""

    peer: Peer
    method: str
    context: grpc.ServicerContext
    set_deadline: Callable[["Call", float | None], None]
    bounds: Bounds
    deadline: float | None = None  # when it is canceled, by the monotonic clock; None while the peer owes nothing
    answered: bool = False  # its worker is free; gRPC may still be sending
    _moved: int = field(default=0)

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Cancel the call if the block takes longer."""
        self.set_deadline(self, seconds)
        try:
            yield
        finally:
            self.set_deadline(self, None)

    def first(self, messages: Iterator[bytes], most: int) -> bytes:
        """The call's first message.

        Raises:
            BadData: none came, or one of more than ``most`` bytes.
        """
        with self.waiting(self.bounds.first_message_s + max(0, most - SMALL_MESSAGE) / SLOWEST):
            message = next(messages, None)
        if message is None:
            raise BadData(f"`{self.method}` wants a message, and none came", code="MESSAGE_MALFORMED")
        if len(message) > most:
            raise BadData(
                f"a message of {len(message)} bytes for `{self.method}`, at most {most} are taken",
                code="MESSAGE_MALFORMED",
            )
        return message

    def further(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """The messages after the first. The call is canceled when they bring less than ``rate_bytes`` in ``rate_s``."""
        left = self.bounds.rate_s
        while True:
            began = time.monotonic()
            with self.waiting(left):
                message = next(messages, None)
            if message is None:
                return
            left -= time.monotonic() - began
            self._moved += len(message)
            if self._moved >= self.bounds.rate_bytes:
                self._moved, left = 0, self.bounds.rate_s
            yield message


class Calls:
    """All calls under way of one coordinator."""

    def __init__(self, certificate_status: CertificateStatus, bounds: Bounds = DEFAULT) -> None:
        self.bounds = bounds
        self._status = certificate_status
        self._changed = threading.Condition()
        self._calls: dict[Name, set[Call]] = {}  # of each peer that has one
        self._spent: dict[Name, tuple[float, float]] = {}  # peer -> (calls counted against its burst, when)
        self._wakes_at = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._keep_time, name="calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @contextmanager
    def under_way(self, peer: Peer, method: str, context: grpc.ServicerContext) -> Iterator[Call]:
        """Count one more call of ``peer`` for as long as the block takes, however it ends.

        Raises:
            TryAgain: the peer has too many calls under way, or made too many in a short time (TOO_BUSY).
            NotPermitted: its certificate has just become invalid.
        """
        call = Call(peer, method, context, self._set_deadline, self.bounds)
        with self._changed:
            self._refuse_too_many(peer.name)
            self._refuse_too_often(peer.name)
            self._calls.setdefault(peer.name, set()).add(call)
        try:
            self._status.check(peer)  # after the call is listed: a revocation finds the call, or is found here
            yield call
        finally:
            with self._changed:
                call.answered = True
            self._set_deadline(call, call.bounds.left_s)
            if not context.add_callback(lambda: self._forget(call)):
                self._forget(call)

    def of(self, name: str) -> list[Call]:
        """The calls of a site that still hold a worker thread."""
        with self._changed:
            return [call for call in self._each() if call.peer.name.id == name and not call.answered]

    def all(self) -> list[Call]:
        """Every call, also those whose answer is still on its way."""
        with self._changed:
            return list(self._each())

    def peers(self) -> set[str]:
        """Who has a call under way, as gRPC names the other end of a connection."""
        return {call.context.peer() for call in self.all()}

    def cancel_invalid(self) -> None:
        """Cancel every call whose peer's certificate is no longer valid, also while it waits for its first message."""
        for call in self.all():
            try:
                self._status.check(call.peer)
            except NotPermitted:
                call.context.cancel()

    def _refuse_too_many(self, name: Name) -> None:
        own = self._calls.get(name, ())
        live = sum(not call.answered for call in own)
        if live >= MAX_CALLS or len(own) - live >= MAX_LEFT:
            raise TryAgain(f"{name.kind} `{name.id}` has {len(own)} calls under way", code="TOO_BUSY")
        if name.kind != "site":
            others = sum(call.peer.name.kind != "site" and not call.answered for call in self._each())
            if others >= MAX_BOOTSTRAP_CALLS:
                raise TryAgain(f"{others} calls with invitations are under way", code="TOO_BUSY")

    def _refuse_too_often(self, name: Name) -> None:
        """Count one more call against the peer's burst: many short calls in a row cost everybody's time too."""
        now = time.monotonic()
        spent, when = self._spent.get(name, (0.0, now))
        spent = max(0.0, spent - (now - when) * self.bounds.calls_a_second)
        if spent + 1 > self.bounds.burst:
            raise TryAgain(
                f"{name.kind} `{name.id}` makes more than {self.bounds.calls_a_second:g} calls a second",
                code="TOO_BUSY",
            )
        self._spent[name] = (spent + 1, now)

    def _forget(self, call: Call) -> None:
        with self._changed:
            own = self._calls.get(call.peer.name, set())
            own.discard(call)
            if not own:
                self._calls.pop(call.peer.name, None)

    def _each(self) -> Iterator[Call]:
        return chain.from_iterable(self._calls.values())

    def _set_deadline(self, call: Call, seconds: float | None) -> None:
        with self._changed:
            call.deadline = None if seconds is None else time.monotonic() + seconds
            if call.deadline is not None and call.deadline < self._wakes_at:
                self._changed.notify_all()

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [call for call in self._each() if call.deadline is not None and call.deadline <= now]
                for call in late:
                    call.deadline = None
                deadlines = [call.deadline for call in self._each() if call.deadline is not None]
                self._wakes_at = min([now + CHECK_S, *deadlines])
                if not late:
                    self._changed.wait(self._wakes_at - now)
                if self._closing:
                    return
            for call in late:
                if not call.answered:
                    log.warning("%s %s kept `%s` waiting too long", call.peer.name.kind, call.peer.name.id, call.method)
                call.context.cancel()
            self.cancel_invalid()


def permitted(
    kind: str | tuple[str, ...], request: type[Message], *, most: int = SMALL_MESSAGE, stream: bool = False
) -> Callable[[Method], Method]:
    """Let only peers of ``kind`` ("site", "invitation" or "renewal", or several) call a servicer's method.

    The method gets the ``Peer``, the parsed request, and the ``Call``. An error that it raises ends the call.
    The method's class has an ``Authenticator`` as ``authenticator``. A ``request`` has at most ``most`` bytes. With
    ``stream`` the method gets the messages as they come, unparsed, in place of the request.
    """

    def wrap(method: Method) -> Method:
        def arguments(self: Any, call: Call, messages: Iterator[bytes]) -> tuple[Any, ...]:
            if stream:
                return self, call.peer, messages, call
            return self, call.peer, parsed(request, call.first(messages, most)), call

        def admitted(self: Any, context: grpc.ServicerContext) -> AbstractContextManager[Call]:
            peer = self.authenticator.peer(context, kind)
            calls: Calls = self.authenticator.calls
            return calls.under_way(peer, method.__name__, context)

        if inspect.isgeneratorfunction(method):

            @functools.wraps(method)
            def many_replies(self: Any, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Message]:
                try:
                    with admitted(self, context) as call, closing(method(*arguments(self, call, messages))) as replies:
                        for reply in replies:
                            with call.waiting(call.bounds.rate_s):
                                yield reply
                except Exception as error:
                    self.authenticator.abort(context, error)

            wrapped: Method = many_replies
        else:

            @functools.wraps(method)
            def one_reply(self: Any, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
                try:
                    with admitted(self, context) as call:
                        return method(*arguments(self, call, messages))
                except Exception as error:
                    self.authenticator.abort(context, error)

            wrapped = one_reply
        wrapped.permitted_kind = kind  # type: ignore[attr-defined]  # a test, and ``handlers``, read it
        return wrapped

    return wrap


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """A servicer as gRPC wants it: its methods that wear ``permitted``, each as one that takes a stream of bytes."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in vars(type(servicer)).items():
        if hasattr(method, "permitted_kind"):
            many = inspect.isgeneratorfunction(method)
            make = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
            methods[name] = make(getattr(servicer, name), None, _serialized)
    return grpc.method_handlers_generic_handler(service, methods)


def _serialized(reply: Message | bytes | None) -> bytes:
    """A reply as bytes, which it may be already. It is None when the peer gave the call up; then nothing is sent."""
    if isinstance(reply, bytes):
        return reply
    return reply.SerializeToString() if reply is not None else b""


def parsed(kind: type[M], data: bytes) -> M:
    """``data`` as a message of ``kind``. Raises BadData (MESSAGE_MALFORMED): it is none."""
    with _one_at_a_time if len(data) > LARGE_MESSAGE else nullcontext():
        try:
            return kind.FromString(data)
        except DecodeError:
            raise BadData(f"a message that is no {kind.DESCRIPTOR.name}", code="MESSAGE_MALFORMED") from None
