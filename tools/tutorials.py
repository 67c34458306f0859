"""Does what a tutorial of docs/ tells its reader, as it is written there.

    python -m tools.tutorials [PAGE...]        (each in a folder of its own; without names, those that need no root)

A page is read from top to bottom. What counts:

* ```` ```sh TERMINAL ````: lines that a person pastes into that terminal, one after the other. Each must end with 0.
  ```` ```sh TERMINAL stays ````: the last one is a service, and has the terminal from then on.
  ```` ```sh TERMINAL ends ````: the last one ends the terminal, as switching a machine off does.
  ```` ```sh TERMINAL install ````: counted, and not run: what it installs is here.
* ```` ```text ```` after that: lines that must be seen then, in this order; ``…`` stands for anything in a line.
* A table "it asks | you answer" after that: what a person types, in backticks; **Enter**; or the text of a file.

The terminals of a page are shells at a terminal of their own, all in one home directory. Nothing else is done, and
nothing is changed in what is pasted but what the caller says: a reader is told to take another port where one is taken.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.world import BIN, free_port

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WITHOUT_ROOT = ("tutorial-federation", "tutorial-audit", "tutorial-csv", "tutorial-network")
TOLD_ADDRESS = "127.0.0.1:8443"
DONE, MORE = "<<done {}>>", "<<more>>"
ENDED = re.compile(r"<<done (\d+)>>|<<more>>")
WAIT_S = 120
FENCE = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\| it asks \| you answer \|\n\|[-| ]+\|\n((?:\|.*\|\n?)+)", re.MULTILINE)
ANSWER = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`|\*\*Enter\*\*|the line in `([^`]+)`)(?:[:,;][^|]*)? \|$")


class TutorialFailed(Exception):
    """What a page tells its reader did not work as the page says."""


@dataclass(frozen=True)
class Answer:
    """What a person types when ``question`` stands there: ``text``, or what is in ``file``."""

    question: str
    text: str = ""
    file: str = ""


@dataclass(frozen=True)
class Step:
    """One block of a page: what is pasted where, what is answered, and what is seen then."""

    terminal: str
    lines: tuple[str, ...]
    stays: bool = False
    installs: bool = False
    ends: bool = False
    answers: tuple[Answer, ...] = ()
    shown: tuple[str, ...] = ()


def steps(text: str) -> list[Step]:
    """The steps of a page. Raises TutorialFailed: an answer or a block that nobody could follow."""
    found: list[Step] = []
    for kind, at, words, body in sorted(_pieces(text), key=lambda piece: piece[1]):
        if kind == "sh":
            if not words:
                raise TutorialFailed(f"a block names no terminal: {body!r}")
            found.append(
                Step(words[0], tuple(body.splitlines()), "stays" in words, "install" in words, "ends" in words)
            )
        elif found and kind == "text":
            lines = (line.strip() for line in body.splitlines())
            found[-1] = replace(found[-1], shown=tuple(line for line in lines if line))
        elif found and kind == "answers":
            found[-1] = replace(found[-1], answers=tuple(map(_answer, body.strip().splitlines())))
        elif kind in ("text", "answers"):
            raise TutorialFailed(f"nothing was typed before {body!r} at {at}")
    return found


def _pieces(text: str) -> list[tuple[str, int, list[str], str]]:
    blocks = [(found[1], found.start(), found[2].split(), found[3]) for found in FENCE.finditer(text)]
    tables: list[tuple[str, int, list[str], str]] = [
        ("answers", found.start(), [], found[1]) for found in TABLE.finditer(FENCE.sub(_blank, text))
    ]
    return [block for block in blocks if block[0] in ("sh", "text")] + tables


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _answer(row: str) -> Answer:
    if (found := ANSWER.match(row)) is None:
        raise TutorialFailed(f"nobody can answer {row!r}")
    return Answer(found[1], found[2] or "", found[3] or "")


def _at_a_terminal() -> None:
    """Ctrl-C reaches what runs in it, also where whoever runs us ignores it, as what is in the background does."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Shell:
    """A person's terminal: a shell, in which one line after the other is typed. Ended with the block."""

    def __init__(self, name: str, home: Path, prefix: Sequence[str] = (), path: str = "") -> None:
        """``prefix``: a command that is given the shell as its last words; ``path``: where it looks for programs."""
        self.name, self.seen = name, ""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        modes = termios.tcgetattr(theirs)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARDROUND_", "XDG_"))}
        paths = path or f"{BIN}:{kept['PATH']}"
        asked = {
            "HOME": str(home),
            "PATH": paths,
            "PS1": DONE.format("$?"),
            "PS2": MORE,
            "TERM": "dumb",
            "NO_COLOR": "1",
        }
        self.process = subprocess.Popen(
            [*prefix, "bash", "--noprofile", "--norc", "--noediting", "-i"], stdin=theirs, stdout=theirs,
            stderr=theirs, cwd=home, env={**kept, **asked, "HISTFILE": ""}, start_new_session=True,
            preexec_fn=_at_a_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.screen = ours
        self.wait(ENDED)

    def read(self, timeout_s: float) -> bool:
        """Whether anything more came within ``timeout_s``."""
        ready, _, _ = select.select([self.screen], [], [], max(0.0, timeout_s))
        try:
            piece = os.read(self.screen, 65536).decode(errors="replace").replace("\r", "") if ready else ""
        except OSError:  # the shell has ended
            piece = ""
        self.seen += piece
        return bool(piece)

    def wait(self, wanted: re.Pattern[str]) -> tuple[str, re.Match[str]]:
        """What came before ``wanted``, and it. Raises TutorialFailed: it does not come."""
        deadline = time.monotonic() + WAIT_S
        while (found := wanted.search(self.seen)) is None:
            if not self.read(deadline - time.monotonic()):
                raise TutorialFailed(f"at `{self.name}`, {wanted.pattern!r} does not come; there stands:\n{self.seen}")
        before, self.seen = self.seen[: found.start()], self.seen[found.end() :]
        return before, found

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode() + b"\n")

    def ended(self, line: str) -> str:
        """What the line that was typed showed. Raises TutorialFailed: it did not end with 0."""
        shown, found = self.wait(ENDED)
        if found[1] not in ("0", None):
            raise TutorialFailed(f"at `{self.name}`, `{line}` ended with {found[1]}:\n{shown}")
        return shown

    def interrupt(self) -> None:
        """Ctrl-C, and the shell is there again."""
        os.write(self.screen, b"\x03")
        self.wait(ENDED)

    def close(self) -> None:
        """The person closes the terminal: what runs in it hears SIGHUP, and then SIGTERM."""
        with contextlib.suppress(TutorialFailed, OSError):
            self.interrupt()
            self.type("exit")
        os.close(self.screen)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class Reader:
    """Somebody who follows pages, one after the other, with the same terminals and the same files."""

    home: Path
    replaced: Mapping[str, str] = field(default_factory=dict)
    open: Callable[[str, Path], Shell] = Shell
    left: Callable[[str], None] = lambda name: None
    file: Callable[[Path, str], Path] = lambda home, name: home / name
    terminals: dict[str, Shell] = field(default_factory=dict)
    typed: int = 0

    def __enter__(self) -> "Reader":
        self.home.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        for terminal in reversed(self.terminals.values()):
            terminal.close()

    def follow(self, page: str) -> None:
        """Do what a page of docs/ says. Raises TutorialFailed: it does not work so."""
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for told, here in self.replaced.items():
            text = text.replace(told, here)
        for step in steps(text):
            self.do(step)

    def do(self, step: Step) -> None:
        self.typed += len(step.lines)
        if step.installs:
            return
        if step.terminal not in self.terminals:
            self.terminals[step.terminal] = self.open(step.terminal, self.home)
        terminal, shown = self.terminals[step.terminal], ""
        terminal.seen = ""
        *before, last = step.lines
        for line in before:
            terminal.type(line)
            shown += terminal.ended(line)
        terminal.type(last)
        for answer in step.answers:
            terminal.wait(re.compile(re.escape(answer.question)))
            terminal.type(self.file(self.home, answer.file).read_text().strip() if answer.file else answer.text)
        if step.ends:
            while terminal.read(WAIT_S):
                pass
            terminal.close()
            del self.terminals[step.terminal]
            self.left(step.terminal)
            return
        if not step.stays:
            shown += terminal.ended(last)
            _refuse_unseen(step, shown)
            return
        for line in step.shown:
            terminal.wait(_pattern(line))


def _refuse_unseen(step: Step, shown: str) -> None:
    rest = shown
    for line in step.shown:
        if (found := _pattern(line).search(rest)) is None:
            raise TutorialFailed(f"`{step.lines[-1]}` does not show {line!r}, but:\n{shown}")
        rest = rest[found.end() :]


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile("[^\n]*".join(r"\s+".join(map(re.escape, part.split())) for part in line.split("…")))


def main(pages: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="wardround-tutorials-") as folder:
        replaced = {TOLD_ADDRESS: f"127.0.0.1:{free_port()}"}
        with Reader(Path(folder, "home"), replaced) as reader:
            for page in pages or WITHOUT_ROOT:
                began, typed = time.monotonic(), reader.typed
                reader.follow(page)
                print(f"{page}: {reader.typed - typed} lines, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
