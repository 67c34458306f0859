"""Telling a moment without a free file descriptor from other failures.

It passes by itself, and nothing is wrong with what was to be opened: a service waits, and goes on.
"""

import errno

FULL = frozenset({errno.EMFILE, errno.ENFILE})


def ran_out(error: BaseException) -> bool:
    """Whether ``error`` comes of such a moment, itself or by what it was raised for."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
