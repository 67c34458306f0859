"""The site's account of everything that left: append-only, hash-chained, fsynced before the first byte is sent.

One line is the canonical JSON of one record; ``prev`` is the head before it, and the head after it is
SHA-256(prev ‖ SHA-256(line)); see ``wardround.receipts``. Heads are signed into ``heads.jsonl``. Anyone who holds a
receipt, which names a head, can tell whether a line before it was changed.

This module writes. ``site_agent.audit`` judges, from the files alone.
"""

import hashlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.state import now_text
from wardround import __version__, canonical, durable
from wardround.dsse import Envelope
from wardround.errors import BadData, NeedsPerson
from wardround.receipts import ACCEPTED, EMPTY_HEAD, REFUSED, LedgerHead, line_hash, next_head

FIRST_SEGMENT = "000001.jsonl"
HEADS = "heads.jsonl"


class Ledger:
    """The one writer of a ledger folder. Safe to use from several threads.

    Opening it repairs what a crash can leave: a torn last line is cut, kept in ``torn/`` and recorded. Only lines that
    no signed head covers may be cut.

    Raises:
        NeedsPerson: the ledger is broken before its unsigned tail; nothing is changed.
    """

    def __init__(self, folder: Path, key: Ed25519PrivateKey) -> None:
        self._folder = folder
        self._key = key
        self._lock = threading.RLock()
        self._hashes: list[bytes] = []
        self._heads: list[str] = [EMPTY_HEAD]  # after 0, 1, 2 ... lines
        self._witnessed = 0  # lines under the last head that a receipt names
        self._open_uploads: dict[str, dict[str, Any]] = {}
        self._bytes: Counter[object] = Counter()  # payloads by day, and by (study, revision, round)
        self._decided: dict[tuple[str, int, int, str], str] = {}  # what a person said of a held update
        self._released: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int, int, str]] = set()
        self._policy = ""
        self.ledger_id = ""
        durable.make_folder(folder)
        torn = self._read()
        self._signed = self._read_heads(bool(torn))
        if torn:
            self._cut(torn)
        self._lines = durable.AppendFile(self._segment)
        self._signatures = durable.AppendFile(folder / HEADS)
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
            StorageFailed: the disk failed; the process must end.
        """
        self.append_all([(kind, fields)])

    def append_all(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Add several records, (type, fields) each, with one fsync; a full disk takes none."""
        if not records:
            return
        with self._lock:
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

    def resolve(self, upload_id: str, envelope: Envelope) -> None:
        """Append the coordinator's receipt for an upload, and sign. A receipt that is already here is not added."""
        with self._lock:
            if upload_id in self._open_uploads:
                self.append("receipt", upload_id=upload_id, envelope=envelope.document())
                self.sign(lasting=False)

    def sign(self, *, lasting: bool = True) -> None:
        """Sign the head as it is now, unless it is signed already.

        A signature may be lost with the power and be made again; ``lasting`` ones, at the end of a connection, may not.
        """
        with self._lock:
            head = self.head
            if head.lines > self._signed:
                envelope = head.sign(self._key)
                self._signatures.append(canonical.dumps(envelope.document()) + b"\n", lasting=False)
                self._signed = head.lines
            if lasting:
                self._signatures.sync()

    def statement(self) -> tuple[LedgerHead, bytes, list[bytes]]:
        """What goes with an upload: the head, its signature, the hash of each line since the last receipt's head."""
        with self._lock:
            self.sign(lasting=False)
            head = self.head
            return head, head.sign(self._key).signature, self._hashes[self._witnessed :]

    @property
    def head(self) -> LedgerHead:
        return LedgerHead(self.ledger_id, len(self._hashes), self._heads[-1])

    @property
    def unresolved(self) -> dict[str, dict[str, Any]]:
        """Uploads without a receipt: id -> their record. They may have left."""
        with self._lock:
            return dict(self._open_uploads)

    def records(self, kind: str) -> Iterator[dict[str, Any]]:
        """The records of one type, oldest first, read from the file."""
        for line in (self._segment.read_bytes() if self._segment.exists() else b"").splitlines():
            record = json.loads(line)
            if record["type"] == kind:
                yield record

    def payload_bytes(self, part: object) -> int:
        """Bytes of payload recorded so far on a UTC day ("2026-01-31"), or in a round (study, revision, round)."""
        with self._lock:
            return self._bytes[part]

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
        """Sign and close."""
        with self._lock:
            if self.ledger_id:
                self.sign()
            self._lines.close()
            self._signatures.close()

    @property
    def _segment(self) -> Path:
        return self._folder / FIRST_SEGMENT

    def _note(self, record: dict[str, Any], hash_of_line: bytes) -> None:
        self._hashes.append(hash_of_line)
        self._heads.append(next_head(self._heads[-1], hash_of_line))
        if record["type"] == "genesis":
            self.ledger_id = record["ledger_id"]
        elif record["type"] == "upload":
            self._open_uploads[record["upload_id"]] = record
            self._bytes[record["ts"][:10]] += record["payload_bytes"]
            self._bytes[record["study"], record["revision"], record["round"]] += record["payload_bytes"]
        elif record["type"] == "policy":
            self._policy = record["sha256"]
        elif record["type"] in ("held", "released", "rejected"):
            self._note_hold(record)
        elif record["type"] == "receipt":
            self._open_uploads.pop(record["upload_id"], None)
            receipt = json.loads(record["envelope"]["payload"])
            if receipt["decision"] in (ACCEPTED, REFUSED) and receipt["ledger"] is not None:
                self._witnessed = max(self._witnessed, min(receipt["ledger"]["lines"], len(self._hashes)))

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
                    self._note(record, line_hash(line))
                except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
                    raise self._broken(f"line {number + 1} of {len(lines)} is no record of this version") from None
            elif number == len(lines) - 1:
                return line + b"\n" + torn
            else:
                raise self._broken(f"line {number + 1} of {len(lines)} does not continue the one before it")
        return torn

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
