"""What the page knows: the site's own files, read, and the running agent's answers on its command socket."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from site_agent.audit.left import LedgerReader, Left
from site_agent.gateway import service_requests
from site_agent.gateway.consent.rows import StudyRow, study_rows
from site_agent.gateway.policy_requests import NOTHING, GetProposed, Proposed
from site_agent.gateway.request_form import A, Request
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.state.directory import SiteState
from site_agent.state.site import Site
from wardround.errors import Unavailable, WardroundError
from wardround.local import control, liveness
from wardround.signing.certificates import Name
from wardround.web.live import Live

SERVICE_S = 600  # approving reads the table, perhaps after the round under way
LOOK_S = 1.0  # how often the files are looked at for changes
FOLDERS = ("offers", "consents", "journal", "ledger", "policies", "identity")


@dataclass(frozen=True)
class Here:
    """How the site stands now. ``service``: None where no agent runs."""

    site: Site
    service: ServiceStatus | None
    studies: tuple[StudyRow, ...]
    has_policy: bool
    left: Left
    proposed: Proposed


class Source:
    """One site. Safe to use from several threads."""

    def __init__(self, state: SiteState, live: Live) -> None:
        self._state = state
        self._live = live
        self._site = state.site()
        self._ledger = LedgerReader(state.ledger)
        self._reading = threading.Lock()
        self._ending = threading.Event()

    def here(self) -> Here:
        """Raises Unavailable, BadData: the ledger cannot be read."""
        coordinator = Name(self._site.federation, "coordinator").uri
        service = self.service()
        return Here(
            self._site, service, tuple(study_rows(self._state, coordinator, ask_trainer=False)),
            self._state.policy.exists(), self.left(), self.ask(GetProposed()) if service is not None else NOTHING,
        )  # fmt: skip

    def row(self, study: str) -> StudyRow | None:
        """Where this site stands in a study; None where it is not offered."""
        coordinator = Name(self._site.federation, "coordinator").uri
        rows = study_rows(self._state, coordinator, ask_trainer=False)
        return next((row for row in rows if row.id == study), None)

    def endorsed(self, study: str) -> tuple[str, ...]:
        """Who approved it so far, where that is not enough by the policy."""
        kept = self._state.endorsement(study)
        return tuple(person.text for person in kept.by) if kept is not None else ()

    def left(self) -> Left:
        """Raises Unavailable, BadData: the ledger cannot be read."""
        with self._reading:
            return self._ledger.read()

    def service(self) -> ServiceStatus | None:
        """How the agent runs; None where it does not."""
        try:
            return self.ask(service_requests.Status())
        except Unavailable:
            return None

    def ask(self, request: "Request[A]", progress: Callable[[Any], Any] | None = None) -> A:
        """The running agent's answer.

        Raises:
            Unavailable: none runs.
            WardroundError: what it refuses, and why.
        """
        if not control.is_listening(self._state.control):
            raise Unavailable("the agent does not run, and nothing can be decided", hint="start it: `site-agent run`")
        answer = control.call(
            self._state.control, request.document(), progress, timeout_s=SERVICE_S, silent_s=liveness.SILENT_S
        )
        return request.answer_from(answer)

    def watch(self) -> None:
        """Tell the pages of each change, in a thread of its own, until ``end``."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def end(self) -> None:
        self._ending.set()

    def _watch(self) -> None:
        seen = self._looked()
        while not self._ending.wait(LOOK_S):
            if (now := self._looked()) != seen:
                seen = now
                self._live.tell()

    def _looked(self) -> tuple[object, ...]:
        """Something else after each change that a page shows."""
        root = self._state.root
        files = [_mark(root / folder) for folder in FOLDERS] + [_mark(self._state.policy)]
        segments = [_mark(path) for path in sorted(self._state.ledger.glob("*.jsonl"))[-1:]]
        try:
            service: object = self.service()
        except WardroundError as error:
            service = error.message
        return (*files, *segments, service)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
