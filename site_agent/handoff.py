"""The local conversation between the gateway, which has the network, and the trainer, which has the patients.

Requests and answers are small JSON lines over a Unix socket; tensors cross as safetensors files in ``STATE/staging``.

    gateway or command ──> listener at STATE/staging/trainer.sock ──> worker     (isolated, torch, warm between rounds)
    command, no listener ──> one-shot worker                                     (isolated, ends with its answer)

    describe     {study, site, data?: NAME}                  -> {leaves, comes, stays, exposure, apart, network,
                                                                 model, parameters, weights}
    inspect      {PATHS and COLUMNS of trainer.kinds}        -> {digest, rows, test_rows, columns, patients}
    check        {study, site, data: NAME}                   -> {digest, rows, train_rows, validation_rows, test_rows,
                                                                 gives, classes, warnings, common, weights, seen}
    look         {data: NAME}                                -> {data, weights, bytes, missing, unreadable}
    digests      {data: NAME}                                -> {digest, weights}
    train        {study, revision, study_digest, site, round, attempt, base, base_digest, data}
                                                             -> {update, num_examples, num_validation, metrics}
    validate     the same                                    -> {num_examples, num_validation, metrics}
    commit       {study: NAME, revision, round}              -> {}
    discard      {study: NAME, revision, round}              -> {}
    finish       {study, revision, study_digest, site, data, best_round, best, contributors?, capped?,
                  left_out?}                                 -> {checkpoints}
    checkpoints  {study: NAME}                               -> {checkpoints}
    export       {study: NAME, checkpoint, out}              -> {files}
    predict      {study: NAME, checkpoint, table | images | arrays, out} -> {rows, out}
    device       {}                                          -> {device}
    status       {}                                          -> {isolation, missing, user, uid, worker, device}
    abort        {}                                          -> {}

``study`` is the resolved study's document where it is not called NAME; ``data`` is what was approved, as
``gateway.consent.trained_on`` says; ``weights`` are None, or {digest, used, drawn, unused} of the file that the private
tensors begin with; file names are those in the staging folder.
Progress of ``train`` is {step, steps}. Nothing here imports torch, and nobody's pickle is read.

What comes back is checked by ``answers``, at the worker's end and again at the gateway's: the trainer runs code of
others. Of a failure only ``code`` may go further than the hospital, and a failure's sentences are shown as the
trainer's.
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from wardround.errors import BadData, TryAgain, WardroundError
from wardround.local import control
from wardround.records import trainer as answers
from wardround.records.trainer import TRAINING_FAILED
from wardround.terminal import escaped

MAX_LINE = control.MAX_LINE
MAX_PRINTED = 4096  # bytes of one line that a worker prints; a longer one is several
LAST_WORDS_S = 5  # a process that it started may hold its output open
HELLO_TIMEOUT_S = 60  # a worker says hello before it imports torch
ANSWER_TIMEOUT_S = 300  # for what reads no patients: a cold start on a busy machine
ROUND_COMMANDS = frozenset({"train", "validate", "finish"})
READING_COMMANDS = frozenset({"inspect", "check", "digests", "predict"})  # a folder of images may be large
STAGED = re.compile(r"[A-Za-z0-9._-]{1,200}")
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

    def ask(self, command: str, progress: control.Reply | None = None, **fields: Any) -> Any:
        """Ask the listener; what reads patients may take as long as it takes, anything else five minutes.

        Raises:
            Unavailable: no listener is there, or it went away.
            BrokenProtocol: it said something else than it may: see ``answers``.
            WardroundError: what the trainer said, marked as its words; ``code`` is a DECLINED name or "".
        """
        timeout_s = None if command in ROUND_COMMANDS | READING_COMMANDS else ANSWER_TIMEOUT_S
        request = {**fields, "command": command}
        try:
            said = control.call(
                trainer_socket(self._state), request, _checked(progress), timeout_s=timeout_s, most=MAX_LINE,
                parse=partial(_parsed, command), failure=lambda said: answers.marked(answers.failure(said)),
            )  # fmt: skip
        except control.Garbled as error:
            raise answers.broken(error.message) from None
        return answers.answer(command, said)

    def abort(self) -> None:
        """End the round that is being trained, at once. What was not committed is trained again when asked again.

        Raises:
            Unavailable: no listener is there.
        """
        self.ask("abort")


def ask(state: Path, command: str, progress: control.Reply | None = None, **fields: Any) -> Any:
    """Ask the listener if there is one, else a one-shot worker. Raises as they do."""
    trainer = Trainer(state)
    if trainer.available():
        return trainer.ask(command, progress, **fields)
    return one_shot(state, command, progress, **fields)


def one_shot(state: Path, command: str, progress: control.Reply | None = None, **fields: Any) -> Any:
    """Ask an isolated worker that ends with its answer.

    Raises:
        TryAgain: the worker died.
        WardroundError: what it said.
    """
    try:
        return ask_alone(state, {**fields, "command": command}, progress)
    except Died:
        raise
    except WardroundError as error:
        raise answers.marked(error) from None


def ask_alone(state: Path, request: dict[str, Any], progress: control.Reply | None = None) -> Any:
    """The same, for the trainer's own listener: what the worker says is not yet marked as its words. Raises as
    ``Worker.ask``.
    """
    from site_agent.state.person import user_name

    with Worker(state, warm=False) as worker:
        if request["command"] == "status":  # of the listener, which is not there: what its worker would be
            user = {"user": user_name(os.geteuid()), "uid": os.geteuid()}
            in_force = {"isolation": worker.isolation, "missing": list(worker.missing)}
            return {**in_force, **user, "worker": None, "device": "cpu"}
        return worker.ask(request, progress)


class Died(TryAgain):
    """The worker did not start, or it ended before its answer."""


class Worker:
    """An isolated child process that reads patients, with torch where the request needs it.

    It dies with the thread that made it, so that thread must live as long as the worker is wanted.
    """

    def __init__(self, state: Path, *, warm: bool, options: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            warm: it imports torch at once, and will be asked more than once.
            options: on its command line, `fl_algorithms.hardware.Hardware.options`.

        Raises:
            TryAgain: it did not start; its own words are in the log.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        line = [sys.executable, "-P", "-m", "site_agent.trainer.process", "--fd", str(theirs.fileno())]
        line += ["--parent", str(os.getpid()), "--state", str(state.resolve()), *(["--warm"] if warm else []), *options]
        with theirs:
            # No terminal in any way: what it prints comes to our log, escaped, and none of it is a command's result.
            self._process = subprocess.Popen(
                line, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._words = threading.Thread(target=_repeat, args=(self._process.stdout,), name="worker-words", daemon=True)
        self._words.start()
        self._connection = ours
        self._stream = ours.makefile("rwb")
        self._turn = threading.Lock()
        ours.settimeout(HELLO_TIMEOUT_S)
        try:
            hello = self._read()
        except TimeoutError:
            hello = None
        except WardroundError:
            self.close()
            raise
        if hello is None:
            self.close()
            raise Died("the trainer's worker did not start", hint="its log says why", code=TRAINING_FAILED)
        ours.settimeout(None)
        in_force = answers.hello(hello.get("hello"))
        self.isolation: str = in_force.isolation
        self.missing = tuple(in_force.missing)
        if self.isolation == "none":
            log.warning(
                "NO ISOLATION: this system allows neither a network namespace nor seccomp, "
                "so the process that reads patients could reach the network"
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], progress: control.Reply | None = None) -> Any:
        """One request, its progress and its result. Others wait for their turn.

        Raises:
            TryAgain: the worker died, or was ended.
            WardroundError: what it said.
        """
        with self._turn:
            try:
                self._stream.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
                self._stream.flush()
                command = str(request["command"])
                while (answer := self._read(command)) is not None:
                    if "result" in answer:
                        return answers.answer(command, answer["result"])
                    if "error" in answer:
                        raise answers.failure(answer["error"])
                    _checked(progress)(answer.get("progress"))
            except (BrokenPipeError, ConnectionResetError):
                pass  # it died before it had read the request
        raise self._died(str(request["command"]))

    def kill(self) -> None:
        """End it at once, and wait for its end. Whoever waits for its answer gets ``TryAgain``."""
        if self.alive():
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it and wait for its end, and for the last that it printed."""
        self.kill()
        self._words.join(LAST_WORDS_S)
        self._stream.close()
        self._connection.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, command: str = "hello") -> dict[str, Any] | None:
        """Its next line; None where it died before the end of it."""
        line = self._stream.readline(answers.LONGEST)
        if not line.endswith(b"\n") and len(line) < answers.LONGEST:
            return None
        try:
            return _parsed(command, line)
        except control.Garbled as error:
            self.kill()  # what else it has said cannot be told apart any more
            raise answers.broken(error.message) from None

    def _died(self, command: str) -> "Died":
        code = self._process.wait()
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


def _parsed(command: str, line: bytes) -> dict[str, Any]:
    """A line of the trainer's about ``command``. Raises control.Garbled: too long, or no answer."""
    if len(line) >= answers.LONGEST:
        raise control.Garbled(f"an answer of more than {answers.LONGEST} bytes")
    return control.parsed(line, answers.MAX_PARTS.get(command, answers.FEW_PARTS))


def _checked(progress: control.Reply | None) -> control.Reply:
    """``progress`` for what has its form. Raises BadData for the rest."""

    def tell(item: Any) -> None:
        found = answers.progress(item)
        if progress is not None:
            progress(found)

    return tell
