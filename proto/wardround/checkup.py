"""What a doctor found: a line for each thing that it looked at, with the cause and the fix; and what both programs
look at on a machine. ``site_agent.doctor`` and ``coordinator.doctor`` have the rest.

Each check judges what it is given; the functions that look are apart, so that a test can cause every finding.
"""

import ctypes
import datetime
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from wardround.cli import print_json, say_next
from wardround.errors import NotPermitted, TryAgain, WardroundError
from wardround.local import control
from wardround.local.durable import StateLock
from wardround.signing.certificates import refuse_readable
from wardround.terminal import escaped, many

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MIB, GIB = 1 << 20, 1 << 30
LEAST_FREE = 64 * MIB  # below it nothing is written
ROOMY = GIB  # below it somebody should look
LEAST_INODES = 1000
CLOCK = datetime.timedelta(minutes=5)
SOON = datetime.timedelta(days=30)  # before an authority ends, somebody has to act
_STA_UNSYNC = 0x40  # linux/timex.h
_TIMEX_BYTES, _STATUS_OFFSET = 256, 40  # struct timex: modes, padding, offset, freq, maxerror, esterror, then status


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what it is, in a word or two.
        state: ok, warning (it works, and somebody should know) or problem (it does not, or will not).
        text: what was found; of a problem, the cause.
        fix: what to do, with the next command; "" where there is nothing to do.
    """

    about: str
    state: str
    text: str
    fix: str = ""

    def document(self) -> dict[str, str]:
        """As scripts get it."""
        return {"about": self.about, "state": self.state, "text": self.text, "fix": self.fix}


def ok(about: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(about, OK, text)


def warning(about: str, text: str, fix: str) -> Finding:
    """It works, and somebody should know."""
    return Finding(about, WARNING, text, fix)


def problem(about: str, text: str, fix: str) -> Finding:
    """It does not work, or will not."""
    return Finding(about, PROBLEM, text, fix)


def of_error(about: str, error: WardroundError) -> Finding:
    """What an error of ours says, as a finding."""
    return Finding(about, PROBLEM, error.message, error.hint)


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(one.state == PROBLEM for one in findings)


@dataclass(frozen=True)
class Room:
    """What a file system has left for this user."""

    bytes: int
    inodes: int | None  # None: it does not count them
    read_only: bool


def room_at(path: Path) -> Room:
    """Raises OSError: nobody can say."""
    found = os.statvfs(path)
    inodes = found.f_favail if found.f_files else None
    return Room(found.f_bavail * found.f_frsize, inodes, bool(found.f_flag & os.ST_RDONLY))


def disk(path: Path, room: Room, needed: int = 0) -> Finding:
    """Whether there is room at ``path`` for ``needed`` bytes and what else is written."""
    free = f"{room.bytes / GIB:.1f} GiB free at {path}"
    if room.read_only:
        return problem("disk", f"the file system at {path} is read-only", "mount it for writing; `dmesg` may say why")
    if room.bytes < max(LEAST_FREE, needed):
        return problem(
            "disk", f"{free}, and {max(LEAST_FREE, needed) / GIB:.1f} GiB are needed", "free some space there"
        )
    if room.inodes is not None and room.inodes < LEAST_INODES:
        return problem("disk", f"{free}, but only {room.inodes} files more can be made", "remove files nobody needs")
    if room.bytes < max(ROOMY, 2 * needed):
        return warning("disk", free, "free some space there, before it is full")
    return ok("disk", free)


def clock(now: datetime.datetime, last: datetime.datetime | None, synchronized: bool | None) -> Finding:
    """Whether this machine's clock can be right.

    Args:
        last: a time that this clock has shown before; None where nothing was written down yet.
        synchronized: as the kernel says; None where it says nothing.
    """
    fix = "set it right and keep it so: `timedatectl set-ntp true`"
    shown = f"{now:%Y-%m-%d %H:%M} UTC"
    if last is not None and now < last - CLOCK:
        return problem("clock", f"this machine's clock says {shown}, and has said {last:%Y-%m-%d %H:%M} before", fix)
    if synchronized is False:
        return warning("clock", f"{shown}; the kernel says that nothing keeps it right", fix)
    return ok("clock", shown)


def is_synchronized() -> bool | None:
    """Whether a time service keeps the clock right, as the kernel says; None where it may not be asked."""
    found = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.sizeof(ctypes.c_long) != 8 or ctypes.CDLL(None).adjtimex(found) < 0:
        return None
    status = int.from_bytes(found.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], "little")
    return not status & _STA_UNSYNC


def temporary() -> Finding:
    """Whether temporary files can be made."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return problem(
            "temporary files",
            f"none can be made ({error.strerror or error})",
            "make /tmp writable for this user, or set TMPDIR to a folder that is",
        )
    return ok("temporary files", f"in {tempfile.gettempdir()}")


