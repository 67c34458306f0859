"""The site's account of everything that left: append-only, hash-chained, fsynced before the first byte is sent.

One line is the canonical JSON of one record; ``prev`` is the head before it, and the head after it is
SHA-256(prev ‖ SHA-256(line)); see ``wardround.records.receipts``. Heads are signed into ``heads.jsonl``. Anyone who
holds a receipt, which names a head, can tell whether a line before it was changed.

This module writes. ``site_agent.audit`` judges, from the files alone.
"""

import hashlib
import json
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from site_agent.gateway.allowance import Allowance
from site_agent.gateway.exit.evidence import Evidence, HostileReceipt
from site_agent.state.directory import COUNTS, now_text
from wardround import __version__
from wardround.errors import BadData, NeedsPerson
from wardround.local import durable
from wardround.records.receipts import (
    ACCEPTED,
    EMPTY_HEAD,
    MAX_NEW_LINES,
    NOT_RECEIVED,
    REFUSED,
    Awaited,
    LedgerHead,
    Receipt,
    judge,
    line_hash,
    next_head,
)
from wardround.signing import canonical
from wardround.signing.dsse import Envelope
from wardround.v1 import federation_pb2 as pb

FIRST_SEGMENT = "000001.jsonl"
HEADS = "heads.jsonl"
OFTEN = ("session", "declare", "blocked")  # lines that a coordinator can cause without end; by none an update leaves
log = logging.getLogger(__name__)


@dataclass
class _Charge:
    """What the last line that let an upload out counts for: ``bytes`` in each of ``parts``."""

    parts: tuple[object, object]
    bytes: int
    tries: int


