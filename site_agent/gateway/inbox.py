"""The assignments of a site: which wait, which is being done, which waits for a person.

The inbox holds the last assignment of each study. One that makes the work under way pointless (a newer round, a stop,
a withdrawal) interrupts it at once.
"""

import threading
from dataclasses import dataclass, field

from site_agent.gateway.connection.interrupt import Interrupt
from wardround.records.assignment import STOP, Assignment

MOST_STRANGE = 64  # assignments that wait, of studies that nobody here approved


@dataclass(frozen=True)
class Work:
    """An assignment that is being done, and how to call it off."""

    assignment: Assignment
    interrupt: Interrupt = field(default_factory=Interrupt)


class ResolveUploads:
    """To do before any assignment: ask the coordinator about the uploads that have no receipt."""


class Inbox:
    """What one thread is to do next, as the others say it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, Assignment] = {}
        self._held: dict[str, Assignment] = {}
        self._current: Work | None = None
        self._resolve_uploads = False
        self._closed = False

    def next(self) -> Work | ResolveUploads | None:
        """What to do now; waits for it. None: the inbox is closed. ``done`` must follow each ``Work``."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._resolve_uploads or self._closed)
            if self._closed:
                return None
            if self._resolve_uploads:
                self._resolve_uploads = False
                return ResolveUploads()
            self._current = Work(self._waiting.pop(next(iter(self._waiting))))
            return self._current

    def done(self) -> None:
        """The work that ``next`` gave is over."""
        with self._changed:
            self._current = None

    def put(self, assignment: Assignment, *, approved: bool = True) -> None:
        """Take an assignment, unless it is being done; interrupt what it makes pointless.

        Args:
            approved: somebody here approved its study, at whatever time. Of others there is nothing to end, and at most
                ``MOST_STRANGE`` wait: their number is the coordinator's alone, and the work under way may take hours.
        """
        with self._changed:
            has_room = len(self._waiting) < MOST_STRANGE or assignment.study in self._waiting
            if not approved and (assignment.kind == STOP or not has_room):
                return
            current = self._current_of(assignment.study)
            if current is not None and current.assignment.key == assignment.key and not current.interrupt.thrown:
                return
            self._waiting[assignment.study] = assignment
            self._changed.notify_all()
        if current is not None:
            current.interrupt.throw()

    def hold(self, assignment: Assignment) -> None:
        """Keep an assignment whose update waits for a person."""
        with self._changed:
            self._held[assignment.study] = assignment

    def release(self, study: str, round_: int) -> bool:
        """Go on with an assignment that waited for a person.

        Returns:
            True if an assignment of that round is here to be done; False: the coordinator must ask for it again.
        """
        with self._changed:
            assignment = self._held.pop(study, None)
            if assignment is not None and assignment.round == round_:
                self._waiting[study] = assignment
                self._changed.notify_all()
            current = self._current_of(study)
            here = [self._waiting.get(study), current.assignment if current is not None else None]
            return any(known is not None and known.round == round_ for known in here)

    def begin_anew(self, study: str) -> None:
        """Do a study's assignment again from its beginning, if it is being done or waits for a person."""
        with self._changed:
            current = self._current_of(study)
            again = self._held.pop(study, None) or (current.assignment if current is not None else None)
            if again is not None:
                self._waiting.setdefault(study, again)
                self._changed.notify_all()
        if current is not None:
            current.interrupt.throw()

    def drop(self, study: str) -> None:
        """Forget a study's assignments, and stop what is done for it. What was sent is asked about."""
        with self._changed:
            self._waiting.pop(study, None)
            self._held.pop(study, None)
            current = self._current_of(study)
            self._resolve_uploads = True
            self._changed.notify_all()
        if current is not None:
            current.interrupt.throw()

    def resolve_uploads(self) -> None:
        """Have the uploads without a receipt asked about before anything else."""
        with self._changed:
            self._resolve_uploads = True
            self._changed.notify_all()

    def close(self) -> None:
        """End ``next`` and the work under way."""
        with self._changed:
            self._closed = True
            current = self._current
            self._changed.notify_all()
        if current is not None:
            current.interrupt.throw()

    def _current_of(self, study: str) -> Work | None:
        current = self._current
        return current if current is not None and current.assignment.study == study else None
