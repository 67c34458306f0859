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
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.answers import Answer
from coordinator.requests import ShowReport, ShowStatus, StartStudy, StudyRequest
from coordinator.study_answers import AttemptReport, StudyReport, StudyStatus
from tools.demo import Audit
from tools.studies import SECURE, study_text
from tools.world import BIN, Service, World, descendants, in_parallel
from wardround.errors import WardroundError
from wardround.local import control

ALPHABET = (
    "alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima",
)  # fmt: skip
MODELS = {"tiny": "hidden = [8]", "1 MB": "hidden = [498, 498]", "8 MB": "hidden = [1412, 1412]"}
TRAINING = "local_steps = 1\nbatch_size = 8\nlearning_rate = 0.1"
ENDED = ("finished", "stopped", "failed")
NEEDS_PERSON = (64, 65, 77, 78)  # with these codes the service files do not start a program again
STUCK_S = 150
READY_S = 600  # seven programs that start at once, on a machine that has other work
LAB_S = 900
PATIENCE_S = 2  # before a paused study is continued once more
MOST_PAUSES = 40
PARTS = ("trainer", "gateway")  # of a site, each a unit of its own
SOCKETS = shutil.ignore_patterns("*.sock")


@dataclass(frozen=True)
class Plan:
    """What is trained, and by whom. ``quorum`` 0: all sites. Real training of one step, so that each round counts.
    ``secure``: the coordinator sees sums alone.
    """

    sites: int = 3
    rounds: int = 5
    model: str = "tiny"
    studies: int = 1
    quorum: int = 0
    deadline_s: int = 600
    secure: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The sites."""
        return ALPHABET[: self.sites]

    @property
    def study_names(self) -> tuple[str, ...]:
        return tuple(f"trial-{number:02d}" for number in range(1, self.studies + 1))

    def study_file(self, name: str) -> str:
        quorum = self.quorum or self.sites
        return study_text(
            name, self.names, self.rounds, model=f'name = "mlp"\n{MODELS[self.model]}', training=TRAINING,
            more=f"quorum = {quorum}\nround_deadline_s = {self.deadline_s}\nseed = 7\nthreads = 1",
            tables=SECURE if self.secure else "",
        )  # fmt: skip


class Template:
    """A federation at rest under ``folder``: every study of ``plan`` is approved at every site, and none has begun.

    Attributes:
        address: of its coordinator, in every copy.
    """

    def __init__(self, folder: Path, plan: Plan, prepare: Callable[[World], object] = lambda world: None) -> None:
        """``prepare``: called between the coordinator's `init` and its start, for settings of its own."""
        self.folder = folder
        self.plan = plan
        self._copies = 0
        write_tables(folder / "data", plan.names)
        with World(folder / "template") as world:
            self.address = world.address
            world.init()
            prepare(world)
            world.serve()

            def admit(site: str) -> None:
                world.join(site)
                world.add_data(site, folder / "data" / site, "y")
                world.run_agent(site)

            in_parallel(admit, plan.names, at_once=os.cpu_count())
            for name in plan.study_names:
                file = folder / f"{name}.toml"
                file.write_text(plan.study_file(name))
                world.create_study(file)
            if plan.secure:
                world.know_peers(plan.study_names[0], plan.names)
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
        text = re.sub(r"(_per_day = )\d+", r"\g<1>1000000000000", text)  # the draft's are for one study
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
    """A federation that runs from a copy of a template, in units that can be killed one by one.

    Attributes:
        prefixes, environments: what is put before the command line of a unit, and into its environment.
        poll_s: how long `until` waits between two looks.
        seen: what was noticed.
    """

    def __init__(self, state: Path, plan: Plan, parts: Sequence[str] = PARTS) -> None:
        """``parts``: the units of a site; ``("agent",)`` for one that has its trainer with it."""
        super().__init__(state)
        self.plan = plan
        self.parts = parts
        self.units: dict[str, Service] = {}
        self.seen = Seen()
        self.prefixes: dict[str, Sequence[str]] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.poll_s = 0.05

    def __exit__(self, *exception: object) -> None:
        for unit in sorted(self.units, key=lambda name: name == "coordinator"):
            self.stop(unit)

    @property
    def all_units(self) -> list[str]:
        return ["coordinator", *(f"{part}:{site}" for part in self.parts for site in self.plan.names)]

    def begin(self) -> None:
        """Start every unit and wait until each is ready."""
        for unit in self.all_units:
            self.spawn(unit)
        for unit in self.all_units:
            self.units[unit].wait_line("ready", READY_S)

    def spawn(self, unit: str) -> Service:
        """Start ``unit`` and do not wait. ``prefixes`` has what to put before its command line."""
        part, _, site = unit.partition(":")
        log = self.logs / f"{unit.replace(':', '-')}.log"
        only = () if part == "agent" else ("--only", part)
        words: tuple[str | Path, ...] = ("run", *only, "--state", self.state / site)
        if part == "coordinator":
            words = self.serve_words()
        program = "coordinator" if part == "coordinator" else "site-agent"
        environment = {**self.environment, **self.environments.get(unit, {})}
        self.units[unit] = Service(log, program, *words, prefix=self.prefixes.get(unit, ()), environment=environment)
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

    def stop(self, unit: str, within_s: float = 40) -> int:
        """SIGTERM and wait; SIGKILL if it does not end in time. Returns its exit code, -9 for the latter.

        Where ``py-spy`` is installed, what it was doing then is beside its log.
        """
        service = self.units[unit]
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self.signal(unit, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return service.ended(within_s)
                self._note_stacks(unit)
            raise TimeoutError(f"{unit} does not end")
        finally:
            del self.units[unit]

    def _note_stacks(self, unit: str) -> None:
        if (dumper := shutil.which("py-spy")) is None:
            return
        for pid in (self.pid(unit), *descendants(self.pid(unit))):
            line = [dumper, "dump", "--native", "--pid", str(pid)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
            with (self.logs / f"{unit.replace(':', '-')}.stacks").open("a") as file:
                file.write(f"{unit}, process {pid}\n{done.stdout}{done.stderr}")

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
        before, since, started = "", time.monotonic(), 0.0
        while True:
            act()
            self.tend(plainly=plainly)
            status = self.look(study)
            if status is not None:
                if status.state in ENDED or reached(status):
                    return status
                if status.state in ("created", "paused") and time.monotonic() - started > PATIENCE_S:
                    self.seen.paused += status.state == "paused"
                    if self.seen.paused > MOST_PAUSES:
                        raise Stuck(f"{study} has paused {self.seen.paused} times: {status.why}")
                    self.start_study(study)
                    started = time.monotonic()
            seen = "" if status is None else status.model_dump_json()
            if seen and seen != before:
                before, since = seen, time.monotonic()
            if time.monotonic() - since > stuck_s:
                raise Stuck(f"nothing has changed in {study} for {stuck_s:.0f} s: {before[:600]}")
            time.sleep(self.poll_s)

    def judge(self, study: str, undisturbed: Mapping[int, str], absent: bool = False) -> list[str]:
        """What is wrong with a study that has ended, in words; none if it came out as if nothing had happened.

        1. It is finished, and each of its rounds that ``undisturbed`` has, has the model that is there.
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
            if row.model_digest != undisturbed.get(number, row.model_digest):
                wrong.append(f"round {number} has another model than the undisturbed run")
                break
        for site in self.plan.names:
            ended = max(closed, default=0) + 1 if report.state == "stopped" else None  # the round that a person ended
            receipted = [(number, update) for number, update in self.receipted(site, study, closed) if number != ended]
            wrong += astray(site, receipted, closed)
        return wrong + self.opened_otherwise() + self.broken_ledgers()

    def opened_otherwise(self) -> list[str]:
        """With secure aggregation: the rounds in which two sets were opened, or both secrets of one site, in words."""
        opened: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for site in self.plan.names:
            for entry in self.entries(site):
                if entry["type"] == "opened":
                    opened.setdefault((entry["study"], entry["round"]), []).append(entry)
        wrong = []
        for (study, number), entries in sorted(opened.items()):
            if len({(entry["context"], entry["chosen"]) for entry in entries}) > 1:
                wrong.append(f"round {number} of {study} was opened twice")
            kinds = [{site for entry in entries for site in entry[kind]} for kind in ("self_masks", "mask_keys")]
            if both := kinds[0] & kinds[1]:
                wrong.append(f"round {number} of {study}: both secrets of {', '.join(sorted(both))} were opened")
        return wrong

    def receipted(self, site: str, study: str, closed: Mapping[int, AttemptReport]) -> Iterator[tuple[int, str]]:
        """Round and digest of each update of ``study`` for whose training ``site`` holds an accepting receipt; with
        secure aggregation, of the attempts that closed: what was masked for another is in no model.
        """
        decisions = self._decisions(site)
        for entry in self.entries(site):
            if entry["type"] != "upload" or decisions.get(entry["upload_id"]) != "accepted":
                continue
            if (entry["study"], entry["kind"]) == (study, "train") and not self._void(entry, closed):
                yield int(entry["round"]), str(entry["manifest_sha256"])

    def _void(self, upload: dict[str, Any], closed: Mapping[int, AttemptReport]) -> bool:
        round_ = closed.get(upload["round"])
        return self.plan.secure and (round_ is None or round_.attempt != upload["attempt"])

    def broken_ledgers(self, patience_s: float = 30) -> list[str]:
        """The sites whose ledger one of the verifiers does not accept, or that the coordinator's copy contradicts.

        A gateway that has just started may still be asking what became of its last update: it has ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        while (broken := self._broken_ledgers()) and time.monotonic() < deadline:
            self.tend()
            time.sleep(1)
        return broken

    def _broken_ledgers(self) -> list[str]:
        broken: dict[str, str] = {}

        def verify(site: str) -> None:
            receipts = self.state / f"receipts-{site}.jsonl"
            receipts.unlink(missing_ok=True)
            audit = Audit(self, site, receipts)
            if not audit.ok:
                broken[site] = f"the ledger of {site}: {', '.join(audit.words)}"

        in_parallel(verify, self.plan.names)
        return [broken[site] for site in sorted(broken)]

    def _decisions(self, site: str) -> dict[str, str]:
        """The newest decision about each upload of a site, as its ledger has it."""
        return {
            entry["upload_id"]: json.loads(entry["envelope"]["payload"])["decision"]
            for entry in self.entries(site)
            if entry["type"] == "receipt"
        }

    def entries(self, site: str) -> Iterator[dict[str, Any]]:
        for ledger in sorted((self.state / site / "ledger").glob("0*.jsonl")):
            yield from map(json.loads, ledger.read_text().splitlines())

    def torn_ledgers(self) -> list[str]:
        """The sites whose ledger, as it lies there while rounds go on, one of the verifiers calls changed."""
        program = [BIN / "python", Path(__file__).with_name("verify_ledger.py")]
        torn = []
        for site in self.plan.names:
            ledger = self.state / site / "ledger"
            for line in ([BIN / "site-agent", "audit", "verify", "--ledger", ledger], [*program, ledger]):
                done = subprocess.run(line, capture_output=True, text=True, timeout=LAB_S, check=False)
                if done.returncode not in (0, 2, 4):  # an update under way has no receipt, and its line no head
                    torn.append(f"the ledger of {site}: {done.stdout.strip()[-200:]}")
        return torn

    def tail(self, unit: str) -> str:
        """The last words of ``unit``."""
        lines = (self.logs / f"{unit.replace(':', '-')}.log").read_text(errors="replace").splitlines()
        return " / ".join(lines[-6:])

    def retain(self, kept: Path) -> str:
        """Copy everything to ``kept`` for whoever looks into a failure. Returns where."""
        target = kept / self.state.name
        shutil.copytree(self.state, target, symlinks=True, dirs_exist_ok=True, ignore=SOCKETS)
        return str(target)


def astray(site: str, receipted: Sequence[tuple[int, str]], closed: Mapping[int, AttemptReport]) -> list[str]:
    """The updates with an accepting receipt of ``site``, by round, that are in no model of a closed round, in words."""
    answers = {number: row.answers.get(site) for number, row in closed.items()}
    return [
        f"{site} has a receipt for an update of round {number} that is not in its model"
        for number, update in receipted
        if getattr(answers.get(number), "update_digest", None) != update
    ]


class Stuck(Exception):
    """It does not go on by itself."""


def write_tables(folder: Path, sites: Sequence[str]) -> None:
    """A small table for each site, each unlike the others."""
    for index, site in enumerate(sites):
        rows = "".join(f"{(3 * row + index) % 7},{(row + index * row) % 2}\n" for row in range(20 + index))
        (folder / site).mkdir(parents=True)
        (folder / site / "train.csv").write_text("x,y\n" + rows)


def undisturbed(template: Template) -> dict[int, str]:
    """The digest of each round's model, where nothing happens to anybody."""
    study = template.plan.study_names[0]
    with Disturbed(template.copy(), template.plan) as world:
        world.begin()
        world.until(study, lambda status: False, READY_S)
        wrong = world.broken_ledgers()
        if wrong:
            raise AssertionError(f"without any fault: {wrong}")
        return {row.round: str(row.model_digest) for row in world.report(study).rounds_closed}


def lab_digest(template: Template, rounds: int | None = None) -> str:
    """The model after so many rounds of the template's study, or after all, as the lab makes it."""
    plan = replace(template.plan, rounds=rounds or template.plan.rounds)
    study = template.folder / "lab.toml"
    study.write_text(plan.study_file("lab"))
    line = [BIN / "fl-lab", "run", study, "--data", template.folder / "data", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LAB_S, check=True)
    return str(json.loads(done.stdout)["digests"][0])


def resources(pid: int) -> dict[str, int]:
    """What a process holds now: resident KiB, descriptors, threads."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "kib": int(rows["VmRSS"].split()[0]), "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(rows["Threads"]),
    }  # fmt: skip


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``; what goes while it is counted is not there."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def seeds(seed: int) -> Iterator[tuple[int, random.Random]]:
    """One generator of chances for each trial, so that a single trial can be replayed."""
    for number in range(1_000_000):
        yield number, random.Random(f"{seed}/{number}")


def _first_child(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        if found := descendants(pid):
            return found[0]
    raise ProcessLookupError(f"process {pid} has no child")
