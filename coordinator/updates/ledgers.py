"""What the coordinator knows of each site's ledger: heads, never lines.

Hashing a statement's lines is done in the thread of the call that brought it, one of a site at a time; the thread that
owns the studies only writes the outcome down. Kept are the newest head and those that receipts name.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.storage.database import Store, changed
from coordinator.storage.upserts import Upsert
from coordinator.updates import admission
from coordinator.updates.admission import Refusal
from coordinator.updates.allowance import Allowance
from wardround.errors import TryAgain
from wardround.records.receipts import LedgerHead
from wardround.records.update import LedgerStatement

if TYPE_CHECKING:
    from coordinator.storage.upserts import Insert

MAX_PAGES_AN_HOUR = 200  # of one site: 200,000 lines


class Ledgers:
    """The sites' ledgers, as far as they were shown."""

    def __init__(self, store: Store, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._pages = Allowance("pages of ledger lines", wall_clock)
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def judged(self, site: str, statement: LedgerStatement) -> Iterator["Judged"]:
        """What is to be thought of a statement; while the block lasts no other statement of the site is judged."""
        with self._lock:
            turn = self._turns[site]
        with turn:
            head = statement.head
            with self._store.read() as session:
                row = session.connection().execute(_ENROLLED, {"of_site": site}).one()
                newest = newest_head(session, site, head.ledger_id)
                first = head.lines - len(statement.new_lines)
                known = _heads(session, site, head.ledger_id, first, head.lines)
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(row.ledger_key))
            refusal = admission.ledger_refusal(statement, key, row.ledger_id, newest, known)
            yield Judged(site, head, row, refusal, newest[0] if newest else 0)

    def page(self, site: str, statement: LedgerStatement) -> int:
        """Take a page of lines, if it continues the ledger. How many lines of it are known then.

        Raises:
            TryAgain: too many pages in an hour (TOO_BUSY).
        """
        self._pages.take(site, MAX_PAGES_AN_HOUR)
        with self.judged(site, statement) as judged:
            if judged.refusal is not None:
                return judged.known_lines
            with self._store.write() as session:
                judged.remember(session)
        return statement.head.lines


class Judged:
    """A statement, its refusal if it has one, and the record of the site that it was judged against."""

    def __init__(
        self, site: str, head: LedgerHead, row: "sa.Row[str, str]", refusal: Refusal | None, known_lines: int
    ) -> None:
        self.refusal = refusal
        self.known_lines = known_lines
        self._site = site
        self._head = head
        self._row = row

    def remember(self, session: Session) -> None:
        """Write down what was found good.

        Raises:
            TryAgain: the site was enrolled again, or took another ledger, since it was judged.
        """
        if self.refusal is not None:
            return
        row, ledger_id = self._row, self._head.ledger_id
        values = {"of_site": self._site, "its_key": row.ledger_key, "known_ledger": row.ledger_id}
        if not changed(session, _TAKE_LEDGER, **values, of_ledger=ledger_id):
            raise TryAgain(f"site `{self._site}` has just changed its ledger here", code="TOO_BUSY")
        keep_head(session, self._site, self._head, in_receipt=False)


def newest_head(session: Session, site: str, ledger_id: str) -> tuple[int, str] | None:
    """(lines, head) of the longest ledger that was seen."""
    row = session.connection().execute(_NEWEST, {"of_site": site, "of_ledger": ledger_id}).first()
    return (row.lines, row.head) if row else None


def _heads(session: Session, site: str, ledger_id: str, first: int, last: int) -> dict[int, str]:
    """The known heads after ``first`` to ``last`` lines."""
    values = {"of_site": site, "of_ledger": ledger_id, "first": first, "last": last}
    return {row.lines: row.head for row in session.connection().execute(_BETWEEN, values)}


def keep_head(session: Session, site: str, head: LedgerHead, *, in_receipt: bool) -> None:
    """Note a head; the older ones go, but for those that a receipt names."""
    values = {"of_site": site, "of_ledger": head.ledger_id, "after_lines": head.lines}
    _KEEP.run(session, **values, the_head=head.head, named=in_receipt)
    changed(session, _FORGET_OLDER, **values)


def _newest() -> sa.Select[int, str]:
    table = tables.LedgerHead
    own = (table.site == sa.bindparam("of_site"), table.ledger_id == sa.bindparam("of_ledger"))
    return sa.select(table.lines, table.head).where(*own).order_by(table.lines.desc()).limit(1)


def _between() -> sa.Select[int, str]:
    table = tables.LedgerHead
    own = (table.site == sa.bindparam("of_site"), table.ledger_id == sa.bindparam("of_ledger"))
    between = (table.lines >= sa.bindparam("first"), table.lines <= sa.bindparam("last"))
    return sa.select(table.lines, table.head).where(*own, *between)


def _keep(insert: "Insert") -> sa.Insert:
    table = tables.LedgerHead
    new = insert.values(
        site=sa.bindparam("of_site"), ledger_id=sa.bindparam("of_ledger"), lines=sa.bindparam("after_lines"),
        head=sa.bindparam("the_head"), in_receipt=sa.bindparam("named"),
    )  # fmt: skip
    kept = {"head": new.excluded.head, "in_receipt": sa.or_(table.in_receipt, new.excluded.in_receipt)}
    return new.on_conflict_do_update(index_elements=(table.site, table.ledger_id, table.lines), set_=kept)


def _forget_older() -> sa.Delete:
    table = tables.LedgerHead
    return sa.delete(table).where(
        table.site == sa.bindparam("of_site"), table.ledger_id == sa.bindparam("of_ledger"),
        table.lines < sa.bindparam("after_lines"), table.in_receipt.is_(False),
    )  # fmt: skip


def _take_ledger() -> sa.Update:
    table = tables.Site
    return sa.update(table).where(
        table.name == sa.bindparam("of_site"), table.ledger_key == sa.bindparam("its_key"),
        table.ledger_id == sa.bindparam("known_ledger"),
    ).values(ledger_id=sa.bindparam("of_ledger"))  # fmt: skip


_ENROLLED = sa.select(tables.Site.ledger_key, tables.Site.ledger_id).where(tables.Site.name == sa.bindparam("of_site"))
_NEWEST, _BETWEEN = _newest(), _between()
_KEEP = Upsert(tables.LedgerHead, _keep)
_FORGET_OLDER, _TAKE_LEDGER = _forget_older(), _take_ledger()
