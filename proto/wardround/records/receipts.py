"""What both sides sign about one upload: the site its ledger's head, the coordinator what it took.

The chain. Each ledger line holds, as ``prev``, the head before it. The head after a line is
SHA-256(head before ‖ SHA-256(the line's bytes without the newline)). So whoever knows one head, and is given the
32-byte hashes of the lines since, can compute the next head and see whether the ledger shrank or forked, without seeing
a line.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wardround.errors import BadData
from wardround.signing import canonical, dsse
from wardround.signing.canonical import MAX_INTEGER

HEAD_TYPE = "application/vnd.wardround.ledger-head.v1+json"
RECEIPT_TYPE = "application/vnd.wardround.receipt.v1+json"
EMPTY_HEAD = "0" * 64

MAX_NEW_LINES = 1000  # hashes of ledger lines in one message; a round writes a few dozen
ACCEPTED, REFUSED, NOT_RECEIVED = "accepted", "refused", "not_received"
DECISIONS = (ACCEPTED, REFUSED, NOT_RECEIVED)
FACTS = ("study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes")
MAX_TEXT = 300  # characters of a receipt's text field: a tensor's name is the longest
_DIGEST, _UPLOAD_ID = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,39}")


def line_hash(line: bytes) -> bytes:
    """SHA-256 of a ledger line without its newline."""
    return hashlib.sha256(line).digest()


def next_head(head: str, hash_of_line: bytes) -> str:
    """The head (hex) after a line whose hash is given."""
    return hashlib.sha256(bytes.fromhex(head) + hash_of_line).hexdigest()


def head_after(head: str, hashes: Iterable[bytes]) -> str:
    """The head after several lines."""
    for hash_of_line in hashes:
        head = next_head(head, hash_of_line)
    return head


@dataclass(frozen=True)
class LedgerHead:
    """How long a ledger is and what its last line says of all before it."""

    ledger_id: str
    lines: int
    head: str

    def sign(self, key: Ed25519PrivateKey) -> dsse.Envelope:
        return dsse.sign(HEAD_TYPE, vars(self), key)

    def verify(self, signature: bytes, key: Ed25519PublicKey) -> None:
        """Raises BadData: ``signature`` is not the ledger key's over this head."""
        envelope = dsse.Envelope(HEAD_TYPE, canonical.dumps(vars(self)), dsse.keyid(key), signature)
        dsse.verify(envelope, HEAD_TYPE, key)


@dataclass(frozen=True)
class Receipt:
    """The coordinator's answer to one upload. ``decision`` is accepted, refused or not_received.

    ``previous`` is the SHA-256 (hex) of the payload of the receipt before it for the same site, so that the coordinator
    cannot quietly drop one. ``tensor`` names the tensor that was refused, if it was one; a name, never a value.
    ``ledger_key`` is the one with which the site enrolled, so that whoever holds a receipt knows whose ledger it is of.
    """

    receipt_id: str
    federation: str
    site: str
    study: str
    revision: int
    round: int
    attempt: int
    upload_id: str  # hex
    manifest_sha256: str
    payload_bytes: int
    decision: str
    code: str  # a name of RefusalCode, "" when accepted
    tensor: str
    time: str  # RFC 3339, UTC
    ledger: LedgerHead | None
    previous: str  # hex; EMPTY_HEAD for the first
    ledger_key: str = ""  # hex; "" where the coordinator does not say it

    def sign(self, key: Ed25519PrivateKey) -> dsse.Envelope:
        head = vars(self.ledger) if self.ledger is not None else None
        return dsse.sign(RECEIPT_TYPE, {**vars(self), "ledger": head}, key)

    @classmethod
    def verified(cls, envelope: dsse.Envelope, key: Ed25519PublicKey) -> "Receipt":
        """The receipt in ``envelope``.

        Raises:
            BadData: not signed by ``key``, or not a receipt.
        """
        return cls.from_document(dsse.verify(envelope, RECEIPT_TYPE, key))

    @classmethod
    def from_document(cls, document: Any) -> "Receipt":
        """Raises BadData: not a receipt, or one of its fields has not its form."""
        head = document.get("ledger") if isinstance(document, dict) else None
        if not isinstance(document, dict) or document.keys() != _NAMES:
            raise BadData("signed, but not a receipt")
        if head is not None and not (isinstance(head, dict) and head.keys() == _HEAD_NAMES):
            raise BadData("signed, but not a receipt: ledger")
        receipt = cls(**{**document, "ledger": LedgerHead(**head) if head is not None else None})
        for name in _misshapen(receipt):
            raise BadData(f"signed, but not a receipt: {name}")
        return receipt


_NAMES = frozenset(item.name for item in fields(Receipt))
_HEAD_NAMES = frozenset(item.name for item in fields(LedgerHead))
_TYPES = [(item.name, item.type) for item in fields(Receipt)]


