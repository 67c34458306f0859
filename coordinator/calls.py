"""The calls under way: whose they are, how many one peer may have, and how long it may keep one waiting.

A worker thread stands behind each call from its first moment, so what a peer can hold of them is bounded before its
first message is waited for. gRPC gives no time limit for a message that does not come; one thread here keeps the time
and ends what is late. A call that was ended for that looks like a broken connection to its peer, and may be made again.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from coordinator.enrolment import Peer, Standing
from wardround.errors import BadData, NotPermitted, TryAgain
from wardround.identity import Name

FIRST_MESSAGE_S = 5  # for a first message that is small
SMALL_MESSAGE = 8 * 1024
SLOWEST = 4096  # bytes a second, for what is not small of a first message
RATE_BYTES, RATE_S = 512 * 1024, 300  # an upload moves so much in so long; each reply is taken in so long
LEFT_S = 300  # how long an answer may be on its way after its worker is free
MAX_CALLS = 8  # of one peer at a time; a working site has two or three
MAX_BOOTSTRAP_CALLS = 64  # of all invitations together
MAX_LEFT = 32  # answered calls of one peer whose answer has not arrived yet
LOOK_S = 60  # how often a certificate's end is noticed while its calls are silent
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """One call of one peer, and what it is given time for."""

    peer: Peer
    method: str
    context: grpc.ServicerContext
    set_deadline: Callable[["Call", float | None], None]
    deadline: float | None = None  # when it is ended, by the monotonic clock; None while the peer owes nothing
    answered: bool = False  # its worker is free; gRPC may still be sending
    _moved: int = field(default=0)

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """The call ends if the block takes longer."""
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
        with self.waiting(FIRST_MESSAGE_S + max(0, most - SMALL_MESSAGE) / SLOWEST):
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
        """The messages after the first, as long as enough of them comes."""
        left = float(RATE_S)
        while True:
            began = time.monotonic()
            with self.waiting(left):
                message = next(messages, None)
            if message is None:
                return
            left -= time.monotonic() - began
            self._moved += len(message)
            if self._moved >= RATE_BYTES:
                self._moved, left = 0, float(RATE_S)
            yield message


class Calls:
    """All calls under way."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
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
        """One more call of ``peer``, for as long as the block takes, however it ends.

        Raises:
            TryAgain: it has enough under way (TOO_BUSY).
            NotPermitted: it has just lost its standing.
        """
        call = Call(peer, method, context, self._set_deadline)
        with self._changed:
            self._refuse_crowd(peer.name)
            self._calls.add(call)
        try:
            self._standing.check(peer)  # after it is on the list: a revocation finds it here or is found by it
            yield call
        finally:
            with self._changed:
                call.answered = True
            self._set_deadline(call, LEFT_S)
            if not context.add_callback(lambda: self._forget(call)):
                self._forget(call)

    def of(self, name: str) -> list[Call]:
        """The calls of a site that still hold a worker."""
        with self._changed:
            return [call for call in self._calls if call.peer.name.id == name and not call.answered]

    def all(self) -> list[Call]:
        """Also those whose answer is still on its way."""
        with self._changed:
            return list(self._calls)

    def end_unfit(self) -> None:
        """End the calls of everyone who is no longer in good standing, also those that wait for their first message."""
        with self._changed:
            calls = list(self._calls)
        for call in calls:
            try:
                self._standing.check(call.peer)
            except NotPermitted:
                call.context.cancel()

    def _refuse_crowd(self, name: Name) -> None:
        own = [call for call in self._calls if call.peer.name == name]
        live = sum(not call.answered for call in own)
        if live >= MAX_CALLS or len(own) - live >= MAX_LEFT:
            raise TryAgain(f"{name.kind} `{name.id}` has {len(own)} calls under way", code="TOO_BUSY")
        if name.kind != "site":
            others = sum(call.peer.name.kind != "site" and not call.answered for call in self._calls)
            if others >= MAX_BOOTSTRAP_CALLS:
                raise TryAgain(f"{others} calls with invitations are under way", code="TOO_BUSY")

    def _forget(self, call: Call) -> None:
        with self._changed:
            self._calls.discard(call)

    def _set_deadline(self, call: Call, seconds: float | None) -> None:
        with self._changed:
            call.deadline = None if seconds is None else time.monotonic() + seconds
            if call.deadline is not None and call.deadline < self._wakes_at:
                self._changed.notify_all()

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [call for call in self._calls if call.deadline is not None and call.deadline <= now]
                for call in late:
                    call.deadline = None
                deadlines = [call.deadline for call in self._calls if call.deadline is not None]
                self._wakes_at = min([now + LOOK_S, *deadlines])
                if not late:
                    self._changed.wait(self._wakes_at - now)
                if self._closing:
                    return
            for call in late:
                if not call.answered:
                    log.warning("%s %s kept `%s` waiting too long", call.peer.name.kind, call.peer.name.id, call.method)
                call.context.cancel()
            self.end_unfit()
