"""The writer of the site's ledger: the account of everything that left, fsynced before the first byte is sent.

One line is the canonical JSON of one record (``wardround.records.ledger``); ``prev`` is the head before it, and the
head after it is SHA-256(prev ‖ SHA-256(line)); see ``wardround.records.receipts``. Heads are signed into
``heads.jsonl``. Anyone who holds a receipt, which names a head, can tell whether a line before it was changed.

This module writes. ``site_agent.audit`` judges, from the files alone.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.gateway.exit.evidence import Evidence, HostileReceipt
from site_agent.gateway.exit.ledger_opening import FIRST_SEGMENT, HEADS, opened
from site_agent.gateway.exit.ledger_state import LedgerState, Part, refuse_incomplete
from site_agent.gateway.exit.pledged import Pledged
from site_agent.state.directory import Journal, now_text
from wardround import __version__
from wardround.errors import BadData, NeedsPerson, TryAgain
from wardround.local import durable
from wardround.local.rate_limit import RateLimit
from wardround.records.codes import REFUSAL_CODES
from wardround.records.ledger.decided import PolicyEntry
from wardround.records.ledger.entries import (
    BlockedEntry,
    CitedHead,
    DeclareEntry,
    Entry,
    GenesisEntry,
    Limited,
    ReceiptEntry,
    RecoveredEntry,
    SessionEntry,
    SignedText,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.receipts import MAX_NEW_LINES, LedgerHead, Receipt, judge, line_hash, next_head
from wardround.records.update import LedgerStatement
from wardround.signing import canonical
from wardround.signing.dsse import Envelope, keyid

LIMITED = (SessionEntry.type, DeclareEntry.type, BlockedEntry.type)  # by none of these an update leaves
AnyEntry = TypeVar("AnyEntry", bound=Entry)
Known = TypeVar("Known")
log = logging.getLogger(__name__)


class Ledger:
    """The one writer of a ledger folder. Safe to use from several threads.

    Opening it repairs what a crash or a failed disk can leave. A torn last line is cut, kept in ``torn/`` and recorded.
    Whole lines that no signed head covers, whose fsync may have failed, follow the one before them and are kept: they
    are written once more, because they may stand in memory alone. Of an upload among them nothing was sent, but it
    counts as one that may have left until the coordinator has said otherwise: the account says too much, never too
    little.

    A coordinator can cause an entry of ``Limited`` as often as it likes: ``append_often`` leaves some out, and the next
    line of that type, at the latest ``close``, says how many (``left_out``).

    After a write that failed and left unknown what the disk has, the object refuses everything; the process must end.

    Raises:
        NeedsPerson: the ledger is broken before its unsigned tail; nothing is changed.
    """

    def __init__(self, folder: Path, key: Ed25519PrivateKey, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._key = key
        self._signed_head = lru_cache(maxsize=1)(partial(LedgerHead.sign, key=key))  # asked for one head several times
        self._lock = threading.RLock()
        self.policy_turn = threading.RLock()  # held while the policy's file is read or written, and noted here
        self._shown = 0  # lines that the coordinator has said it knows; in memory, for it can be asked again
        self._limits = {kind: RateLimit(monotonic) for kind in LIMITED}
        self._left_out: dict[str, tuple[int, Limited]] = {}  # by type: how many, and the last of them
        self._failed: durable.StorageFailed | None = None
        self._closed = False
        durable.make_folder(folder)
        read = opened(folder)
        self._state, self._signed = read.state, read.signed
        if unsigned := self._state.lines - self._signed:
            log.warning("the ledger's last %d lines were not signed when it was last closed: they are kept", unsigned)
        self._lines = durable.AppendFile(self._segment, tail=read.unsigned_bytes)
        self._signatures = durable.AppendFile(folder / HEADS)
        self._evidence = Evidence(folder)
        if read.torn and self.ledger_id:
            self.append(RecoveredEntry(torn_bytes=read.torn))

    @property
    def key_id(self) -> str:
        return keyid(self._key.public_key())

    @property
    def ledger_id(self) -> str:
        """ "" until the first line is written."""
        return self._state.ledger_id

    def begin(self, continues: LedgerHead | None = None) -> None:
        """Write the first line, if there is none: who keeps this ledger, by its key, and which one it continues."""
        with self._lock:
            if not self.ledger_id:
                key = self._key.public_key().public_bytes_raw().hex()
                cited = CitedHead.of(continues) if continues is not None else None
                software = f"wardround {__version__}"
                self.append(
                    GenesisEntry(ledger_id=uuid.uuid4().hex, ledger_key=key, software=software, continues=cited)
                )

    def refuse_unbegun(self) -> None:
        """Raises NeedsPerson: there is no ledger where a site's must be. A new one would hide what left before."""
        if not self.ledger_id:
            raise NeedsPerson(
                f"there is no ledger in {self._folder}; nothing was sent",
                hint="restore the folder from the last backup, then `site-agent audit rollover`",
            )

    def append(self, entry: Entry) -> None:
        """Add one entry; it is durable when this returns.

        Raises:
            CannotWrite: the disk is full; the ledger is as it was, and nothing may be sent.
            StorageFailed: the disk failed, now or before; the process must end.
            BadData: the entry has not its form; the ledger is as it was.
            TryAgain: the ledger is closed, because the service is stopping.
        """
        self.append_all([entry])

    def append_often(self, entry: Limited) -> bool:
        """Add one entry that a coordinator can cause without end, unless there were many of late. Whether it was added.

        Raises:
            CannotWrite, StorageFailed, BadData: as ``append``.
        """
        kind = entry.type
        with self._lock:
            count, _ = self._left_out.get(kind, (0, entry))
            if not self._limits[kind].take():
                self._left_out[kind] = (count + 1, entry)
                return False
            self.append(replace(entry, left_out=count) if count else entry)
            self._left_out.pop(kind, None)
            return True

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Add several entries with one fsync; a full disk takes none. Raises as ``append``."""
        if not entries:
            return
        with self._lock, self._writing():
            made: list[tuple[Line, bytes]] = []
            head = self._state.head.head
            for entry in entries:
                refuse_incomplete(entry)
                line = Line(self._state.lines + len(made), now_text(), head, entry)
                data = line.encoded()
                head = next_head(head, line_hash(data))
                made.append((line, data))
            self._lines.append(b"".join(data + b"\n" for _, data in made))
            for line, data in made:
                self._state.take(line, line_hash(data))

    def resolve(self, upload_id: str, envelope: Envelope) -> Receipt:
        """Append the coordinator's receipt for an upload that has none, if it may stand here, and sign.

        Raises:
            OutOfOrder: a receipt between this one and the last one here is missing; nothing was appended.
            BadData: it is not a receipt, not the coordinator's, or not about that upload and this ledger; nothing was
                appended. See ``wardround.records.receipts.judge``; besides, its code must be one of the contract's.
        """
        with self._lock:
            if upload_id not in self._state.open:
                raise BadData(f"upload {upload_id[:12]}… has a receipt already, or is not in this ledger")
            key = self._state.receipt_key
            if key is None:
                raise BadData("this ledger has no `identity` line, so no receipt can be believed")
            receipt = judge(envelope, key, self._state.awaited(upload_id))
            if receipt.code and receipt.code not in REFUSAL_CODES:
                raise BadData("the receipt's code is none of those that a coordinator may say")
            self.append(ReceiptEntry(upload_id=upload_id, envelope=SignedText.of(envelope)))
            self.sign(lasting=False)
            return receipt

    def dispute(self, upload_id: str, envelope: Envelope, why: str) -> HostileReceipt:
        """Keep a receipt that cannot stand here as evidence; its upload stays unresolved. Returns what to raise."""
        with self._lock:
            return self._evidence.keep(self._state.open[upload_id], envelope, why)

    def disputed(self, study: str, revision: int) -> bool:
        """Whether an unresolved upload of this study was answered with a receipt that cannot stand here."""
        with self._lock:
            open_ = self._state.open
            return any(
                (open_[upload_id].study, open_[upload_id].revision) == (study, revision)
                for upload_id in self._evidence.uploads & open_.keys()
            )

    def sign(self, *, lasting: bool = True) -> None:
        """Sign the head as it is now, unless it is signed already.

        A signature may be lost with the power and be made again; ``lasting`` ones, at the end of a connection, may not.
        """
        with self._lock, self._writing():
            head = self.head
            if head.lines > self._signed:
                self._signatures.append(canonical.dumps(self._signed_head(head).document()) + b"\n", lasting=False)
                self._signed = head.lines
            if lasting:
                self._signatures.sync()

    def statement(self) -> LedgerStatement:
        """What goes with an upload: the signed head, and the hash of each line since the last head that is known.

        Of more lines than a message takes only the newest: ``catch_up`` shows the others before.
        """
        with self._lock:
            self.sign(lasting=False)
            head = self.head
            since = max(self._shown, self._state.witnessed, head.lines - MAX_NEW_LINES)
            return LedgerStatement(head, self._signed_head(head).signature, tuple(self._state.hashes[since:]))

    def catch_up(self, show: Callable[[LedgerStatement], int]) -> None:
        """Show a backlog of lines in pages, until what is left goes with an upload.

        Args:
            show: takes the signed head after a page and the hashes of the page's lines; returns how many lines are
                known then. Where a page changes nothing, the upload's receipt will say why.
        """
        while True:
            with self._lock:
                since = max(self._shown, self._state.witnessed)
                if self._state.lines - since <= MAX_NEW_LINES // 2:  # others may write before the upload goes
                    return
                page = self._state.hashes[since : since + MAX_NEW_LINES]
                head = self._state.head_at(since + len(page))
            known = show(LedgerStatement(head, head.sign(self._key).signature, tuple(page)))
            with self._lock:
                if known <= since:
                    return
                self._shown = min(known, self._state.lines)

    @property
    def head(self) -> LedgerHead:
        return self._state.head

    def show_again(self) -> None:
        """Show the coordinator all lines again that no receipt names."""
        with self._lock:
            self._shown = 0

    @property
    def last_receipt(self) -> str:
        """SHA-256 of the payload of the last receipt of a decided upload; "" where it lies in an earlier ledger."""
        return self._state.last_receipt

    @property
    def unresolved(self) -> dict[str, UploadEntry]:
        """Uploads without a receipt, by their id. They may have left."""
        with self._lock:
            return dict(self._state.open)

    def receipt(self, upload_id: str) -> Receipt | None:
        """The receipt that stands here for an upload, read from the file; None if there is none."""
        answers = self.entries(ReceiptEntry, upload_id)
        return next((answer.receipt for answer in answers if answer.upload_id == upload_id), None)

    def entries(self, kind: type[AnyEntry], naming: str = "") -> Iterator[AnyEntry]:
        """The entries of one type in whole lines with ``naming`` in them, oldest first, read from the file."""
        if not self._segment.exists():
            return
        with self._segment.open("rb") as lines:
            whole = takewhile(lambda data: data.endswith(b"\n"), lines)
            for document in (json.loads(data) for data in whole if naming.encode() in data):
                if document["type"] == kind.type and isinstance(entry := Line.from_document(document).entry, kind):
                    yield entry

    def payload_bytes(self, part: Part) -> int:
        """Bytes of payload that may have left on a UTC day ("2026-01-31"), or in a round (study, revision, round).

        An `upload` or `resend` line counts for all that it lets out, until the next one says what was sent under it.
        """
        with self._lock:
            return self._state.bytes[part]

    def tries(self, upload_id: str) -> int:
        """How many lines let this upload out so far: its `upload` line and each `resend`."""
        with self._lock:
            return self._state.charges[upload_id].tries

    def sent(self, upload_id: str, size: int) -> None:
        """Count no more than ``size`` bytes for the last line that let this upload out; the next one will say so."""
        with self._lock:
            self._state.sent(upload_id, size)

    def numbers(self, part: Part) -> int:
        """Metrics and counts recorded so far, by day or in a round as ``payload_bytes``."""
        with self._lock:
            return self._state.numbers[part]

    def estimates(self, journal: Journal) -> int:
        """How often it was told how long the journal's round will still take, in all its attempts."""
        with self._lock:
            return self._state.estimates[journal.study, journal.revision, journal.round]

    def summarized(self) -> dict[str, tuple[str, str]]:
        """This site's columns of which figures left, each with its last summary request and when that was."""
        with self._lock:
            return dict(self._state.summarized)

    def last_sent(self, study: str, revision: int) -> tuple[int, int]:
        """The furthest round, and its furthest attempt, of which anything was recorded; (0, 0) for none."""
        with self._lock:
            return self._state.last.get((study, revision), (0, 0))

    def says(self, question: Callable[[LedgerState], Known]) -> Known:
        """What the lines so far answer to ``question``, while nobody writes. It changes nothing."""
        with self._lock:
            return question(self._state)

    def release_decision(self, study: str, revision: int, round_: int, update: str, persons: int) -> str:
        """What people decided about an update, by its digest: released, by ``persons`` at least; rejected; or ""."""
        with self._lock:
            return self._state.release_decision((study, revision, round_, update), persons)

    @property
    def pledged(self) -> Pledged:
        """Which sums this site signed, here and in the ledgers that this one continues."""
        return Pledged(self._state, self._lock)

    @property
    def policy_sha256(self) -> str:
        """The digest of the policy in force, as it was recorded last."""
        with self._lock:
            return self._state.policy

    def note_policy(self, policy: PolicyEntry) -> None:
        """Record the policy in force, unless it was recorded last; what happened to it is filled in here."""
        with self._lock:
            if policy.sha256 != self._state.policy:
                event = "removed" if not policy.sha256 else ("changed" if self._state.policy else "seen")
                self.append(replace(policy, event=event))

    def close(self) -> None:
        """Say what was left out, sign and close; after a failed disk, only close. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            try:
                if self.ledger_id and self._failed is None:
                    self._say_left_out()
                    self.sign()
            finally:
                self._closed = True
                self._lines.close()
                self._signatures.close()

    def _say_left_out(self) -> None:
        """Write the last line of each type that was left out, and how many were before it."""
        for kind in sorted(self._left_out):
            count, entry = self._left_out[kind]
            last = replace(entry, left_out=count - 1)
            self.append(replace(last, event="closed", bytes_up=0) if isinstance(last, SessionEntry) else last)
        self._left_out.clear()

    @property
    def failed(self) -> bool:
        """Whether the disk failed: nothing more is written."""
        return self._failed is not None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _segment(self) -> Path:
        return self._folder / FIRST_SEGMENT

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse after a failed disk, and remember one: what the file holds from then on is not what memory says."""
        if self._closed:
            raise TryAgain("the ledger is closed: the service is stopping", hint="start it, then try again")
        if self._failed is not None:
            raise durable.StorageFailed(f"{self._failed.message}; nothing more is written", hint=self._failed.hint)
        try:
            yield
        except durable.StorageFailed as error:
            self._failed = error
            raise
