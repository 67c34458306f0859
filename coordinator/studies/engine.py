"""The one thread that owns the studies: what happens comes in by a queue, what follows goes out when it is durable.

``study.advance`` judges; here its judgement is written down in one transaction, and only then acted upon: assignments
to the sites' streams, an aggregation to a worker, spools and models that nobody needs any more away. Waiting is a
blocking ``get`` with the next deadline as its timeout; nothing polls.

Before ``start`` (a command on a state directory that no service owns) the calls run in the caller's thread, and what
needs a running service waits for one: an open round is told to the sites when they connect, an aggregation is done at
the next start.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from coordinator.models.downloads import Downloads
from coordinator.storage import database
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Records, Store
from coordinator.studies import cleanup
from coordinator.studies.assignments import Assignments
from coordinator.studies.conclusion import Conclusion, conclude
from coordinator.studies.failures import StudyFailed, blamed, said
from coordinator.studies.lifecycle import (
    ENDED,
    Action,
    Aggregate,
    Answer,
    Answered,
    Clock,
    Closed,
    Event,
    Gone,
    Halted,
    Kind,
    Now,
    Opened,
    Outcome,
    Phase,
    Ready,
    Restarted,
    Round,
    Tell,
    advance,
    halted,
)
from coordinator.studies.study import Assignment, Stream, Study, TwoLines, study_from_row
from wardround.errors import CannotWrite, TryAgain
from wardround.local.durable import StorageFailed

LATER_S = 5  # after which a step of a study that could not be written is tried again
T = TypeVar("T")
Also = Callable[[Records], None]
log = logging.getLogger(__name__)


class Engine:
    """The studies of one coordinator.

    Args:
        fatal: called with an error after which the process must end, a failed disk: what is durable is then read again.
            An error in one study pauses that study, and nothing else.
        wall: Unix time, for the record. ``ticks``: a clock that does not jump, for deadlines.
    """

    def __init__(
        self,
        records: Store,
        blobs: Blobs,
        *,
        fatal: Callable[[BaseException], None],
        wall: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = records
        self._blobs = blobs
        self._fatal = fatal
        self._assignments = Assignments(records, Downloads(records, blobs))
        self._wall = wall
        self._ticks = ticks
        self._studies: dict[str, Study] = {}
        self._streams: dict[str, Stream] = {}
        self._held: dict[tuple[str, str], tuple[int, int, int]] = {}  # (study, site): revision, round, attempt
        self._followers: list[tuple[str, queue.SimpleQueue[bool]]] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._alone = threading.RLock()
        self._gate = threading.Lock()
        self._running = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._workers: ThreadPoolExecutor | None = None
        self._unreadable: dict[str, str] = {}  # studies whose record is damaged: the others go on without them
        self._later: dict[str, float] = {}  # study -> when a step that could not be written is tried again
        with records.read() as read:
            for row in read.all(database.studies):  # the later revision replaces the earlier
                self._load(read, row)

    def _load(self, read: Records, row: database.Row) -> None:
        name = str(row["name"])
        try:
            self._studies[name] = study_from_row(read, row)
            self._unreadable.pop(name, None)
        except StorageFailed:
            raise
        except Exception as error:  # whatever stands in that row, it is that study's failure alone
            log.exception("%s: what is kept of revision %s cannot be read", name, row["revision"])
            self._studies.pop(name, None)
            self._unreadable[name] = said(error)

    # The thread.

    def start(self) -> None:
        """Begin to own the studies, and take up what the last process left."""
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="aggregation")
        self._running = True
        if not self._unreadable:  # else what belongs to a study that cannot be read might be thrown away
            cleanup.tidy(self._store, self._blobs, self._studies.values())
        for study in list(self._studies.values()):
            if study.life.phase in (Phase.WAITING, Phase.RUNNING):
                away_s = max(0.0, self._wall() - study.saved.wall)
                left = study.saved.round_left(study.life), study.saved.start_left(study.life)
                self._step_alone(study.name, Restarted(away_s, *left))
        self._thread.start()

    def stop(self) -> None:
        """Wait for an aggregation, do the jobs that are queued, and end."""
        if not self._running:
            return
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown()
        self._jobs.put(None)
        self._thread.join()

    def call(self, act: Callable[[], T]) -> T:
        """Run ``act`` where the studies are owned, and return or raise what it does."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(act())
            except BaseException as error:
                if isinstance(error, StorageFailed):
                    self._fatal(error)  # before the next job, which would stand on what the disk may not have
                done.set_exception(error)

        with self._gate:
            queued = self._running and threading.current_thread() is not self._thread
            if queued:
                self._jobs.put(job)
        if not queued:
            with self._alone:
                return act()
        return done.result()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._patience())
                if job is None:
                    break
                job()
            except queue.Empty:
                pass
            try:
                self._let_time_pass()
            except StorageFailed as error:
                self._fatal(error)
                return
        with self._gate:
            self._running = False
        while not self._jobs.empty():
            if job := self._jobs.get():
                job()

    def _patience(self) -> float | None:
        times = [time for study in self._studies.values() if (time := self._next_time(study)) is not None]
        return max(0.0, min(times) - self._ticks()) if times else None

    def _next_time(self, study: Study) -> float | None:
        """When a study must be looked at without anything having happened."""
        deadline = study.life.next_deadline
        return None if deadline is None else max(deadline, self._later.get(study.name, deadline))

    def _let_time_pass(self) -> None:
        now = self._ticks()
        for study in list(self._studies.values()):
            time = self._next_time(study)
            if time is not None and time <= now:
                self._step_alone(study.name, Clock())

    def _step_alone(self, name: str, event: Event) -> None:
        """A step that nobody waits for: what goes wrong in it is that study's, and the others go on.

        Raises:
            StorageFailed: the process must end.
        """
        self._later.pop(name, None)
        try:
            self._advance(name, event)
        except StorageFailed:
            raise
        except (CannotWrite, TryAgain) as error:
            log.error("%s: %s; trying again in %d s", name, error.message, LATER_S)
            self._later[name] = self._ticks() + LATER_S
        except Exception as error:
            log.exception("%s: a step failed", name)
            self._halt(name, said(error))

    # What others ask. All of it runs where the studies are owned.

    def studies(self) -> list[Study]:
        return self.call(lambda: sorted(self._studies.values(), key=lambda study: study.name))

    def unreadable(self) -> dict[str, str]:
        """Studies whose record here is damaged, and why; nothing can be done for them until it is restored."""
        return self.call(lambda: dict(self._unreadable))

    def find(self, name: str) -> Study | None:
        return self.call(lambda: self._studies.get(name))

    def add(self, study: Study, also: Also) -> None:
        """A new study, or a new revision of one that has ended or never ran; its sites hear of it."""

        def act() -> None:
            with self._store.write() as records:
                also(records)
                records.add(database.studies, **study.row(self._wall(), self._ticks()))
            self._studies[study.name] = study
            for site in study.rules.sites:
                self._push(site, study)
            self._tell_followers(study.name)

        self.call(act)

    def happened(self, name: str, event: Event, also: Also | None = None) -> Study:
        """Let a study know, in one transaction with ``also``."""
        return self.call(lambda: self._advance(name, event, also))

    def ready(self, site: str, name: str) -> None:
        """The site approved this revision. Said again on every connection, it changes nothing."""

        def act() -> None:
            study = self._studies[name]
            if site not in study.life.ready and study.life.phase not in ENDED:
                self._advance(name, Ready(site))

        self.call(act)

    def gone(self, site: str, name: str, code: str) -> None:
        def act() -> None:
            if site in self._studies[name].life.ready:
                self._advance(name, Gone(site, code))

        self.call(act)

    def declined(self, site: str, name: str, round_number: int, attempt: int, code: str) -> None:
        """The site will not do an assignment. Of another round or attempt, or after an answer, it changes nothing."""

        def act() -> None:
            current = self._open_round(name)
            if current and (current.number, current.attempt) == (round_number, attempt) and site in current.unanswered:
                log.info("%s: site %s declines round %d: %s", name, site, round_number, code)
                self._advance(name, Answered(site, Answer(Kind.DECLINED, code)))

        self.call(act)

    def held(self, site: str, name: str, round_number: int, attempt: int) -> None:
        """The site's update waits for a person there: it may still come. In memory; every connection says it again."""

        def act() -> None:
            current, asked = self._open_round(name), (self._studies[name].revision, round_number, attempt)
            if not current or (current.number, current.attempt) != asked[1:] or site not in current.unanswered:
                return
            if self._held.get((name, site)) != asked:  # said again, it changes nothing and nobody is told
                log.info("%s: site %s holds its update of round %d for a person", name, site, round_number)
                self._held[name, site] = asked
                self._tell_followers(name)

        self.call(act)

    def _open_round(self, name: str) -> Round | None:
        """The attempt in which answers are taken now."""
        life = self._studies[name].life
        return None if life.aggregating else life.round

    def holding(self, name: str) -> frozenset[str]:
        """The sites whose update of the round under way waits for a person there."""

        def act() -> frozenset[str]:
            study = self._studies[name]
            if (one := study.life.round) is None:
                return frozenset()
            asked = (study.revision, one.number, one.attempt)
            return frozenset(site for site in one.unanswered if self._held.get((name, site)) == asked)

        return self.call(act)

    def revoked(self, site: str) -> None:
        """Go on without a site in every study."""
        for study in self.studies():
            self.gone(site, study.name, "SITE_REVOKED")

    def watch(self, site: str, stream: Stream) -> None:
        """Send a site's studies and its open assignments to ``stream``, and from now on the new ones.

        A stream that the site had before ends.
        """

        def act() -> None:
            if old := self._streams.get(site):
                old.end()
            self._streams[site] = stream
            self._seen(site)
            for study in self._studies.values():
                if site in study.rules.sites:
                    stream.put(study)
            for study in self._studies.values():
                if assignment := self._assignments.of(study, site):
                    stream.put(assignment)

        self.call(act)

    def unwatch(self, site: str, stream: Stream) -> None:
        def act() -> None:
            self._seen(site)
            if self._streams.get(site) is stream:
                del self._streams[site]

        self.call(act)

    def connected(self) -> frozenset[str]:
        return self.call(lambda: frozenset(self._streams))

    def follow(self, name: str) -> "queue.SimpleQueue[bool]":
        """A queue that gets True after each change of a study, and False when the service goes down."""
        changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.call(lambda: self._followers.append((name, changes)))
        return changes

    def unfollow(self, changes: "queue.SimpleQueue[bool]") -> None:
        def act() -> None:
            self._followers = [pair for pair in self._followers if pair[1] is not changes]

        self.call(act)

    def say_goodbye(self) -> None:
        """The service goes down: tell the sites and the followers."""

        def act() -> None:
            for stream in self._streams.values():
                stream.goodbye()
            for _, changes in self._followers:
                changes.put(False)

        self.call(act)

    # One step of a study.

    def _advance(self, name: str, event: Event, also: Also | None = None, newest: str = "") -> Study:
        """Judge, write down, act. If the writing fails, nothing has happened. What fails in the study itself pauses it.

        Raises:
            TryAgain: the study was paused for that.
            Exception: as ``also`` and the store; that says nothing about the study.
        """
        try:
            return self._step(name, event, also, newest)
        except StudyFailed as failed:
            log.error("%s: the coordinator failed at this study", name, exc_info=failed.error)
            self._halt(name, f"the coordinator failed at it: {said(failed.error)}")
            raise TryAgain(f"study `{name}` is paused: the coordinator failed at it", code="TOO_BUSY") from None

    def _halt(self, name: str, why: str) -> None:
        """Pause a study in which something failed, unless it is; if need be in memory alone.

        Raises:
            StorageFailed: the process must end.
        """
        if self._studies[name].life.phase not in (Phase.WAITING, Phase.RUNNING):
            return
        try:
            self._step(name, Halted(why), None, "")
        except StorageFailed:
            raise
        except Exception:
            log.exception("%s: that it is paused could not be written; at the next start it is tried again", name)
            study = self._studies[name]
            self._studies[name] = replace(study, life=halted(study.life, why))
            self._tell_followers(name)

    def _step(self, name: str, event: Event, also: Also | None, newest: str) -> Study:
        before = self._studies[name]
        now = Now(self._ticks(), frozenset(self._streams))
        with blamed():
            life, actions = advance(before.life, before.rules, event, now)
        if life is before.life and also is None:
            return before
        study = replace(before, life=life, newest=newest or before.newest).saved_at(self._wall(), self._ticks())
        with self._store.write() as records:
            if also is not None:
                also(records)
            with blamed():
                for action in actions:
                    study = self._write_down(records, study, action)
                records.put(database.studies, **study.row(self._wall(), self._ticks()))
        self._studies[name] = study
        with blamed():
            for action in actions:
                self._act(study, action)
            cleanup.forget(self._blobs, before, study, self._studies.values())
        self._tell_followers(name)
        return study

    def _write_down(self, records: Records, study: Study, action: Action) -> Study:
        key = {"study": study.name, "revision": study.revision}
        if isinstance(action, Opened):
            one = action.round
            records.put(
                database.rounds, **key, number=one.number, attempt=one.attempt, closing=one.closing, base=study.newest,
                asked=json.dumps(one.asked), opened_s=self._wall(),
            )  # fmt: skip
        elif isinstance(action, Closed):
            one = action.round
            key |= {"number": one.number, "attempt": one.attempt}
            row = records.get(database.rounds, **key)
            assert row is not None
            made = action.outcome == Outcome.CLOSED and not one.closing
            answers = {site: [answer.kind, answer.code, answer.upload] for site, answer in sorted(one.answers.items())}
            records.change(
                database.rounds, key, closed_s=self._wall(), outcome=action.outcome, answers=json.dumps(answers),
                model=study.newest if made else None,
            )  # fmt: skip
            if action.outcome == Outcome.CLOSED:
                return study.judged(one, row["base"], records)
        return study

    def _act(self, study: Study, action: Action) -> None:
        match action:
            case Opened(one):
                log.info("%s: round %d, attempt %d: %s", study.name, one.number, one.attempt, ", ".join(one.asked))
                for site in one.unanswered:
                    self._push(site, self._assignments.of(study, site))
            case Aggregate(one):
                if workers := self._workers:
                    workers.submit(self._aggregate, study, one)
            case Closed(one, outcome):
                log.info("%s: round %d, attempt %d: %s", study.name, one.number, one.attempt, outcome)
            case Tell(phase):
                log.info("%s: %s %s", study.name, phase, study.life.why)
                for site in study.life.ready:
                    self._push(site, self._assignments.of(study, site))

    def _aggregate(self, study: Study, one: Round) -> None:
        """In the worker: make the next model, and let the study know."""
        try:
            end = conclude(self._store, self._blobs, study, one)
            self.call(lambda: self._concluded(study, one, end))
        except StorageFailed as error:
            self._fatal(error)

    def _concluded(self, study: Study, one: Round, end: Conclusion) -> None:
        """Let the study know, if it still waits for this aggregation."""
        now = self._studies[study.name]
        if now.revision != study.revision or not now.life.aggregating or now.life.round != one:
            return

        def record(records: Records) -> None:
            end.record(records, study, one, int(self._wall()))

        try:
            self._advance(study.name, end.event, record, end.manifest.digest() if end.manifest is not None else "")
        except StorageFailed:
            raise
        except Exception as error:
            log.exception("%s: round %d could not be recorded", study.name, one.number)
            self._halt(study.name, f"round {one.number} could not be recorded: {said(error)}")

    # What follows.

    def tell(self, site: str, item: TwoLines) -> None:
        """Say something to a site, if it is connected."""
        self.call(lambda: self._push(site, item))

    def _push(self, site: str, item: "Study | Assignment | TwoLines | None") -> None:
        if item is not None and (stream := self._streams.get(site)):
            stream.put(item)

    def _seen(self, site: str) -> None:
        with self._store.write() as records:
            records.change(database.sites, {"name": site}, last_seen_s=int(self._wall()))

    def _tell_followers(self, name: str) -> None:
        for followed, changes in self._followers:
            if followed == name:
                changes.put(True)
