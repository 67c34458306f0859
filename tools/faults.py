"""A federation whose programs are killed, starved and cut off: built once, begun again from its files many times.

``Template`` is a federation at rest: sites that joined, named their data and approved studies that have not begun.
``Disturbed`` is one that runs from a copy of it: coordinator, and for each site a gateway and a trainer as units of
their own, as the service files have them. Whoever disturbs it calls ``tend`` now and then, which starts again what has
ended, as a service manager does. ``judge`` compares what came of it with the undisturbed run, receipt by receipt.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.answers import Answer, StudyReport, StudyStatus
from coordinator.requests import ShowReport, ShowStatus, StartStudy, StudyRequest
from tools.demo import Audit
from tools.world import Service, World, descendants, in_parallel
from wardround.errors import WardroundError
from wardround.local import control

ALPHABET = (
    "alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima",
)  # fmt: skip
MODELS = {"tiny": "hidden = [8]", "8 MB": "hidden = [1412, 1412]"}
STUDY = """
[study]
name = "{name}"
sites = {sites}
rounds = {rounds}
quorum = {quorum}
round_deadline_s = {deadline_s}
seed = 7
threads = 1

[task]
name = "tabular"
label = "y"
classes = ["0", "1"]
features = [{{ name = "x", kind = "numeric" }}]

[model]
name = "mlp"
{model}

[algorithm]
name = "fedavg"

[training]
local_steps = 1
batch_size = 8
learning_rate = 0.1
"""
ENDED = ("finished", "stopped", "failed")
NEEDS_PERSON = (64, 65, 77, 78)  # with these codes the service files do not start a program again
STUCK_S = 150
SOCKETS = shutil.ignore_patterns("*.sock")


@dataclass(frozen=True)
class Plan:
    """What is trained, and by whom. ``quorum`` 0: all sites. Real training of one step, so that each round counts."""

    sites: int = 3
    rounds: int = 5
    model: str = "tiny"
    studies: int = 1
    quorum: int = 0
    deadline_s: int = 600

    @property
    def names(self) -> tuple[str, ...]:
        """The sites."""
        return ALPHABET[: self.sites]

    @property
    def study_names(self) -> tuple[str, ...]:
        return tuple(f"trial-{number:02d}" for number in range(1, self.studies + 1))

    def study_file(self, name: str) -> str:
        return STUDY.format(
            name=name, sites=json.dumps(self.names), rounds=self.rounds, quorum=self.quorum or self.sites,
            deadline_s=self.deadline_s, model=MODELS[self.model],
        )  # fmt: skip


class Template:
    """A federation at rest under ``folder``: every study of ``plan`` is approved at every site, and none has begun."""

    def __init__(self, folder: Path, plan: Plan, prepare: Callable[[World], object] = lambda world: None) -> None:
        """``prepare``: called between the coordinator's `init` and its start, for settings of its own."""
        self.folder = folder
        self.plan = plan
        self._copies = 0
        for index, site in enumerate(plan.names):
            rows = "".join(f"{(3 * row + index) % 7},{(row + index * row) % 2}\n" for row in range(20 + index))
            (folder / "data" / site).mkdir(parents=True)
            (folder / "data" / site / "train.csv").write_text("x,y\n" + rows)
        with World(folder / "template") as world:
            world.init()
            prepare(world)
            world.serve()

            def admit(site: str) -> None:
                world.join(site)
                world.add_data(site, folder / "data" / site, "y")
                world.run_agent(site)

            in_parallel(admit, plan.names)
            for name in plan.study_names:
                file = folder / f"{name}.toml"
                file.write_text(plan.study_file(name))
                world.create_study(file)
            in_parallel(lambda site: self._allow(world, site), plan.names)
            for name in plan.study_names:
                world.approve(name, plan.names)

    def _allow(self, world: World, site: str) -> None:
        """A policy that lets out what the first study asks, for all of them."""
        first, *_ = self.plan.study_names
        world.ask_site(site, "policy", "draft", first)
        policy = world.state / site / "policy.toml"
        text = policy.read_text()
        assert json.dumps([first]) in text
        policy.write_text(text.replace(json.dumps([first]), json.dumps(self.plan.study_names)))

    def copy(self) -> Path:
        """The state of a new federation, as it stood at rest. One runs at a time: they share an address."""
        self._copies += 1
        target = self.folder / f"copy-{self._copies}"
        shutil.copytree(self.folder / "template", target, symlinks=True, ignore=SOCKETS)
        return target


@dataclass
class Seen:
    """What was noticed besides the outcome. ``exits``: unit and exit code of what ended by itself."""

    exits: list[tuple[str, int]] = field(default_factory=list)
    paused: int = 0


