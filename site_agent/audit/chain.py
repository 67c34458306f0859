"""Judges one ledger: its lines, what they say, and the heads that were signed over them.

One pass over the lines; the first fault ends it. For each line, in this order:

    1. it is canonical JSON, a record, its known fields have their form, it is numbered densely from 0
    2. it names the head before it; of two lines that disagree, the one that does not lead to the next is the bad one
    3. a summary's figures give its digest; an upload's tensors give its manifest digest and its bytes, its facts the
       digest that a person releases, and its id is new; what is sent again is an upload before it without a receipt,
       and its tries are counted from 2
    4. no set was agreed twice, no two secrets of one site opened, each within the policy in force (``audit.secure``)
    5. a receipt may stand there (``wardround.records.receipts``): the writer of a ledger asks the same before it
       appends one

Then every signed head is this ledger's key's, and a head that this ledger had, each longer than the one before. Lines
are counted from 1 here and in everything that a person reads; a line's own ``seq`` counts from 0.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.audit.files import LedgerFiles, RawLines
from site_agent.audit.form import digest, line_in, read
from site_agent.audit.secure import SecureLines
from wardround.errors import BadData, Unavailable
from wardround.records.ledger.entries import (
    Entry,
    GenesisEntry,
    IdentityEntry,
    ReceiptEntry,
    ResendEntry,
    UnknownEntry,
    UploadEntry,
)
from wardround.records.ledger.summary import SummaryEntry
from wardround.records.receipts import (
    ACCEPTED,
    EMPTY_HEAD,
    HEAD_TYPE,
    NOT_RECEIVED,
    RECEIPT_TYPE,
    REFUSED,
    Awaited,
    LedgerHead,
    Receipt,
    RecordedUpload,
    refuse_misfit,
)
from wardround.signing import dsse

RESEND_FACTS = ("study", "revision", "round", "attempt", "payload_bytes")
NEWEST_HEADS = 1000  # whose signatures are checked; an older head lies under each newer one's signature anyway


class Changed(Exception):
    """The first fault: the line it is in, counted from 1, or None where it is in no line, and the ledger's folder."""

    def __init__(self, line: int | None, reason: str, ledger: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason
        self.ledger = ledger


class Account:
    """What a ledger's lines say, taken one at a time. Holds a head for each line and the open uploads, not the lines.

    ``key`` is the ledger key of its first line (hex). ``cited`` is the ledger that it continues, ``signed`` how many
    lines its last signed head covers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.heads = [bytes.fromhex(EMPTY_HEAD)]  # after 0, 1, 2 ... lines
        self.ledger_id = self.key = self.site = self.federation = self.first_time = self.last_time = ""
        self.cited: LedgerHead | None = None
        self.receipt_keys: dict[str, Ed25519PublicKey] = {}  # by key id
        self.receipt_key_lines: dict[str, int] = {}  # where each is named first
        self.open: dict[str, RecordedUpload] = {}  # uploads without a receipt
        self._tries: dict[str, int] = {}  # of each of them, how many lines let it out
        self.resolved: set[str] = set()
        self.receipts: list[str] = []  # SHA-256 of the payload of each accepted or refused receipt
        self.verified: dict[str, tuple[str, Receipt]] = {}  # by SHA-256 of its envelope: that of its payload, and it
        self.decisions = dict.fromkeys((ACCEPTED, REFUSED, NOT_RECEIVED), 0)
        self.uploads = self.bytes = self.resends = self.resent_bytes = self.summaries = self.signed = 0
        self.torn = False
        self.key_named = False  # by a receipt
        self.unknown: set[str] = set()  # types of records that a later version writes
        self._receipt_key = ""
        self.secure = SecureLines()

    @property
    def lines(self) -> int:
        return len(self.heads) - 1

    def take(self, line: bytes, following: bytes | None, files: LedgerFiles) -> None:
        """One line, with the next one and the signed heads to find a culprit by."""
        seq = self.lines
        try:
            record = line_in(line)
        except BadData as error:
            raise self.changed(seq + 1, f"line {seq + 1} is not as it was written: {error.message}") from None
        if record.seq != seq:
            reason = f"line {seq + 1} says it is line {record.seq + 1}: lines were removed, added or moved"
            raise self.changed(seq + 1, reason)
        if isinstance(record.entry, GenesisEntry) != (seq == 0):
            raise self.changed(seq + 1, f"line {seq + 1}: a ledger begins with its `genesis` line, and has one")
        named = bytes.fromhex(record.prev)
        if named != self.heads[-1]:
            intact = seq > 0 and _after(named, line).hex() == _head_wanted(seq + 1, following, files)
            reason = f"line {seq + 1} names {named.hex()[:12]}… as the head before it, the lines before it give "
            raise self.changed(seq if intact else seq + 1, f"{reason}{self.heads[-1].hex()[:12]}…")
        try:
            self._account(seq, record.entry)
        except BadData as error:
            raise self.changed(seq + 1, f"line {seq + 1}: {error.message}") from None
        self.heads.append(_after(named, line))
        self.first_time, self.last_time = self.first_time or record.ts, record.ts

    def changed(self, line: int, reason: str) -> Changed:
        return Changed(line, reason, self.name)

    def had(self, head: LedgerHead) -> bool:
        """Whether this ledger, as it is now, had that head."""
        return head.ledger_id == self.ledger_id and self._head_after(head.lines) == head.head

    def fits(self, receipt: Receipt) -> None:
        """Raises BadData: the receipt of an open upload is not about what that line says, or about another ledger."""
        refuse_misfit(receipt, self._awaited(receipt.upload_id))

    def _account(self, seq: int, entry: Entry) -> None:
        self.secure.take(seq + 1, entry)
        match entry:
            case GenesisEntry():
                self.ledger_id, self.key = entry.ledger_id, entry.ledger_key or ""
                self.cited = entry.continues.ledger_head() if entry.continues is not None else None
            case IdentityEntry():
                key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry.receipt_key))
                self._receipt_key = dsse.keyid(key)
                self.receipt_keys[self._receipt_key] = key
                self.receipt_key_lines.setdefault(self._receipt_key, seq + 1)
                self.site, self.federation = entry.site or "", entry.federation or ""
            case UploadEntry():
                self._upload(seq, entry)
            case ResendEntry():
                self._resend(entry)
            case ReceiptEntry():
                self._receipt(entry)
            case SummaryEntry():
                if digest(entry.left()) != entry.summary_sha256:
                    raise BadData("what it says left does not give its `summary_sha256`")
                self.summaries += 1
            case UnknownEntry():
                self.unknown.add(entry.unknown_type)

    def _upload(self, seq: int, entry: UploadEntry) -> None:
        upload_id = entry.upload_id
        if digest(entry.manifest()) != entry.manifest_sha256:
            raise BadData("its tensors do not give its manifest digest")
        if sum(row.bytes for row in entry.tensors) != entry.payload_bytes:
            raise BadData(f"its tensors do not add up to its {entry.payload_bytes} bytes")
        if entry.update is not None and digest(entry.left()) != entry.update:
            raise BadData("what it says left does not give its `update` digest")
        if upload_id in self.open or upload_id in self.resolved:
            raise BadData(f"upload {upload_id[:12]}… was recorded before")
        self.open[upload_id], self._tries[upload_id] = entry.recorded(seq), 1
        self.uploads += 1
        self.bytes += entry.payload_bytes

    def _resend(self, entry: ResendEntry) -> None:
        upload_id = entry.upload_id
        upload = self.open.get(upload_id)
        if upload is None:
            raise BadData("it sends again what no line before it records, or what has a receipt")
        for name in RESEND_FACTS:
            if getattr(entry, name) != getattr(upload, name):
                raise BadData(f"its {name} is not that of upload {upload_id[:12]}…")
        if entry.try_ != self._tries[upload_id] + 1:
            raise BadData(f"it is try {entry.try_}, the one before it was {self._tries[upload_id]}")
        if (entry.sent or 0) > upload.payload_bytes:
            raise BadData("more was sent under the line before it than that line lets out")
        self._tries[upload_id] = entry.try_
        self.resends += 1
        self.resent_bytes += entry.payload_bytes

    def _receipt(self, entry: ReceiptEntry) -> None:
        if not self.receipt_keys:
            raise BadData("a receipt stands before any `identity` line")
        envelope, upload_id = entry.envelope.envelope(), entry.upload_id
        if upload_id in self.resolved:
            raise BadData(f"upload {upload_id[:12]}… has a receipt already")
        if upload_id not in self.open:
            raise BadData("this receipt is for an upload that no line before it records")
        receipt = receipt_in(envelope, self.receipt_keys[self._receipt_key])
        awaited = self._awaited(upload_id)
        refuse_misfit(receipt, awaited)
        if receipt.decision != NOT_RECEIVED:  # that speaks of an id alone
            if awaited.previous not in (None, receipt.previous):
                raise BadData("this receipt does not follow the one before it: one is missing")
            self.receipts.append(hashlib.sha256(envelope.payload).hexdigest())
            self.verified[digest(entry.envelope.document())] = self.receipts[-1], receipt
        self.key_named = self.key_named or receipt.ledger_key == self.key
        self.decisions[receipt.decision] += 1
        self.resolved.add(upload_id)
        del self.open[upload_id], self._tries[upload_id]

    def _awaited(self, upload_id: str) -> Awaited:
        first = None if self.cited is not None else EMPTY_HEAD  # it may follow one that is in the ledger before
        return Awaited(
            self.open[upload_id], self.ledger_id, self._head_after, self.receipts[-1] if self.receipts else first,
            site=self.site, federation=self.federation, ledger_key=self.key,
        )  # fmt: skip

    def _head_after(self, lines: int) -> str | None:
        return self.heads[lines].hex() if 0 <= lines < len(self.heads) else None


def account_of(files: LedgerFiles) -> Account:
    """What a ledger says, every line and every signed head of it judged.

    Raises:
        Changed: at the first fault.
        Unavailable: it cannot be read, has no whole line, or does not say its key.
    """
    account, lines = Account(files.name), RawLines(files)
    for line, following in pairwise(chain(lines, (None,))):
        if line is not None:
            account.take(line, following, files)
    if not account.lines:
        raise Unavailable("the ledger has no whole line")
    if not account.key:
        raise Unavailable("the first line holds no ledger key")
    account.torn = lines.torn
    try:
        account.signed = _signed_heads(files, account)
    except OSError as error:
        raise Unavailable(f"{files.name}: the signed heads cannot be read ({error.strerror})") from None
    return account


def receipt_in(envelope: dsse.Envelope, key: Ed25519PublicKey) -> Receipt:
    """Raises BadData: not a receipt, or not signed with ``key``."""
    return Receipt.from_document(signed_value(envelope, RECEIPT_TYPE, dsse.keyid(key), key))


def signed_value(envelope: dsse.Envelope, kind: str, keyid: str, key: Ed25519PublicKey | None) -> Any:
    """The value in an envelope. ``key`` None: the signature is not looked at.

    Raises:
        BadData: another type, another key, a signature that does not verify, or no canonical JSON.
    """
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


def _after(head: bytes, line: bytes) -> bytes:
    return hashlib.sha256(head + hashlib.sha256(line).digest()).digest()


def _head_wanted(lines: int, following: bytes | None, files: LedgerFiles) -> Any:
    """What others say the head after so many lines was: the next line, or, at the end, a signed head; else None."""
    try:
        if following is not None:
            return read(following)["prev"]
        for line in files.signatures():
            head = read(read(line)["payload"].encode())
            if head["lines"] == lines:
                return head["head"]
    except (BadData, KeyError, TypeError, AttributeError):
        return None  # what cannot be read says nothing; the check of that line or head says what is wrong with it
    return None


def _signed_heads(files: LedgerFiles, account: Account) -> int:
    """How many lines the last signed head covers. A torn last head is none."""
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(account.key))
    keyid = dsse.keyid(key)
    count = sum(1 for _ in files.signatures())
    signed = 0
    for number, line in enumerate(files.signatures(), 1):
        whose = key if number > count - NEWEST_HEADS else None
        value = partial(signed_value, kind=HEAD_TYPE, keyid=keyid, key=whose)
        signed = _head(number, line, signed, account, value)
    return signed


def _head(number: int, line: bytes, signed: int, account: Account, value: Callable[[dsse.Envelope], Any]) -> int:
    """Check one signed head; ``signed`` is what the one before it covers. Returns what this one covers."""
    at = min(signed + 1, account.lines)
    try:
        head = LedgerHead(**value(dsse.Envelope.from_document(read(line))))
        grows = head.lines > signed
    except BadData as error:
        raise account.changed(at, f"signed head {number}: {error.message}") from None
    except TypeError:
        raise account.changed(at, f"signed head {number} is no head") from None
    if not grows:
        reason = f"signed head {number} covers {head.lines} lines, the one before it {signed}: they were moved"
        raise account.changed(at, reason)
    if head.ledger_id != account.ledger_id:
        raise account.changed(at, f"signed head {number} is of another ledger")
    if head.lines > account.lines:
        reason = f"the ledger has {account.lines} lines, a signed head covers {head.lines}"
        raise account.changed(account.lines + 1, reason)
    if not account.had(head):
        reason = f"the lines from {signed + 1} to {head.lines} are not those that a signed head covers"
        raise account.changed(at, reason)
    return head.lines
