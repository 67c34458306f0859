"""Our own errors, branched by who must act.

    WardroundError
    ├── UsageProblem     64  the command was given wrongly
    ├── BadData          65  a file, a table or a message is not what it must be
    ├── Unavailable      69  the other side cannot be reached
    ├── CannotWrite      73  the disk does not take it
    ├── TryAgain         75  it will work later, unchanged
    ├── NotPermitted     77  this identity or user may not
    │   └── Refused          the coordinator does not take this one thing
    └── NeedsPerson      78  someone must decide or repair
        └── RefusedForGood   the coordinator has ended this site's membership, or cannot work with this program

Two audiences. ``message`` and ``hint`` are for the machine's own terminal and log, and may name files and columns of
the hospital. ``code`` is a name of ``RefusalCode`` in ``federation.proto``, and is the only part that may cross to the
coordinator. Nothing sends ``str(error)``.

A message says what, which, and found against wanted; the hint gives the next command. Neither ends in a full stop, and
neither ever holds a value out of a patient's row.
"""

from typing import ClassVar

LONGEST = 2000  # characters of a message or hint: it may quote a file or a peer, and has to fit a trailer of gRPC


class WardroundError(Exception):
    """A failure that we understand: a sentence, a hint, an exit code, and perhaps a code for the wire."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(_cut(message))
        self.message = _cut(message)
        self.hint = _cut(hint)
        self.code = code


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


class UsageProblem(WardroundError):
    """The command was given wrongly."""

    exit_code = 64


class BadData(WardroundError):
    """A file, a table or a message is not what it must be."""

    exit_code = 65


class Unavailable(WardroundError):
    """The other side cannot be reached."""

    exit_code = 69


class CannotWrite(WardroundError):
    """The disk does not take it."""

    exit_code = 73


class TryAgain(WardroundError):
    """It will work later, unchanged."""

    exit_code = 75


class NotPermitted(WardroundError):
    """This identity or user may not."""

    exit_code = 77


class Refused(NotPermitted):
    """The coordinator does not take this one thing: see ``wardround.refusals``."""


class NeedsPerson(WardroundError):
    """Someone must decide or repair."""

    exit_code = 78


class RefusedForGood(NeedsPerson):
    """The coordinator has ended this site's membership, or cannot work with this program. Only ``wardround.refusals``
    and a version or receipt that was checked here make one; no message between processes becomes it."""


BY_EXIT_CODE: dict[int, type[WardroundError]] = {
    kind.exit_code: kind
    for kind in (WardroundError, UsageProblem, BadData, Unavailable, CannotWrite, TryAgain, NotPermitted, NeedsPerson)
}
