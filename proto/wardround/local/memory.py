"""A process's memory: kept from the other processes of its user, as its open files are, and kept small."""

import ctypes
import os

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_M_ARENA_MAX = -8
_libc = ctypes.CDLL(None, use_errno=True)


def hide() -> None:
    """No other process but root's may trace this one, read its memory or take its descriptors; no core is dumped.

    It ends with ``exec``, so each program does it for itself, first of all, before it reads a key.
    """
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_hidden() -> bool:
    """Whether ``hide`` is in force."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0)


def share_arenas(most: int) -> bool:
    """Let all threads take their memory from so many arenas, instead of eight for each core: what one thread gave back,
    another takes. For a program of many threads that hold large pieces for a short time. False: this system's C library
    has no arenas.
    """
    mallopt = getattr(_libc, "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, most))
