"""Unix sockets at paths of any length: listening, connecting, and who is at the other end.

A Unix socket's path may be 107 bytes long and a state directory's longer, so both ends go through the folder's
descriptor.
"""

import errno
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wardround.errors import CannotWrite, Unavailable

QUEUE_S = 5.0  # for a place in the queue of a service; one that is stopped takes nobody out of a full one
RETRY_S = 0.5  # after a connection could not be accepted
_CLOSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
log = logging.getLogger(__name__)


class QueueFull(Unavailable):
    """Somebody listens, and takes no connection."""


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
        QueueFull: whoever listens there takes no connection in ``QUEUE_S``.
        Unavailable: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        patience = struct.pack("ll", int(QUEUE_S), int(QUEUE_S % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        with _short(path) as short, _itself(short) as bound:
            connection.connect(bound)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    except BlockingIOError:
        connection.close()
        raise QueueFull(
            f"the service at {path.parent} takes no connection", hint="it is stopped, or hung: start it again"
        ) from None
    except OSError as error:
        connection.close()
        raise Unavailable(f"no service listens at {path} ({error.strerror})") from None
    return connection


def accepted(listener: socket.socket, closing: Callable[[], bool]) -> Iterator[socket.socket]:
    """Every connection that ``listener`` accepts, until it is closed.

    Where the process has no descriptor or memory left for one, it waits in the kernel's queue until there is.
    """
    reported = False
    while not closing():
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if closing() or error.errno in _CLOSED:
                return
            if not reported:
                log.error("a connection cannot be accepted now (%s); it waits", error.strerror)
            reported = True
            time.sleep(RETRY_S)
            continue
        reported = False
        yield connection


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
