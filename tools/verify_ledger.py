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
import re
import sys
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

HEAD_TYPE = "application/vnd.wardround.ledger-head.v1+json"
RECEIPT_TYPE = "application/vnd.wardround.receipt.v1+json"
LARGEST_INTEGER = 2**53 - 1
NEWEST_HEADS = 1000  # an older head's own signature is not checked: every newer one covers it
EMPTY = "0" * 64

FIELDS_OF = {
    "genesis": "ledger_id",
    "identity": "receipt_key",
    "session": "event",
    "policy": "event",
    "consent": "event study",
    "declare": "study standing",
    "control": "bytes",
    "upload": "upload_id study revision round attempt manifest_sha256 payload_bytes tensors metrics",
    "receipt": "upload_id envelope",
    **dict.fromkeys(("blocked", "held", "released", "rejected"), "study"),
    **dict.fromkeys(("left", "recovered"), ""),
}
FORM_OF = {  # a list means a list of that; an object must have at least these fields
    "by": {"name": "text", "uid": "count"},
    "tensors": [
        dict.fromkeys(("bundle", "name", "dtype", "encoding"), "text")
        | {"shape": ["count"], "bytes": "count", "sha256": "digest"}
    ],
    "metrics": [{"name": "text", "value": "text"}],
    "methods": [{"method": "text", "count": "count", "bytes": "count"}],
    "envelope": {"payload_type": "text", "payload": "text", "keyid": "text", "signature": "text"},
    "continues": {"ledger_id": "text", "lines": "count", "head": "digest"},
}
TEXT = "ts event site federation software peer study standing code destination not_after upload_id ledger_id rule"
COUNT = "seq revision round attempt payload_bytes num_examples num_validation bytes_up bytes torn_bytes"
DIGEST = "prev manifest_sha256 ledger_key receipt_key"
for form, names in (("text", TEXT), ("count", COUNT), ("digest", DIGEST)):
    FORM_OF.update((name, form) for name in names.split())


class Tampered(Exception):
    def __init__(self, line, why):
        super().__init__(why)
        self.line = line


class CannotVerify(Exception):
    pass


# Canonical JSON: sorted keys, no spaces, UTF-8, integers only. What is read must be what would be written.


def no_floats(text):
    raise ValueError(f"{text} is not an integer")


def integer(text):
    if len(text) > 17 or abs(int(text)) > LARGEST_INTEGER:
        raise ValueError("an integer that some readers would round")
    return int(text)


def canonical(data):
    """The value of canonical JSON; ValueError if it is not that."""
    try:
        value = json.loads(data, parse_float=no_floats, parse_int=integer, parse_constant=no_floats)
        written = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if written != data:  # a key that stands twice, too, is not written twice
        raise ValueError("not in canonical form")
    return value


def has_form(value, form):
    """Whether a field's value has the form that docs/auditors.md gives it."""
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(name in value and has_form(value[name], form[name]) for name in form)
    if form == "count":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, str) and (form == "text" or re.fullmatch("[0-9a-f]{64}", value) is not None)


def signed_value(envelope, wanted_type, key, old=False):
    """The value in a signed envelope; ValueError if anything is wrong. ``old``: a head under newer ones."""
    kind, payload = envelope["payload_type"], envelope["payload"].encode()
    signature = base64.b64decode(envelope["signature"], validate=True)
    if base64.b64encode(signature).decode() != envelope["signature"]:  # its last character has bits to spare
        raise ValueError("its signature is not as it was written")
    if kind != wanted_type or envelope["keyid"] != hashlib.sha256(key.public_bytes_raw()).hexdigest():
        raise ValueError("another type or another key")
    message = b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)
    try:
        if not old:
            key.verify(signature, message)
        return canonical(payload)
    except InvalidSignature:
        raise ValueError("its signature does not verify") from None


def public_key(hexadecimal):
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(hexadecimal))


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


def read_record(number, line):
    """The record of one line, which has its form and its number."""
    try:
        record = canonical(line)
    except ValueError as error:
        raise Tampered(number, f"is not as it was written: {error}") from None
    kind = record.get("type") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in FIELDS_OF or record.get("v") != 1:
        raise Tampered(number, "is no record of a known type")
    for name in ["seq", "ts", "prev", *FIELDS_OF[record["type"]].split()]:
        if name not in record:
            raise Tampered(number, f"does not have its form: no {name}")
    for name, value in record.items():
        if name in FORM_OF and not has_form(value, FORM_OF[name]):
            raise Tampered(number, f"does not have its form: {name}")
    if record["seq"] != number:
        raise Tampered(number, "has another number: lines were removed, added or moved")
    if (record["type"] == "genesis") != (number == 0):
        raise Tampered(number, "is a second beginning, or the ledger has none")
    return record


def blame(number, lines, named, folder):
    """Two lines disagree. The later is intact if, with the head it names, it leads to what others say comes next."""
    if number == 0:
        return 0
    try:
        if number + 1 < len(lines):
            wanted = [canonical(lines[number + 1])["prev"]]
        else:
            heads = [json.loads(canonical(line)["payload"]) for line in head_lines(folder)]
            wanted = [head["head"] for head in heads if head["lines"] == number + 1]
    except (ValueError, KeyError, TypeError):
        return number
    return number - 1 if after(named, lines[number]) in wanted[:1] else number


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