class Ledger:
    """The one writer of a ledger folder. Safe to use from several threads.

    Opening it repairs what a crash or a failed disk can leave. A torn last line is cut, kept in ``torn/`` and recorded.
    Whole lines that no signed head covers, whose fsync may have failed, follow the one before them and are kept: they
    are written once more, because they may stand in memory alone. Of an upload among them nothing was sent, but it
    counts as one that may have left until the coordinator has said otherwise: the account says too much, never too
    little.

    Of the kinds in ``OFTEN`` a coordinator can cause a line as often as it likes: ``append_often`` leaves some out, and
    the next line of that kind, at the latest ``close``, says how many (``left_out``).

    After a write that failed and left unknown what the disk has, the object refuses everything; the process must end.

    Raises:
        NeedsPerson: the ledger is broken before its unsigned tail; nothing is changed.
    """

    def __init__(self, folder: Path, key: Ed25519PrivateKey, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._key = key
        self._lock = threading.RLock()
        self._hashes: list[bytes] = []
        self._heads: list[str] = [EMPTY_HEAD]  # after 0, 1, 2 ... lines
        self._witnessed = 0  # lines under the last head that a receipt names
        self._shown = 0  # lines that the coordinator has said it knows; in memory, for it can be asked again
        self._open_uploads: dict[str, dict[str, Any]] = {}
        self._charges: dict[str, _Charge] = {}  # of each open upload, what its last line counts for
        self._bytes: Counter[object] = Counter()  # payloads by day, and by (study, revision, round)
        self._numbers: Counter[object] = Counter()  # metrics and counts, likewise
        self._last: dict[tuple[str, int], tuple[int, int]] = {}  # (study, revision) -> its last round and attempt
        self._decided: dict[tuple[str, int, int, str], str] = {}  # what a person said of a held update
        self._released: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int, int, str]] = set()
        self._allowances = {kind: Allowance(monotonic) for kind in OFTEN}
        self._left_out: dict[str, tuple[int, dict[str, Any]]] = {}  # by kind: how many, and the last of them
        self._policy = ""
        self._receipt_key: Ed25519PublicKey | None = None
        self._names = {"site": "", "federation": "", "ledger_key": ""}
        self._previous: str | None = EMPTY_HEAD  # SHA-256 of the last accepted or refused receipt's payload
        self._failed: durable.StorageFailed | None = None
        self._sizes: list[int] = []
        self.ledger_id = ""
        durable.make_folder(folder)
        torn = self._read()
        self._signed = self._read_heads(bool(torn))
        if torn:
            self._cut(torn)
        if unsigned := len(self._hashes) - self._signed:
            log.warning("the ledger's last %d lines were not signed when it was last closed: they are kept", unsigned)
        self._lines = durable.AppendFile(self._segment, tail=sum(self._sizes[self._signed :]))
        self._sizes.clear()
        self._signatures = durable.AppendFile(folder / HEADS)
        self._evidence = Evidence(folder)
        if torn and self.ledger_id:
            self.append("recovered", torn_bytes=len(torn))

    def begin(self, continues: LedgerHead | None = None) -> None:
        """Write the first line, if there is none: who keeps this ledger, by its key, and which one it continues."""
        with self._lock:
            if not self.ledger_id:
                key = self._key.public_key().public_bytes_raw().hex()
                before = {"continues": asdict(continues)} if continues is not None else {}
                self.append(
                    "genesis", ledger_id=uuid.uuid4().hex, ledger_key=key, software=f"wardround {__version__}", **before
                )

    def refuse_unbegun(self) -> None:
        """Raises NeedsPerson: there is no ledger where a site's must be. A new one would hide what left before."""
        if not self.ledger_id:
            raise NeedsPerson(
                f"there is no ledger in {self._folder}; nothing was sent",
                hint="restore the folder from the last backup, then `site-agent audit reopen`",
            )

    def append(self, kind: str, **fields: Any) -> None:
        """Add one record; it is durable when this returns.

        Raises:
            CannotWrite: the disk is full; the ledger is as it was, and nothing may be sent.
            StorageFailed: the disk failed, now or before; the process must end.
        """
        self.append_all([(kind, fields)])

    def append_often(self, kind: str, **fields: Any) -> bool:
        """Add one record of a kind in ``OFTEN``, unless there were many of late. Whether it was added.

        Raises:
            CannotWrite, StorageFailed: as ``append``.
        """
        with self._lock:
            count, _ = self._left_out.get(kind, (0, {}))
            if not self._allowances[kind].take():
                self._left_out[kind] = (count + 1, fields)
                return False
            self.append(kind, **fields, **({"left_out": count} if count else {}))
            self._left_out.pop(kind, None)
            return True

    def append_all(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Add several records, (type, fields) each, with one fsync; a full disk takes none."""
        if not records:
            return
        with self._lock, self._writing():
            made: list[tuple[dict[str, Any], bytes]] = []
            seq, head = len(self._hashes), self._heads[-1]
            for kind, fields in records:
                record = {"v": 1, "seq": seq + len(made), "ts": now_text(), "type": kind, "prev": head, **fields}
                line = canonical.dumps(record)
                head = next_head(head, line_hash(line))
                made.append((record, line))
            self._lines.append(b"".join(line + b"\n" for _, line in made))
            for record, line in made:
                self._note(record, line_hash(line))

    def resolve(self, upload_id: str, envelope: Envelope) -> Receipt:
        """Append the coordinator's receipt for an upload that has none, if it may stand here, and sign.

        Raises:
            OutOfOrder: a receipt between this one and the last one here is missing; nothing was appended.
            BadData: it is not a receipt, not the coordinator's, or not about that upload and this ledger; nothing was
                appended. See ``wardround.records.receipts.judge``; besides, its code must be one of the contract's.
        """
        with self._lock:
            upload = self._open_uploads.get(upload_id)
            if upload is None:
                raise BadData(f"upload {upload_id[:12]}… has a receipt already, or is not in this ledger")
            if self._receipt_key is None:
                raise BadData("this ledger has no `identity` line, so no receipt can be believed")
            awaited = Awaited(upload, self.ledger_id, self._head_after, self._previous, **self._names)
            receipt = judge(envelope, self._receipt_key, awaited)
            if receipt.code and receipt.code not in pb.RefusalCode.keys():  # noqa: SIM118  a protobuf enum, no mapping
                raise BadData("the receipt's code is none of those that a coordinator may say")
            self.append("receipt", upload_id=upload_id, envelope=envelope.document())
            self.sign(lasting=False)
            return receipt

    def dispute(self, upload_id: str, envelope: Envelope, why: str) -> HostileReceipt:
        """Keep a receipt that cannot stand here as evidence; its upload stays unresolved. Returns what to raise."""
        with self._lock:
            return self._evidence.keep(self._open_uploads[upload_id], envelope, why)

    def disputed(self, study: str, revision: int) -> bool:
        """Whether an unresolved upload of this study was answered with a receipt that cannot stand here."""
        with self._lock:
            return any(
                (self._open_uploads[one]["study"], self._open_uploads[one]["revision"]) == (study, revision)
                for one in self._evidence.uploads & self._open_uploads.keys()
            )

    def sign(self, *, lasting: bool = True) -> None:
        """Sign the head as it is now, unless it is signed already.

        A signature may be lost with the power and be made again; ``lasting`` ones, at the end of a connection, may not.
        """
        with self._lock, self._writing():
            head = self.head
            if head.lines > self._signed:
                envelope = head.sign(self._key)
                self._signatures.append(canonical.dumps(envelope.document()) + b"\n", lasting=False)
                self._signed = head.lines
            if lasting:
                self._signatures.sync()

    def statement(self) -> tuple[LedgerHead, bytes, list[bytes]]:
        """What goes with an upload: the head, its signature, the hash of each line since the last head that is known.

        Of more lines than a message takes only the newest: ``catch_up`` shows the others before.
        """
        with self._lock:
            self.sign(lasting=False)
            head = self.head
            since = max(self._shown, self._witnessed, head.lines - MAX_NEW_LINES)
            return head, head.sign(self._key).signature, self._hashes[since:]

    def catch_up(self, show: Callable[[LedgerHead, bytes, list[bytes]], int]) -> None:
        """Show a backlog of lines in pages, until what is left goes with an upload.

        Args:
            show: takes the head after a page, its signature and the hashes of the page's lines; returns how many lines
                are known then. Where a page changes nothing, the upload's receipt will say why.
        """
        while True:
            with self._lock:
                since = max(self._shown, self._witnessed)
                if len(self._hashes) - since <= MAX_NEW_LINES // 2:  # others may write before the upload goes
                    return
                page = self._hashes[since : since + MAX_NEW_LINES]
                head = LedgerHead(self.ledger_id, since + len(page), self._heads[since + len(page)])
            known = show(head, head.sign(self._key).signature, page)
            with self._lock:
                if known <= since:
                    return
                self._shown = min(known, len(self._hashes))

    @property
    def head(self) -> LedgerHead:
        return LedgerHead(self.ledger_id, len(self._hashes), self._heads[-1])

    @property
    def unresolved(self) -> dict[str, dict[str, Any]]:
        """Uploads without a receipt: id -> their record. They may have left."""
        with self._lock:
            return dict(self._open_uploads)

    def receipt(self, upload_id: str) -> Receipt | None:
        """The receipt that stands here for an upload, read from the file; None if there is none."""
        for record in self.records("receipt"):
            if record["upload_id"] == upload_id:
                return Receipt.from_document(json.loads(record["envelope"]["payload"]))
        return None

    def records(self, kind: str) -> Iterator[dict[str, Any]]:
        """The records of one type, oldest first, read from the file."""
        for line in (self._segment.read_bytes() if self._segment.exists() else b"").splitlines():
            record = json.loads(line)
            if record["type"] == kind:
                yield record

    def payload_bytes(self, part: object) -> int:
        """Bytes of payload that may have left on a UTC day ("2026-01-31"), or in a round (study, revision, round).

        An `upload` or `resend` line counts for all that it lets out, until the next one says what was sent under it.
        """
        with self._lock:
            return self._bytes[part]

    def tries(self, upload_id: str) -> int:
        """How many lines let this upload out so far: its `upload` line and each `resend`."""
        with self._lock:
            return self._charges[upload_id].tries

    def sent(self, upload_id: str, size: int) -> None:
        """Count no more than ``size`` bytes for the last line that let this upload out; the next one will say so."""
        with self._lock:
            charge = self._charges[upload_id]
            for part in charge.parts:
                self._bytes[part] -= charge.bytes - size
            charge.bytes = size

    def numbers(self, part: object) -> int:
        """Metrics and counts recorded so far, by day or in a round as ``payload_bytes``."""
        with self._lock:
            return self._numbers[part]

    def last_sent(self, study: str, revision: int) -> tuple[int, int]:
        """The furthest round, and its furthest attempt, of which anything was recorded; (0, 0) for none."""
        with self._lock:
            return self._last.get((study, revision), (0, 0))

    def is_held(self, study: str, revision: int, round_: int, update: str) -> bool:
        """Whether the ledger says that this update waits, or waited, for a person."""
        with self._lock:
            return (study, revision, round_, update) in self._held

    def word(self, study: str, revision: int, round_: int, update: str) -> str:
        """What a person said of an update, by its digest: released, rejected, or "" while nobody did."""
        with self._lock:
            return self._decided.get((study, revision, round_, update), "")

    def ever_released(self, study: str, revision: int) -> bool:
        """Whether a person has released an update of this study before."""
        with self._lock:
            return (study, revision) in self._released

    def note_policy(self, sha256: str) -> None:
        """Record the digest of the policy in force ("" for none), unless it is the one recorded last."""
        with self._lock:
            if sha256 != self._policy:
                event = "removed" if not sha256 else ("changed" if self._policy else "seen")
                self.append("policy", event=event, sha256=sha256)

    def close(self) -> None:
        """Say what was left out, sign and close; after a failed disk, only close."""
        with self._lock:
            try:
                if self.ledger_id and self._failed is None:
                    self._say_left_out()
                    self.sign()
            finally:
                self._lines.close()
                self._signatures.close()

    def _say_left_out(self) -> None:
        """Write the last line of each kind that was left out, and how many were before it."""
        for kind, (count, fields) in sorted(self._left_out.items()):
            ended = {"event": "closed", "bytes_up": 0} if kind == "session" else {}
            self.append(kind, **{**fields, **ended, "left_out": count - 1})
        self._left_out.clear()

    @property
    def failed(self) -> bool:
        """Whether the disk failed: nothing more is written."""
        return self._failed is not None

    @property
    def _segment(self) -> Path:
        return self._folder / FIRST_SEGMENT

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse after a failed disk, and remember one: what the file holds from then on is not what memory says."""
        if self._failed is not None:
            raise durable.StorageFailed(f"{self._failed.message}; nothing more is written", hint=self._failed.hint)
        try:
            yield
        except durable.StorageFailed as error:
            self._failed = error
            raise

    def _head_after(self, lines: int) -> str | None:
        return self._heads[lines] if 0 <= lines < len(self._heads) else None

    def _note(self, record: dict[str, Any], hash_of_line: bytes) -> None:
        self._hashes.append(hash_of_line)
        self._heads.append(next_head(self._heads[-1], hash_of_line))
        if record["type"] == "genesis":
            self.ledger_id = record["ledger_id"]
            self._names["ledger_key"] = record.get("ledger_key", "")
            self._previous = None if "continues" in record else EMPTY_HEAD
        elif record["type"] == "identity":
            self._receipt_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(record["receipt_key"]))
            self._names |= {name: record.get(name, "") for name in ("site", "federation")}
        elif record["type"] == "upload":
            self._open_uploads[record["upload_id"]] = record
            self._charge(record, 1)
            self._note_told(record)
        elif record["type"] == "resend":
            if "sent" in record and record["upload_id"] in self._charges:
                self.sent(record["upload_id"], record["sent"])
            self._charge(record, record["try"])
        elif record["type"] == "policy":
            self._policy = record["sha256"]
        elif record["type"] in ("held", "released", "rejected"):
            self._note_hold(record)
        elif record["type"] == "receipt":
            self._open_uploads.pop(record["upload_id"], None)
            self._charges.pop(record["upload_id"], None)
            receipt = json.loads(record["envelope"]["payload"])
            if receipt["decision"] != NOT_RECEIVED:
                self._previous = hashlib.sha256(record["envelope"]["payload"].encode()).hexdigest()
            if receipt["decision"] in (ACCEPTED, REFUSED) and receipt["ledger"] is not None:
                self._witnessed = max(self._witnessed, min(receipt["ledger"]["lines"], len(self._hashes)))

    def _charge(self, record: dict[str, Any], tries: int) -> None:
        """Count what a line lets out, by its day and its round."""
        parts = (record["ts"][:10], (record["study"], record["revision"], record["round"]))
        for part in parts:
            self._bytes[part] += record["payload_bytes"]
        self._charges[record["upload_id"]] = _Charge(parts, record["payload_bytes"], tries)

    def _note_told(self, record: dict[str, Any]) -> None:
        study, revision, round_ = record["study"], record["revision"], record["round"]
        numbers = len(record["metrics"]) + COUNTS
        self._numbers[record["ts"][:10]] += numbers
        self._numbers[study, revision, round_] += numbers
        self._last[study, revision] = max(self._last.get((study, revision), (0, 0)), (round_, record["attempt"]))

    def _note_hold(self, record: dict[str, Any]) -> None:
        key = (record["study"], record["revision"], record["round"], record["update"])
        if record["type"] == "held":
            self._held.add(key)
        else:
            self._decided[key] = record["type"]
        if record["type"] == "released":
            self._released.add(key[:2])

    def _read(self) -> bytes:
        """Take every whole line; return the torn bytes at the end, if any."""
        data = self._segment.read_bytes() if self._segment.exists() else b""
        end = data.rfind(b"\n") + 1
        whole, torn = data[:end], data[end:]
        lines = whole.splitlines()
        for number, line in enumerate(lines):
            record = self._continues(line)
            if record is not None:
                try:
                    self._take(number, record, line)
                except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
                    raise self._broken(f"line {number + 1} of {len(lines)} is no record of this version") from None
            elif number == len(lines) - 1:
                return line + b"\n" + torn
            else:
                raise self._broken(f"line {number + 1} of {len(lines)} does not continue the one before it")
        return torn

    def _take(self, number: int, record: dict[str, Any], line: bytes) -> None:
        try:
            self._note(record, line_hash(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._broken(f"line {number + 1} has not the form of a record") from None
        self._sizes.append(len(line) + 1)

    def _continues(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
            fits = record["seq"] == len(self._hashes) and record["prev"] == self._heads[-1] and record["v"] == 1
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return record if fits else None

    def _read_heads(self, torn: bool) -> int:
        """How many lines the last signed head covers. A torn last signature is cut: it can be made again."""
        path = self._folder / HEADS
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        if end != len(data):
            with durable.SpoolFile(path) as file:
                file.truncate(end)
                file.sync()
        signed = 0
        for line in data[:end].splitlines():
            try:
                head = json.loads(Envelope.from_document(json.loads(line)).payload)
                lines, digest = int(head["lines"]), str(head["head"])
                if lines < 0:
                    raise ValueError("fewer than no lines")
            except (BadData, ValueError, TypeError, KeyError, OverflowError, RecursionError):
                raise self._broken(f"{HEADS} holds a line that is no signed head") from None
            if lines >= len(self._heads):
                found = f"{len(self._hashes)} whole lines" + (" and a torn one" if torn else "")
                raise self._broken(f"it has {found}, a signed head covers {lines}")
            if self._heads[lines] != digest:
                raise self._broken(f"its first {lines} lines are not those that the signed head covers")
            signed = max(signed, lines)
        return signed

    def _cut(self, torn: bytes) -> None:
        """Keep the torn bytes aside, then cut them off."""
        kept = self._folder / "torn" / f"{len(self._hashes):06d}-{hashlib.sha256(torn).hexdigest()[:12]}"
        durable.make_folder(kept.parent)
        durable.write_file(kept, torn)
        with durable.SpoolFile(self._segment) as file:
            file.truncate(file.size() - len(torn))
            file.sync()

    def _broken(self, why: str) -> NeedsPerson:
        return NeedsPerson(
            f"ledger {self._segment} is broken: {why}; nothing was sent or changed",
            hint="keep this folder as it is and run `site-agent audit verify`; restore the last backup beside it",
        )
