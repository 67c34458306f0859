"""Commands speak to the service that owns a state directory over a Unix socket in it.

One request, one JSON line: ``{"command": ..., ...}``. Any number of answers come back: ``{"progress": ...}`` while it
lasts, then ``{"result": ...}`` or ``{"error": {"message", "hint", "exit_code", "code"}}``. An answer is one line of
JSON; a long one comes in pieces, each a line ``{"piece": "..."}``, the last ``{"last_piece": "..."}``.

Who may connect is decided by the folder's mode and checked again by the peer's user id, before a request is waited for.
A request must come within ``REQUEST_S``, and only so many are served at one time.

A Unix socket's path may be 107 bytes long and a state directory's longer, so both ends go through the folder's
descriptor.
"""

import errno
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from wardround.errors import (
    BY_EXIT_CODE,
    BadData,
    CannotWrite,
    NotPermitted,
    TryAgain,
    Unavailable,
    UsageProblem,
    WardroundError,
)
from wardround.local.durable import StorageFailed

MAX_LINE = 8 * 1024 * 1024
PIECE = 1024 * 1024  # characters of a long answer that go into one line
REQUEST_S = 10  # how long a connection may take to say what it wants
MAX_CONNECTIONS = 64  # served at one time; `status --follow` holds one for as long as it follows
PAUSE_S = 0.5  # after a connection could not be accepted
_PIECES = (b'{"piece":', b'{"last_piece":')
_CLOSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
Reply = Callable[[Any], None]
Handler = Callable[[dict[str, Any], Reply], Any]
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
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Answers under way are finished by their own threads."""
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=5)
        self._path.unlink(missing_ok=True)

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

    def _answer(self, connection: socket.socket) -> None:
        gone = suppress(BrokenPipeError, ConnectionResetError)  # whoever asked may leave at any time
        with gone, connection:
            try:
                line = _first_line(connection, time.monotonic() + REQUEST_S)
                if not line:
                    return  # someone looked whether we listen
                _PEER.set(peer_of(connection))
                result = self._handler(_request(line), lambda item: _send(connection, {"progress": item}))
                _send(connection, {"result": result})
            except StorageFailed as error:
                try:
                    _send(connection, _failure(error))
                finally:
                    self._fatal(error)
            except WardroundError as error:
                _send(connection, _failure(error))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                log.exception("a command failed")
                said = WardroundError("the service failed at this command", hint="its log says why")
                _send(connection, _failure(said))


def accepted(listener: socket.socket, closing: Callable[[], bool]) -> Iterator[socket.socket]:
    """The connections that come to ``listener``, until it is closed.

    Where the process has no descriptor or memory left for one, it waits in the kernel's queue until there is.
    """
    said = False
    while not closing():
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if closing() or error.errno in _CLOSED:
                return
            if not said:
                log.error("a connection cannot be accepted now (%s); it waits", error.strerror)
            said = True
            time.sleep(PAUSE_S)
            continue
        said = False
        yield connection


class Garbled(BadData):
    """What came is no answer: not one JSON object on a line, or not of an answer's form."""


def call(
    path: Path,
    request: dict[str, Any],
    progress: Reply | None = None,
    *,
    timeout_s: float | None = 60,
    most: int | None = None,
    parse: Callable[[bytes], dict[str, Any]] | None = None,
    failure: Callable[[Any], WardroundError] | None = None,
) -> Any:
    """Ask the service at ``path``.

    Args:
        most: an answer of more bytes is refused, for a service that is not trusted with our memory.
        parse: reads an answer, if not ``parsed``.
        failure: makes what is raised of what the service says of an error, if not ``failure_from``.

    Raises:
        Unavailable: nobody listens there, or no answer came in ``timeout_s``.
        Garbled: what came is no answer, or is longer than ``most``.
        WardroundError: what the service's handler raised.
    """
    parse, failure = parse or parsed, failure or failure_from
    with connect(path) as connection, connection.makefile("rb") as stream:
        connection.settimeout(timeout_s)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered already, and closed
                connection.sendall(json.dumps(request, separators=(",", ":")).encode() + b"\n")
            for answer in map(parse, texts(stream, most)):
                if "result" in answer:
                    return answer["result"]
                if "error" in answer:
                    raise failure(answer["error"])
                if progress is not None:
                    progress(answer.get("progress"))
        except TimeoutError:
            raise Unavailable(f"the service at {path.parent} gave no answer in {timeout_s} s") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # said below
    raise Unavailable(f"the service at {path.parent} went away before it answered")


def parsed(line: bytes, parts: int | None = None) -> dict[str, Any]:
    """One line as the object that it is.

    Args:
        parts: how many values it may hold, if that is bounded; each takes some 60 bytes of memory or more.

    Raises:
        Garbled: it is cut, no JSON, no object, nested too deep, or holds nan, infinity or too many values.
    """
    if parts is not None and sum(line.count(mark) for mark in (b",", b"[", b"{")) > parts:
        raise Garbled(f"more than {parts} values in one answer")
    try:
        found = json.loads(line, parse_constant=_no_number) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Garbled("not an answer: one JSON object on one line was wanted")
    return found


