"""Reads a site's ledger and judges it: no network, no torch, no service, nothing but the files.

One pass over the lines; the first fault ends it. For each line, in this order:

    1. it is canonical JSON, of a known type, its known fields have their form, it is numbered densely from 0
    2. it names the head before it; of two lines that disagree, the one that does not lead to the next is the bad one
    3. an upload's tensors give its manifest digest and its bytes, and its id is new
    4. a receipt is signed by the coordinator's receipt key, speaks of an upload recorded before it, names a head that
       this ledger had, and follows the receipt before it

Then every signed head is this ledger's key's, and a head that this ledger had, each longer than the one before; then,
if it is given, the coordinator's copy of the receipts. What is left over at the end is no fault, and is said: uploads
without a receipt, lines that no signed head covers.

Not checked here: that a receipt key or a ledger key is the right party's. The first is in the `identity` line, the
second in `genesis`; compare them with the coordinator's and the hospital's records.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.audit.form import HEADS, MANIFEST_FIELDS, Lines, digest, read, record_in
from wardround import dsse
from wardround.errors import BadData, Unavailable
from wardround.receipts import (
    ACCEPTED,
    EMPTY_HEAD,
    FACTS,
    HEAD_TYPE,
    NOT_RECEIVED,
    RECEIPT_TYPE,
    REFUSED,
    Awaited,
    LedgerHead,
    Receipt,
    judge,
    refuse_misfit,
)

VERIFIED, TAMPERED, UNRESOLVED, CANNOT_VERIFY = 0, 1, 2, 3
NEWEST_HEADS = 1000  # whose signatures are checked; an older head lies under each newer one's signature anyway


@dataclass
class Verdict:
    """What a verification found. ``first_bad`` is the number (``seq``) of the first bad line, None if there is none.

    ``ok`` means all of it: nothing changed, nothing unresolved, nothing unsigned. ``bytes`` is what the uploads'
    payloads hold, whether or not the coordinator took them. ``compared`` counts the receipts of the coordinator's copy,
    None without one.
    """

    ok: bool = False
    lines: int = 0
    unsigned_tail: int = 0
    first_bad: int | None = None
    reason: str = ""
    bytes: int = 0
    uploads: int = 0
    accepted: int = 0
    refused: int = 0
    unresolved: int = 0
    compared: int | None = None
    ledger_id: str = ""
    head: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


class _Bad(Exception):
    """The first fault, and the line it is in."""

    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(reason)
        self.seq = seq
        self.reason = reason


def verify(folder: Path, receipts: Path | None = None) -> tuple[Verdict, int]:
    """The verdict on a ledger folder, and the exit code that says it.

    0 verified; 1 changed since it was written; 2 unchanged, but with unresolved uploads or an unsigned tail;
    3 cannot be verified (no ledger, no key).

    Args:
        receipts: the coordinator's copy of this site's receipts, one envelope a line. With it, a ledger that was cut
            short and signed again by whoever holds the hospital's key is found.
    """
    verdict = Verdict()
    account = _Account()
    signed = 0
    try:
        lines = Lines(folder)
        heads = folder / HEADS
        for seq, (line, following) in enumerate(pairwise(chain(lines, (None,)))):
            if line is not None:
                account.take(seq, line, following, heads)
        verdict.lines = account.lines
        if not account.lines:
            raise Unavailable("the ledger has no whole line")
        signed = _signed_heads(heads, account)
        if receipts is not None:
            verdict.compared = _compare(receipts, account)
    except _Bad as bad:
        verdict.lines = max(verdict.lines, sum(1 for _ in Lines(folder)))
        verdict.first_bad, verdict.reason = bad.seq, bad.reason
        return verdict, TAMPERED
    except Unavailable as error:
        verdict.reason = error.message
        return verdict, CANNOT_VERIFY
    verdict.ledger_id, verdict.head = account.ledger_id, account.heads[-1].hex()
    verdict.uploads, verdict.bytes = account.uploads, account.bytes
    verdict.accepted, verdict.refused = account.decisions[ACCEPTED], account.decisions[REFUSED]
    verdict.unresolved = len(account.open)
    verdict.unsigned_tail = account.lines - signed
    verdict.reason = "; ".join(_left_over(verdict, lines.torn))
    verdict.ok = not verdict.reason
    return verdict, VERIFIED if verdict.ok else UNRESOLVED


def _left_over(verdict: Verdict, torn: bool) -> list[str]:
    said = []
    if verdict.unresolved:
        said.append(f"{verdict.unresolved} uploads have no receipt and may have left")
    if verdict.unsigned_tail or torn:
        half = " and a torn one" if torn else ""
        said.append(f"no signed head covers the last {verdict.unsigned_tail} lines{half}")
    return said


class _Account:
    """What the lines say, taken one at a time. Holds a head for each line and the open uploads, not the lines."""

    def __init__(self) -> None:
        self.heads = [bytes.fromhex(EMPTY_HEAD)]  # after 0, 1, 2 ... lines
        self.ledger_id = ""
        self.ledger_key: str | None = None
        self.reopened = False  # it continues an older ledger, which is kept beside it
        self.site: str | None = None
        self.receipt_keys: dict[str, Ed25519PublicKey] = {}  # by key id
        self.open: dict[str, dict[str, Any]] = {}  # uploads without a receipt
        self.resolved: set[str] = set()
        self.receipts: list[str] = []  # SHA-256 of the payload of each accepted or refused receipt
        self.decisions = dict.fromkeys((ACCEPTED, REFUSED, NOT_RECEIVED), 0)
        self.uploads = self.bytes = 0
        self._receipt_key = self._federation = ""

    @property
    def lines(self) -> int:
        return len(self.heads) - 1

    def take(self, seq: int, line: bytes, following: bytes | None, said: Path) -> None:
        """One line, with the next one and the file of signed heads to find a culprit by."""
        try:
            record = record_in(line)
        except BadData as error:
            raise _Bad(seq, f"line {seq} is not as it was written: {error.message}") from None
        if record["seq"] != seq:
            raise _Bad(seq, f"line {seq} says it is line {record['seq']}: lines were removed, added or moved")
        if (record["type"] == "genesis") != (seq == 0):
            raise _Bad(seq, f"line {seq}: a ledger begins with its `genesis` line, and has one")
        named = bytes.fromhex(record["prev"])
        if named != self.heads[-1]:
            intact = seq > 0 and _after(named, line).hex() == _head_wanted(seq + 1, following, said)
            reason = f"line {seq} names {named.hex()[:12]}… as the head before it, the lines before it give "
            raise _Bad(seq - 1 if intact else seq, f"{reason}{self.heads[-1].hex()[:12]}…")
        try:
            self._account(seq, record)
        except BadData as error:
            raise _Bad(seq, f"line {seq}: {error.message}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _Bad(seq, f"line {seq} does not have the form of a `{record['type']}` record") from None
        self.heads.append(_after(named, line))

    def had(self, head: LedgerHead) -> bool:
        """Whether this ledger, as it is now, had that head."""
        mine = head.ledger_id == self.ledger_id and 0 <= head.lines < len(self.heads)
        return mine and self.heads[head.lines].hex() == head.head

    def _account(self, seq: int, record: dict[str, Any]) -> None:
        match record["type"]:
            case "genesis":
                self.ledger_id, self.ledger_key = record["ledger_id"], record.get("ledger_key")
                self.reopened = "continues" in record
            case "identity":
                key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(record["receipt_key"]))
                self._receipt_key = dsse.keyid(key)
                self.receipt_keys[self._receipt_key] = key
                self.site, self._federation = record.get("site"), record.get("federation", "")
            case "upload":
                self._upload(seq, record)
            case "receipt":
                self._receipt(record)

    def _upload(self, seq: int, record: dict[str, Any]) -> None:
        upload_id = record["upload_id"]
        manifest = [{key: row[key] for key in MANIFEST_FIELDS} for row in record["tensors"]]
        if digest(manifest) != record["manifest_sha256"]:
            raise BadData("its tensors do not give its manifest digest")
        if sum(row["bytes"] for row in manifest) != record["payload_bytes"]:
            raise BadData(f"its tensors do not add up to its {record['payload_bytes']} bytes")
        if upload_id in self.open or upload_id in self.resolved:
            raise BadData(f"upload {upload_id[:12]}… was recorded before")
        names = [{"bundle": row["bundle"], "name": row["name"]} for row in manifest]
        facts = {name: record[name] for name in ("upload_id", *FACTS)}
        self.open[upload_id] = {"seq": seq, "tensors": names, **facts}
        self.uploads += 1
        self.bytes += record["payload_bytes"]

    def _receipt(self, record: dict[str, Any]) -> None:
        if not self.receipt_keys:
            raise BadData("a receipt stands before any `identity` line")
        envelope = dsse.Envelope.from_document(record["envelope"])
        upload_id = record["upload_id"]
        if upload_id in self.resolved:
            raise BadData(f"upload {upload_id[:12]}… has a receipt already")
        if upload_id not in self.open:
            raise BadData("this receipt is for an upload that no line before it records")
        receipt = judge(envelope, self.receipt_keys[self._receipt_key], self._awaited(upload_id))
        if receipt.decision != NOT_RECEIVED:  # that speaks of an id alone
            self.receipts.append(hashlib.sha256(envelope.payload).hexdigest())
        self.decisions[receipt.decision] += 1
        self.resolved.add(upload_id)
        del self.open[upload_id]

    def fits(self, receipt: Receipt) -> None:
        """Raises BadData: the receipt of an open upload is not about what that line says, or about another ledger."""
        refuse_misfit(receipt, self._awaited(receipt.upload_id))

    def _awaited(self, upload_id: str) -> Awaited:
        first = None if self.reopened else EMPTY_HEAD  # of a reopened ledger it follows one that is in the old ledger
        return Awaited(
            self.open[upload_id], self.ledger_id, self._head_after, self.receipts[-1] if self.receipts else first,
            site=self.site or "", federation=self._federation,
        )  # fmt: skip

    def _head_after(self, lines: int) -> str | None:
        return self.heads[lines].hex() if 0 <= lines < len(self.heads) else None


def _after(head: bytes, line: bytes) -> bytes:
    return hashlib.sha256(head + hashlib.sha256(line).digest()).digest()


def _head_wanted(lines: int, following: bytes | None, said: Path) -> Any:
    """What others say the head after so many lines was: the next line, or, at the end, a signed head; else None."""
    try:
        if following is not None:
            return read(following)["prev"]
        for line in said.read_bytes().split(b"\n")[:-1] if said.exists() else []:
            head = read(read(line)["payload"].encode())
            if head["lines"] == lines:
                return head["head"]
    except (BadData, KeyError, TypeError, AttributeError):
        return None  # what cannot be read says nothing; the check of that line or head says what is wrong with it
    return None


def _signed(envelope: dsse.Envelope, kind: str, keyid: str, key: Ed25519PublicKey | None) -> Any:
    """The value in an envelope. ``key`` None: the signature is not looked at."""
    if envelope.payload_type != kind:
        raise BadData(f"signed as {envelope.payload_type[:60]!r}, wanted {kind!r}")
    if envelope.keyid != keyid:
        raise BadData(f"signed by key {envelope.keyid[:12]}…, wanted {keyid[:12]}…")
    if key is not None:
        try:
            key.verify(envelope.signature, dsse.encoding(kind, envelope.payload))
        except InvalidSignature:
            raise BadData(f"the signature of key {keyid[:12]}… does not verify") from None
    return read(envelope.payload)


def _signed_heads(path: Path, account: _Account) -> int:
    """How many lines the last signed head covers. A torn last head is none."""
    if account.ledger_key is None:
        raise Unavailable("the first line holds no ledger key")
    if not path.exists():
        return 0
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(account.ledger_key))
    keyid = dsse.keyid(key)
    with path.open("rb") as file:
        count = sum(line.endswith(b"\n") for line in file)
        file.seek(0)
        signed = 0
        for number in range(count):
            whose = key if number >= count - NEWEST_HEADS else None
            value = partial(_signed, kind=HEAD_TYPE, keyid=keyid, key=whose)
            signed = _head(number, file.readline()[:-1], signed, account, value)
    return signed


def _head(number: int, line: bytes, signed: int, account: _Account, value: Callable[[dsse.Envelope], Any]) -> int:
    """Check one signed head; ``signed`` is what the one before it covers. Returns what this one covers."""
    at = min(signed, account.lines - 1)
    try:
        head = LedgerHead(**value(dsse.Envelope.from_document(read(line))))
        grows = head.lines > signed
    except BadData as error:
        raise _Bad(at, f"signed head {number}: {error.message}") from None
    except TypeError:
        raise _Bad(at, f"signed head {number} is no head") from None
    if head.ledger_id != account.ledger_id:
        raise _Bad(0, f"signed head {number} is of another ledger")
    if not grows:
        raise _Bad(at, f"signed head {number} covers {head.lines} lines, the one before it {signed}: they were moved")
    if head.lines > account.lines:
        raise _Bad(account.lines, f"the ledger has {account.lines} lines, a signed head covers {head.lines}")
    if not account.had(head):
        raise _Bad(at, f"the lines from {signed} to {head.lines - 1} are not those that a signed head covers")
    return head.lines


def _compare(path: Path, account: _Account) -> int:
    """Hold the coordinator's copy of the receipts against the ledger. Returns how many it has.

    A receipt for an upload that waits for one is no fault: it stays unresolved until the site has asked. Receipts that
    the ledger has beyond the copy's end are newer than the copy.

    Raises:
        Unavailable: there is no such file, or it is not a whole copy of this site's receipts.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise Unavailable(f"the receipts in {path} cannot be read ({error.strerror})") from None
    if torn:
        raise Unavailable(f"the receipts in {path} end within a line: the copy is not whole")
    if not lines and account.receipts:
        raise Unavailable(f"{path} holds no receipt, the ledger has {len(account.receipts)}: it is not the copy")
    previous, place = EMPTY_HEAD, 0
    for number, line in enumerate(lines, 1):
        try:
            envelope = dsse.Envelope.from_document(read(line))
            key = account.receipt_keys.get(envelope.keyid)
            if key is None:
                raise BadData("it is signed by a key that no `identity` line of this ledger names")
            receipt = Receipt.from_document(_signed(envelope, RECEIPT_TYPE, envelope.keyid, key))
        except BadData as error:
            raise Unavailable(f"{path}, receipt {number}: {error.message}") from None
        if account.site is not None and receipt.site != account.site:
            raise Unavailable(
                f"{path}, receipt {number} is for site `{receipt.site}`, this ledger is `{account.site}`'s"
            )
        if receipt.decision == NOT_RECEIVED:
            continue
        if receipt.previous != previous:
            raise Unavailable(f"{path}, receipt {number} does not follow the one before it: the copy is not whole")
        previous = hashlib.sha256(envelope.payload).hexdigest()
        if place < len(account.receipts) and account.receipts[place] == previous:
            place += 1
        elif (
            account.reopened
            and place == 0
            and (receipt.ledger is None or receipt.ledger.ledger_id != account.ledger_id)
        ):
            continue  # of the ledger that this one continues
        else:
            _missing(number, receipt, place, account)
    return len(lines)


def _missing(number: int, receipt: Receipt, place: int, account: _Account) -> None:
    """The coordinator holds a receipt that the ledger does not: a fault, unless its upload still waits for one."""
    head = receipt.ledger
    at = min(head.lines, account.lines) if head is not None else account.lines
    told = f"receipt {number} of the coordinator's copy ({receipt.study} round {receipt.round}, {receipt.decision})"
    if head is not None and head.lines > account.lines:
        raise _Bad(at, f"{told} names a ledger of {head.lines} lines, this one has {account.lines}: it was cut short")
    if receipt.upload_id not in account.open or place < len(account.receipts):
        raise _Bad(at, f"{told} is not in the ledger at its place")
    try:
        account.fits(receipt)
    except BadData as error:
        raise _Bad(at, f"{told}: {error.message}") from None
