"""The local conversation between the gateway, which has the network, and the trainer, which has the patients.

Requests and answers are small JSON lines over a Unix socket; tensors cross as safetensors files in ``STATE/staging``.

    gateway or command ──> listener at STATE/staging/trainer.sock ──> worker     (isolated, torch, warm between rounds)
    command, no listener ──> one-shot worker                                     (isolated, ends with its answer)

    describe     {study, site, data?: NAME}                  -> {leaves, comes, stays, exposure, apart, network,
                                                                 model, parameters, weights}
    inspect      {PATHS and COLUMNS of trainer.kinds}        -> {digest, rows, test_rows, columns, patients}
    check        {study, site, data: NAME}                   -> {digest, rows, train_rows, validation_rows, test_rows,
                                                                 gives, classes, warnings, common, weights}
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
    status       {}                                          -> {isolation, user, uid, worker, device}
    abort        {}                                          -> {}

``study`` is the resolved study's document where it is not called NAME; ``data`` is what was approved, as
``gateway.consent.trained_on`` says; ``weights`` are None, or {digest, used, drawn, unused} of the file that the private
tensors begin with; file names are those in the staging folder.
Progress of ``train`` is {step, steps}. Nothing here imports torch, and nobody's pickle is read.

The two programs trust each other with sentences, not with the hospital's network: of a ``WardroundError`` that comes
back, only ``code`` may go further than the hospital.
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
from pathlib import Path
from typing import Any

from wardround import control
from wardround.errors import BY_EXIT_CODE, BadData, TryAgain, WardroundError

TRAINING_FAILED = "DECLINED_TRAINING_FAILED"
MAX_LINE = control.MAX_LINE
HELLO_TIMEOUT_S = 60  # a worker says hello before it imports torch
ANSWER_TIMEOUT_S = 300  # for what reads no patients: a cold start on a busy machine
ROUND_COMMANDS = frozenset({"train", "validate", "finish"})
READING_COMMANDS = frozenset({"inspect", "check", "predict"})  # a folder of images may be large
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
            WardroundError: what the trainer said; ``code`` is a DECLINED name or "".
        """
        timeout_s = None if command in ROUND_COMMANDS | READING_COMMANDS else ANSWER_TIMEOUT_S
        request = {**fields, "command": command}
        return control.call(trainer_socket(self._state), request, progress, timeout_s=timeout_s)

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
    from site_agent.state import user_name

    with Worker(state, warm=False) as worker:
        if command == "status":  # of the listener, which is not there: what its worker would be
            user = {"user": user_name(os.geteuid()), "uid": os.geteuid()}
            return {"isolation": worker.isolation, **user, "worker": None, "device": "cpu"}
        return worker.ask({**fields, "command": command}, progress)


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
            # Its stdout is our stderr: nothing that a library prints may be mistaken for a command's result.
            self._process = subprocess.Popen(line, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=2)
        self._connection = ours
        self._stream = ours.makefile("rwb")
        self._turn = threading.Lock()
        ours.settimeout(HELLO_TIMEOUT_S)
        try:
            hello = self._read()
        except TimeoutError:
            hello = None
        if hello is None or "hello" not in hello:
            self.close()
            raise TryAgain("the trainer's worker did not start", hint="its log says why", code=TRAINING_FAILED)
        ours.settimeout(None)
        self.isolation: str = hello["hello"]["isolation"]
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
                while (answer := self._read()) is not None:
                    if "result" in answer:
                        return answer["result"]
                    if "error" in answer:
                        raise _as_error(answer["error"])
                    if progress is not None:
                        progress(answer["progress"])
            except (BrokenPipeError, ConnectionResetError):
                pass  # it died before it had read the request
        raise self._died(str(request["command"]))

    def kill(self) -> None:
        """End it at once, and wait for its end. Whoever waits for its answer gets ``TryAgain``."""
        if self.alive():
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it and wait for its end."""
        self.kill()
        self._stream.close()
        self._connection.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any] | None:
        line = self._stream.readline(MAX_LINE)
        return json.loads(line) if line.endswith(b"\n") else None

    def _died(self, command: str) -> TryAgain:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return TryAgain(
            f"the trainer's worker ended ({how}) while it was asked to {command}",
            hint="its log says why; a round that was not finished is trained again when it is asked again",
            code=TRAINING_FAILED,
        )


def _as_error(said: dict[str, Any]) -> WardroundError:
    kind = BY_EXIT_CODE.get(said["exit_code"], WardroundError)
    return kind(said["message"], hint=said["hint"], code=said["code"])
