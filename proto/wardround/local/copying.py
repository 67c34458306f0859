"""Copying from one open file to another by the kernel, which shares the blocks where the file system can."""

import errno
import os

from wardround.local.writing import Room

COPY_PIECE = 64 * 1024 * 1024  # bytes asked of the kernel at once
READ_PIECE = 1024 * 1024  # bytes in memory where the kernel does not copy by itself
CANNOT_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})


def copy(source: int, target: int, size: int) -> int:
    """Copy the first ``size`` bytes into an empty file that nobody else writes to. Returns how many there were."""
    room = Room(target, size)
    room.need(size)
    copied = 0
    while copied < size and (count := _piece(source, target, copied, size - copied)):
        copied += count
    room.give_back(copied)
    return copied


def _piece(source: int, target: int, offset: int, count: int) -> int:
    """Copy some of ``count`` bytes at ``offset``. Returns how many, 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, min(count, COPY_PIECE), offset, offset)
    except OSError as error:
        if error.errno not in CANNOT_COPY:
            raise
    data = os.pread(source, min(count, READ_PIECE), offset)
    written = 0
    while written < len(data):
        written += os.pwrite(target, data[written:], offset + written)
    return len(data)
