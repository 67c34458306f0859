"""Commands speak to the service that owns a state directory over a Unix socket in it.

One request, one JSON line: ``{"command": ..., ...}``. Any number of lines come back: ``{"progress": ...}`` while it
lasts, then ``{"result": ...}`` or ``{"error": {"message", "hint", "exit_code", "code"}}``. Who may connect is decided
by the folder's mode and checked again by the peer's user id.

A Unix socket's path may be 107 bytes long and a state directory's longer, so both ends go through the folder's
descriptor.
"""

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wardround.errors import BY_EXIT_CODE, BadData, CannotWrite, NotPermitted, Unavailable, UsageProblem, WardroundError

MAX_LINE = 8 * 1024 * 1024
Reply = Callable[[Any], None]
Handler = Callable[[dict[str, Any], Reply], Any]
log = logging.getLogger(__name__)


class ControlServer:
    """Listens at ``path`` and runs ``handler(request, progress)`` in a thread for each connection.

    What the handler returns is the result; a ``WardroundError`` that it raises reaches the caller as itself.
    """

    def __init__(self, path: Path, handler: Handler, *, users: frozenset[int] | None = None, mode: int = 0o600) -> None:
        """``users``: the user ids that may connect; None means this process's user and root."""
        self._path = path
        self._handler = handler
        self._users = users if users is not None else frozenset({os.geteuid(), 0})
        self._listener = listen(path, mode=mode)
        self._closing = False
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
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed under us, which is how it ends
            threading.Thread(target=self._serve, args=(connection,), name="control-call", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        gone = suppress(BrokenPipeError, ConnectionResetError)  # whoever asked may leave at any time
        with gone, connection, connection.makefile("rb") as stream:
            try:
                line = stream.readline(MAX_LINE)
                if not line:
                    return  # someone looked whether we listen
                if (user := peer_user(connection)) not in self._users:
                    raise NotPermitted(f"user {user} may not command this service", hint=self._owner_hint())
                result = self._handler(_request(line), lambda item: _send(connection, {"progress": item}))
                _send(connection, {"result": result})
            except WardroundError as error:
                _send(connection, _failure(error))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                log.exception("a command failed")
                said = WardroundError("the service failed at this command", hint="its log says why")
                _send(connection, _failure(said))


def call(path: Path, request: dict[str, Any], progress: Reply | None = None, *, timeout_s: float | None = 60) -> Any:
    """Ask the service at ``path``.

    Raises:
        Unavailable: nobody listens there, or no answer came in ``timeout_s``.
        BadData: what came is no answer.
        WardroundError: what the service's handler raised.
    """
    with connect(path) as connection, connection.makefile("rb") as stream:
        connection.settimeout(timeout_s)
        try:
            _send(connection, request)
            for answer in _lines(stream):
                if "result" in answer:
                    return answer["result"]
                if "error" in answer:
                    raise as_error(answer["error"])
                if progress is not None:
                    progress(answer.get("progress"))
        except TimeoutError:
            raise Unavailable(f"the service at {path.parent} gave no answer in {timeout_s} s") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # said below
    raise Unavailable(f"the service at {path.parent} went away before it answered")


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
        with _short(path) as short:
            listener.bind(short)
            os.chmod(short, mode)  # noqa: PTH101  a path through /proc, good only here
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
        with _short(path) as short:
            connection.connect(short)
    except OSError as error:
        connection.close()
        raise Unavailable(f"no service listens at {path} ({error.strerror})") from None
    return connection


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


@contextmanager
def _short(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _send(connection: socket.socket, item: Any) -> None:
    connection.sendall(json.dumps(item, separators=(",", ":")).encode() + b"\n")


def _request(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        json.dumps(request, ensure_ascii=False).encode()  # half a character has no place in a name or a database
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        request = None
    if not isinstance(request, dict):
        raise UsageProblem("not a request: one JSON object on one line was wanted")
    return request


def _failure(error: WardroundError) -> dict[str, Any]:
    said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code, "code": error.code}
    return {"error": said}


def as_error(said: Any) -> WardroundError:
    """The error that an answer holds, as itself.

    Raises:
        BadData: it holds none.
    """
    texts = [said.get(key) for key in ("message", "hint", "code")] if isinstance(said, dict) else []
    code = said.get("exit_code") if texts else None
    message, hint, name = (text if isinstance(text, str) else None for text in texts or (None,) * 3)
    if message is None or hint is None or name is None or not message.strip() or type(code) is not int:
        raise BadData("the service's answer is none: an error without its form")
    return BY_EXIT_CODE.get(code, WardroundError)(message, hint=hint, code=name)


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


def _lines(stream: Any) -> Iterator[dict[str, Any]]:
    while line := stream.readline(MAX_LINE):
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise BadData("the service's answer is none: JSON objects were wanted")
        yield answer
