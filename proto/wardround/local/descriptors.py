"""A moment in which this process, or this machine, has no file descriptor left. It passes by itself, and nothing is
wrong with what was to be opened: whoever runs for long waits, and goes on."""

import errno

FULL = frozenset({errno.EMFILE, errno.ENFILE})


def ran_out(error: BaseException) -> bool:
    """Whether ``error`` comes of such a moment, itself or by what it was raised for."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in FULL:
            return True
        found = found.__cause__ or found.__context__
    return False