def failure_from(said: Any) -> WardroundError:
    """What a service's error is here. One that is of no form is Garbled."""
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in ("message", "hint", "code")):
        return Garbled("not an answer: an error without its words")
    code = said.get("exit_code")
    if type(code) is not int or not said["message"].strip():
        return Garbled("not an answer: an error without its words")
    return BY_EXIT_CODE.get(code, WardroundError)(said["message"], hint=said["hint"], code=said["code"])


def _no_number(text: str) -> None:
    raise ValueError(text)


def is_listening(path: Path) -> bool:
    """Whether a service answers at ``path``."""
    try:
        connect(path).close()
    except Unavailable:
        return False
    return True


def listen(path: Path, *, mode: int = 0o600) -> socket.socket:
    """A listening Unix socket at ``path``; a stale one is replaced. The caller holds the state directory's lock.

    Raises:
        CannotWrite: the folder is missing, or another user's.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), mode)  # of the socket to be, so that it is at no time more open than that
        with _short(path) as short:
            listener.bind(short)
            with _itself(short) as made:
                os.chmod(made, mode)  # noqa: PTH101  whatever the umask took away
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise CannotWrite(f"{path}: no socket can be made there ({error.strerror})") from None
    return listener


def connect(path: Path) -> socket.socket:
    """A connection to the Unix socket at ``path``.

    Raises:
        Unavailable: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short, _itself(short) as found:
            connection.connect(found)
    except OSError as error:
        connection.close()
        raise Unavailable(f"no service listens at {path} ({error.strerror})") from None
    return connection


def peer() -> tuple[int, int] | None:
    """Process id and user id of whoever asked, inside a handler; None outside of one."""
    return _PEER.get()


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    return peer_of(connection)[1]


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the process at the other end when it connected, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return int(pid), int(user)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextmanager
def _itself(path: str) -> Iterator[str]:
    """The socket at ``path`` and nothing that the name may lead to later. Raises OSError: it is no socket."""
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        yield f"/proc/self/fd/{place}"
    finally:
        os.close(place)


def texts(stream: Any, most: int | None = None) -> Iterator[bytes]:
    """The text of each answer that comes, for ``parsed``, put together from its pieces, with the newline that ends it.

    Raises:
        Garbled: a piece that is none, or one answer of more than ``most`` bytes.
    """
    pieces: list[str] = []
    size = 0
    while line := stream.readline(MAX_LINE):
        size += len(line)
        if most is not None and size > most:
            raise Garbled("the service's answer is longer than is taken here")
        if not line.startswith(_PIECES):
            yield line
        else:
            (kind, text), *more = parsed(line).items()
            if more or not isinstance(text, str):
                raise Garbled("not an answer: a piece without its text")
            pieces.append(text)
            if kind == "piece":
                continue
            yield "".join(pieces).encode() + b"\n"
        pieces, size = [], 0


def lines_of(item: Any) -> Iterator[bytes]:
    """The lines of one answer."""
    text = json.dumps(item, separators=(",", ":"))
    if len(text) <= PIECE:
        yield text.encode() + b"\n"
        return
    for start in range(0, len(text), PIECE):
        kind = "piece" if start + PIECE < len(text) else "last_piece"
        yield json.dumps({kind: text[start : start + PIECE]}, separators=(",", ":")).encode() + b"\n"


def _send(connection: socket.socket, item: Any) -> None:
    for line in lines_of(item):
        connection.sendall(line)


def _turn_away(connection: socket.socket, error: WardroundError) -> None:
    """Say why, if that goes at once, and close."""
    with suppress(OSError), connection:
        connection.setblocking(False)
        _send(connection, _failure(error))


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
            if len(line) > MAX_LINE:
                raise UsageProblem(f"a request of more than {MAX_LINE} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
    except TimeoutError:
        raise UsageProblem(f"no request came in {REQUEST_S} s") from None
    finally:
        connection.settimeout(None)
    return bytes(line.partition(b"\n")[0])


def _request(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        json.dumps(request, ensure_ascii=False).encode()  # half a character has no place in a name or a database
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        request = None
    if not isinstance(request, dict):
        raise UsageProblem("not a request: one JSON object on one line was wanted")
    return request


def _end_process(error: StorageFailed) -> None:
    log.critical("%s; %s", error.message, error.hint)
    os._exit(error.exit_code)


def _failure(error: WardroundError) -> dict[str, Any]:
    said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code, "code": error.code}
    return {"error": said}


def wanted(request: dict[str, Any], **kinds: type) -> tuple[Any, ...]:
    """The fields of a request by name, each of its kind; a bool is no int.

    Raises:
        UsageProblem: one is missing, or of another kind.
    """
    for name, kind in kinds.items():
        if type(request.get(name)) is not kind:
            what = {"str": "a text", "int": "a whole number", "dict": "a table"}.get(kind.__name__, kind.__name__)
            raise UsageProblem(f"the request's `{name}` is not {what}", hint="is one of the two of another version?")
    return tuple(request[name] for name in kinds)