@dataclass(frozen=True)
class RecordedUpload:
    """What an `upload` line holds that a receipt for it must repeat. ``seq`` is the line's number, from 0.

    ``tensors`` are the names that a refusal may name: a tensor's own, and after its bundle's.
    """

    seq: int
    upload_id: str
    study: str
    revision: int
    round: int
    attempt: int
    manifest_sha256: str
    payload_bytes: int
    tensors: frozenset[str]


@dataclass(frozen=True)
class Awaited:
    """What a ledger knows of itself and of an upload that has no receipt yet: what a receipt is judged against.

    ``head_after`` gives the head after so many lines, None
    where the ledger has fewer. ``previous`` is the SHA-256 of the payload of the receipt before, `EMPTY_HEAD` for the
    first, None where it lies in a ledger that this one continues. ``site``, ``federation`` and ``ledger_key`` are ""
    where the ledger does not say them.
    """

    upload: RecordedUpload
    ledger_id: str
    head_after: Callable[[int], str | None]
    previous: str | None
    site: str = ""
    federation: str = ""
    ledger_key: str = ""


class OutOfOrder(BadData):
    """A receipt that follows another than the last one of the ledger: one between them is missing."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__("this receipt does not follow the one before it: one is missing")
        self.receipt = receipt


def judge(envelope: dsse.Envelope, key: Ed25519PublicKey, awaited: Awaited) -> Receipt:
    """The receipt in ``envelope``, if it may stand as the ledger's next line about ``awaited.upload``.

    The one judgement: whoever writes a ledger asks it before a receipt is appended, whoever verifies one asks it again.

        1. it is signed by the coordinator's receipt key, and each field has its form
        2. it is about this upload, of this site and federation
        3. accepted or refused, it repeats what the `upload` line says, and names a tensor of that line or none
        4. accepted or refused, the head that it names is one that this ledger had, that line included
        5. accepted or refused, it follows the receipt before it

    A ``not_received`` speaks of an id alone, so 3 to 5 do not apply to it.

    Raises:
        OutOfOrder: all holds but 5.
        BadData: it may not; the message says why.
    """
    receipt = Receipt.verified(envelope, key)  # 1
    refuse_misfit(receipt, awaited)
    if receipt.decision != NOT_RECEIVED and awaited.previous not in (None, receipt.previous):  # 5
        raise OutOfOrder(receipt)
    return receipt


def refuse_misfit(receipt: Receipt, awaited: Awaited) -> None:
    """Steps 2 to 4 of ``judge``.

    Raises:
        BadData: it is about something else than that line says, or about another ledger.
    """
    upload = awaited.upload
    if receipt.upload_id != upload.upload_id:
        raise BadData("this receipt is for an upload that no line before it records")
    for name in ("site", "federation", "ledger_key"):  # 2
        wanted, value = getattr(awaited, name), getattr(receipt, name)
        if wanted not in ("", value) and (value or name != "ledger_key"):
            raise BadData(f"the receipt's {name} is not that of this ledger")
    if receipt.decision == NOT_RECEIVED:
        return
    for name in FACTS:  # 3
        if getattr(receipt, name) != getattr(upload, name):
            raise BadData(f"the receipt's {name} is not that of upload {upload.upload_id[:12]}…")
    if receipt.tensor and receipt.tensor not in upload.tensors:
        raise BadData(f"the receipt names a tensor that upload {upload.upload_id[:12]}… does not have")
    head = receipt.ledger
    if head is None:
        return
    known = head.ledger_id == awaited.ledger_id and awaited.head_after(head.lines) == head.head  # 4
    if not (known and head.lines > upload.seq):
        raise BadData(f"the receipt names a head of {head.lines} lines that this ledger never had")


def _misshapen(receipt: Receipt) -> Iterable[str]:
    """The fields of a receipt that have not their form."""
    for name, kind in _TYPES:
        value = getattr(receipt, name)
        if kind is int and not _count(value):
            yield name
        if kind is str and not (isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()):
            yield name
            return  # what follows looks at texts
    if not _UPLOAD_ID.fullmatch(receipt.upload_id):
        yield "upload_id"
    if not _DIGEST.fullmatch(receipt.previous):
        yield "previous"
    head = receipt.ledger
    if head is not None:
        texts = isinstance(head.ledger_id, str) and isinstance(head.head, str)
        if not (texts and _count(head.lines) and len(head.ledger_id) <= MAX_TEXT and _DIGEST.fullmatch(head.head)):
            yield "ledger"
    if receipt.decision not in DECISIONS:
        yield "decision"
    refused = _CODE.fullmatch(receipt.code) is not None
    if refused == (receipt.decision == ACCEPTED) or (receipt.code == "") != (receipt.decision == ACCEPTED):
        yield "code"
    if receipt.tensor and receipt.decision != REFUSED:
        yield "tensor"


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER
