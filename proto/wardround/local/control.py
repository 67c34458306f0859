"""Commands speak to the service that owns a state directory over a Unix socket in it.

One request, one line of JSON: ``{"command": ..., ...}``. Any number of answers: progress while it lasts, then a result
or an error; ``frames`` has their form. While a request lasts the service also says every ``BEAT_S`` that it is alive.

Who may connect is decided by the folder's mode and checked again by the peer's user id, before a request is waited for.
A request must come within ``REQUEST_S``, and only so many are served at one time.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from wardround.errors import NotPermitted, TryAgain, Unavailable, UsageProblem, WardroundError
from wardround.local import frames
from wardround.local.durable import StorageFailed
from wardround.local.liveness import BEAT_S
from wardround.local.sockets import QueueFull, accepted, connect, listen, peer_of, peer_user

REQUEST_S = 10  # how long a connection may take to say what it wants
STARTING_S = 20  # from a service's lock to its socket; longer is no start but a fault
LOOK_S = 0.05
FINISH_S = 3  # for answers under way when the service stops
MAX_CONNECTIONS = 64  # served at one time; `status --follow` holds one for as long as it follows
Reply = Callable[[Any], None]
Handler = Callable[[frames.Document, Reply], Any]
Ending = Callable[[Callable[[], object]], AbstractContextManager[None]]  # while its block lasts, what ends it
BEAT = b'{"alive":true}\n'
_PEER: ContextVar[tuple[int, int] | None] = ContextVar("peer", default=None)
log = logging.getLogger(__name__)


class ControlServer:
    """Listens at ``path`` and runs ``handler(request, progress)`` in a thread for each connection.

    What the handler returns is the result; a ``WardroundError`` that it raises reaches the caller as itself. A disk
    that failed ends the service too, once the caller has heard of it.
    """

    def __init__(
        self,
        path: Path,
        handler: Handler,
        *,
        fatal: Callable[[StorageFailed], object] | None = None,
        users: frozenset[int] | None = None,
        mode: int = 0o600,
    ) -> None:
        """``users``: the user ids that may connect; None means this process's user and root.

        Args:
            fatal: called with an error after which the service must end; None ends the process at once.
        """
        self._path = path
        self._fatal = fatal or _end_process
        self._handler = handler
        self._users = users if users is not None else frozenset({os.geteuid(), 0})
        self._listener = listen(path, mode=mode)
        self._closing = False
        self._lock = threading.Lock()
        self._served = 0
        self._answered = threading.Condition(self._lock)  # one caller less
        self._callers: set[_Caller] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()
        threading.Thread(target=self._beat, name="control-beat", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and give the answers under way ``FINISH_S`` to end: what they read may be closed next."""
        self._closing = True
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=5)
        self._path.unlink(missing_ok=True)
        with self._answered:
            self._answered.wait_for(lambda: not self._callers, FINISH_S)

    def _owner_hint(self) -> str:
        return f"run the command as the service's user: `sudo -u '#{os.geteuid()}' ...`"

    def _accept(self) -> None:
        for connection in accepted(self._listener, lambda: self._closing):
            try:
                self._refuse_stranger(connection)
                self._refuse_crowd()
                threading.Thread(target=self._serve, args=(connection,), name="control-call", daemon=True).start()
            except WardroundError as error:
                _turn_away(connection, error)
            except RuntimeError:  # no thread can be started now
                self._leave()
                _turn_away(connection, TryAgain("this machine starts no more threads now"))

    def _refuse_stranger(self, connection: socket.socket) -> None:
        if (user := peer_user(connection)) not in self._users:
            raise NotPermitted(f"user {user} may not command this service", hint=self._owner_hint())

    def _refuse_crowd(self) -> None:
        """Count one more that is served, unless there are enough."""
        with self._lock:
            if self._served >= MAX_CONNECTIONS:
                raise TryAgain(f"{self._served} commands are under way here", hint="try again when one has ended")
            self._served += 1

    def _leave(self) -> None:
        with self._lock:
            self._served -= 1

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        finally:
            self._leave()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._lock:
                callers = list(self._callers)
            for caller in callers:
                caller.beat()

    def _answer(self, connection: socket.socket) -> None:
        gone = suppress(BrokenPipeError, ConnectionResetError)  # whoever asked may leave at any time
        with gone, connection:
            caller = _Caller(connection)
            try:
                line = _first_line(connection, time.monotonic() + REQUEST_S)
                if not line:
                    return  # somebody tried whether we listen
                asked_by = _PEER.set(peer_of(connection))
                with self._lock:
                    self._callers.add(caller)
                try:
                    result = self._handler(frames.request_from(line), lambda item: caller.send({"progress": item}))
                finally:
                    _PEER.reset(asked_by)
                    with self._answered:
                        self._callers.discard(caller)
                        self._answered.notify_all()
                caller.send({"result": result})
            except StorageFailed as error:
                try:
                    caller.send(frames.failure_of(error))
                finally:
                    self._fatal(error)
            except WardroundError as error:
                caller.send(frames.failure_of(error))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                log.exception("a command failed")
                failed = WardroundError("the service failed at this command", hint="its log says why")
                caller.send(frames.failure_of(failed))


