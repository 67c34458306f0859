"""Calls of the system that `strace` lists, fails, or holds for a kill: its command line, and what its record says.

Needs `strace` and the right to trace one's own processes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HELD_S = 2  # before the call, in which the kill must come
FAULTS = {"EIO": "error=EIO", "ENOSPC": "error=ENOSPC", "SIGKILL": f"delay_enter={HELD_S}s"}
SYNCS = ("fsync", "fdatasync")
CALLS = (
    *SYNCS, "rename", "renameat", "renameat2", "link", "linkat", "mkdir", "write", "pwrite64", "ftruncate",
    "copy_file_range", "openat",
)  # fmt: skip
LINE = re.compile(r"(\d+) +(\w+)\((.*)")
INJECTED = re.compile(r"^(\d+) .*\(INJECTED\)", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Call:
    """The ``count``-th call of one kind in a thread of one side.

    Attributes:
        file: what it was done to, without its own ids.
        first: only the first round of a study has it.
    """

    name: str
    count: int
    file: str
    first: bool = False


def available() -> bool:
    """Whether `strace` is here and may inject into a process of ours."""
    if shutil.which("strace") is None:
        return False
    line = ["strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", sys.executable, "-c"]
    program = "import os, tempfile\nwith tempfile.TemporaryFile() as file: os.fsync(file)"
    return subprocess.run([*line, program], capture_output=True, timeout=60, check=False).returncode == 1


def durable_calls(trace: Path, state: Path) -> Iterator[Call]:
    """What ``trace`` has of calls that change ``state``, in order."""
    counts: Counter[tuple[str, str]] = Counter()
    inside = _inside(state)
    for line in trace.read_text(errors="replace").splitlines():
        if (found := LINE.match(line)) is None:
            continue
        thread, name, rest = found.groups()
        counts[thread, name] += 1
        file = inside.search(rest)
        if file is None or (name == "openat" and "O_CREAT" not in rest):
            continue
        yield Call(name, counts[thread, name], _plain(file[1]))


def _inside(state: Path) -> re.Pattern[str]:
    """A file in ``state``, as a line of the record names it."""
    return re.compile(rf'[<"]{re.escape(str(state))}/([^>"]*)[>"]')


def _plain(file: str) -> str:
    file = re.sub(r"\.\d+\.\d+\.tmp$", ".tmp", file)
    return re.sub(r"[0-9a-f]{12,}|\d+(?=[-./]|$)", "#", file)


def words(out: Path, inject: str = "", names: tuple[str, ...] = CALLS) -> tuple[str, ...]:
    """What stands before the command line of a side. ``inject``: as `strace` has it.

    With ``--seccomp-bpf`` a process stops at ``names`` alone; strace 6.1 then sends a signal at `when=1` only, so for a
    kill it is made to hold the call, and ``kill_at`` kills.
    """
    line = ("strace", "-f", "-y", "-qq", "--seccomp-bpf", "-o", str(out), "-e", f"trace={','.join(names)}")
    return (*line, "-e", f"inject={inject}") if inject else line


def held(trace: Path, count: int) -> int | None:
    """The thread that ``trace`` (of calls of one name) shows at its ``count``-th call, not yet back from it."""
    counts: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines(keepends=True) if trace.exists() else ():
        thread = line.split(maxsplit=1)[0]
        counts[thread] += LINE.match(line) is not None
        newest[thread] = line
    for thread, line in newest.items():
        under_way = not line.endswith("\n") or line.endswith("<unfinished ...>\n")
        if counts[thread] == count and under_way and LINE.match(line):
            return int(thread)
    return None


@contextmanager
def kill_at(trace: Path, count: int) -> Iterator[set[int]]:
    """While the block lasts: SIGKILL to the first process that `strace` holds before its ``count``-th call.

    Gives a set, into which the thread goes that was at that call.
    """
    over, killed = threading.Event(), set[int]()

    def look() -> None:
        while not over.wait(0.02):
            if (thread := held(trace, count)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(thread, signal.SIGKILL)
                    killed.add(thread)
                return

    looking = threading.Thread(target=look, name="kill-at")
    looking.start()
    try:
        yield killed
    finally:
        over.set()
        looking.join()


def failed(trace: Path) -> set[int]:
    """The threads of which a call was made to fail."""
    return {int(thread) for thread in INJECTED.findall(trace.read_text(errors="replace"))} if trace.exists() else set()


def hit(trace: Path, state: Path, killed: set[int]) -> str:
    """What the call was done to that failed first, or at which one of ``killed`` was; "" if nothing in ``state``."""
    lines = trace.read_text(errors="replace").splitlines()
    if killed:
        own = [line for line in lines if int(line.split()[0]) in killed]
        if any("(DELAYED)" in line for line in own):
            return ""  # the kill came late: the call was made
        own = [line for line in own if LINE.match(line)][-1:]
    else:
        at = next((index for index, line in enumerate(lines) if "(INJECTED)" in line), None)
        if at is None:
            return ""
        own = [line for line in lines[: at + 1] if line.split()[0] == lines[at].split()[0]]
        own = own[-1:] if LINE.match(lines[at]) else own[-2:]  # "resumed" leaves out what the call was done to
    inside = _inside(state)
    found = [match[1] for line in own if (match := inside.search(line))]
    return _plain(found[-1]) if found else ""
