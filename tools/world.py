"""A federation of real processes on loopback: one coordinator, several site agents, mutual TLS between them.

The demo, the benchmark and the system tests stand on this. Everything is done through the commands that people use;
nothing is imported from the programs. Processes are ended by their id, and every wait is bounded.
"""

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

BIN = Path(sys.executable).parent
COMMAND_TIMEOUT_S = 600  # these two tell a program that hangs from a busy machine
READY_TIMEOUT_S = 300
MOVING_S = 600
ENDED = (FileNotFoundError, ProcessLookupError)  # what the system answers of a process that is gone
DATA_FILES = {  # of the lab -> the option of `site-agent data add`
    "train.csv": "--table", "test.csv": "--test", "train.npz": "--arrays", "test.npz": "--test-arrays",
    "images": "--images", "labels.csv": "--labels", "masks": "--masks", "patients.csv": "--labels",
    "test_images": "--test-images", "test_labels.csv": "--test-labels", "test_masks": "--test-masks",
    "test_patients.csv": "--test-labels",
}  # fmt: skip


class CommandFailed(Exception):
    """A command ended with a code that was not expected."""

    def __init__(self, args: Sequence[str], code: int, stdout: str, stderr: str) -> None:
        super().__init__(f"`{' '.join(args)}` ended with {code}\n{stdout}{stderr}")
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


