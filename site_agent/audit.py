"""Reads a site's ledger and judges it: no network, no torch, no service, nothing but the files.

What is checked, in this order; the first fault ends it:

    1. every line is canonical JSON, of a known type, numbered densely from 0
    2. every line names the head before it
    3. an upload's tensors give its manifest digest and its bytes, and its id is new
    4. every receipt is signed by the coordinator's receipt key, speaks of an upload recorded before it, names a head
       that this ledger had, and follows the receipt before it
    5. every signed head is this ledger's key's, and a head that this ledger had
    6. what is left over: uploads without a receipt, lines that no signed head covers

Not checked here: that a receipt key or a ledger key is the right party's. The first is in the `identity` line, the
second in `genesis`; compare them with the coordinator's and the hospital's records.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from wardround import canonical, dsse
from wardround.errors import BadData, Unavailable
from wardround.receipts import (
    ACCEPTED,
    EMPTY_HEAD,
    HEAD_TYPE,
    NOT_RECEIVED,
    REFUSED,
    Receipt,
    line_hash,
    next_head,
)

VERIFIED, TAMPERED, UNRESOLVED, CANNOT_VERIFY = 0, 1, 2, 3
TYPES = {"genesis", "identity", "session", "upload", "receipt", "declare", "consent", "recovered"}
MANIFEST_FIELDS = ("bundle", "name", "dtype", "shape", "encoding", "bytes", "sha256")
HEADS = "heads.jsonl"


@dataclass
class Verdict:
    """What a verification found. ``first_bad`` is the number (``seq``) of the first bad line, None if there is none.

    ``ok`` means all of it: nothing changed, nothing unresolved, nothing unsigned. ``bytes`` is what the uploads'
    payloads hold, whether or not the coordinator took them.
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

    def document(self) -> dict[str, Any]:
        return asdict(self)


class _Bad(Exception):
    """The first fault, and the line it is in."""

    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(reason)
        self.seq = seq
        self.reason = reason


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """The ledger's records, oldest first, for showing; a line that cannot be read ends it.

    Raises:
        Unavailable: there is no ledger.
        BadData: a line is not canonical JSON; the message says which.
    """
    for number, line in enumerate(_whole_lines(folder)[0]):
        try:
            yield canonical.loads(line)
        except BadData as error:
            raise BadData(
                f"ledger line {number} cannot be read: {error.message}", hint="`site-agent audit verify` says more"
            ) from None


def verify(folder: Path) -> tuple[Verdict, int]:
    """The verdict on a ledger folder, and the exit code that says it.

    0 verified; 1 changed since it was written; 2 unchanged, but with unresolved uploads or an unsigned tail;
    3 cannot be verified (no ledger, no key).
    """
    verdict = Verdict()
    try:
        lines, torn = _whole_lines(folder)
    except Unavailable as error:
        verdict.reason = error.message
        return verdict, CANNOT_VERIFY
    if not lines:
        verdict.reason = "the ledger has no whole line"
        return verdict, CANNOT_VERIFY
    verdict.lines = len(lines)
    try:
        entries = _entries(lines)
        heads = _chain(entries, lines, _heads_said(folder / HEADS))
        uploads, receipts = _receipts(entries, heads)
        signed = _signed_heads(folder / HEADS, entries[0], heads)
    except _Bad as bad:
        verdict.first_bad, verdict.reason = bad.seq, bad.reason
        return verdict, TAMPERED
    except Unavailable as error:
        verdict.reason = error.message
        return verdict, CANNOT_VERIFY
    decisions = [receipt.decision for receipt in receipts.values()]
    verdict.uploads = len(uploads)
    verdict.bytes = sum(upload["payload_bytes"] for upload in uploads.values())
    verdict.accepted, verdict.refused = decisions.count(ACCEPTED), decisions.count(REFUSED)
    verdict.unresolved = len(uploads) - len(receipts)
    verdict.unsigned_tail = len(lines) - signed
    left_over = []
    if verdict.unresolved:
        left_over.append(f"{verdict.unresolved} uploads have no receipt and may have left")
    if verdict.unsigned_tail or torn:
        half = " and a torn one" if torn else ""
        left_over.append(f"no signed head covers the last {verdict.unsigned_tail} lines{half}")
    verdict.reason = "; ".join(left_over)
    verdict.ok = not left_over
    return verdict, VERIFIED if verdict.ok else UNRESOLVED


