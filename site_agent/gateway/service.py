"""``site-agent run``: the gateway as a process, with its trainer beside it, and the commands it answers."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from site_agent.gateway import peer_requests, policy_requests, requests, service_requests
from site_agent.gateway.agent import Agent
from site_agent.gateway.consent.preview import Preview
from site_agent.gateway.consent.recorded import person_entry
from site_agent.gateway.monitoring import Monitoring
from site_agent.gateway.request_form import Answer, Done
from site_agent.gateway.trainer_process import TrainerApart, TrainerProcess
from site_agent.state import formats
from site_agent.state.directory import SiteState
from site_agent.state.person import Person, behind
from wardround.errors import UsageProblem
from wardround.local import control, durable, memory
from wardround.local.event import set_by_signals
from wardround.local.logs import log_to_stderr
from wardround.web.monitoring import monitored
from wardround.web.tracing import traced

log = logging.getLogger(__name__)


def run(
    state: SiteState, *, with_trainer: bool, options: Sequence[str] = (), metrics: str = "", traces: str = ""
) -> None:
    """Serve until SIGTERM or SIGINT. Prints ``ready`` on stdout when commands and, if it is ours, the trainer answer.

    The coordinator need not be reachable: the agent goes on trying, and says so.

    Args:
        options: for the trainer's command line.
        metrics: the address of metrics and health, of this machine alone; "" for none.
        traces: that of a collector for spans, of this machine alone; "" for none.

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
        trainer: TrainerProcess | TrainerApart = (
            TrainerProcess(state.root, options) if with_trainer else TrainerApart(state.root)
        )
        try:
            agent = Agent(state)
            try:
                with traced(traces, "wardround-site", only_here=True):
                    _serve(state, agent, trainer, metrics)
            finally:
                agent.stop()
        finally:
            trainer.stop()


def _serve(state: SiteState, agent: Agent, trainer: TrainerProcess | TrainerApart, metrics: str) -> None:
    trainer.keep(agent.fail)
    dispatcher = RequestDispatcher(state, agent, lambda: trainer.problem)
    server = control.ControlServer(state.control, dispatcher.answer_document, fatal=agent.fail)
    monitoring = Monitoring(state, dispatcher.status)
    try:
        with (
            set_by_signals(agent.stopped),
            monitored(metrics, monitoring.families, monitoring.is_ready, only_here=True),
        ):
            agent.start()
            print("ready", flush=True)
            error = agent.wait()
    finally:
        server.close()
    if error is not None:
        raise error


class RequestDispatcher:
    """Answers what commands ask of the running service."""

    def __init__(self, state: SiteState, agent: Agent, trainer_problem: Callable[[], str] = lambda: "") -> None:
        self._state = state
        self._agent = agent
        self._trainer_problem = trainer_problem

    def answer_document(self, document: Mapping[str, Any], progress: control.Reply) -> Any:
        """The answer to one request, both as JSON. Raises UsageProblem: it is no request."""
        return self._answer(requests.request_from(document), progress).document()

    def status(self) -> service_requests.ServiceStatus:
        """How the service runs now."""
        agent = self._agent
        return service_requests.ServiceStatus(
            agent.connected, os.geteuid(), agent.certificate_fork_since, self._trainer_problem()
        )

    def _answer(self, request: requests.AnyRequest, progress: control.Reply) -> Answer | Preview:
        agent, handler = self._agent, self._agent.commands
        match request:
            case service_requests.Status():
                return self.status()
            case service_requests.Refresh():
                agent.refresh()
                return Done()
            case service_requests.FetchReceipts():
                return service_requests.Receipts(agent.fetch_receipts())
            case requests.GetPreview(study, data):
                return handler.preview(study, data)
            case requests.Approve(study, data, digest, by):
                consent = handler.approve(study, data, digest, _person(by), progress)
                return requests.Approved(
                    agent.approved(consent), consent.rows, consent.study_digest, consent.exposure, consent.personalized
                )
            case requests.Withdraw(study, by):
                return requests.Withdrawn(agent.withdraw(study, _person(by)))
            case requests.SendFit(study, data, digest, fits, rows, by):
                return handler.fit(study, data, digest, requests.Fit(fits, rows), _person(by))
            case requests.ListSummaries():
                return handler.summaries.offered()
            case requests.GetSummary(request_name, data):
                return handler.summaries.show(request_name, data)
            case requests.TellSummary(request_name, data, digest, again, by):
                return handler.summaries.tell(request_name, data, digest, _person(by), again=again)
            case requests.GetWaiting(study, round_):
                return handler.releases.waiting(study, round_)
            case requests.Decide(study, round_, decision, update, by):
                return requests.Decided(agent.decide(study, round_, decision, update, _person(by)))
            case requests.PutPolicy(text, before, by):
                return requests.PolicyPut(handler.policy.put(text.encode(), before, person_entry(_person(by))))
            case policy_requests.GetProposed():
                return handler.policy.proposed()
            case policy_requests.TakeBackPolicy(sha256, by):
                handler.policy.take_back(sha256, person_entry(_person(by)))
                return Done()
            case peer_requests.GetPeers(study):
                return handler.peers.of_study(study)
            case peer_requests.KnowPeer(site, fingerprint, by):
                handler.peers.know(site, fingerprint, _person(by))
                return Done()
            case peer_requests.ForgetPeer(site, by):
                handler.peers.forget(site, _person(by))
                return Done()
            case peer_requests.CheckSum():
                return agent.check_sum(request)
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