class Disturbed(World):
    """A federation that runs from a copy of a template, in units that can be killed one by one."""

    def __init__(self, state: Path, plan: Plan) -> None:
        super().__init__(state)
        self.plan = plan
        self.units: dict[str, Service] = {}
        self.seen = Seen()
        self.prefixes: dict[str, Sequence[str]] = {}

    def __exit__(self, *exception: object) -> None:
        for unit in sorted(self.units, key=lambda name: name == "coordinator"):
            self.stop(unit)

    @property
    def all_units(self) -> list[str]:
        return ["coordinator", *(f"{part}:{site}" for part in ("trainer", "gateway") for site in self.plan.names)]

    def begin(self) -> None:
        """Start every unit and wait until each is ready."""
        for unit in self.all_units:
            self.spawn(unit)
        for unit in self.all_units:
            self.units[unit].wait_line("ready", 120)

    def spawn(self, unit: str) -> Service:
        """Start ``unit`` and do not wait. ``prefixes`` has what to put before its command line."""
        part, _, site = unit.partition(":")
        log = self.logs / f"{unit.replace(':', '-')}.log"
        words: tuple[str | Path, ...] = ("run", "--only", part, "--state", self.state / site)
        if part == "coordinator":
            words = ("serve", "--state", self.coordinator_state)
        program = "coordinator" if part == "coordinator" else "site-agent"
        self.units[unit] = Service(log, program, *words, prefix=self.prefixes.get(unit, ()))
        return self.units[unit]

    def pid(self, unit: str) -> int:
        """The process of ``unit`` itself, whatever was put before it; ``worker:SITE`` is the trainer's worker.

        Raises:
            ProcessLookupError: there is none now.
        """
        part, _, site = unit.partition(":")
        if part == "worker":
            return _first_child(self.pid(f"trainer:{site}"))
        service = self.units[unit]
        if service.process.poll() is not None:
            raise ProcessLookupError(unit)
        return _first_child(service.process.pid) if self.prefixes.get(unit) else service.process.pid

    def kill(self, unit: str) -> bool:
        """SIGKILL to one process and its worker's fate to the kernel. Returns whether there was one."""
        return self.signal(unit, signal.SIGKILL)

    def signal(self, unit: str, number: signal.Signals) -> bool:
        """Send a signal to the process of ``unit``. Returns whether there was one."""
        try:
            os.kill(self.pid(unit), number)
        except (ProcessLookupError, FileNotFoundError):
            return False
        return True

    def stop(self, unit: str) -> int:
        """SIGTERM and wait; SIGKILL if it does not end within 40 s. Returns its exit code, -9 for the latter."""
        service = self.units[unit]
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self.signal(unit, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return service.ended(40)
            raise TimeoutError(f"{unit} does not end")
        finally:
            del self.units[unit]

    def tend(self, *, plainly: bool = True) -> None:
        """Start again each unit that has ended, as the service files would, and note with which code it ended.

        Args:
            plainly: without what ``prefixes`` has for it.

        Raises:
            Stuck: it ended with a code after which a service manager leaves it alone.
        """
        for unit, service in list(self.units.items()):
            code = service.process.poll()
            if code is None:
                continue
            if code != -signal.SIGKILL:
                self.seen.exits.append((unit, code))
            if code in NEEDS_PERSON:
                raise Stuck(f"{unit} ended with {code}, and waits for a person:\n{service.tail(6)}")
            service.ended(5)
            if plainly:
                self.prefixes.pop(unit, None)
            self.spawn(unit)

    def ask(self, request: StudyRequest, answer: type[Answer]) -> Any:
        """What the running coordinator answers; None where it does not, now."""
        socket = self.coordinator_state / "control.sock"
        with contextlib.suppress(WardroundError, OSError):
            if control.is_listening(socket):
                return answer.from_document(
                    control.call(socket, request.to_document(), lambda item: None, timeout_s=20)
                )
        return None

    def look(self, study: str) -> StudyStatus | None:
        found: StudyStatus | None = self.ask(ShowStatus(study=study), StudyStatus)
        return found

    def report(self, study: str) -> StudyReport:
        """Raises TimeoutError: the coordinator does not answer within 60 s."""
        deadline = time.monotonic() + 60
        while (found := self.ask(ShowReport(study=study), StudyReport)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("no report from the coordinator")
            self.tend()
            time.sleep(0.2)
        assert isinstance(found, StudyReport)
        return found

    def start_study(self, study: str) -> None:
        self.ask(StartStudy(study=study), StudyStatus)

    def until(
        self,
        study: str,
        reached: Callable[[StudyStatus], bool],
        stuck_s: float = STUCK_S,
        act: Callable[[], object] = lambda: None,
        *,
        plainly: bool = True,
    ) -> StudyStatus:
        """Tend the units, and continue the study where it pauses, until ``reached`` or the study has ended.

        Args:
            stuck_s: how long nothing may change.
            act: called each time that it looks.

        Raises:
            Stuck: nothing has changed for that long.
        """
        before, since = "", time.monotonic()
        while True:
            act()
            self.tend(plainly=plainly)
            status = self.look(study)
            if status is not None:
                if status.state in ENDED or reached(status):
                    return status
                if status.state in ("created", "paused"):
                    self.seen.paused += status.state == "paused"
                    self.start_study(study)
            seen = "" if status is None else status.model_dump_json()
            if seen and seen != before:
                before, since = seen, time.monotonic()
            if time.monotonic() - since > stuck_s:
                raise Stuck(f"nothing has changed in {study} for {stuck_s:.0f} s: {before[:600]}")
            time.sleep(0.05)

    def judge(self, study: str, undisturbed: Mapping[int, str], absent: bool = False) -> list[str]:
        """What is wrong with a study that has ended, in words; none if it came out as if nothing had happened.

        1. It is finished, and each of its rounds has the model of the undisturbed run.
        2. Every site is in every round. (``absent``: those who are not are named in the status; 1. then ends at the
           first round without one of them.)
        3. Every update whose receipt a site holds is in its round's model, and the coordinator has the receipt.
        4. Both verifiers accept each ledger, beside the coordinator's copy of the receipts.
        """
        report = self.report(study)
        wrong = [] if report.state == "finished" else [f"it is {report.state}: {report.why}"]
        closed = {row.round: row for row in report.rounds_closed}
        for number, row in sorted(closed.items()):
            if set(row.contributors) != set(self.plan.names):
                missing = set(self.plan.names) - set(row.contributors)
                if not absent or not missing <= set(report.incomplete):
                    wrong.append(f"round {number} is without {', '.join(sorted(missing))}")
                break
            if row.model_digest != undisturbed[number]:
                wrong.append(f"round {number} has another model than the undisturbed run")
                break
        for site in self.plan.names:
            for number, update in self.receipted(site, study):
                answer = closed[number].answers.get(site) if number in closed else None
                if getattr(answer, "update_digest", None) != update:
                    wrong.append(f"{site} has a receipt for an update of round {number} that is not in its model")
        return wrong + self.broken_ledgers()

    def receipted(self, site: str, study: str) -> Iterator[tuple[int, str]]:
        """Round and digest of each update of ``study`` for whose training ``site`` holds an accepting receipt."""
        uploads: dict[str, dict[str, Any]] = {}
        for ledger in sorted((self.state / site / "ledger").glob("0*.jsonl")):
            for line in ledger.read_text().splitlines():
                entry = json.loads(line)
                if entry["type"] == "upload":
                    uploads[entry["upload_id"]] = entry
                elif entry["type"] == "receipt":
                    receipt = json.loads(entry["envelope"]["payload"])
                    upload = uploads.get(entry["upload_id"])
                    if upload is None or receipt["decision"] != "accepted":
                        continue
                    if (upload["study"], upload["kind"]) == (study, "train"):
                        yield int(upload["round"]), str(upload["manifest_sha256"])

    def broken_ledgers(self) -> list[str]:
        """The sites whose ledger one of the verifiers does not accept, or that the coordinator's copy contradicts."""
        broken: dict[str, str] = {}

        def verify(site: str) -> None:
            receipts = self.state / f"receipts-{site}.jsonl"
            receipts.unlink(missing_ok=True)
            audit = Audit(self, site, receipts)
            if not audit.ok:
                broken[site] = f"the ledger of {site}: {', '.join(audit.words)}"

        in_parallel(verify, self.plan.names)
        return [broken[site] for site in sorted(broken)]

    def tail(self, unit: str) -> str:
        """The last words of ``unit``."""
        lines = (self.logs / f"{unit.replace(':', '-')}.log").read_text(errors="replace").splitlines()
        return " / ".join(lines[-6:])

    def retain(self, kept: Path) -> str:
        """Copy everything to ``kept`` for whoever looks into a failure. Returns where."""
        target = kept / self.state.name
        shutil.copytree(self.state, target, symlinks=True, dirs_exist_ok=True, ignore=SOCKETS)
        return str(target)


class Stuck(Exception):
    """It does not go on by itself."""


def undisturbed(template: Template) -> dict[int, str]:
    """The digest of each round's model, where nothing happens to anybody."""
    study = template.plan.study_names[0]
    with Disturbed(template.copy(), template.plan) as world:
        world.begin()
        world.until(study, lambda status: False)
        wrong = world.broken_ledgers()
        if wrong:
            raise AssertionError(f"without any fault: {wrong}")
        return {row.round: str(row.model_digest) for row in world.report(study).rounds_closed}


def seeds(seed: int) -> Iterator[tuple[int, random.Random]]:
    """One generator of chances for each trial, so that a single trial can be replayed."""
    for number in range(1_000_000):
        yield number, random.Random(f"{seed}/{number}")


def _first_child(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        if found := descendants(pid):
            return found[0]
    raise ProcessLookupError(f"process {pid} has no child")
