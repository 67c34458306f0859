"""``site-agent run --only trainer``: waits for the gateway, and starts an isolated worker when there is work. No torch.

The worker is started with the first request that needs it and stays warm between rounds. It serves one request at a
time; what concerns no round (``check``, ``predict``, ...) gets a worker of its own while a round is being trained.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fl_algorithms.engine.hardware import Hardware
from site_agent.handoff import OnProgress, Worker, ask_alone, trainer_socket
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
    records.Describe, records.Inspect, records.Check, records.Examine, records.DraftMapping, records.HashFiles,
    records.Predict,
)  # fmt: skip
log = logging.getLogger(__name__)


def listen_forever(
    state: Path, hardware: Hardware = Hardware(), ready: Callable[[], None] = lambda: print("ready", flush=True)
) -> None:
    """Listen at ``state/staging/trainer.sock`` until SIGTERM or SIGINT, then end the worker and return.

    Runs in the main thread.

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
    with set_by_signals(Latch()) as stop:
        with StateLock(state / "studies", owner, patience_s=LEAVING_S), Listener(state, stop, hardware) as listener:
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
    """Passes requests on. ``stop`` is set when the disk fails, and ``failed`` says how."""

    def __init__(self, state: Path, stop: Latch, hardware: Hardware = Hardware()) -> None:
        self._state = state
        self._stop = stop
        self._options = hardware.options
        self.failed: StorageFailed | None = None
        with Worker(state, warm=False, options=self._options) as probe:
            self._isolation, self._missing = probe.isolation, probe.missing
            self._device = "cpu"
            if hardware.device != "cpu":  # only an isolated process with torch can say
                self._device = probe.ask(records.GetDevice()).device
        # One thread makes the worker and speaks to it: a worker dies with the thread that made it.
        self._thread = ThreadPoolExecutor(1, "worker")
        self._worker: Worker | None = None
        self._closing = False
        self._waiting = 0
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
                self._end_worker()
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
            busy = self._waiting > 0
            if self._closing:
                raise TryAgain("the trainer is stopping", hint="start it again", code="DECLINED_TRAINING_FAILED")
            alone = busy and isinstance(request, OF_NO_ROUND)
            self._waiting += not alone
        if alone:
            return ask_alone(self._state, request, progress)
        try:
            return self._thread.submit(self._ask_worker, request, progress).result()
        finally:
            with self._lock:
                self._waiting -= 1

    def _ask_worker(self, request: AnyRequest, progress: OnProgress) -> Answer:
        if self._worker is None or not self._worker.alive():
            if self._worker is not None:
                self._worker.close()
            self._worker = Worker(self._state, warm=True, options=self._options)
            if self._closing:
                self._worker.kill()
        return self._worker.ask(request, progress)

    def _end_worker(self) -> None:
        worker = self._worker
        if worker is not None:
            worker.kill()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._closing = True
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
