"""What the dashboard knows: the service's answers on its socket for readers, asked once for each change."""

import datetime
import logging
import threading
from pathlib import Path
from typing import TypeVar

from coordinator.answers import Answer, Changed, SiteList, StudyList
from coordinator.journal_records import WaitingList
from coordinator.requests import (
    ListSites,
    ListStudies,
    ListWaiting,
    Request,
    ShowFits,
    ShowReport,
    ShowStatus,
    WatchAll,
)
from coordinator.study_answers import StudyFits, StudyReport, StudyStatus
from wardround.errors import Unavailable, WardroundError
from wardround.local import control, liveness
from wardround.web.live import Live

ANSWER_S = 60
AGAIN_S = 2.0  # after the service went away
MOST_KEPT = 512  # answers
log = logging.getLogger(__name__)
A = TypeVar("A", bound=Answer)


class Source:
    """Answers, kept until the service says that something changed. Safe to use from several threads."""

    def __init__(self, socket: Path, live: Live) -> None:
        self._socket = socket
        self._live = live
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], Answer] = {}
        self._of = 0  # the version that what is kept belongs to
        self._ending = threading.Event()
        self._times = -1  # changes since the watch began, as the service counts them

    def studies(self) -> StudyList:
        return self._ask(ListStudies(archived=False), StudyList)

    def status(self, study: str) -> StudyStatus:
        """Raises BadData: there is no such study."""
        return self._ask(ShowStatus(study=study), StudyStatus)

    def report(self, study: str) -> StudyReport:
        """Raises BadData: there is no such study."""
        return self._ask(ShowReport(study=study), StudyReport)

    def fits(self, study: str) -> StudyFits:
        """Raises BadData: there is no such study."""
        return self._ask(ShowFits(study=study), StudyFits)

    def sites(self) -> SiteList:
        return self._ask(ListSites(), SiteList)

    def waiting(self) -> WaitingList:
        """What waits for a second person, without what has lapsed since the service was asked."""
        answer, now = self._ask(ListWaiting(), WaitingList), datetime.datetime.now(datetime.UTC)
        waits = (row for row in answer.waiting if datetime.datetime.fromisoformat(row.until) >= now)
        return answer.model_copy(update={"waiting": tuple(waits)})

    def is_there(self) -> bool:
        """Whether the service answers."""
        try:
            self._asked(ListStudies(archived=False))
        except WardroundError:
            return False
        return True

    def watch(self) -> None:
        """Tell the pages of each change, in a thread of its own, until ``end``."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def end(self) -> None:
        """The pages are told of nothing more; the thread ends with the next word of the service."""
        self._ending.set()

    def _watch(self) -> None:
        was_there = True
        while not self._ending.is_set():
            self._times = -1
            try:
                control.call(
                    self._socket, WatchAll().to_document(), self._hear, timeout_s=None, silent_s=liveness.SILENT_S
                )
            except WardroundError as error:
                if was_there and not self._ending.is_set():
                    log.warning("the coordinator is not reached: %s", error.message)
                    self._live.tell()
                was_there = isinstance(error, Unavailable) and control.is_listening(self._socket)
            self._ending.wait(AGAIN_S)

    def _hear(self, item: object) -> None:
        times = Changed.from_document(item).times
        if times != self._times and not self._ending.is_set():
            self._times = times
            self._live.tell()

    def _ask(self, request: Request, kind: type[A]) -> A:
        key, version = (request.command, getattr(request, "study", "")), self._live.version
        with self._lock:
            if self._of != version or len(self._kept) >= MOST_KEPT:
                self._kept.clear()
                self._of = version
            kept = self._kept.get(key)
        if isinstance(kept, kind):
            return kept
        answer = kind.from_document(self._asked(request))
        with self._lock:
            if self._of == version == self._live.version:
                self._kept[key] = answer
        return answer

    def _asked(self, request: Request) -> object:
        answer: object = control.call(self._socket, request.to_document(), timeout_s=ANSWER_S)
        return answer
