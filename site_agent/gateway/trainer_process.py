"""The trainer's listener: a child of the gateway, started again where it ends or hangs; or apart, and watched."""

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from site_agent.gateway.connection.backoff import backoff
from site_agent.handoff import Trainer, trainer_socket
from wardround.errors import Unavailable, WardroundError
from wardround.local import control, durable, liveness

PR_SET_PDEATHSIG = 1
START_S = 60
STOP_S = 8
LOOK_S = 5.0  # between two looks at it
STEADY_S = 60  # one that ran this long is started again without a pause
log = logging.getLogger(__name__)


class TrainerProcess:
    """A listener, for as long as this object is not stopped. It dies with this process.

    Raises:
        Unavailable: the first one did not get ready.
    """

    def __init__(self, state: Path, options: Sequence[str] = ()) -> None:
        self._state = state
        self._line = [sys.executable, "-P", "-m", "site_agent.cli.main", "run", "--only", "trainer"]
        self._line += ["--state", str(state), *options]
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # a process is begun, or the end is, and not both
        self._thread: threading.Thread | None = None
        self.problem = ""  # why no listener answers now; "" while one does
        self._process = self._begun()
        try:
            self._wait_ready()
        except Unavailable:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def keep(self, failed: Callable[[WardroundError], object]) -> None:
        """From now on start another where one ends. ``failed`` is called with the error after which none helps."""
        self._thread = threading.Thread(target=self._keep, args=(failed,), name="trainer-keep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait for its end."""
        with self._lock:
            self._stopping.set()
        if liveness.is_stopped(self._process.pid):
            self._process.kill()  # it would hear of nothing else
        else:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread is not None:
            self._thread.join()
        _close(self._process)

    def _keep(self, failed: Callable[[WardroundError], object]) -> None:
        """Runs until ``stop``: a child ends with the thread that began it."""
        waits, began = backoff(), time.monotonic()
        while why := self._until_ended():
            if self._process.returncode == durable.StorageFailed.exit_code:
                failed(
                    durable.StorageFailed(
                        "the disk failed at the trainer", hint="its last words are above; check the disk"
                    )
                )
                return
            if time.monotonic() - began > STEADY_S:
                waits = backoff()
            wait_s = next(waits)
            self.problem = f"the trainer's listener {why}; another is started"
            log.error(
                "the trainer's listener (process %d) %s; another is started in %.1f s", self._process.pid, why, wait_s
            )
            if self._stopping.wait(wait_s):
                return
            began = time.monotonic()
            _close(self._process)
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = self._begun()
            try:
                self._wait_ready()
            except Unavailable as error:
                log.error("%s", error.message)
                continue
            self.problem = ""
            log.info("the trainer's listener runs again (process %d)", self._process.pid)

    def _until_ended(self) -> str:
        """Wait until the process has ended, by itself or from here: it was stopped or hung. How, in words; "": it was
        to end."""
        trainer, watch = Trainer(self._state), liveness.Watch(self._process.pid)
        for _ in self._looks():
            if trainer.answers():
                watch.heard()
            if frozen := watch.frozen():
                self._process.kill()
                self._process.wait()
                return "" if self._stopping.is_set() else f"{frozen} and was ended"
        code = self._process.wait()
        if self._stopping.is_set():
            return ""
        return f"ended ({signal.Signals(-code).name})" if code < 0 else f"ended (exit code {code})"

    def _looks(self) -> Iterator[None]:
        """One every few seconds, until the process has ended."""
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except ProcessLookupError:
            return
        try:
            while not select.select([descriptor], [], [], LOOK_S)[0]:
                yield
        finally:
            os.close(descriptor)

    def _begun(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent
        )

    def _wait_ready(self) -> None:
        """Raises Unavailable: it ended instead, or takes too long."""
        late = threading.Timer(START_S, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        ready = any(text.strip() == "ready" for text in iter(self._process.stdout.readline, ""))
        late.cancel()
        if not ready or not control.is_listening(trainer_socket(self._state)):
            self._process.kill()
            raise Unavailable("the trainer's listener did not start", hint="its last words are above")


class TrainerApart:
    """A listener that somebody else starts (``--only trainer``): it is said when it does not answer, and when it does
    again. Whoever started it must start it again."""

    def __init__(self, state: Path, look_s: float = LOOK_S, silent_s: float = liveness.SILENT_S) -> None:
        self._trainer = Trainer(state)
        self._look_s, self._silent_s = look_s, silent_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainer-watch", daemon=True)
        self.problem = ""  # as of ``TrainerProcess``

    def keep(self, _: Callable[[WardroundError], object]) -> None:
        """From now on look at it. Nothing that it does ends the gateway."""
        self._thread.start()

    def stop(self) -> None:
        """Look at it no more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self._stopping.wait(self._look_s):
            if self._trainer.answers():
                heard = time.monotonic()
                if self.problem:
                    self.problem = ""
                    log.info("the trainer's listener answers again")
            elif not self.problem and time.monotonic() - heard >= self._silent_s:
                problem = f"the trainer's listener has not answered for {self._silent_s:g} s"
                log.error(
                    "%s: it is stopped, hangs, or has ended, and nothing is trained here; start it again, for instance "
                    "`systemctl restart wardround-trainer`",
                    problem,
                )
                self.problem = problem


def _close(process: "subprocess.Popen[str]") -> None:
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