def owner(paths: Sequence[Path], uid: int) -> list[Finding]:
    """Those of ``paths`` that belong to another user than ``uid``, who needs them; root may use them all."""
    if uid == 0:
        return []
    return [
        problem(
            "permissions",
            f"{path} belongs to user {path.stat().st_uid}, and user {uid} needs it",
            f"give commands as the service's user, or `chown {uid} {path}` if another user took it over",
        )
        for path in paths
        if path.exists() and path.stat().st_uid != uid
    ]


def private(paths: Sequence[Path]) -> list[Finding]:
    """Whether keys can be read by their owner alone."""
    findings = []
    for path in paths:
        try:
            refuse_readable(path)
        except NotPermitted as error:
            findings.append(of_error("keys", error))
    return findings or [ok("keys", f"in {paths[0].parent}, readable by this user only")]


def service(root: Path, socket: Path, program: str, without: str, start: str) -> Finding:
    """Whether the service of ``root`` runs, or a process holds its place without answering. Changes nothing.

    Args:
        without: what does not happen while it does not run.
        start: the command that starts it.
    """
    if control.is_listening(socket):
        return ok("service", "runs")
    try:
        StateLock(root, f"{program} doctor").release()
    except TryAgain as error:
        return problem(
            "service",
            f"{error.message}, and answers no command",
            "that process is stopped or hangs: end it by its number, and start the service again",
        )
    except WardroundError as error:
        return of_error("service", error)
    return warning("service", f"does not run: {without}", f"{start}, as a service")


def ending(about: str, end: datetime.datetime, now: datetime.datetime, soon: datetime.timedelta, fix: str) -> Finding:
    """Whether something that is valid until ``end`` still is, and for longer than ``soon``."""
    until = f"valid until {end:%Y-%m-%d %H:%M} UTC"
    if now >= end:
        return problem(about, f"ended on {end:%Y-%m-%d %H:%M} UTC, by this machine's clock", fix)
    return warning(about, until, fix) if end - now < soon else ok(about, until)


def versions(names: Sequence[str]) -> Finding:
    """Which versions are installed of what this program stands on."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ok("versions", ", ".join([*found, f"Python {python_version()}"]))


def shown(findings: Iterable[Finding], *, json: bool) -> Iterator[Finding]:
    """The same findings, each printed when it comes: the cause on one line, the fix on the next. ``json``: at the end,
    as one object.
    """
    kept = []
    for one in findings:
        kept.append(one)
        if not json:
            print(f"{one.state:8} {one.about}: {escaped(one.text)}")
            if one.fix:
                say_next(f"{'':8} fix: {escaped(one.fix)}")
        yield one
    if json:
        print_json({"findings": [one.document() for one in kept]})
        return
    problems, warnings = (sum(one.state == state for one in kept) for state in (PROBLEM, WARNING))
    print(f"{many(problems, 'problem')}, {many(warnings, 'warning')}, {many(len(kept), 'thing')} looked at")
