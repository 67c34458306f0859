"""The local conversation between the gateway, which has the network, and the trainer, which has the patients.

    gateway or command ──> listener at STATE/staging/trainer.sock ──> worker     (isolated, torch, warm between rounds)
    command, no listener ──> one-shot worker                                     (isolated, ends with its answer)

Requests and answers are the classes of ``wardround.records.trainer``, as lines of JSON over a Unix socket; tensors
cross as safetensors files in ``STATE/staging``. Nothing here imports torch, and nobody's pickle is read.

Both a listener and its worker say every few seconds, while a request lasts, that they are alive. A worker that does not
is ended by its listener, a listener by the gateway whose child it is; whoever asked hears of it within 25 s.

What a trainer sends is checked at the worker's end and again at the gateway's: it runs code of others. Of a failure
only ``code`` may go further than the hospital, and a failure's sentences are shown as the trainer's.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from wardround.errors import BadData, NeedsPerson, TryAgain, Unavailable, WardroundError
from wardround.local import control, frames, liveness
from wardround.records import trainer as records
from wardround.records.trainer import TRAINING_FAILED, Answer, Request
from wardround.terminal import escaped

MAX_PRINTED = 4096  # bytes of one line that a worker prints; a longer one is several
OUTPUT_END_S = 5  # a process that it started may hold its output open
HELLO_TIMEOUT_S = 60  # a worker says hello before it imports torch
ANSWER_TIMEOUT_S = 300  # for what reads no patients: a cold start on a busy machine
AT_ONCE_S = 1.5  # the listener answers by itself, however busy its worker is
LOOK_S = 2.0  # between two looks at a worker that was asked something
ROUND_REQUESTS = (records.Train, records.Validate, records.Finish)
READING_REQUESTS = (  # a folder of images is large
    records.Inspect, records.Check, records.Examine, records.Summarize, records.DraftMapping,
    records.DraftSummaryMapping, records.HashFiles, records.Predict,
)  # fmt: skip
OUR_CODE_ALONE = (records.GetStatus, records.StatFiles)  # neither torch nor a plug-in, and no file is read
STAGED = re.compile(r"[A-Za-z0-9._-]{1,200}")
A = TypeVar("A", bound=Answer)
OnProgress = Callable[[records.Progress], None]
log = logging.getLogger(__name__)


def trainer_socket(state: Path) -> Path:
    return state / "staging" / "trainer.sock"


def staged(state: Path, name: str) -> Path:
    """The file ``name`` in the staging folder.

    Raises:
        BadData: the name could lead out of it.
    """
    if not STAGED.fullmatch(name) or name.startswith("."):
        raise BadData(f"{name[:80]!r} is no file name of the staging folder: A-Z a-z 0-9 . _ - only")
    return state / "staging" / name


class Trainer:
    """The trainer of a site as the gateway sees it."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def available(self) -> bool:
        """Whether a listener is there. Says nothing about its worker, which starts with the first request."""
        return control.is_listening(trainer_socket(self._state))

    def answers(self) -> bool:
        """Whether the listener answers at once, whatever it says, as it does unless it is stopped or hung."""
        try:
            return self.status() is not None
        except WardroundError:
            return True

    def status(self) -> records.Status | None:
        """What the listener says of itself; None where none is there, or it does not answer at once."""
        try:
            return self.ask(records.GetStatus(), timeout_s=AT_ONCE_S)
        except Unavailable:
            return None

    def ask(
        self,
        request: Request[A],
        progress: OnProgress | None = None,
        *,
        ending: control.Ending = lambda stop: nullcontext(),
        timeout_s: float | None = None,
    ) -> A:
        """Ask the listener; what reads patients may take as long as it takes, anything else five minutes.

        Args:
            ending: of an ``Interrupt``: ends the waiting, and not what the trainer does.
            timeout_s: of the answer, if it is less.

        Raises:
            Unavailable: no listener is there, it went away, or it is stopped or hung.
            BrokenProtocol: it sent something that its protocol does not have.
            WardroundError: what the trainer said, marked as its words; ``code`` is a DECLINED name or "".
        """
        if timeout_s is None and not isinstance(request, ROUND_REQUESTS + READING_REQUESTS):
            timeout_s = ANSWER_TIMEOUT_S
        try:
            answer = control.call(
                trainer_socket(self._state), request.to_document(), _as_document(progress), timeout_s=timeout_s,
                silent_s=liveness.SILENT_S, ending=ending, most=frames.MAX_LINE,
                parse=partial(_parsed, request.answer_class().max_parts),
                failure=lambda document: records.marked(records.error_from(document)),
            )  # fmt: skip
        except frames.Garbled as error:
            raise records.broken(error.message) from None
        return request.answer_from(answer)

    def abort(self, study_digest: str, revision: int, round_: int) -> None:
        """End one round's training at once. What was not committed is trained again when asked again.

        Raises:
            Unavailable: no listener is there, or it does not answer at once.
        """
        abort = records.Abort(study_digest=study_digest, revision=revision, round=round_)
        self.ask(abort, timeout_s=AT_ONCE_S)