def _whole_lines(folder: Path) -> tuple[list[bytes], bytes]:
    segments = sorted(folder.glob("[0-9]*.jsonl"))
    if not segments:
        raise Unavailable(f"there is no ledger in {folder}", hint="give the site's --state, or the copy's folder")
    try:
        data = b"".join(segment.read_bytes() for segment in segments)
    except OSError as error:
        raise Unavailable(f"the ledger in {folder} cannot be read ({error.strerror})") from None
    *lines, torn = data.split(b"\n")
    return lines, torn


def _entries(lines: list[bytes]) -> list[dict[str, Any]]:
    """Step 1."""
    entries: list[dict[str, Any]] = []
    for seq, line in enumerate(lines):
        try:
            entry = canonical.loads(line)
        except BadData as error:
            raise _Bad(seq, f"line {seq} is not as it was written: {error.message}") from None
        if not isinstance(entry, dict) or entry.get("v") != 1 or entry.get("type") not in TYPES:
            raise _Bad(seq, f"line {seq} is no record of a known type")
        if entry.get("seq") != seq:
            raise _Bad(
                seq, f"line {seq} says it is line {str(entry.get('seq'))[:20]}: lines were removed, added or moved"
            )
        entries.append(entry)
    if entries[0]["type"] != "genesis":
        raise _Bad(0, "the first line is not the ledger's beginning")
    return entries


def _chain(entries: list[dict[str, Any]], lines: list[bytes], said: dict[int, str]) -> list[str]:
    """Step 2. Returns the heads after 0, 1, 2 ... lines. ``said``: signed heads, only to find the culprit by."""
    heads = [EMPTY_HEAD]
    for seq, (entry, line) in enumerate(zip(entries, lines, strict=True)):
        named = entry.get("prev")
        if named != heads[-1]:
            raise _Bad(_culprit(seq, entries, lines, said), _chain_reason(seq, str(named), heads[-1]))
        heads.append(next_head(heads[-1], line_hash(line)))
    return heads


def _culprit(seq: int, entries: list[dict[str, Any]], lines: list[bytes], said: dict[int, str]) -> int:
    """Which of two lines was changed, the one that names a wrong head or the one before it.

    If the later line, with the head it names, still leads to the next line's (or to a signed head), it is as written.
    """
    named = entries[seq].get("prev")
    if seq == 0 or not isinstance(named, str) or len(named) != 64:
        return seq
    wanted = entries[seq + 1].get("prev") if seq + 1 < len(lines) else said.get(seq + 1)
    try:
        return seq - 1 if next_head(named, line_hash(lines[seq])) == wanted else seq
    except ValueError:
        return seq


def _heads_said(path: Path) -> dict[int, str]:
    """The heads in ``heads.jsonl`` by their number of lines, believed by nobody yet."""
    said = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            head = json.loads(json.loads(line)["payload"])
            said[int(head["lines"])] = str(head["head"])
        except (ValueError, TypeError, KeyError):
            continue  # step 5 says what is wrong with it
    return said


def _chain_reason(seq: int, named: str, found: str) -> str:
    return f"line {seq} names {named[:12]}… as the head before it, the lines before it give {found[:12]}…"


