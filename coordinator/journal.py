"""The operator's journal: which person gave which command to this coordinator, when, and what came of it.

Each command that changes something has a line before it acts (``begun``) and one after: ``done``, or ``refused`` with
the reason. One without a second line ended in between, with the program. A line is canonical JSON, and the head after
it is SHA-256 over the head before and the line's own SHA-256, as in a site's ledger: a line that is changed, removed or
moved breaks the chain. The journal lies in the database, and not in a file beside it, so that a backup has both as they
were at one moment, and so that every process that may act on the database writes the same one.

Whoever can write the database can write the chain anew. So ``export`` gives the head signed, for somebody else to keep.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from coordinator.journal_records import JournalEntry, Known
from coordinator.storage import tables
from coordinator.storage.database import Store
from wardround.errors import BadData, WardroundError
from wardround.local.person import Person
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


class Journal:
    """The journal in a coordinator's database."""

    def __init__(self, store: Store, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._wall_clock = wall_clock

    @contextmanager
    def act(self, by: Person, act: str, about: dict[str, Known]) -> Iterator[Act]:
        """Write down that ``by`` gave a command, and after the block what came of it. Nothing is done unwritten."""
        number = self._add(by, act, "begun", about)
        under_way = Act()
        try:
            yield under_way
        except WardroundError as error:
            why: dict[str, Known] = {"why": escaped(error.message, MOST_REASON), "exit": error.exit_code}
            self._add(by, act, "refused", why, of=number)
            raise
        self._add(by, act, "done", under_way.result, of=number)

    def done(self, by: Person, act: str, about: dict[str, Known]) -> None:
        """Write down what was done just now, with one line."""
        self._add(by, act, "done", about)

    def _add(
        self, by: Person, act: str, event: Literal["begun", "done", "refused"], about: dict[str, Known],
        of: int | None = None,
    ) -> int:  # fmt: skip
        table = tables.JournalLine
        with self._store.write() as session:
            last = session.scalars(sa.select(table).order_by(table.number.desc()).limit(1)).first()
            number, head = (last.number + 1, last.head) if last is not None else (1, EMPTY_HEAD)
            entry = JournalEntry(
                number=number, at=tables.utc_text(self._wall_clock()), by=by, act=act, event=event,
                about=about, of=of,
            )  # fmt: skip
            line = canonical.dumps(entry.model_dump(mode="json", exclude_none=True))
            session.add(table(number=number, line=line.decode(), head=_after(head, line)))
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


def _after(head: str, line: bytes) -> str:
    return next_head(head, hashlib.sha256(line).digest())
