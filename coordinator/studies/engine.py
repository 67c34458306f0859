"""The one thread that owns the studies: what happens comes in by a queue, what follows goes out when it is durable.

``lifecycle.advance`` judges; here its judgement is written down in one transaction, and only then acted upon: the sites
are sent assignments, a worker an aggregation, and files that nobody needs any more are removed. Nothing polls.

Before ``start`` (a command on a state directory that no service owns) the calls run in the caller's thread, and what
needs a running service waits for one: an open round is told to the sites when they connect, an aggregation is done at
the next start.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from sqlalchemy.orm import Session

from coordinator.models.downloads import Downloads
from coordinator.storage import tables
from coordinator.storage.blobs import Blobs, DamagedModel
from coordinator.storage.database import Store
from coordinator.studies import cleanup, events, lifecycle, secure_rounds, telling
from coordinator.studies.aggregations import Aggregations
from coordinator.studies.assignments import Assignments
from coordinator.studies.conclusion import Conclusion
from coordinator.studies.failures import StudyFailed, blamed, reason_of
from coordinator.studies.history import write_down
from coordinator.studies.holding import Holding, arriving_for
from coordinator.studies.secure_rounds import SecureRounds, with_attempt
from coordinator.studies.state import ENDED, Answer, Kind, Phase, Round
from coordinator.studies.streams import Changes, Stream, Streams
from coordinator.studies.study import Change, Study, last_revision, load_studies, put_away, unchanged
from coordinator.studies.thread import OneThread
from wardround.errors import CannotWrite, TryAgain
from wardround.local.durable import StorageFailed
from wardround.records.event import CertificateFork
from wardround.records.plugins import PluginTable
from wardround.records.secure_messages import SecureTold

LATER_S = 5  # after which a step of a study that could not be written is tried again
T = TypeVar("T")
Write = Callable[[Session], T]
log = logging.getLogger(__name__)


class Engine:
    """The studies of one coordinator.

    Args:
        fatal: called with an error after which the process must end, a failed disk: what is durable is then read again.
            An error in one study pauses that study, and nothing else.
        wall_clock: Unix time, for the record. monotonic: a clock that does not jump, for deadlines.
        plugins: whose code may run here beside ours.
        arriving: (study, round, attempt, site) of the updates that are being received; whoever receives them sets it.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        *,
        fatal: Callable[[BaseException], None],
        wall_clock: Callable[[], float],
        monotonic: Callable[[], float],
        plugins: PluginTable = PluginTable(),
        federation: str = "",
    ) -> None:
        self._store, self._blobs, self._fatal = store, blobs, fatal
        downloads = Downloads(store, blobs)
        self._assignments, self._secure = Assignments(store, downloads), SecureRounds(downloads, federation)
        self._wall_clock, self._monotonic = wall_clock, monotonic
        self._streams, self._holding = Streams(), Holding()
        self.arriving: Callable[[], frozenset[tuple[str, int, int, str]]] = frozenset
        self._thread = OneThread("engine", patience=self._patience, wake=self._let_time_pass, fatal=fatal)
        self._aggregations = Aggregations(
            store, blobs, is_wanted=self._waits_for, concluded=self._concluded, fatal=fatal
        )
        self._later: dict[str, float] = {}  # study -> when a step that could not be written is tried again
        self._studies, self._unreadable = load_studies(store, plugins)

    # The thread.

    def start(self) -> None:
        """Begin to own the studies, and take up what the last process left."""
        self._aggregations.start()
        self._thread.start(self._take_up)

    def _take_up(self) -> None:
        if not self._unreadable:  # else what belongs to a study that cannot be read might be thrown away
            cleanup.tidy(self._store, self._blobs, self._studies.values())
        for study in list(self._studies.values()):
            if study.state.phase in (Phase.WAITING, Phase.RUNNING):
                away_s = max(0.0, self._wall_clock() - study.saved.wall_clock)
                left = study.saved.round_left(study.state), study.saved.start_left(study.state)
                self._step_alone(study.name, events.Restarted(away_s, *left))

    def stop(self) -> None:
        """Wait for an aggregation, do the jobs that are queued, and end."""
        self._aggregations.stop()
        self._thread.stop()

    def call(self, act: Callable[[], T]) -> T:
        """Run ``act`` where the studies are owned, and return or raise what it does."""
        return self._thread.call(act)

    def _patience(self) -> float | None:
        times = [time for study in self._studies.values() if (time := self._next_time(study)) is not None]
        return max(0.0, min(times) - self._monotonic()) if times else None

    def _next_time(self, study: Study) -> float | None:
        """When a study must be looked at without anything having happened."""
        deadline = study.state.next_deadline
        return None if deadline is None else max(deadline, self._later.get(study.name, deadline))

    def _let_time_pass(self) -> None:
        now = self._monotonic()
        for study in list(self._studies.values()):
            time = self._next_time(study)
            if time is not None and time <= now:
                self._step_alone(study.name, events.Clock())

    def _step_alone(self, name: str, event: events.Event) -> None:
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
            self._later[name] = self._monotonic() + LATER_S
        except Exception as error:
            log.exception("%s: a step failed", name)
            self._halt(name, reason_of(error))

    # What others ask. All of it runs where the studies are owned.

    def studies(self) -> list[Study]:
        """As they are durable now, by name. Asks nobody: a study is never changed, and its place at once."""
        return sorted(self._studies.values(), key=lambda study: study.name)

    def unreadable(self) -> dict[str, str]:
        """Studies whose record here is damaged, and why; nothing can be done for them until it is restored."""
        return self.call(lambda: dict(self._unreadable))

    def find(self, name: str) -> Study | None:
        """As it is durable now. Asks nobody."""
        return self._studies.get(name)

    def add(self, study: Study, write: Callable[[Session], None]) -> None:
        """A new study, or a new revision of one that has ended or never ran; its sites hear of it.

        ``write`` writes what the study's row refers to, in the same transaction.

        Raises:
            TryAgain: another command added a study of that name at the same time.
        """

        def act() -> None:
            saved = study.saved_at(self._wall_clock(), self._monotonic())
            with self._store.write() as session:
                if last_revision(session, study.name) != study.revision - 1:
                    raise TryAgain(
                        f"study `{study.name}` was created by another command at the same time; here nothing changed",
                        hint=f"`coordinator study status {study.name}` shows which it is",
                    )
                write(session)
                session.add(saved.row())
            self._studies[study.name] = saved
            for site in study.rules.sites:
                self._streams.push(site, saved)
            self._streams.tell_followers(study.name)

        self.call(act)

    def happened(self, name: str, event: events.Event) -> None:
        """Let a study know what happened."""
        self.call(lambda: self._advance(name, event))

    def happened_with(self, name: str, event: events.Event, write: Write[T], change: Change = unchanged) -> T:
        """The same in one transaction with ``write``, whose answer it returns. ``change``: of more than its state."""
        return cast(T, self.call(lambda: self._advance(name, event, write, change)))

    def told(self, site: str, told: SecureTold) -> None:
        """Take what a site tells in an attempt with secure aggregation. Raises as ``SecureRounds.taken``."""

        def act() -> None:
            if taken := self._secure.taken(self._studies[told.attempt.study], site, told):
                attempt, event = taken
                self._advance(told.attempt.study, event, change=with_attempt(attempt))

        self.call(act)

    def ready(self, site: str, name: str) -> None:
        """The site approved this revision. Said again on every connection, it changes nothing."""

        def act() -> None:
            study = self._studies[name]
            if site not in study.state.ready and study.state.phase not in ENDED:
                self._advance(name, events.Ready(site))

        self.call(act)

    def gone(self, site: str, name: str, code: str) -> None:
        """The site withdrew or was revoked; ``code`` says which."""

        def act() -> None:
            if site in self._studies[name].state.ready:
                self._advance(name, events.Gone(site, code))

        self.call(act)

    def declined(self, site: str, name: str, round_number: int, attempt: int, code: str) -> None:
        """The site will not do an assignment. Of another round or attempt, or after an answer, it changes nothing."""

        def act() -> None:
            current = self._studies[name].state.round
            if current is None or (current.number, current.attempt) != (round_number, attempt):
                return
            if current.waits:
                self._advance(name, events.Unwilling(site, code))
            elif site in current.unanswered and self._studies[name].state.open_round:
                log.info("%s: site %s declines round %d: %s", name, site, round_number, code)
                if code == "DECLINED_MODEL_MISMATCH":
                    self._blobs.doubt(self._studies[name].newest)
                self._advance(name, events.Answered(site, Answer(Kind.DECLINED, code)))

        self.call(act)

    def held(self, site: str, name: str, round_number: int, attempt: int) -> None:
        """The site's update waits for a person there: it may still come."""

        def act() -> None:
            if self._holding.note(self._studies[name], site, round_number, attempt):  # said again, nobody is told
                log.info("%s: site %s holds its update of round %d for a person", name, site, round_number)
                self._streams.tell_followers(name)

        self.call(act)

    def holding(self, study: Study) -> frozenset[str]:
        """The sites whose update of the round under way waits for a person there."""
        return self.call(lambda: self._holding.of(study))

    def cannot_offer(self, name: str, damaged: DamagedModel) -> None:
        """A model that the study offers is damaged in both copies: a study that needs it pauses and says so."""

        def act() -> None:
            if self._studies[name].newest == damaged.digest:
                self._halt(name, damaged.message)

        self.call(act)

    def archive(self, name: str) -> None:
        """Tell nobody of an ended study any more, and keep it in the store alone."""

        def act() -> None:
            with self._store.write() as session:
                put_away(session, name, int(self._wall_clock()))
            del self._studies[name]

        self.call(act)

    def watch(self, site: str, stream: Stream) -> None:
        """Send a site's studies and its open assignments to ``stream``, and from now on the new ones.

        A stream that the site had before ends.
        """

        def act() -> None:
            self._seen(site)
            self._streams.open(site, stream)
            telling.greet(stream, site, self._studies.values(), self._assignments)

        self.call(act)

    def unwatch(self, site: str, stream: Stream) -> None:
        def act() -> None:
            self._streams.close(site, stream)
            self._seen(site)

        self.call(act)

    def connected(self) -> frozenset[str]:
        return self.call(lambda: frozenset(self._streams))

    def tell(self, site: str, item: CertificateFork) -> None:
        """Say something to a site, if it is connected."""
        self.call(lambda: self._streams.push(site, item))

    def follow(self, name: str) -> Changes:
        """Where the changes of a study are told from now on."""
        return self.call(lambda: self._streams.follow(name))

    def unfollow(self, changes: Changes) -> None:
        self.call(lambda: self._streams.unfollow(changes))

    def tell_watchers(self) -> None:
        self.call(lambda: self._streams.tell_followers(""))

    def say_goodbye(self) -> None:
        """The service goes down: tell the sites and the followers."""
        self.call(self._streams.say_goodbye)

    def _seen(self, site: str) -> None:
        with self._store.write() as session:
            if (row := session.get(tables.Site, site)) is not None:
                row.last_seen_s = int(self._wall_clock())

    # One step of a study.

    def _advance(
        self, name: str, event: events.Event, write: Write[T] | None = None, change: Change = unchanged
    ) -> T | None:
        """Judge, write down, act. If the writing fails, nothing has happened. What fails in the study itself pauses it.

        Raises:
            TryAgain: the study was paused for that.
            Exception: as ``write`` and the store; that says nothing about the study.
        """
        try:
            return self._step(name, event, write, change)
        except StudyFailed as failed:
            log.error("%s: the coordinator failed at this study", name, exc_info=failed.error)
            self._halt(name, f"the coordinator failed at it: {reason_of(failed.error)}")
            raise TryAgain(f"study `{name}` is paused: the coordinator failed at it", code="TOO_BUSY") from None

    def _halt(self, name: str, why: str) -> None:
        """Pause a study in which something failed, unless it is; if need be in memory alone.

        Raises:
            StorageFailed: the process must end.
        """
        if self._studies[name].state.phase not in (Phase.WAITING, Phase.RUNNING):
            return
        try:
            self._step(name, events.Halted(why), None, unchanged)
        except StorageFailed:
            raise
        except Exception:
            log.exception("%s: that it is paused could not be written; at the next start it is tried again", name)
            study = self._studies[name]
            self._studies[name] = replace(study, state=lifecycle.halted(study.state, why))
            self._streams.tell_followers(name)

    def _step(self, name: str, event: events.Event, write: Callable[[Session], T] | None, change: Change) -> T | None:
        before = self._studies[name]
        now = events.Now(self._monotonic(), frozenset(self._streams), arriving_for(before, self.arriving()))
        with blamed():
            state, actions = lifecycle.advance(before.state, before.rules, event, now)
            study = replace(change(before), state=state)
            for action in actions:
                study = secure_rounds.followed(study, action)
        if state is before.state and study.attempt is before.attempt and write is None:
            return None
        study = study.saved_at(self._wall_clock(), self._monotonic())
        with self._store.write() as session:
            result = write(session) if write is not None else None
            session.flush()  # what fails in that is not the study's failure
            with blamed():
                for action in actions:
                    study = write_down(session, study, action, self._wall_clock())
                secure_rounds.write_down(session, before, study, actions)
                study.write(session)
        self._studies[name] = study
        telling.heard(before, event)
        with blamed():
            for action in actions:
                telling.act(study, action, self._streams, self._assignments, self._aggregations)
            cleanup.forget(self._blobs, before, study, self._studies.values())
        self._streams.tell_followers(name)
        return result

    def _waits_for(self, study: Study, current: Round) -> bool:
        """Whether a study still waits for the aggregation of a round."""
        now = self.find(study.name)
        return now is not None and now.waits_for(study.revision, current)

    def _concluded(self, study: Study, current: Round, end: Conclusion) -> None:
        """From the worker: let the study know, if it still waits for this aggregation."""
        self.call(lambda: self._conclude(study, current, end))

    def _conclude(self, study: Study, current: Round, end: Conclusion) -> None:
        if not self._waits_for(study, current):
            return
        newest = end.manifest.digest() if end.manifest is not None else study.newest
        now_s = int(self._wall_clock())
        try:
            self._advance(
                study.name, end.event, lambda session: end.record(session, study, current, now_s),
                lambda before: replace(before, newest=newest),
            )  # fmt: skip
        except (CannotWrite, TryAgain):  # nothing happened; the worker tries again
            raise
        except Exception as error:
            log.exception("%s: round %d could not be recorded", study.name, current.number)
            self._halt(study.name, f"round {current.number} could not be recorded: {reason_of(error)}")
