"""``site-agent run``: the gateway as a process, with its trainer beside it, and the commands it answers."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from site_agent.gateway import requests
from site_agent.gateway.agent import Agent
from site_agent.gateway.consent.preview import Preview
from site_agent.handoff import trainer_socket
from site_agent.state import formats
from site_agent.state.directory import SiteState
from site_agent.state.person import Person, behind
from wardround.errors import Unavailable, UsageProblem
from wardround.local import control, durable, memory
from wardround.local.event import set_by_signals
from wardround.local.logs import log_to_stderr

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
    state.require_joined()
    with durable.StateLock(state.root, "site-agent run"):
        formats.bring_forward(state.root)
        state.site()
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
    server = control.ControlServer(state.control, RequestDispatcher(state, agent).answer_document, fatal=agent.fail)
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


class RequestDispatcher:
    """Answers what commands ask of the running service."""

    def __init__(self, state: SiteState, agent: Agent) -> None:
        self._state = state
        self._agent = agent

    def answer_document(self, document: Mapping[str, Any], progress: control.Reply) -> Any:
        """The answer to one request, both as JSON. Raises UsageProblem: it is no request."""
        return self._answer(requests.request_from(document), progress).document()

    def _answer(self, request: requests.AnyRequest, progress: control.Reply) -> requests.Answer | Preview:
        agent, handler = self._agent, self._agent.commands
        match request:
            case requests.Status():
                return requests.ServiceStatus(agent.connected, os.geteuid(), agent.certificate_fork_since)
            case requests.Refresh():
                agent.refresh()
                return requests.Done()
            case requests.FetchReceipts():
                return requests.Receipts(agent.fetch_receipts())
            case requests.GetPreview(study, data):
                return handler.preview(study, data)
            case requests.Approve(study, data, digest, by):
                consent = handler.approve(study, data, digest, _person(by), progress)
                return requests.Approved(
                    agent.approved(consent), consent.rows, consent.study_digest, consent.exposure, consent.personalized
                )
            case requests.Withdraw(study, by):
                return requests.Withdrawn(agent.withdraw(study, _person(by)))
            case requests.SendFit(study, data, by):
                return handler.fit(study, data, _person(by))
            case requests.GetWaiting(study, round_):
                return handler.waiting(study, round_)
            case requests.Decide(study, round_, decision, update, by):
                return requests.Decided(agent.decide(study, round_, decision, update, _person(by)))
            case requests.Leave(by):
                return requests.Left(tuple(agent.leave(_person(by))))


def _person(claimed: Person) -> Person:
    """Who gave the command: as the command says, unless the kernel knows better.

    Raises:
        UsageProblem: nobody has such a user id.
    """
    peer = control.peer()
    person = behind(claimed, *peer) if peer is not None else claimed
    if min(person.uid, person.account.uid if person.account is not None else 0) < 0:
        raise UsageProblem("the request's `uid` is no user's")
    return person


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

    def on_death(self, act: Callable[[], object]) -> None:
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