class _Caller:
    """The connection of one command: several threads may say something on it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()

    def send(self, item: Any) -> None:
        with self._turn:
            _send(self._connection, item)

    def beat(self) -> None:
        """Say that the service is alive, unless something is being said, or is still to be read."""
        if self._turn.acquire(blocking=False):
            try:
                with suppress(OSError):
                    self._connection.send(BEAT, socket.MSG_DONTWAIT)
            finally:
                self._turn.release()


def call(
    path: Path,
    request: frames.Document,
    progress: Reply | None = None,
    *,
    timeout_s: float | None = 60,
    silent_s: float | None = None,
    ending: Ending = lambda stop: nullcontext(),
    most: int | None = None,
    parse: Callable[[bytes], frames.Document] | None = None,
    failure: Callable[[Any], WardroundError] | None = None,
) -> Any:
    """Ask the service at ``path``.

    Args:
        timeout_s: how long the answer may take, however often the service says that it is alive.
        silent_s: how long the service may say nothing at all.
        ending: of an ``Interrupt``: by what it gets, another thread ends the call.
        most: an answer of more bytes is refused, for a service that is not trusted with our memory.
        parse: reads an answer, if not ``parsed``.
        failure: makes what is raised of what the service says of an error, if not ``failure_from``.

    Raises:
        Unavailable: nobody listens there, no answer came in ``timeout_s``, or the service was silent for longer than a
            service that is alive is.
        Garbled: what came is no answer, or is longer than ``most``.
        WardroundError: what the service's handler raised.
    """
    parse, failure = parse or frames.parsed, failure or frames.failure_from
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    with connect(path) as connection, connection.makefile("rb") as stream, ending(partial(_hang_up, connection)):
        limits = [limit for limit in (timeout_s, silent_s) if limit is not None]
        connection.settimeout(min(limits, default=None))
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered already, and closed
                connection.sendall(json.dumps(request, separators=(",", ":")).encode() + b"\n")
            for answer in map(parse, frames.texts(stream, most)):
                if "result" in answer:
                    return answer["result"]
                if "error" in answer:
                    raise failure(answer["error"])
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError
                if progress is not None and "alive" not in answer:
                    progress(answer.get("progress"))
        except TimeoutError:
            waited_s = timeout_s if deadline is not None and time.monotonic() >= deadline else silent_s
            raise Unavailable(f"the service at {path.parent} gave no answer in {waited_s} s") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # raised below
    raise Unavailable(f"the service at {path.parent} went away before it answered")


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def is_listening(path: Path) -> bool:
    """Whether a service listens at ``path``; one that is stopped does too."""
    try:
        connect(path).close()
    except QueueFull:
        return True
    except Unavailable:
        return False
    return True


def is_held(state: Path) -> bool:
    """Whether a process owns a state directory now, as far as this user may know."""
    try:
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def serves(state: Path, path: Path) -> bool:
    """Whether the service that owns ``state`` answers at ``path``. One that is only just starting is waited for."""
    deadline = time.monotonic() + STARTING_S
    while not (listening := is_listening(path)) and is_held(state) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return listening


def peer() -> tuple[int, int] | None:
    """Process id and user id of whoever asked, inside a handler; None outside of one."""
    return _PEER.get()


def _send(connection: socket.socket, item: Any) -> None:
    for line in frames.lines_of(item):
        connection.sendall(line)


def _turn_away(connection: socket.socket, error: WardroundError) -> None:
    """Say why, if that goes at once, and close."""
    with suppress(OSError), connection:
        connection.setblocking(False)
        _send(connection, frames.failure_of(error))


def _first_line(connection: socket.socket, deadline: float) -> bytes:
    """What comes up to the first newline, or before the other end closed.

    Raises:
        UsageProblem: it took longer than ``deadline``, or is too long.
    """
    line, piece = bytearray(), b""
    try:
        while b"\n" not in piece:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            piece = connection.recv(65536)
            if not piece:
                break
            line += piece
            if len(line) > frames.MAX_LINE:
                raise UsageProblem(f"a request of more than {frames.MAX_LINE} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
    except TimeoutError:
        raise UsageProblem(f"no request came in {REQUEST_S} s") from None
    finally:
        connection.settimeout(None)
    return bytes(line.partition(b"\n")[0])


def _end_process(error: StorageFailed) -> None:
    log.critical("%s; %s", error.message, error.hint)
    os._exit(error.exit_code)


def wanted(request: frames.Document, **types: type) -> tuple[Any, ...]:
    """The fields of a request by name, each of its type; a bool is no int.

    Raises:
        UsageProblem: one is missing, or of another type.
    """
    for name, kind in types.items():
        if type(request.get(name)) is not kind:
            what = {"str": "a text", "int": "a whole number", "dict": "a table"}.get(kind.__name__, kind.__name__)
            raise UsageProblem(f"the request's `{name}` is not {what}", hint="is one of the two of another version?")
    return tuple(request[name] for name in types)
