"""The operator's journal: which person gave which command to this coordinator, when, and what came of it.

Each command that changes something has a line before it acts (``begun``) and one after: ``done``, or ``refused`` with
the reason. One without a second line ended in between, with the program. Where a command needs a second person, the
first one's line says ``proposed``, and the second one's ``begun`` names that line: so it is carried out once.

A line is canonical JSON, and the head after it is SHA-256 over the head before and the line's own SHA-256, as in a
site's ledger: a line that is changed, removed or moved breaks the chain. The journal lies in the database, and not in a
file beside it, so that a backup has both as they were at one moment, and so that every process that may act on the
database writes the same one.

Whoever can write the database can write the chain anew. So ``export`` gives the head signed, for somebody else to keep.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError
from sqlalchemy.orm import Session

from coordinator.journal_records import Event, JournalEntry, Known, Proposed, WaitingRow
from coordinator.second_person import TERMS, Proposal, Terms, proposals, same_subject
from coordinator.storage import tables
from coordinator.storage.database import Store
from wardround.errors import BadData, UsageProblem, WardroundError
from wardround.local.person import Person, together
from wardround.records.receipts import EMPTY_HEAD, next_head
from wardround.signing import canonical, dsse
from wardround.terminal import escaped

HEAD_TYPE = "application/vnd.wardround.journal-head.v1+json"
MOST_REASON = 300  # characters of why a command was refused
PAGE = 500  # lines that are read at a time


@dataclass
class Act:
    """A command under way. ``result``: what it came to, for its second line."""

    result: dict[str, Known] = field(default_factory=dict)


@dataclass(frozen=True)
class Waits:
    """A proposal that was just made. ``beside``: what else was proposed of the same subject, in words."""

    proposal: Proposal
    beside: str = ""

    @property
    def answer(self) -> Proposed:
        """What the first person is told."""
        one = self.proposal
        until = tables.utc_text(one.until_s)
        return Proposed(proposal=one.number, what=one.text, by=one.by.text, until=until, beside=self.beside)


class Journal:
    """The journal in a coordinator's database."""

    def __init__(self, store: Store, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._wall_clock = wall_clock

    def begin(self, by: Person, act: str, about: dict[str, Known], second: Terms | None = None) -> "int | Waits":
        """Write down that ``by`` gives a command, before it acts.

        Args:
            second: the terms under which it needs a second person; None where it needs none.

        Returns:
            The number of the line that begins it. Or, where a second person must give it too, what waits for that.

        Raises:
            UsageProblem: this person has proposed exactly this already.
        """
        if second is None:
            return self._add(by, act, "begun", about)
        now = self._wall_clock()
        with self._store.write() as session:  # one after the other: a proposal is carried out once
            proposed = list(proposals(_newest_first(session), second.lapse_s, now - 2 * second.lapse_s))
            same = [one for one in proposed if (one.act, one.about) == (act, about) and one.counts(now)]
            if same:
                did, again = f"proposed {same[0].text}", "somebody with another login gives the same command"
                together([one.by for one in same], by, 2, did, again, wants="this needs")
                return self._append(session, by, act, "begun", {**about, "proposal": same[-1].number})
            number = self._append(session, by, act, "proposed", about)
        beside = [_beside(one, about, now) for one in proposed if same_subject(one, act, about)]
        return Waits(Proposal(number, now, now + second.lapse_s, by, act, about), "; ".join(beside))

    @contextmanager
    def under_way(self, by: Person, act: str, number: int) -> Iterator[Act]:
        """Write down after the block what came of the command that line ``number`` began."""
        under_way = Act()
        try:
            yield under_way
        except WardroundError as error:
            why: dict[str, Known] = {"why": escaped(error.message, MOST_REASON), "exit": error.exit_code}
            self._add(by, act, "refused", why, of=number)
            raise
        self._add(by, act, "done", under_way.result, of=number)

    def ended(self, by: Person, act: str, number: int) -> None:
        """Write down that what line ``number`` began is done."""
        self._add(by, act, "done", {}, of=number)

    def done(self, by: Person, act: str, about: dict[str, Known]) -> None:
        """Write down what was done just now, with one line."""
        self._add(by, act, "done", about)

    def terms(self, config: Terms) -> Terms:
        """Which commands need a second person now: those of the configuration, and those that two people agreed to."""
        with self._store.read() as session:
            return config.with_all_of(_recorded_terms(session))

    def keep_terms(self, by: Person, config: Terms) -> Terms:
        """``terms``, which are in the journal from now on if they were not."""
        with self._store.write() as session:
            recorded = _recorded_terms(session)
            now = config.with_all_of(recorded)
            if now != recorded and now.commands:
                self._append(session, by, TERMS, "done", now.known())
        return now

    def waiting(self, lapse_s: int) -> list[Proposal]:
        """The proposals that wait for a second person, the oldest first."""
        now = self._wall_clock()
        with self._store.read() as session:
            found = [one for one in proposals(_newest_first(session), lapse_s, now - lapse_s) if one.counts(now)]
        return found[::-1]

    def take_back(self, by: Person, number: int, lapse_s: int) -> Proposal:
        """Let a proposal count no more. Raises UsageProblem: none of that number waits."""
        now = self._wall_clock()
        with self._store.write() as session:
            waiting = {one.number: one for one in proposals(_newest_first(session), lapse_s, now - lapse_s)}
            if (one := waiting.get(number)) is not None:
                self._append(session, by, one.act, "taken_back", {}, of=number)
                return one
        raise UsageProblem(
            f"no proposal {number} waits for a second person", hint="`coordinator second-person list` lists them"
        )

    def unfinished_restore(self) -> Mapping[str, Known] | None:
        """What the restore was about that made this state directory, if a person or its end is missing."""
        with self._store.read() as session:
            entry = next(_newest_first(session, "restore"), None)
        return entry.about if entry is not None and entry.event in ("proposed", "begun") else None

    def _add(self, by: Person, act: str, event: Event, about: Mapping[str, Known], of: int | None = None) -> int:
        with self._store.write() as session:
            return self._append(session, by, act, event, about, of)

    def _append(
        self, session: Session, by: Person, act: str, event: Event, about: Mapping[str, Known], of: int | None = None
    ) -> int:
        table = tables.JournalLine
        last = session.scalars(sa.select(table).order_by(table.number.desc()).limit(1)).first()
        number, head = (last.number + 1, last.head) if last is not None else (1, EMPTY_HEAD)
        entry = JournalEntry(
            number=number, at=tables.utc_text(self._wall_clock()), by=by, act=act, event=event, about=about, of=of
        )
        line = canonical.dumps(entry.model_dump(mode="json", exclude_none=True))
        session.add(table(number=number, line=line.decode(), head=_after(head, line)))
        session.flush()
        return number

    def lines(self) -> Iterator[str]:
        """Each line, the oldest first.

        Raises:
            BadData: the head that stands beside a line is not that of the lines up to it: one of them was changed.
        """
        table, last, head = tables.JournalLine, 0, EMPTY_HEAD
        while True:
            with self._store.read() as session:
                chosen = sa.select(table).where(table.number > last).order_by(table.number).limit(PAGE)
                page = session.scalars(chosen).all()
            for number, row in enumerate(page, last + 1):
                head = _after(head, row.line.encode())
                if (row.number, row.head) != (number, head):
                    raise BadData(f"line {number} of the journal is not the one that was written")
                yield row.line
            if len(page) < PAGE:
                return
            last = page[-1].number


def waiting_row(one: Proposal) -> WaitingRow:
    """A proposal in the list of those that wait."""
    return WaitingRow(**Waits(one).answer.model_dump(), at=tables.utc_text(one.at_s), about=one.about)


def entries(lines: Iterable[str]) -> tuple[list[JournalEntry], str]:
    """A journal's entries, and its head.

    Raises:
        BadData: a line is none, or not the one that belongs there.
    """
    found: list[JournalEntry] = []
    head = EMPTY_HEAD
    for number, line in enumerate(lines, 1):
        try:
            entry = JournalEntry.model_validate(canonical.loads(line.encode()))
        except (BadData, ValidationError):
            raise BadData(f"line {number} of the journal is no entry of one") from None
        if entry.number != number:
            raise BadData(f"line {number} of the journal says that it is line {entry.number}: lines are missing")
        found.append(entry)
        head = _after(head, line.encode())
    return found, head


def signed_head(count: int, head: str, federation: str, time: str, key: Ed25519PrivateKey) -> dsse.Envelope:
    """The coordinator's word that its journal had this head."""
    value = {"federation": federation, "lines": count, "head": head, "time": time}
    return dsse.sign(HEAD_TYPE, value, key)


def refuse_other_head(envelope: dsse.Envelope, key: Ed25519PublicKey, count: int, head: str) -> None:
    """Raises BadData: it is no head that ``key`` signed, or one of another journal than the one with this head."""
    value = dsse.verify(envelope, HEAD_TYPE, key)
    lines, signed = (value.get("lines"), value.get("head")) if isinstance(value, dict) else (None, None)
    if (lines, signed) != (count, head):
        raise BadData(
            "the journal is not the one whose head was signed",
            hint=f"its chain has {count} lines and head {head[:12]}…; signed were {lines} lines",
        )


def _newest_first(session: Session, act: str = "") -> Iterator[JournalEntry]:
    """The journal's entries from the last on; of one act alone, if it is given.

    Raises:
        BadData: a line is none.
    """
    table, below = tables.JournalLine, None
    while True:
        chosen = sa.select(table.number, table.line).order_by(table.number.desc()).limit(PAGE)
        if act:
            chosen = chosen.where(table.line.contains(f'"act":"{act}"', autoescape=True))
        if below is not None:
            chosen = chosen.where(table.number < below)
        page = session.execute(chosen).all()
        for number, line in page:
            try:
                yield JournalEntry.model_validate(canonical.loads(line.encode()))
            except (BadData, ValidationError):
                raise BadData(f"line {number} of the journal is no entry of one") from None
        if len(page) < PAGE:
            return
        below = page[-1].number


def _recorded_terms(session: Session) -> Terms:
    """Those that the journal has last; without one, that no command needs a second person."""
    for entry in _newest_first(session, TERMS):
        if entry.event == "done":
            return Terms.from_known(entry.about)
    return Terms()


def _beside(other: Proposal, about: Mapping[str, Known], now: float) -> str:
    """What a person is told of an earlier proposal of the same subject."""
    by = f"the proposal of {other.by.text} in line {other.number}"
    if other.about == about:
        return f"{by} lapsed at {tables.utc_text(other.until_s)}"
    others = [name for name in ({**other.about, **about}) if other.about.get(name) != about.get(name)]
    lapsed = " and has lapsed" if now > other.until_s else ""
    return f"{by} says something else of {', '.join(sorted(others))}{lapsed}"


def _after(head: str, line: bytes) -> str:
    return next_head(head, hashlib.sha256(line).digest())