def command(
    program: str,
    *args: str | Path,
    stdin: str | None = None,
    ok: Sequence[int] = (0,),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run one of our commands to its end and return its stdout. ``environment``: beside this process's own.

    Raises:
        CommandFailed: it ended with a code that is not in ``ok``.
    """
    line = [str(BIN / program), *map(str, args)]
    done = subprocess.run(
        line, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        stdin=subprocess.DEVNULL if stdin is None else None, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode not in ok:
        raise CommandFailed([program, *line[1:]], done.returncode, done.stdout, done.stderr)
    return done.stdout


class Service:
    """A command that runs until it is stopped. Its stderr goes to a file."""

    def __init__(
        self,
        log: Path,
        program: str,
        *args: str | Path,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """``prefix``: a command that is given ours as its last words, as `strace` is."""
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*prefix, str(BIN / program), *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_line(self, prefix: str, timeout_s: float = READY_TIMEOUT_S) -> str:
        """The next line on stdout that begins with ``prefix``.

        Raises:
            TimeoutError: it did not come, or the process ended first; the message has the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if line.startswith(prefix):
                    return line
        raise TimeoutError(f"no line {prefix!r} from process {self.process.pid}; its log ends:\n{self.tail()}")

    def tail(self, count: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def stop(self, timeout_s: float = 30) -> int:
        """SIGTERM and wait. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.ended(timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a power cut would for the process alone."""
        if self.process.poll() is None:
            self.process.kill()
        self.ended(30)

    def ended(self, timeout_s: float) -> int:
        """Wait for its end, and return its exit code. Raises subprocess.TimeoutExpired: it goes on."""
        code = self.process.wait(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def free_port() -> int:
    """A port that nobody listens on, below the range from which outgoing connections are taken."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 32000")


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float, moves: Callable[[], object] | None = None
) -> Any:
    """Ask ``condition`` until it is true, for tests that look at a process from outside.

    With ``moves``, ``timeout_s`` begins anew whenever that returns something else than before, ``MOVING_S`` at most:
    a machine under load is waited for, what stands still is not.

    Raises:
        TimeoutError: it never was.
    """
    began = since = time.monotonic()
    before = moves() if moves else None
    while not (value := condition()):
        now = time.monotonic()
        if moves and (seen := moves()) != before and now - began < MOVING_S:
            before, since = seen, now
        if now - since > timeout_s:
            raise TimeoutError(f"after {now - began:.0f} s still not: {what}")
        time.sleep(0.1)
    return value


class World:
    """One coordinator and its sites under one folder: ``state/coordinator`` and ``state/SITE``.

    Attributes:
        environment: what every program and command of it has beside this process's environment.
        listen: HOST:PORT where the coordinator listens, if something stands between it and its address.
    """

    def __init__(self, state: Path, federation: str = "demo") -> None:
        self.state = state
        self.federation = federation
        self.environment: Mapping[str, str] = {}
        self.coordinator_state = state / "coordinator"
        self.logs = state / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.address = f"127.0.0.1:{free_port()}"
        self.listen = ""
        self.coordinator: Service | None = None
        self.agents: dict[str, Service] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for service in [*self.agents.values(), *([self.coordinator] if self.coordinator else [])]:
            try:
                service.stop()
            except subprocess.TimeoutExpired:
                service.kill()

    def init(self) -> None:
        self.ask_coordinator("init", "--federation", self.federation, "--address", self.address)

    def serve(self) -> Service:
        log = self.logs / "coordinator.log"
        self.coordinator = Service(log, "coordinator", *self.serve_words(), environment=self.environment)
        self.coordinator.wait_line("ready")
        return self.coordinator

    def serve_words(self) -> tuple[str | Path, ...]:
        return "serve", "--state", self.coordinator_state, *(("--listen", self.listen) if self.listen else ())

    def ask_coordinator(self, *args: str | Path, ok: Sequence[int] = (0,)) -> str:
        return command("coordinator", *args, "--state", self.coordinator_state, ok=ok, environment=self.environment)

    def ask_site(self, site: str, *args: str | Path, stdin: str | None = None, ok: Sequence[int] = (0,)) -> str:
        place = ("--state", self.state / site)
        return command("site-agent", *args, *place, stdin=stdin, ok=ok, environment=self.environment)

    def site_json(self, site: str, *args: str | Path, ok: Sequence[int] = (0,)) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask_site(site, *args, "--json", ok=ok))
        return answer

    def study_status(self, study: str, ok: Sequence[int] = (0, 3)) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask_coordinator("study", "status", study, "--json", ok=ok))
        return answer

    def join(self, site: str) -> str:
        invitation = self.ask_coordinator("invite", site)
        return self.ask_site(site, "join", "--invitation", "-", stdin=invitation)

    def add_data(self, site: str, folder: Path, label: str, name: str = "patients") -> None:
        """Name what lies in ``folder`` under the lab's names: a table, arrays, or images with labels or masks."""
        found = {file: option for file, option in DATA_FILES.items() if (folder / file).exists()}
        options = [word for file, option in found.items() for word in (option, folder / file)]
        self.ask_site(site, "data", "add", name, *options, *(["--label", label] if label else []))

    def run_agent(self, site: str) -> Service:
        line = ("site-agent", "run", "--state", self.state / site)
        agent = Service(self.logs / f"{site}.log", *line, environment=self.environment)
        self.agents[site] = agent
        agent.wait_line("ready")
        return agent

    def start(self, data: Path, label: str, sites: Sequence[str]) -> None:
        """A coordinator that serves, and sites that joined, named their data and run: all but a study."""
        self.init()
        self.serve()

        def admit(site: str) -> None:
            self.join(site)
            self.add_data(site, data / site, label)
            self.run_agent(site)

        in_parallel(admit, sites)

    def create_study(self, study: Path, *options: str | Path) -> str:
        """Create a study from its file and return its id."""
        self.ask_coordinator("study", "create", study, *options)
        with study.open("rb") as file:
            return str(tomllib.load(file)["study"]["name"])

    def approve(self, study: str, sites: Sequence[str], data: str = "patients") -> None:
        """At each site: a policy that allows just this study, unless the site has one, and the approval."""

        def act(site: str) -> None:
            if not (self.state / site / "policy.toml").exists():
                self.ask_site(site, "policy", "draft", study)
            shown = self.site_json(site, "preview", study, "--data", data)
            self.ask_site(site, "approve", study, "--data", data, "--digest", shown["digest"])

        in_parallel(act, sites)

    def know_peers(self, study: str, sites: Sequence[str]) -> None:
        """At each site: its people know every other member by the fingerprint that that one's own status shows."""

        def act(site: str) -> None:
            for row in self.site_json(site, "peers", "list", study)["members"]:
                if row["site"] != site:
                    self.ask_site(site, "peers", "know", row["site"], row["fingerprint"])

        in_parallel(act, sites)

    def finish(self, study: str, timeout_s: float = 300) -> dict[str, Any]:
        """Wait until the study has ended, every site has heard of it, and return its status."""
        line = [BIN / "coordinator", "study", "status", study, "--follow", "--state", self.coordinator_state]
        subprocess.run(line, timeout=timeout_s, check=False, capture_output=True, stdin=subprocess.DEVNULL)
        status = self.study_status(study)
        if status["state"] not in ("finished", "stopped", "failed", "paused"):
            raise TimeoutError(f"{study} is {status['state']} in round {status['round']}")
        return status

    def heard(self, site: str, study: str, state: str = "finished", timeout_s: float = 30) -> None:
        """Wait until a site's own status says that the study is in ``state``."""

        def states() -> bool:
            found = self.site_json(site, "status")["studies"]
            return any(row["id"] == study and row["state"] == state for row in found)

        wait_until(states, f"{site} says {study} is {state}", timeout_s)


def in_parallel(act: Callable[[str], object], sites: Sequence[str], at_once: int | None = None) -> None:
    """``act`` for each site at the same time; the first failure is raised when all have ended.

    Args:
        at_once: how many at most, where each is a program that must be ready in time; None: all.
    """
    with ThreadPoolExecutor(at_once or len(sites)) as pool:
        for done in [pool.submit(act, site) for site in sites]:
            done.result()


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` started, and those that they did. A child belongs to the thread that started it.

    Threads and processes end while they are listed: one that has ended has none.
    """
    children: list[int] = []
    with contextlib.suppress(*ENDED):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(*ENDED):
                children += map(int, (task / "children").read_text().split())
    return [found for child in children for found in (child, *descendants(child))]


def command_line(pid: int) -> list[str]:
    """What a process was started with; nothing when it has ended."""
    with contextlib.suppress(*ENDED):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []
