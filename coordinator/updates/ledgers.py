"""What the coordinator knows of each site's ledger: heads, never lines.

Hashing a statement's lines is done in the thread of the call that brought it, one of a site at a time; the thread that
owns the studies only writes the outcome down. Kept are the newest head and those that receipts name.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.storage import database
from coordinator.storage.database import Records, Row, Store
from coordinator.updates import admission
from coordinator.updates.admission import LedgerStatement, Refusal
from wardround.errors import TryAgain

HOUR_S = 3600
MAX_PAGES_AN_HOUR = 200  # of one site: 200,000 lines


class Allowance:
    """How often each site may do something in an hour. In memory: a restart forgets."""

    def __init__(self, what: str, wall: Callable[[], float] = time.time) -> None:
        self._what = what
        self._wall = wall
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = defaultdict(deque)

    def take(self, site: str, most: int, others: int = 0) -> None:
        """Once more, if it was less than ``most`` times. ``others``: how often it was done that is not counted here.

        Raises:
            TryAgain: that is too often (TOO_BUSY).
        """
        with self._lock:
            times = self._times[site]
            while times and times[0] < self._wall() - HOUR_S:
                times.popleft()
            if len(times) + others >= most:
                raise TryAgain(f"{len(times) + others} {self._what} of site `{site}` in an hour", code="TOO_BUSY")
            times.append(self._wall())

    def give_back(self, site: str) -> None:
        """It came to something."""
        with self._lock:
            if self._times[site]:
                self._times[site].popleft()


class Ledgers:
    """The sites' ledgers, as far as they were shown."""

    def __init__(self, records: Store, *, wall: Callable[[], float] = time.time) -> None:
        self._store = records
        self._pages = Allowance("pages of ledger lines", wall)
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def judged(self, site: str, said: LedgerStatement) -> Iterator["Judged"]:
        """What is to be thought of a statement; while the block lasts no other statement of the site is judged."""
        with self._lock:
            turn = self._turns[site]
        with turn:
            with self._store.read() as records:
                row = records.get(database.sites, name=site)
                assert row is not None
                newest = records.newest_head(site, said.head.ledger_id)
                first = said.head.lines - len(said.new_lines)
                known = records.heads(site, said.head.ledger_id, first, said.head.lines)
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(row["ledger_key"]))
            refusal = admission.continues_its_ledger(said, key, row["ledger_id"], newest, known)
            yield Judged(site, said, row, refusal, newest[0] if newest else 0)

    def page(self, site: str, said: LedgerStatement) -> int:
        """Take a page of lines, if it continues the ledger. How many lines of it are known then.

        Raises:
            TryAgain: too many pages in an hour (TOO_BUSY).
        """
        self._pages.take(site, MAX_PAGES_AN_HOUR)
        with self.judged(site, said) as judged:
            if judged.refusal is not None:
                return judged.known_lines
            with self._store.write() as records:
                judged.remember(records)
        return said.head.lines


class Judged:
    """A statement, what was found, and of which record of the site."""

    def __init__(self, site: str, said: LedgerStatement, row: Row, refusal: Refusal | None, known_lines: int) -> None:
        self.refusal = refusal
        self.known_lines = known_lines
        self._site = site
        self._head = said.head
        self._row = row

    def remember(self, records: Records) -> None:
        """Write down what was found good.

        Raises:
            TryAgain: the site was enrolled again, or took another ledger, since it was judged.
        """
        if self.refusal is not None:
            return
        same = {"name": self._site, "ledger_key": self._row["ledger_key"], "ledger_id": self._row["ledger_id"]}
        if not records.change(database.sites, same, ledger_id=self._head.ledger_id):
            raise TryAgain(f"site `{self._site}` has just changed its ledger here", code="TOO_BUSY")
        records.keep_head(self._site, self._head, in_receipt=False)
