"""Keeping a process's memory, and its open files, from the other processes of its user."""

import ctypes
import os

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
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