def check_receipt(number, record, receipt, uploads, receipts, heads, ledger_id):
    upload = uploads.get(record["upload_id"])
    if upload is None or receipt["upload_id"] != record["upload_id"]:
        raise Tampered(number, "is a receipt for an upload that no line before it records")
    if record["upload_id"] in receipts:
        raise Tampered(number, "is a second receipt for one upload")
    if receipt["decision"] not in ("accepted", "refused", "not_received"):
        raise Tampered(number, "is a receipt that decides nothing")
    if receipt["decision"] == "not_received":
        return
    for name in ("study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes"):
        if receipt[name] != upload[name]:
            raise Tampered(number, f"is a receipt whose {name} is not the upload's")
    head = receipt["ledger"]
    if head is None:
        return
    known = upload["seq"] < head["lines"] < len(heads) and heads[head["lines"]] == head["head"]
    if not known or head["ledger_id"] != ledger_id:
        raise Tampered(number, "is a receipt for a head that this ledger never had")


def check_lines(lines, folder):
    """The first record, the heads after 0, 1, 2 ... lines, the uploads, and their receipts by upload id."""
    heads, uploads, receipts = [EMPTY], {}, {}
    genesis = key = previous = None
    for number, line in enumerate(lines):
        record = read_record(number, line)
        if record["prev"] != heads[-1]:
            bad = blame(number, lines, record["prev"], folder)
            raise Tampered(bad, f"breaks the chain: line {number} names another head than the lines before it give")
        try:
            if record["type"] == "genesis":
                genesis, previous = record, None if "continues" in record else EMPTY
            elif record["type"] == "identity":
                key = public_key(record["receipt_key"])
            elif record["type"] == "upload":
                check_upload(number, record, uploads)
                uploads[record["upload_id"]] = record
            elif record["type"] == "receipt":
                receipt = signed_value(record["envelope"], RECEIPT_TYPE, key)
                check_receipt(number, record, receipt, uploads, receipts, heads, genesis["ledger_id"])
                if receipt["decision"] != "not_received":
                    if previous not in (None, receipt["previous"]):
                        raise Tampered(number, "is a receipt that does not follow the one before it: one is missing")
                    previous = hashlib.sha256(record["envelope"]["payload"].encode()).hexdigest()
                receipts[record["upload_id"]] = receipt
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Tampered(number, f"does not have its form: {error}") from None
        heads.append(after(heads[-1], line))
    return genesis, heads, uploads, receipts


def head_lines(folder):
    path = folder / "heads.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def check_signed_heads(folder, genesis, heads):
    """How many lines the last signed head covers."""
    if "ledger_key" not in genesis:
        raise CannotVerify("the first line holds no ledger key")
    key = public_key(genesis["ledger_key"])
    lines = head_lines(folder)
    signed, last = 0, len(heads) - 1
    for number, line in enumerate(lines):
        bad = min(signed, last - 1)
        try:
            head = signed_value(canonical(line), HEAD_TYPE, key, old=number < len(lines) - NEWEST_HEADS)
            covered, digest, ledger = head["lines"], head["head"], head["ledger_id"]
            grows = covered > signed and len(head) == 3
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Tampered(bad, f"or later: a signed head is damaged: {error}") from None
        if ledger != genesis["ledger_id"]:
            raise Tampered(0, "is of another ledger than a signed head")
        if not grows:
            raise Tampered(bad, "or later: the signed heads do not grow")
        if covered > last:
            raise Tampered(last, f"is missing: a signed head covers {covered} lines")
        if heads[covered] != digest:
            raise Tampered(bad, f"or a later one up to {covered - 1} is not the one that a signed head covers")
        signed = covered
    return signed


def judge(folder):
    """(exit code, first bad line or None, a sentence)."""
    try:
        lines, torn = read_lines(folder)
        genesis, heads, uploads, receipts = check_lines(lines, folder)
        unsigned = len(lines) - check_signed_heads(folder, genesis, heads)
    except Tampered as bad:
        return 1, bad.line, f"TAMPERED: line {bad.line} {bad}"
    except (CannotVerify, OSError) as why:
        return 3, None, f"CANNOT VERIFY: {why}"
    unresolved = len(uploads) - len(receipts)
    total = sum(upload["payload_bytes"] for upload in uploads.values())
    said = f"{len(lines)} lines, {len(uploads)} uploads, {total} payload bytes\n"
    if unresolved or unsigned or torn:
        said += f"UNRESOLVED: {unresolved} uploads without a receipt, {unsigned} lines that no signed head covers"
        return 2, None, said
    return 0, None, said + "VERIFIED"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: verify_ledger.py LEDGER_DIR", file=sys.stderr)
        sys.exit(64)
    code, _line, sentence = judge(Path(sys.argv[1]))
    print(sentence)
    sys.exit(code)