def ask(state: Path, request: Request[A], progress: OnProgress | None = None) -> A:
    """Ask the listener if there is one, else a one-shot worker. Raises as they do.

    Raises:
        Unavailable: besides, at once where the listener is stopped or hung.
        NeedsPerson: there is no listener, and the trainer has a user of its own. The code of others that it runs runs
            as that user alone: whoever may remove the listener's socket would else have it run as the gateway's.
    """
    trainer = Trainer(state)
    if not trainer.available():
        if not isinstance(request, OUR_CODE_ALONE) and _has_own_user(state):
            raise NeedsPerson(
                f"{state / 'studies'} belongs to the trainer's user, and the trainer does not run",
                hint="start it: `site-agent run --only trainer` as that user",
                code=TRAINING_FAILED,
            )
        return one_shot(state, request, progress)
    if not trainer.answers():
        raise Unavailable(
            "the trainer does not answer",
            hint="`site-agent run` ends it and starts another; try again in a minute. One that runs alone (`--only "
            "trainer`) must be started again by you",
            code=TRAINING_FAILED,
        )
    return trainer.ask(request, progress)


def _has_own_user(state: Path) -> bool:
    """Whether the trainer's folder is another user's. Root has whatever is here anyway."""
    try:
        return os.geteuid() not in (0, (state / "studies").stat().st_uid)
    except FileNotFoundError:
        return False  # no trainer has run here


def one_shot(state: Path, request: Request[A], progress: OnProgress | None = None) -> A:
    """Ask an isolated worker that ends with its answer.

    Raises:
        TryAgain: the worker died.
        WardroundError: what it said.
    """
    try:
        return ask_alone(state, request, progress)
    except Died:
        raise
    except WardroundError as error:
        raise records.marked(error) from None


def ask_alone(state: Path, request: Request[A], progress: OnProgress | None = None) -> A:
    """The same, for the trainer's own listener: what the worker says is not yet marked as its words. Raises as
    ``Worker.ask``.
    """
    from site_agent.state.person import user_name

    with Worker(state, warm=False) as worker:
        if request.command == "status":  # of the listener, which is not there: what its worker would be
            user = {"user": user_name(os.geteuid()), "uid": os.geteuid()}
            in_force = {"isolation": worker.isolation, "missing": list(worker.missing)}
            return request.answer_from({**in_force, **user, "worker": None, "device": "cpu"})
        return worker.ask(request, progress)


class Died(TryAgain):
    """The worker did not start, or it ended before its answer."""