def _receipts(entries: list[dict[str, Any]], heads: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Receipt]]:
    """Steps 3 and 4. Returns the uploads and their receipts, by upload id."""
    uploads: dict[str, dict[str, Any]] = {}
    receipts: dict[str, Receipt] = {}
    key: Ed25519PublicKey | None = None
    previous = EMPTY_HEAD
    for seq, entry in enumerate(entries):
        try:
            if entry["type"] == "identity":
                key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["receipt_key"]))
            elif entry["type"] == "upload":
                _check_upload(seq, entry, uploads)
                uploads[entry["upload_id"]] = entry
            elif entry["type"] == "receipt":
                if key is None:
                    raise Unavailable("no identity line gives the coordinator's receipt key")
                envelope = dsse.Envelope.from_document(entry["envelope"])
                receipt = Receipt.verified(envelope, key)
                _check_receipt(seq, entry, receipt, uploads, receipts, heads)
                if receipt.decision != NOT_RECEIVED:
                    if receipt.previous != previous:
                        raise _Bad(seq, f"line {seq}: this receipt does not follow the one before it: one is missing")
                    previous = hashlib.sha256(envelope.payload).hexdigest()
                receipts[entry["upload_id"]] = receipt
        except BadData as error:
            raise _Bad(seq, f"line {seq}: {error.message}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _Bad(seq, f"line {seq} does not have the form of a `{entry['type']}` record") from None
    return uploads, receipts


def _check_upload(seq: int, entry: dict[str, Any], uploads: dict[str, dict[str, Any]]) -> None:
    manifest = [{key: row[key] for key in MANIFEST_FIELDS} for row in entry["tensors"]]
    if canonical.digest(manifest) != entry["manifest_sha256"]:
        raise _Bad(seq, f"line {seq}: its tensors do not give its manifest digest")
    if sum(row["bytes"] for row in manifest) != entry["payload_bytes"]:
        raise _Bad(seq, f"line {seq}: its tensors do not add up to its {entry['payload_bytes']} bytes")
    if entry["upload_id"] in uploads:
        raise _Bad(seq, f"line {seq}: upload {entry['upload_id'][:12]}… was recorded before")


def _check_receipt(
    seq: int,
    entry: dict[str, Any],
    receipt: Receipt,
    uploads: dict[str, dict[str, Any]],
    receipts: dict[str, Receipt],
    heads: list[str],
) -> None:
    upload = uploads.get(entry["upload_id"])
    if upload is None or receipt.upload_id != entry["upload_id"]:
        raise _Bad(seq, f"line {seq}: this receipt is for an upload that no line before it records")
    if entry["upload_id"] in receipts:
        raise _Bad(seq, f"line {seq}: upload {entry['upload_id'][:12]}… has a receipt already")
    if receipt.decision == NOT_RECEIVED:
        return  # it speaks of an id alone
    wanted = {key: upload[key] for key in ("study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes")}
    for name, value in wanted.items():
        if getattr(receipt, name) != value:
            raise _Bad(seq, f"line {seq}: the receipt's {name} is not that of upload {entry['upload_id'][:12]}…")
    head = receipt.ledger
    if head is None:
        return
    if head.lines <= upload["seq"] or head.lines >= len(heads) or heads[head.lines] != head.head:
        raise _Bad(seq, f"line {seq}: the receipt names a head of {head.lines} lines that this ledger never had")


def _signed_heads(path: Path, genesis: dict[str, Any], heads: list[str]) -> int:
    """Step 5. Returns how many lines the last signed head covers."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(genesis["ledger_key"]))
    except (KeyError, TypeError, ValueError):
        raise Unavailable("the first line holds no ledger key") from None
    if not path.exists():
        return 0
    *lines, _torn = path.read_bytes().split(b"\n")
    signed = 0
    for number, line in enumerate(lines):
        try:
            head = dsse.verify(dsse.Envelope.from_document(canonical.loads(line)), HEAD_TYPE, key)
            covers, digest, ledger = head["lines"], head["head"], head["ledger_id"]
        except BadData as error:
            raise _Bad(signed, f"signed head {number}: {error.message}") from None
        except (KeyError, TypeError):
            raise _Bad(signed, f"signed head {number} is no head") from None
        if ledger != genesis.get("ledger_id"):
            raise _Bad(0, f"signed head {number} is of another ledger")
        if covers >= len(heads):
            raise _Bad(len(heads) - 1, f"the ledger has {len(heads) - 1} lines, a signed head covers {covers}")
        if heads[covers] != digest:
            raise _Bad(signed, f"the lines from {signed} to {covers - 1} are not those that a signed head covers")
        signed = max(signed, covers)
    return signed
