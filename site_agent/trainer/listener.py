"""``site-agent run --only trainer``: waits for the gateway, and starts an isolated worker when there is work. No torch.

The worker is started with the first request that needs it and stays warm between rounds. It serves one request at a
time; what concerns no round (``check``, ``predict``, ...) gets a worker of its own while a round is being trained. A
round that is called off is called off by its name: where the worker is at something else, that goes on.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fl_algorithms.engine.hardware import Hardware
from site_agent.handoff import Died, OnProgress, Worker, ask_alone, trainer_socket
from site_agent.state.directory import SiteState
from site_agent.state.person import user_name
from site_agent.trainer.requests import BOOKKEEPING, keep_books
from wardround.errors import TryAgain, WardroundError
from wardround.local import control, durable
from wardround.local.durable import StateLock, StorageFailed
from wardround.local.event import Latch, set_by_signals
from wardround.local.logs import log_to_stderr
from wardround.records import trainer as records
from wardround.records.trainer import Answer, AnyRequest, Progress
from wardround.records.trainer.failures import own_code

SOCKET_MODE, STAGING_MODE = 0o660, 0o770
LEAVING_S = 8  # after a gateway was killed, its listener may still be ending a worker
OF_NO_ROUND = (
    records.Describe, records.Inspect, records.Check, records.Examine, records.Summarize, records.DraftMapping,
    records.DraftSummaryMapping, records.HashFiles, records.Predict,
)  # fmt: skip
log = logging.getLogger(__name__)


@dataclass
class Job:
    """A request that waits for the worker or is being answered by it, and its answer to come."""

    request: AnyRequest
    answer: "Future[Answer]"
    called_off: bool = False

    def is_round(self, abort: records.Abort) -> bool:
        """Whether it is the round that ``abort`` names."""
        match self.request:
            case records.Train() | records.Validate() as asked:
                named = (asked.study_digest, asked.revision, asked.round)
                return named == (abort.study_digest, abort.revision, abort.round)
        return False


def listen_forever(
    state: Path,
    hardware: Hardware = Hardware(),
    ready: Callable[[], None] = lambda: print("ready", flush=True),
    *,
    idle_s: int = 0,
) -> None:
    """Listen at ``state/staging/trainer.sock`` until SIGTERM or SIGINT, then end the worker and return.

    Runs in the main thread.

    Args:
        idle_s: as of ``Listener``.

    Raises:
        UsageProblem: the device is not there, or cannot be used by an isolated process.
        TryAgain: another trainer has this state directory.
        CannotWrite: the folders cannot be made; or the disk failed, and what was durable before is still there.
    """
    log_to_stderr()
    SiteState(state).require_folder()
    durable.make_folder(state / "studies")
    durable.make_folder(state / "staging", STAGING_MODE)
    owner = "site-agent run --only trainer"
    with set_by_signals(Latch()) as stop, StateLock(state / "studies", owner, patience_s=LEAVING_S):
        try:
            begun = Listener(state, stop, hardware, idle_s)
        except Died:
            if stop.is_set():
                return
            raise
        with begun as listener:
            users = frozenset({os.geteuid(), 0, state.stat().st_uid})
            server = control.ControlServer(
                trainer_socket(state), listener.answer, fatal=listener.end, users=users, mode=SOCKET_MODE
            )
            try:
                ready()
                stop.wait()
            finally:
                server.close()
        if listener.failed is not None:
            raise listener.failed


class Listener:
    """Passes requests on. ``stop`` is set when the disk fails, and ``failed`` says how.

    Args:
        idle_s: the worker is ended when nobody asked it anything for so long, and the next request starts another; 0:
            it stays.
    """

    def __init__(self, state: Path, stop: Latch, hardware: Hardware = Hardware(), idle_s: int = 0) -> None:
        self._state = state
        self._idle_s = idle_s
        self._rest: threading.Timer | None = None
        self._stop = stop
        self._options = hardware.options
        self.failed: StorageFailed | None = None
        self._closing = False
        with self._new_worker(warm=False) as probe:
            self._isolation, self._missing = probe.isolation, probe.missing
            self._device = "cpu"
            if hardware.device != "cpu":  # only an isolated process with torch can say
                self._device = probe.ask(records.GetDevice()).device
        # One thread makes the worker and speaks to it: a worker dies with the thread that made it.
        self._thread = ThreadPoolExecutor(1, "worker")
        self._worker: Worker | None = None
        self._jobs: list[Job] = []  # oldest first
        self._current: Job | None = None
        self._lock = threading.Lock()

    def answer(self, document: object, progress: control.Reply) -> Mapping[str, object]:
        """One request, in a thread of its own: a codec around ``answer_request``.

        Raises:
            WardroundError: what the worker said, or that it died; ``code`` is one of the trainer's own.
        """
        try:
            request = records.request_from(document)
            return self.answer_request(request, lambda step: progress(step.model_dump())).to_document()
        except WardroundError as error:
            error.code = own_code(error)
            raise

    def answer_request(self, request: AnyRequest, progress: OnProgress) -> Answer:
        """The answer to ``request``. Raises WardroundError: what the worker said, or that it died."""
        match request:
            case records.GetStatus():
                return self._status()
            case records.Abort():
                self._call_off(request)
                return records.Done()
        try:
            if isinstance(request, BOOKKEEPING):
                return keep_books(self._state, request)
            return self._pass_on(request, _until_gone(progress))
        except StorageFailed as error:
            self.end(error)
            raise

    def _status(self) -> records.Status:
        worker = self._worker
        return records.Status.model_validate({
            "isolation": self._isolation, "missing": list(self._missing), "user": user_name(os.geteuid()),
            "uid": os.geteuid(), "worker": worker.pid if worker is not None and worker.alive() else None,
            "device": self._device,
        })  # fmt: skip

    def end(self, error: StorageFailed) -> None:
        """Let the listener end with what the disk did."""
        self.failed = error
        self._stop.set()

    def _pass_on(self, request: AnyRequest, progress: OnProgress) -> Answer:
        with self._lock:
            if self._closing:
                raise TryAgain("the trainer is stopping", hint="start it again", code="DECLINED_TRAINING_FAILED")
            alone = bool(self._jobs) and isinstance(request, OF_NO_ROUND)
            if not alone:
                job = Job(request, Future())
                self._jobs.append(job)
                self._end_rest()
                self._thread.submit(self._work, job, progress)
        if alone:
            return ask_alone(self._state, request, progress)
        try:
            return job.answer.result()
        except CancelledError:
            raise TryAgain(
                f"this `{request.command}` was called off before it began", code="DECLINED_TRAINING_FAILED"
            ) from None

    def _work(self, job: Job, progress: OnProgress) -> None:
        """Have one job done, in the worker's thread, unless it was called off."""
        with self._lock:
            if not job.answer.set_running_or_notify_cancel():
                return
            self._current = job
        try:
            answer = self._ask_worker(job, progress)
        except BaseException as error:  # whoever waits for it gets it
            self._over(job)
            job.answer.set_exception(error)
        else:
            self._over(job)
            job.answer.set_result(answer)

    def _over(self, job: Job) -> None:
        with self._lock:
            self._current = None
            self._jobs.remove(job)
            if self._idle_s and not self._jobs and not self._closing:
                self._rest = threading.Timer(self._idle_s, self._rested)
                self._rest.daemon = True
                self._rest.start()

    def _end_rest(self) -> None:
        """With the lock held: there is something to do."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _rested(self) -> None:
        with self._lock:
            if not self._closing:
                self._thread.submit(self._let_go)  # which made the worker

    def _let_go(self) -> None:
        """End a worker that nobody has asked anything since."""
        with self._lock:
            worker = self._worker if not self._jobs and self._rest is not None else None
            if worker is None:
                return
            self._rest = self._worker = None
        worker.close()
        log.info("the trainer's worker (process %d) was idle for %d s and was ended", worker.pid, self._idle_s)

    def _ask_worker(self, job: Job, progress: OnProgress) -> Answer:
        if self._worker is None or not self._worker.alive():
            if self._worker is not None:
                log.info("the trainer's worker (process %d) ended or is stopped: another is started", self._worker.pid)
                self._worker.close()
            self._worker = self._new_worker(warm=True)
        with self._lock:
            if job.called_off or self._closing:
                raise TryAgain(f"this `{job.request.command}` was called off", code="DECLINED_TRAINING_FAILED")
        return self._worker.ask(job.request, progress)

    def _new_worker(self, *, warm: bool) -> Worker:
        """One that is ended, if it is only starting too, when this listener is to end."""
        return Worker(
            self._state, warm=warm, options=self._options, given_up=lambda: self._closing or self._stop.is_set()
        )

    def _call_off(self, abort: records.Abort) -> None:
        """End the round that ``abort`` names: the worker with it, if it is at that, else what waits of it."""
        with self._lock:
            for job in [job for job in self._jobs if job.is_round(abort)]:
                job.called_off = True
                if job is self._current:
                    self._end_worker()
                elif job.answer.cancel():
                    self._jobs.remove(job)

    def _end_worker(self) -> None:
        worker = self._worker
        if worker is not None:
            worker.end()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._closing = True
            self._end_rest()
            for job in self._jobs:
                job.answer.cancel()
        self._end_worker()
        self._thread.shutdown(cancel_futures=True)
        if self._worker is not None:
            self._worker.close()


def _until_gone(progress: OnProgress) -> OnProgress:
    """Progress for as long as whoever asked listens; the round goes on without them, and its result is kept."""
    gone = False

    def tell(step: Progress) -> None:
        nonlocal gone
        if gone:
            return
        try:
            progress(step)
        except OSError:
            gone = True
            log.info("whoever asked has gone; the round goes on")

    return tell
