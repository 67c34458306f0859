#!/usr/bin/env python3
"""A second verifier of a hospital's ledger: `python verify_ledger.py LEDGER_DIR`.

Written from the format in docs/auditors.md alone; it shares no code with `site-agent audit verify` and needs only the
standard library and `cryptography`. The two must agree on every ledger.

Exit codes: 0 verified; 1 changed since it was written, with the first bad line; 2 unchanged, but uploads without a
receipt or lines that no signed head covers; 3 cannot be verified; 64 usage.
"""

import base64
import hashlib
import json
import sys
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

HEAD_TYPE = "application/vnd.wardround.ledger-head.v1+json"
RECEIPT_TYPE = "application/vnd.wardround.receipt.v1+json"
RECORD_TYPES = ("genesis", "identity", "session", "upload", "receipt", "declare", "consent", "recovered")
LARGEST_INTEGER = 2**53 - 1


class Tampered(Exception):
    """A line that is not as it was written, and why."""

    def __init__(self, line, why):
        super().__init__(why)
        self.line = line


class CannotVerify(Exception):
    """Nothing can be said: no ledger, or no key in it."""


# Canonical JSON: sorted keys, no spaces, UTF-8, integers only. What is read must be what would be written.


def no_floats(text):
    raise ValueError(f"{text} is not an integer")


def integer(text):
    value = int(text)
    if abs(value) > LARGEST_INTEGER:
        raise ValueError("an integer that some readers would round")
    return value


def pairs(items):
    if len({key for key, _ in items}) != len(items):
        raise ValueError("a key stands twice")
    return dict(items)


def canonical(data):
    """The value of canonical JSON; ValueError if it is not that."""
    try:
        value = json.loads(
            data, object_pairs_hook=pairs, parse_float=no_floats, parse_int=integer, parse_constant=no_floats
        )
        written = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if written != data:
        raise ValueError("not in canonical form")
    return value


# DSSE: the signature is over the type and the payload with their lengths.


def signed_value(envelope, wanted_type, key):
    """The value in a signed envelope; ValueError if anything about it is wrong."""
    kind, payload = envelope["payload_type"], envelope["payload"].encode()
    signature = base64.b64decode(envelope["signature"], validate=True)
    if kind != wanted_type or envelope["keyid"] != hashlib.sha256(key.public_bytes_raw()).hexdigest():
        raise ValueError("another type or another key")
    message = b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)
    try:
        key.verify(signature, message)
    except InvalidSignature:
        raise ValueError("its signature does not verify") from None
    return canonical(payload)


def public_key(hexadecimal):
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(hexadecimal))


# The chain.


def after(head, line):
    """The head after a line: SHA-256(head before || SHA-256(line))."""
    return hashlib.sha256(bytes.fromhex(head) + hashlib.sha256(line).digest()).hexdigest()


def read_lines(folder):
    """The ledger's whole lines, and what follows the last newline."""
    segments = sorted(folder.glob("[0-9]*.jsonl"))
    if not segments:
        raise CannotVerify(f"there is no ledger in {folder}")
    *lines, torn = b"".join(segment.read_bytes() for segment in segments).split(b"\n")
    if not lines:
        raise CannotVerify("the ledger has no whole line")
    return lines, torn


def read_records(lines):
    records = []
    for number, line in enumerate(lines):
        try:
            record = canonical(line)
        except ValueError as error:
            raise Tampered(number, f"is not as it was written: {error}") from None
        if not isinstance(record, dict) or record.get("v") != 1 or record.get("type") not in RECORD_TYPES:
            raise Tampered(number, "is no record of a known type")
        if record.get("seq") != number:
            raise Tampered(number, "has another number: lines were removed, added or moved")
        records.append(record)
    if records[0]["type"] != "genesis":
        raise Tampered(0, "is not a ledger's beginning")
    return records


def follow_chain(records, lines):
    """The heads after 0, 1, 2 ... lines. Of two lines that disagree, the one that fits neither side is to blame."""
    heads = ["0" * 64]
    for number, (record, line) in enumerate(zip(records, lines, strict=True)):
        named = record.get("prev")
        if named != heads[-1]:
            blamed = number
            if number > 0 and number + 1 < len(lines) and isinstance(named, str) and len(named) == 64:
                try:
                    if after(named, line) == records[number + 1].get("prev"):
                        blamed = number - 1  # this line still leads to the next, so the one before was changed
                except ValueError:
                    pass  # not hexadecimal: this line was changed
            raise Tampered(blamed, f"breaks the chain: line {number} names another head than the lines before it give")
        heads.append(after(heads[-1], line))
    return heads


