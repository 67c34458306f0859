"""``site-agent run``: the gateway as a process, with its trainer beside it, and the commands it answers."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from site_agent.gateway.agent import Agent
from site_agent.handoff import trainer_socket
from site_agent.state.directory import SiteState
from site_agent.state.person import behind
from wardround.errors import Unavailable, UsageProblem
from wardround.local import control, durable, memory
from wardround.local.event import set_by_signals
from wardround.terminal import log_to_stderr

PR_SET_PDEATHSIG = 1
TRAINER_START_S = 60
TRAINER_STOP_S = 20
log = logging.getLogger(__name__)


def run(state: SiteState, *, with_trainer: bool, options: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT. Prints ``ready`` on stdout when commands and, if it is ours, the trainer answer.

    The coordinator need not be reachable: the agent goes on trying, and says so.

    Args:
        options: for the trainer's command line.

    Raises:
        NeedsPerson: not joined, a broken ledger, or the coordinator refuses this site for good.
        TryAgain: another process owns the state directory.
        StorageFailed: the disk failed; start again when it is sound.
    """
    memory.hide()
    log_to_stderr()
    state.site()
    with durable.StateLock(state.root, "site-agent run"):
        state.make_folders()
        trainer = TrainerProcess(state.root, options) if with_trainer else None
        try:
            agent = Agent(state)
            try:
                _serve(state, agent, trainer)
            finally:
                agent.stop()
        finally:
            if trainer is not None:
                trainer.stop()


def _serve(state: SiteState, agent: Agent, trainer: "TrainerProcess | None") -> None:
    if trainer is not None:
        trainer.on_death(agent.end)
    server = control.ControlServer(state.control, Commands(state, agent).answer, fatal=agent.fail)
    try:
        with set_by_signals(agent.stopped):
            agent.start()
            print("ready", flush=True)
            error = agent.wait()
    finally:
        server.close()
    if error is not None:
        raise error
    if trainer is not None and trainer.died:
        if trainer.code == durable.StorageFailed.exit_code:
            raise durable.StorageFailed(
                "the disk failed at the trainer", hint="its last words are above; check the disk"
            )
        raise Unavailable("the trainer's listener ended by itself", hint="its last words are above; run again")


class Commands:
    """What the commands of ``site-agent`` ask of a running service."""

    def __init__(self, state: SiteState, agent: Agent) -> None:
        self._state = state
        self._agent = agent

    def answer(self, request: dict[str, Any], progress: control.Reply) -> Any:
        """One command, one result."""
        command = request.get("command")
        if command == "status":
            since = self._agent.certificate_fork_since
            return {"connected": self._agent.connected, "uid": os.geteuid(), "certificate_fork_since": since}
        if command == "refresh":
            self._agent.refresh()
            return {}
        if command == "preview":
            return self._agent.desk.preview(*control.wanted(request, study=str, data=str))
        if command == "receipts":
            return {"receipts": self._agent.fetch_receipts()}
        if command == "approve":
            study, data, digest = control.wanted(request, study=str, data=str, digest=str)
            consent = self._agent.desk.approve(study, data, digest, _person(request), progress)
            return {
                "told": self._agent.approved(consent), "rows": consent.rows, "study_digest": consent.study_digest,
                "exposure": consent.exposure, "apart": consent.apart,
            }  # fmt: skip
        if command == "withdraw":
            (study,) = control.wanted(request, study=str)
            return {"told": self._agent.withdraw(study, _person(request))}
        if command == "waiting":
            return self._agent.desk.waiting(*control.wanted(request, study=str, round=int))
        if command in ("released", "rejected"):
            study, round_, update = control.wanted(request, study=str, round=int, update=str)
            return {"going": self._agent.decide(study, round_, command, update, _person(request))}
        if command == "leave":
            return {"untold": self._agent.leave(_person(request))}
        raise UsageProblem(
            f"the running service knows no command {str(command)[:40]!r}", hint="is it an older version?"
        )


def _person(request: dict[str, Any]) -> dict[str, Any]:
    """Who gave the command, in the form that the ledger keeps: as the command says, unless the kernel knows better.

    Raises:
        UsageProblem: it is not in that form.
    """
    (by,) = control.wanted(request, by=dict)
    peer = control.peer()
    by = behind(by, *peer) if peer is not None else by
    name, uid = control.wanted(by, name=str, uid=int)
    found: dict[str, Any] = {"name": name, "uid": uid}
    if "source" in by:
        (found["source"],) = control.wanted(by, source=str)
    if "account" in by:
        (account,) = control.wanted(by, account=dict)
        account_name, account_uid = control.wanted(account, name=str, uid=int)
        found["account"] = {"name": account_name, "uid": account_uid}
        uid = min(uid, account_uid)
    if uid < 0:
        raise UsageProblem("the request's `uid` is no user's")
    return found


class TrainerProcess:
    """The trainer's listener as our child. It dies with us.

    Raises:
        Unavailable: it did not get ready.
    """

    def __init__(self, state: Path, options: Sequence[str] = ()) -> None:
        line = [sys.executable, "-P", "-m", "site_agent.cli.main", "run", "--only", "trainer", "--state", str(state)]
        line += options
        self._process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent
        )
        self._stopping = False
        self.died = False
        self.code = 0
        late = threading.Timer(TRAINER_START_S, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        ready = any(text.strip() == "ready" for text in iter(self._process.stdout.readline, ""))
        late.cancel()
        if not ready or not control.is_listening(trainer_socket(state)):
            self.stop()
            raise Unavailable("the trainer's listener did not start", hint="its last words are above")

    def on_death(self, act: Any) -> None:
        """Call ``act`` if it ends before it is stopped."""

        def watch() -> None:
            self.code = self._process.wait()
            if not self._stopping:
                self.died = True
                act()

        threading.Thread(target=watch, name="trainer-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(TRAINER_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