class Worker:
    """An isolated child process that reads patients, with torch where the request needs it.

    It dies with the thread that made it, so that thread must live as long as the worker is wanted.
    """

    def __init__(
        self, state: Path, *, warm: bool, options: Sequence[str] = (), given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Start it.

        Args:
            warm: it imports torch at once, and will be asked more than once.
            options: on its command line, `fl_algorithms.engine.hardware.Hardware.options`.
            given_up: whether nobody waits for it any more: then it is ended, while it starts too.

        Raises:
            TryAgain: it did not start; its own words are in the log.
        """
        ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        line = [sys.executable, "-P", "-m", "site_agent.trainer.process", "--fd", str(workers.fileno())]
        line += ["--parent", str(os.getpid()), "--state", str(state.resolve()), *(["--warm"] if warm else []), *options]
        with workers:
            # No terminal in any way: what it prints comes to our log, escaped, and none of it is a command's result.
            self._process = subprocess.Popen(
                line, pass_fds=(workers.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._output = threading.Thread(target=_repeat, args=(self._process.stdout,), name="worker-output", daemon=True)
        self._output.start()
        self._connection = ours
        self._stream = ours.makefile("rwb")
        self._turn = threading.Lock()
        self._watch: liveness.Watch | None = None  # while it is asked something
        self._frozen, self._given_up, self._closed = "", given_up, threading.Event()
        threading.Thread(target=self._look, name="worker-watch", daemon=True).start()
        ours.settimeout(HELLO_TIMEOUT_S)
        try:
            with self._watched():
                hello = self._read()
        except TimeoutError:
            hello = None
        except WardroundError:
            self.close()
            raise
        if not isinstance(hello, records.Hello):
            self.close()
            why = f": it {self._frozen}" if self._frozen else ""
            raise Died(f"the trainer's worker did not start{why}", hint="its log says why", code=TRAINING_FAILED)
        ours.settimeout(None)
        self.isolation: str = hello.isolation
        self.missing = tuple(hello.missing)
        if self.isolation == "none":
            log.warning(
                "NO ISOLATION: this system allows neither a network namespace nor seccomp, "
                "so the process that reads patients could reach the network"
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether it can be asked: it has not ended, and is not stopped."""
        return self._process.poll() is None and not liveness.is_stopped(self.pid)

    def ask(self, request: Request[A], progress: OnProgress | None = None) -> A:
        """One request, its progress and its result. Others wait for their turn.

        Raises:
            TryAgain: the worker died, or was ended: from here too, because it was stopped or hung.
            WardroundError: what it said.
        """
        with self._turn, self._watched():
            try:
                self._stream.write(json.dumps(request.to_document(), separators=(",", ":")).encode() + b"\n")
                self._stream.flush()
                while (reply := self._read(request.answer_class().max_parts)) is not None:
                    match reply:
                        case records.Result():
                            return request.answer_from(reply.document)
                        case records.Failure():
                            raise reply.error()
                        case records.Progress():
                            if progress is not None:
                                progress(reply)
                        case records.Alive():
                            pass  # ``_read`` has noted it
                        case records.Hello():
                            self.kill()
                            raise records.broken("its first words, for the second time")
            except (BrokenPipeError, ConnectionResetError):
                pass  # it died before it had read the request
        raise self._died(request.command)

    def end(self) -> None:
        """End it at once. Whoever waits for its answer gets ``TryAgain``."""
        if self._process.poll() is None:
            self._process.kill()

    def kill(self) -> None:
        """The same, and wait for its end."""
        self.end()
        self._process.wait()

    def close(self) -> None:
        """End it and wait for its end, and for the last that it printed."""
        self._closed.set()
        self.kill()
        self._output.join(OUTPUT_END_S)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._stream.close()  # it sends what is left of a request under which the worker died
        self._connection.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, max_parts: int = Answer.max_parts) -> records.Reply | None:
        """Its next reply; None where it died before the end of it."""
        line = self._stream.readline(records.LONGEST)
        if self._watch is not None:
            self._watch.heard()
        if not line.endswith(b"\n") and len(line) < records.LONGEST:
            return None
        try:
            return records.reply_from(_parsed(max_parts, line))
        except BadData as error:
            self.kill()  # which request its next line would answer is not known any more
            raise error if isinstance(error, records.BrokenProtocol) else records.broken(error.message) from None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While the block lasts, it is ended if it is stopped or hung, or given up."""
        self._watch, self._frozen = liveness.Watch(self.pid), ""
        try:
            yield
        finally:
            self._watch = None

    def _look(self) -> None:
        """Look at it now and then, until it is closed or ended from here."""
        while not self._closed.wait(LOOK_S):
            if (watch := self._watch) is None:
                continue
            if self._given_up():
                self.end()
                return
            if frozen := watch.frozen():
                self._frozen = frozen
                log.error("the trainer's worker (process %d) %s: it is ended", self.pid, frozen)
                self.end()
                return

    def _died(self, command: str) -> "Died":
        code = self._process.wait()
        if self._frozen:
            return Died(
                f"the trainer's worker {self._frozen} while it was asked to {command}, and was ended",
                hint="did somebody stop it, or is its data on a disk that does not answer?",
                code=TRAINING_FAILED,
            )
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Died(
            f"the trainer's worker ended ({how}) while it was asked to {command}",
            hint="its log says why; a round that was not finished is trained again when it is asked again",
            code=TRAINING_FAILED,
        )


def _repeat(printed: IO[bytes]) -> None:
    """What a worker prints, line by line, to our stderr, until its end."""
    with printed:
        while line := printed.readline(MAX_PRINTED):
            print(escaped(line.decode(errors="replace").rstrip("\n")), file=sys.stderr, flush=True)


def _parsed(max_parts: int, line: bytes) -> frames.Document:
    """A line of the trainer's as a document. Raises Garbled: too long, more than ``max_parts`` values, or no answer."""
    if len(line) >= records.LONGEST:
        raise frames.Garbled(f"an answer of more than {records.LONGEST} bytes")
    return frames.parsed(line, max_parts)


def _as_document(progress: OnProgress | None) -> control.Reply:
    """``progress`` for the documents that a trainer sends. It raises BrokenProtocol: one is no progress."""

    def tell(document: Any) -> None:
        step = records.Progress.from_document(document)
        if progress is not None:
            progress(step)

    return tell