# What the lines say.


def check_upload(number, record, uploads):
    names = ("bundle", "name", "dtype", "shape", "encoding", "bytes", "sha256")
    manifest = [{name: tensor[name] for name in names} for tensor in record["tensors"]]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if hashlib.sha256(text.encode()).hexdigest() != record["manifest_sha256"]:
        raise Tampered(number, "has tensors that do not give its manifest's digest")
    if sum(tensor["bytes"] for tensor in manifest) != record["payload_bytes"]:
        raise Tampered(number, "has tensors that do not add up to its bytes")
    if record["upload_id"] in uploads:
        raise Tampered(number, "repeats an upload")


def check_receipt(number, record, receipt, uploads, receipts, heads):
    upload = uploads.get(record["upload_id"])
    if upload is None or receipt["upload_id"] != record["upload_id"]:
        raise Tampered(number, "is a receipt for an upload that no line before it records")
    if record["upload_id"] in receipts:
        raise Tampered(number, "is a second receipt for one upload")
    if receipt["decision"] == "not_received":
        return
    for name in ("study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes"):
        if receipt[name] != upload[name]:
            raise Tampered(number, f"is a receipt whose {name} is not the upload's")
    head = receipt["ledger"]
    if head is None:
        return
    if not upload["seq"] < head["lines"] < len(heads) or heads[head["lines"]] != head["head"]:
        raise Tampered(number, "is a receipt for a head that this ledger never had")


def check_records(records, heads):
    """Uploads and their receipts, by upload id."""
    uploads, receipts, key, previous = {}, {}, None, "0" * 64
    for number, record in enumerate(records):
        try:
            if record["type"] == "identity":
                key = public_key(record["receipt_key"])
            elif record["type"] == "upload":
                check_upload(number, record, uploads)
                uploads[record["upload_id"]] = record
            elif record["type"] == "receipt":
                if key is None:
                    raise CannotVerify("no identity line gives the coordinator's receipt key")
                receipt = signed_value(record["envelope"], RECEIPT_TYPE, key)
                check_receipt(number, record, receipt, uploads, receipts, heads)
                if receipt["decision"] != "not_received":
                    if receipt["previous"] != previous:
                        raise Tampered(number, "is a receipt that does not follow the one before it: one is missing")
                    previous = hashlib.sha256(record["envelope"]["payload"].encode()).hexdigest()
                receipts[record["upload_id"]] = receipt
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Tampered(number, f"does not have its form: {error}") from None
    return uploads, receipts


def check_signed_heads(folder, genesis, heads):
    """How many lines the last signed head covers."""
    try:
        key = public_key(genesis["ledger_key"])
    except (KeyError, TypeError, ValueError):
        raise CannotVerify("the first line holds no ledger key") from None
    path = folder / "heads.jsonl"
    signed = 0
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            head = signed_value(canonical(line), HEAD_TYPE, key)
            covered, digest, ledger = head["lines"], head["head"], head["ledger_id"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Tampered(signed, f"or later: a signed head is damaged: {error}") from None
        if ledger != genesis.get("ledger_id"):
            raise Tampered(0, "is of another ledger than a signed head")
        if covered >= len(heads):
            raise Tampered(len(heads) - 1, f"is missing: a signed head covers {covered} lines")
        if heads[covered] != digest:
            raise Tampered(signed, f"or a later one up to {covered - 1} is not the one that a signed head covers")
        signed = max(signed, covered)
    return signed


def verify(folder):
    """Print the verdict and return the exit code."""
    try:
        lines, torn = read_lines(folder)
        records = read_records(lines)
        heads = follow_chain(records, lines)
        uploads, receipts = check_records(records, heads)
        unsigned = len(lines) - check_signed_heads(folder, records[0], heads)
    except Tampered as bad:
        print(f"TAMPERED: line {bad.line} {bad}")
        return 1
    except (CannotVerify, OSError) as why:
        print(f"CANNOT VERIFY: {why}")
        return 3
    unresolved = len(uploads) - len(receipts)
    total = sum(upload["payload_bytes"] for upload in uploads.values())
    print(f"{len(lines)} lines, {len(uploads)} uploads, {total} payload bytes")
    if unresolved or unsigned or torn:
        print(f"UNRESOLVED: {unresolved} uploads without a receipt, {unsigned} lines that no signed head covers")
        return 2
    print("VERIFIED")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: verify_ledger.py LEDGER_DIR", file=sys.stderr)
        sys.exit(64)
    sys.exit(verify(Path(sys.argv[1])))
