"""What two hospitals and a coordinator type until they have closed their first round together, counted as it is run.

    python -m tools.first_round

Each line below is what one person types at one machine: a command, or an answer to a question of `site-agent setup`.
Every command is run as a process at a terminal of its own, with a home directory a machine, and nothing else is run
between them but what people do: an invitation is handed over. Installing is counted, and not run or timed
(`make install` prints its own time). Reading what is shown takes as long as people take.
"""

import json
import os
import pty
import re
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tools.world import BIN, READY_TIMEOUT_S, command, free_port, wait_until
from wardround.local.directory import SYSTEM

SITES = ("ashford", "birchwood")
STUDY_FILE = Path(__file__).resolve().parent.parent / "examples" / "breast_cancer.toml"
STUDY = "breast-cancer"
ANSWER_S = 120
INSTALL = "pip install 'wardround[site]'"


class NotAsked(Exception):
    """A command did not say what was waited for."""


@dataclass
class Terminal:
    """A command at a terminal, as a person sees it. Ended with the block."""

    process: subprocess.Popen[bytes]
    screen: int
    seen: str = ""
    answers: list[str] = field(default_factory=list)

    def wait_for(self, text: str, timeout_s: float = ANSWER_S) -> None:
        """Read until ``text`` stands there, and take it as read. Raises NotAsked: it does not come."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            ready, _, _ = select.select([self.screen], [], [], max(0.0, deadline - time.monotonic()))
            try:
                piece = os.read(self.screen, 65536).decode(errors="replace") if ready else ""
            except OSError:  # the command has ended
                piece = ""
            if not piece:
                raise NotAsked(f"{text!r} does not come; it stands there:\n{self.seen}")
            self.seen += piece
        self.seen = self.seen.partition(text)[2]

    def answer(self, question: str, text: str) -> None:
        """Wait for a question and type an answer."""
        self.wait_for(question)
        self.answers.append(text)
        os.write(self.screen, text.encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self.screen)


class Machine:
    """One machine with one person at it: a home directory, and what was typed."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.home = name, home
        home.mkdir(parents=True)
        self.typed: list[str] = []
        self.services: list[Terminal] = []

    def install(self) -> None:
        """Counted, and not run."""
        self.typed.append(INSTALL)

    def types(self, line: str) -> Terminal:
        """Start what a person types; it goes on until its block ends."""
        self.typed.append(line)
        words = shlex.split(line)
        ours, theirs = pty.openpty()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARDROUND_", "XDG_"))}
        process = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]], stdin=theirs, stdout=theirs, stderr=theirs, cwd=self.home,
            env={**kept, "HOME": str(self.home), "NO_COLOR": "1"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        return Terminal(process, ours)

    def runs(self, line: str) -> None:
        """A command that a person waits for. Raises NotAsked: it failed; the message has what it said."""
        with self.types(line) as terminal:
            shown = ""
            try:
                while piece := os.read(terminal.screen, 65536).decode(errors="replace"):
                    shown += piece
            except OSError:
                pass  # as a terminal ends
            if terminal.process.wait(ANSWER_S) != 0:
                raise NotAsked(f"`{line}` failed:\n{shown}")

    def serves(self, line: str) -> None:
        """A command that goes on running."""
        terminal = self.types(line)
        self.services.append(terminal)
        terminal.wait_for("ready", READY_TIMEOUT_S)

    def stop(self) -> None:
        for terminal in self.services:
            with terminal:
                pass


@dataclass(frozen=True)
class Count:
    """What people typed: commands by the machine where they did, answers by the site; and how long it took."""

    commands: dict[str, list[str]]
    answers: dict[str, list[str]]
    seconds: float

    @property
    def total(self) -> int:
        return sum(map(len, self.commands.values()))


def first_round(root: Path, sites: Sequence[str] = SITES) -> Count:
    """From fresh machines to a closed round. Raises NotAsked, TimeoutError: something did not come."""
    if SYSTEM.exists():
        raise FileExistsError(f"{SYSTEM} is there: commands without --state would act on what this machine serves")
    data = root / "data"
    command("fl-lab", "data", "breast-cancer", "--out", data)  # the hospitals' own; nobody types it
    operator = Machine("operator", root / "operator")
    hospitals = {site: Machine(site, root / site) for site in sites}
    listed = re.sub(r"sites = \[.*?\]", f"sites = {json.dumps(list(sites))}", STUDY_FILE.read_text())
    (operator.home / "study.toml").write_text(re.sub(r"quorum = \d+", f"quorum = {len(sites)}", listed))
    answers: dict[str, list[str]] = {}
    began = time.monotonic()
    try:
        operator.install()
        operator.runs(f"coordinator init --federation north --address 127.0.0.1:{free_port()}")
        operator.serves("coordinator serve")
        operator.runs("coordinator study create study.toml")
        operator.runs(f"coordinator invite {' '.join(sites)} --out invitations")
        for site, hospital in hospitals.items():
            hospital.install()
            invitation = (operator.home / "invitations" / f"{site}.invitation").read_text().strip()  # handed over
            answers[site] = _set_up(hospital, invitation, data / site / "train.csv")
        operator.runs(f"coordinator study start {STUDY}")
        place = operator.home / ".local" / "state" / "wardround" / "coordinator"

        def closed() -> bool:
            status = json.loads(command("coordinator", "study", "status", STUDY, "--json", "--state", place, ok=(0, 3)))
            return all(site["rounds_contributed"] for site in status["sites"].values())

        wait_until(closed, "round 1", 60)
        seconds = time.monotonic() - began
    finally:
        for machine in (*hospitals.values(), operator):
            machine.stop()
    typed = {machine.name: machine.typed for machine in (operator, *hospitals.values())}
    return Count(typed, answers, seconds)


def _set_up(hospital: Machine, invitation: str, table: Path) -> list[str]:
    """The one command of a hospital. What is answered to it, in order."""
    terminal = hospital.types("site-agent setup")
    hospital.services.append(terminal)
    terminal.answer("Invitation (not shown): ", invitation)
    terminal.answer("or a folder of images: ", str(table))
    terminal.answer("The column of the class", "")  # as the study calls it
    terminal.answer("What you will call it", "")
    terminal.answer("Put this in force", "y")
    terminal.answer("Approve exactly this for data `patients`?", "y")
    terminal.answer("Run it now", "y")
    terminal.wait_for("ready", READY_TIMEOUT_S)
    shown = ["(the invitation, pasted)", *terminal.answers[1:]]
    return [answer or "(Enter)" for answer in shown]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wardround-first-") as folder:
        count = first_round(Path(folder))
    for machine, lines in count.commands.items():
        for line in lines:
            print(f"  {machine:10} {line}")
    for site, given in count.answers.items():
        print(f"  {site:10} answers: {', '.join(answer.replace(folder, '') for answer in given)}")
    operator = len(count.commands["operator"])
    hospital = len(count.commands[SITES[0]])
    answers = len(count.answers[SITES[0]])
    print(f"{count.total} commands: {operator} by the operator, {hospital} at each hospital, which answers {answers}")
    print(f"questions; 1 file written by hand (the study), {len(SITES)} invitations handed over")
    print(f"first round closed {count.seconds:.0f} s after the first command, installing aside")


if __name__ == "__main__":
    main()
