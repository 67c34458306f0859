"""Bytes into an open file, with room on the disk asked for in large steps just before they come.

Where the kernel finds that room page by page, it costs nearly as much as copying the bytes. Asking is a hint: where the
system cannot, or the disk is full, nothing happens, and the write itself says what is wrong.
"""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress

SMALL = 1024 * 1024  # bytes; up to here it is not worth a call, and a peer that sends less takes no room
AHEAD = 4 * 1024 * 1024  # bytes that are asked for beyond what is being written
Buffer = bytes | bytearray | memoryview
_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Room:
    """The room of one open file.

    Args:
        size: bytes that the file will have; None: not known, and ``give_back`` follows.
    """

    def __init__(self, descriptor: int, size: int | None = None) -> None:
        self._descriptor = descriptor
        self._size = size
        self._until = SMALL
        self._refused = False

    def need(self, end: int) -> None:
        """Bytes up to ``end`` are written next."""
        if end <= self._until or self._refused:
            return
        until = end + AHEAD if self._size is None else max(end, min(end + AHEAD, self._size))
        self._refused = not _fallocate(self._descriptor, self._until, until - self._until)
        self._until = until

    def give_back(self, size: int) -> None:
        """The file has ``size`` bytes, all that it will have. Only where nobody else writes to it."""
        if self._until > max(size, SMALL):
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)


def write_pieces(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write all bytes of a new file, which nobody else writes to."""
    room, end = Room(descriptor), 0
    for piece in pieces:
        end += memoryview(piece).nbytes
        room.need(end)
        write_all(descriptor, piece)
    room.give_back(end)


def write_all(descriptor: int, data: Buffer) -> None:
    """Write where the file is at, as often as it takes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def _fallocate(descriptor: int, start: int, count: int) -> bool:
    """Whether the system took room from byte ``start`` on. The file's size stays as it is."""
    call = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if call is None:
        return False
    return bool(call(descriptor, _KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(count)) == 0)
