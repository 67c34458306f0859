#!/usr/bin/env python3
"""A second verifier of a hospital's ledger: `verify_ledger.py LEDGER_DIR [--receipts FILE]`, or `--bundle FILE`.

Written from docs/auditors.md alone: it shares no code with `site-agent audit verify`, and must agree with it on every
ledger. Run your own copy, never one that the hospital gives you. Exit codes: 0 consistent, complete, the site's own; 1
changed, with the first bad line; 2 receipts or heads lack; 3 cannot be verified; 4 completeness not shown; 64 usage.
"""

import argparse
import base64
import hashlib
import io
import json
import re
import sys
import tarfile
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

HEAD, RECEIPT, COPY, BUNDLE = (
    f"application/vnd.wardround.{kind}.v1+json" for kind in ("ledger-head", "receipt", "receipts", "audit-bundle")
)
LARGEST_BUNDLE, DEPTH, NEWEST_HEADS = 2**30, 64, 1000  # bytes; levels of lists; heads: a newer one covers those before
SEGMENT, LEDGERS, EMPTY = re.compile("[0-9]+[.]jsonl"), re.compile("([0-9]+|heads)[.]jsonl"), "0" * 64

UPLOAD = "upload_id study revision round attempt manifest_sha256 payload_bytes"
RESEND = "study revision round attempt payload_bytes"
SENT = "study revision study_digest kind round attempt destination manifest_sha256 metrics num_examples num_validation"
ATTEMPT = "study revision study_sha256 round attempt context "
SUMMARY = "request request_sha256 destination min_count digits rows columns"
LEFT = {"upload": ("update", SENT), "summary": ("summary_sha256", SUMMARY)}  # a digest, and what it is over
FIELDS_OF = {
    "genesis": "ledger_id", "identity": "receipt_key", "session": "event", "policy": "event", "consent": "event study",
    "declare": "study standing", "control": "bytes", "upload": UPLOAD + " tensors metrics", "left": "", "recovered": "",
    "resend": RESEND + " upload_id try", "receipt": "upload_id envelope", "summary": SUMMARY + " summary_sha256",
    "agreed": ATTEMPT + "group base chosen sites known threshold min_sites min_known policy_sha256", "peer": "event "
    "site fingerprint", "proposal": "event policy_sha256", "keys": ATTEMPT + "base roster", "opened": ATTEMPT +
    "chosen self_masks mask_keys", "sum_checked": ATTEMPT + "chosen model looked_at of result",
} | dict.fromkeys(("blocked", "held", "endorsed", "released", "rejected"), "study")  # fmt: skip


def forms(text="", count="", digest="", **others):
    return {name: form for form, names in (("text", text), ("count", count), ("digest", digest))
            for name in names.split()} | others  # fmt: skip


TENSOR = forms("bundle name dtype encoding", "bytes", "sha256", shape=["count"])
CITED, ENVELOPE = forms("ledger_id", "lines", "head"), forms("payload_type payload keyid signature")
FORM_OF = forms(
    "ts event site federation software peer study standing code destination not_after upload_id ledger_id rule kind "
    "request result", "seq revision round attempt payload_bytes num_examples num_validation bytes_up bytes torn_bytes "
    "try sent left_out min_count digits rows estimate_s threshold min_sites min_known of persons", "prev roster model "
    "manifest_sha256 ledger_key receipt_key update request_sha256 summary_sha256 study_sha256 context group chosen "
    "policy_sha256 fingerprint base salt", by=forms("name", "uid"), also_by=[forms("name", "uid")], tensors=[TENSOR],
    columns=[forms("column", "values missing")], envelope=ENVELOPE, sources=["text"], metrics=[forms("name value")],
    methods=[forms("method", "count bytes")], plugins=[forms("name version")], continues=CITED, looked_at=["count"],
    masked=forms("weighting", "bits", "context group blocks plain"), sites=["text"], known=["text"],
    self_masks=["text"], mask_keys=["text"],
)  # fmt: skip
RECEIPT_FORM = forms(
    "receipt_id federation site study upload_id manifest_sha256 decision code tensor time ledger_key",
    "revision round attempt payload_bytes", "previous",
)  # fmt: skip
COPY_FORM = forms("federation site time", "receipts earlier", "ledger_key last")
BUNDLE_FORM = forms("ledger_id", "lines", "head", files=[forms("path", "bytes", "sha256")])
CannotVerify = type("CannotVerify", (Exception,), {})


class Tampered(Exception):
    def __init__(self, why, line=None, ledger=""):  # lines count from 1; None where the fault is in no line
        super().__init__(plain(f"{ledger} line {line} {why}" if line else why))
        self.line = line


def integer(text):
    if len(text) > 17 or not text.removeprefix("-").isdigit() or abs(int(text)) >= 2**53:
        raise ValueError(f"{text} is no integer, or one that some readers would round")
    return int(text)


def written(value):
    """Canonical JSON: sorted keys, no spaces, UTF-8, integers only. What is read must be what would be written."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def canonical(data):
    """The value of canonical JSON; ValueError if it is not that, or deeper than every Python reads."""
    try:
        value = json.loads(data, parse_float=integer, parse_int=integer, parse_constant=integer)
        if written(value) != data:  # a key that stands twice, too, is not written twice
            raise ValueError("not in canonical form")
        if data.count(b"[") + data.count(b"{") > DEPTH and levels(value) > DEPTH:
            raise RecursionError
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def levels(value):
    inner = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inner, list) and 1 + max(map(levels, inner), default=0)


def plain(text):
    """What somebody else wrote, on one line, without anything that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in str(text)[:200])


def has_form(value, form):
    """A list of one form means a list of that; an object must have at least these fields."""
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(name in value and has_form(value[name], form[name]) for name in form)
    if form == "count":
        return type(value) is int and value >= 0
    return isinstance(value, str) and (form == "text" or re.fullmatch("[0-9a-f]{64}", value) is not None)


def keyid(key):
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()


def after(head, line):
    """The head after a line: SHA-256(head before || SHA-256(line))."""
    return hashlib.sha256(bytes.fromhex(head) + hashlib.sha256(line).digest()).hexdigest()


def signed_value(envelope, wanted_type, key, old=False):
    """The value in a signed envelope; ValueError if anything is wrong. ``old``: a head under newer ones."""
    if not has_form(envelope, ENVELOPE) or (envelope["payload_type"], envelope["keyid"]) != (wanted_type, keyid(key)):
        raise ValueError("no signed envelope, or of another type or another key")
    kind, payload = envelope["payload_type"], envelope["payload"].encode()
    signature = base64.b64decode(envelope["signature"], validate=True)
    if base64.b64encode(signature).decode() != envelope["signature"]:  # its last character has bits to spare
        raise ValueError("its signature is not as it was written")
    try:
        if not old:
            message = b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, message)
    except InvalidSignature:
        raise ValueError("its signature does not verify") from None
    return canonical(payload)


def receipt_in(envelope, key):
    receipt = signed_value(envelope, RECEIPT, key)
    head = receipt.get("ledger", "") if has_form(receipt, RECEIPT_FORM) and len(receipt) == 17 else ""
    known = head is None or (has_form(head, CITED) and len(head) == 3 and len(head["ledger_id"]) <= 300)
    if not known or receipt["decision"] not in ("accepted", "refused", "not_received"):
        raise ValueError("no receipt")
    texts = (receipt[name] for name, form in RECEIPT_FORM.items() if form == "text")
    code = "" if receipt["decision"] == "accepted" else "[A-Z][A-Z0-9_]{0,39}"
    named = receipt["tensor"] == "" or receipt["decision"] == "refused"
    plain_texts = all(len(text) <= 300 and text.isprintable() for text in texts) and named
    if not (re.fullmatch(code, receipt["code"]) and re.fullmatch("[0-9a-f]{32}", receipt["upload_id"]) and plain_texts):
        raise ValueError("no receipt")
    return receipt


def read_record(number, line, ledger):
    """The record of one line, which has its form and its number."""
    try:
        record = canonical(line)
    except ValueError as error:
        raise Tampered(f"is not as it was written: {error}", number, ledger) from None
    kind = str(record.get("type")) if isinstance(record, dict) and record.get("v") == 1 else ""
    if not re.fullmatch("[a-z][a-z_]{0,31}", kind) or kind != record["type"]:
        raise Tampered("is no record", number, ledger)
    missing = [name for name in ("seq", "ts", "prev", *FIELDS_OF.get(kind, "").split()) if name not in record]
    wrong = [name for name, value in record.items() if name in FORM_OF and not has_form(value, FORM_OF[name])]
    if missing or wrong:
        raise Tampered(f"does not have its form: {(missing + wrong)[0]}", number, ledger)
    if record["seq"] != number - 1 or (kind == "genesis") != (number == 1):
        raise Tampered("has another number or place: lines were removed, added or moved", number, ledger)
    return record


class Ledger:
    """One ledger, from its files by name: each line checked as it is taken, then the signed heads."""

    def __init__(self, name, files):
        if not files.keys() - {"heads.jsonl"}:
            raise CannotVerify(f"there is no ledger in {name}")
        self.name, self.first, self.signatures = name, "", files.get("heads.jsonl", b"").split(b"\n")[:-1]
        *self.lines, self.torn = b"".join(files[key] for key in sorted(files) if SEGMENT.fullmatch(key)).split(b"\n")
        self.heads, self.uploads, self.open, self.receipts = [EMPTY], {}, {}, []
        self.identity, self.receipt_keys, self.cited, self.named, self.unknown = {}, {}, None, False, set()
        self.policy, self.agreed, self.consents = "", {}, set()
        for number, line in enumerate(self.lines, 1):
            record = read_record(number, line, name)
            if record["prev"] != self.heads[-1]:
                raise Tampered("breaks the chain", self.blame(number, record["prev"]), name)
            self.first, self.last = self.first or record["ts"], record["ts"]
            self.unknown |= {record["type"]} - FIELDS_OF.keys()
            self.consents |= {str(record.get("consent_sha256")) if record["type"] == "consent" else ""}
            try:
                self.take(number, record["type"], record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise Tampered(f"is not what it must be: {error}", number, name) from None
            self.heads.append(after(self.heads[-1], line))
        if not self.lines or not self.key:
            raise CannotVerify("the first line holds no ledger key" if self.lines else "the ledger has no whole line")
        self.unsigned = len(self.lines) - self.check_signatures()

    def blame(self, number, named):
        """Two lines disagree. The later is intact if, with the head it names, it leads to what others say is next."""
        try:
            if number < len(self.lines):
                wanted = canonical(self.lines[number])["prev"]
            else:
                heads = (canonical(canonical(line)["payload"].encode()) for line in self.signatures)
                wanted = next((head["head"] for head in heads if head["lines"] == number), None)
        except (ValueError, KeyError, TypeError, AttributeError):
            return number
        return number - 1 if number > 1 and after(named, self.lines[number - 1]) == wanted else number

    def take(self, number, kind, record):
        name, fields = LEFT.get(kind, (None, ""))
        told = written({one: record[one] for one in fields.split()}) if name in record else b""
        if name in record and hashlib.sha256(told).hexdigest() != record[name]:
            raise ValueError(f"another `{name}` digest than what it says left")
        if kind == "genesis":
            self.id, self.key, self.cited = record["ledger_id"], record.get("ledger_key"), record.get("continues")
        elif kind == "identity":
            self.identity = record
            self.receipt_keys.setdefault(record["receipt_key"], number)
        elif kind == "policy":
            self.policy = record.get("sha256")
        elif kind == "agreed":
            first = self.agreed.setdefault((record["study_sha256"], record["round"]), record)
            sites, known = set(record["sites"]), set(record["known"])
            few = len(sites) < max(record["threshold"], record["min_sites"]) or len(known & sites) < record["min_known"]
            if first["chosen"] != record["chosen"] or few or record["policy_sha256"] != self.policy:
                raise ValueError("a round was agreed twice, or beyond the policy in force")
        elif kind == "opened":
            first, shown = self.agreed[record["study_sha256"], record["round"]], set(record["self_masks"])
            if first["chosen"] != record["chosen"] or shown != set(first["sites"]) or shown & set(record["mask_keys"]):
                raise ValueError("it opens both secrets of a site, or another set than was agreed")
        elif kind == "upload":
            manifest = [{name: row[name] for name in TENSOR} for row in record["tensors"]]
            size, again = sum(row["bytes"] for row in manifest), record["upload_id"] in self.uploads
            told = (hashlib.sha256(written(manifest)).hexdigest(), size)
            if told != (record["manifest_sha256"], record["payload_bytes"]) or again:
                raise ValueError("its tensors do not give its digest and bytes, or it repeats an upload")
            self.uploads[record["upload_id"]] = self.open[record["upload_id"]] = record | {"try": 1}
        elif kind == "resend":
            upload = self.open[record["upload_id"]]
            same = all(record[name] == upload[name] for name in RESEND.split()) and record["try"] == upload["try"] + 1
            if not same or record.get("sent", 0) > upload["payload_bytes"]:
                raise ValueError("it sends again something else or more, or is not the next try")
            upload["try"] += 1
        elif kind == "receipt":
            receipt = receipt_in(record["envelope"], self.identity["receipt_key"])
            self.check(receipt)
            self.named = self.named or receipt["ledger_key"] == self.key
            before = self.receipts[-1] if self.receipts else receipt["previous"] if self.cited else EMPTY
            last = before if receipt["decision"] == "not_received" else receipt["previous"]
            if (record["upload_id"], before) != (receipt["upload_id"], last):
                raise ValueError("a receipt for another upload, or not after the one before it: one is missing")
            if receipt["decision"] != "not_received":
                self.receipts.append(hashlib.sha256(record["envelope"]["payload"].encode()).hexdigest())
            del self.open[receipt["upload_id"]]

    def check(self, receipt):
        """ValueError or KeyError: the receipt is not about an open upload, or not about this ledger."""
        upload, head = self.open[receipt["upload_id"]], receipt["ledger"]
        others = [name for name in ("site", "federation") if self.identity.get(name, "") not in ("", receipt[name])]
        names = {name for row in upload["tensors"] for name in (row["name"], f"{row['bundle']}/{row['name']}")} | {""}
        another = any(receipt[name] != upload[name] for name in UPLOAD.split()) or receipt["tensor"] not in names
        decided = receipt["decision"] != "not_received"
        if others or receipt["ledger_key"] not in ("", self.key) or (decided and another):
            raise ValueError("a receipt for another site, another ledger key, or something else than its upload")
        if decided and head and (head["ledger_id"] != self.id or head["lines"] <= upload["seq"]
                                 or self.heads[head["lines"] :][:1] != [head["head"]]):  # fmt: skip
            raise ValueError("a receipt for a head that this ledger never had")

    def check_signatures(self):
        """How many lines the last signed head covers."""
        signed, last = 0, len(self.lines)
        for number, line in enumerate(self.signatures):
            try:
                head = signed_value(canonical(line), HEAD, self.key, old=number < len(self.signatures) - NEWEST_HEADS)
                if len(head) != 3 or not head["lines"] > signed:
                    raise ValueError("it does not go on from the one before it")
                if head["ledger_id"] == self.id and head["lines"] > last:
                    raise Tampered(f"is missing: a signed head covers {head['lines']} lines", last + 1, self.name)
                if head["ledger_id"] != self.id or self.heads[head["lines"]] != head["head"]:
                    raise ValueError("it is not of these lines")
                signed = head["lines"]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise Tampered(f"or later is not under its head: {error}", min(signed + 1, last), self.name) from None
        return signed


def read_ledgers(name, files_of):
    """The ledger and those that it continues, newest first; and the id of one that is not shown, or None."""
    ledgers = [Ledger(name, files_of(name))]
    while (cited := ledgers[-1].cited) is not None:
        older = f"ledger-{cited['ledger_id']}"
        files = files_of(older) if re.fullmatch("ledger-[0-9a-f]{32}", older) else {}
        if not files.keys() - {"heads.jsonl"}:
            return ledgers, cited["ledger_id"]
        ledgers.append(found := Ledger(older, files))
        ids = (found.id, found.key) == (cited["ledger_id"], ledgers[0].key)
        if not ids or found.heads[cited["lines"] :][:1] != [cited["head"]]:
            raise Tampered("cites another ledger than the one shown", 1, ledgers[-2].name)
        if len(found.lines) > cited["lines"]:
            raise Tampered("stands after the head that the next ledger continues", cited["lines"] + 1, older)
        for newer, key in [(one, key) for one in ledgers[:-1] for key in one.agreed if key in found.agreed]:
            if found.agreed[key]["chosen"] != newer.agreed[key]["chosen"]:
                raise Tampered(f"agrees a round twice: see {older}", newer.agreed[key]["seq"] + 1, newer.name)
    return ledgers, None


def read_copy(data, ledgers):
    """The coordinator's statement at the end of its copy of the receipts, and these: (SHA-256, receipt)."""
    keys = {keyid(key): key for ledger in ledgers for key in ledger.receipt_keys}
    receipts, last, answered = [], EMPTY, set()
    try:
        *envelopes, closing = [canonical(line) for line in data.removesuffix(b"\n").split(b"\n")]
        said = signed_value(closing, COPY, keys[closing["keyid"]])
        for envelope in envelopes:
            receipt = receipt_in(envelope, keys[envelope["keyid"]])
            whose = {**receipt, "ledger_key": receipt["ledger_key"] or said["ledger_key"]}
            another = any(whose[name] != said[name] for name in ("site", "federation", "ledger_key"))
            again = receipt["decision"] == "not_received" or receipt["upload_id"] in answered
            if another or again or receipt["previous"] != last:
                raise ValueError("a receipt is another site's, out of its order, or answers an upload again")
            answered.add(receipt["upload_id"])
            last = hashlib.sha256(envelope["payload"].encode()).hexdigest()
            receipts.append((last, receipt))
        whole = has_form(said, COPY_FORM) and len(said) == 7 and data.endswith(b"\n")
        own = {name: ledgers[0].identity.get(name) or said[name] for name in ("site", "federation")}
        own |= {"last": last, "receipts": len(receipts)}
        if not whole or own != {name: said[name] for name in own}:
            raise ValueError("receipts are missing, it is torn, or another site's")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CannotVerify(f"the receipts are no whole copy of the coordinator's: {error}") from None
    if said["ledger_key"] != ledgers[0].key:
        raise Tampered("holds another key than the one that the site enrolled with", 1, ledgers[0].name)
    return said, receipts


def compare(receipts, ledgers, missing):
    """How many receipts are of lines that stand in no ledger shown: lost before a newer ledger began."""
    order, ends, place, apart = [], {}, 0, 0
    for ledger in reversed(ledgers):
        order += ledger.receipts
        ends[ledger] = len(order)
    seams = {ends[ledger] for ledger in ledgers[1:]} | ({0} if missing is not None else set())
    for digest, receipt in receipts:
        if order[place : place + 1] == [digest]:
            place += 1
            continue
        head, upload_id = receipt["ledger"], receipt["upload_id"]
        here = next((one for one in ledgers if (one.id == head["ledger_id"] if head else upload_id in one.open)), None)
        lost = here is not ledgers[0] and head and here and here.heads[head["lines"] :][:1] != [head["head"]]
        if place in seams and (here is None or lost) and (apart := apart + 1):
            continue
        blamed = here or ledgers[0]
        line = 1 + min(head["lines"] if head else len(blamed.lines), len(blamed.lines))
        try:
            if place != ends[blamed]:
                raise ValueError("it is not at its place")
            blamed.check(receipt)
        except (KeyError, ValueError) as error:
            raise Tampered(f"or later: a receipt of the coordinator's: {error}", line, blamed.name) from None
    if apart and missing is not None:
        raise CannotVerify(f"{apart} of {len(receipts)} receipts are of ledger {plain(missing)}, which is not shown")
    return apart


def read_bundle(path):
    """A bundle's files by path. It must be, byte for byte, the archive that its files make."""
    if path.stat().st_size > LARGEST_BUNDLE:
        raise CannotVerify("the bundle is larger than this program reads")
    data, again = path.read_bytes(), io.BytesIO()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            plain = [entry for entry in archive if entry.isreg() and not entry.issparse()]
            files = {entry.name: archive.extractfile(entry).read() for entry in plain}
        with tarfile.open(fileobj=again, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name in sorted(files):
                entry = tarfile.TarInfo(name)
                entry.size = len(files[name])
                archive.addfile(entry, io.BytesIO(files[name]))
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError):
        files = {}
    if "MANIFEST.json" not in files:
        raise CannotVerify("it is no bundle")
    if again.getvalue() != data:
        raise Tampered("the bundle's archive is not as it was written")
    return files


def check_manifest(files, ledger):
    rows = [{"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in sorted(files.items()) if path != "MANIFEST.json"]  # fmt: skip
    try:
        said = signed_value(canonical(files["MANIFEST.json"].removesuffix(b"\n")), BUNDLE, ledger.key)
    except ValueError as error:
        raise Tampered(f"the bundle's MANIFEST.json: {error}") from None
    found = {"ledger_id": ledger.id, "lines": len(ledger.lines), "head": ledger.heads[-1], "files": rows}
    if not has_form(said, BUNDLE_FORM) or any(said[name] != value for name, value in found.items()):
        raise Tampered("the bundle's files are not those of its MANIFEST.json")


def files_in(place, archive, ledger):
    """A ledger's files, of a bundle or beside ``place``. The signed heads first: an agent signs what it has written."""
    if archive is None:
        folder = place.parent / ledger
        paths = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
        return {path.name: path.read_bytes() for path in paths if LEDGERS.fullmatch(path.name) and path.is_file()}
    found = {path.removeprefix(f"{ledger}/"): data for path, data in archive.items() if path.startswith(f"{ledger}/")}
    return {name: data for name, data in found.items() if LEDGERS.fullmatch(name)}


def judge(place, *, bundle=False, receipts=None, key=None, receipt_key=None):
    """(exit code, first bad line or None, what to print)."""
    place = place.absolute()
    try:
        files = read_bundle(place) if bundle else None
        ledgers, missing = read_ledgers("ledger" if bundle else place.name, lambda name: files_in(place, files, name))
        newest = ledgers[0]
        pinned = [(receipt_key, other, line, one, "--receipt-key") for one in ledgers  # any may have signed a copy
                  for other, line in one.receipt_keys.items()]  # fmt: skip
        pinned.insert(0, (key, newest.key, 1, newest, "--key"))
        for told, other, line, one, option in pinned:
            if told not in (None, keyid(other)):
                raise Tampered(f"holds another key than {option}", line, one.name)
        whose = "--key" if key else "--receipt-key" if receipt_key and newest.named else ""
        if bundle:
            check_manifest(files, newest)
        copies = [(files["receipts.jsonl"], receipt_key is not None)] if "receipts.jsonl" in (files or {}) else []
        copies += [(receipts.read_bytes(), True)] if receipts else []
        complete, shown = False, "no copy of the coordinator's receipts was given"
        for data, independent in copies:
            said, listed = read_copy(data, ledgers)
            apart = compare(listed, ledgers, missing)
            heads = [receipt["ledger"] for _, receipt in listed]
            seen = max([head["lines"] for head in heads if head and head["ledger_id"] == newest.id], default=0)
            shown = f"as of {plain(said['time'])}, {len(listed)} receipts; "
            shown += f"lines {seen + 1} to {len(newest.lines)} are newer"
            shown += f"; {said['earlier']} receipts of earlier enrolments are not among them" * (said["earlier"] > 0)
            shown += f"; {apart} receipts are of lines that were lost" * (apart > 0)
            shown += "; these receipts came from the site itself" * (not independent)
            complete = independent and not apart and missing is None
            whose = whose or ("the receipts" if independent else "")
    except Tampered as bad:
        return 1, bad.line, f"TAMPERED: {bad}"
    except (CannotVerify, OSError) as why:
        return 3, None, f"CANNOT VERIFY: {why}"
    uploads = [upload for one in ledgers for upload in one.uploads.values()]
    unresolved, unsigned = sum(len(one.open) for one in ledgers), sum(one.unsigned for one in ledgers)
    again, size = sum(upload["try"] - 1 for upload in uploads), sum(upload["payload_bytes"] for upload in uploads)
    unknown = ", ".join(sorted({kind for one in ledgers for kind in one.unknown}))
    about = [newest.identity.get("site", "?"), newest.identity.get("federation", "?"), ledgers[-1].first, newest.last]
    hashed = [(path, path.split("/")[0], hashlib.sha256(data).hexdigest()) for path, data in (files or {}).items()]
    others = [path for path, folder, digest in hashed if (folder == "policies" and path != f"policies/{digest}.toml")
              or (folder == "consents" and not any(digest in one.consents for one in ledgers))]  # fmt: skip
    gap = "" if missing is None else f"; ledger {plain(missing)}, which it continues, is not shown"
    text = (
        "{} of {}, {} to {}".format(*map(plain, about)) + f": {sum(len(one.lines) for one in ledgers)} lines, "
        f"{len(uploads)} uploads, {size} payload bytes{f', {again} times again' if again else ''}\n"
        f"consistent: yes{gap}{f'; lines of unknown types: {unknown}' if unknown else ''}\n"
        f"complete: {'yes' if complete else 'NOT SHOWN'}: {shown}\n"
        f"whose: {'yes, by ' + whose if whose else 'NOT SHOWN'}: ledger key {keyid(newest.key)}\n"
        + "".join(f"not shown: that {plain(path)} was approved, or in force\n" for path in others)
    )
    if unresolved or unsigned or any(one.torn for one in ledgers):
        text += f"UNRESOLVED: {unresolved} uploads without a receipt, {unsigned} lines that no signed head covers"
        return 2, None, text
    code, word = (0, "VERIFIED") if complete and whose else (4, "CONSISTENT, COMPLETENESS NOT SHOWN")
    return code, None, text + word


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("ledger", nargs="?", type=Path, metavar="LEDGER_DIR", help="older ledgers are found beside it")
    options.add_argument("--bundle", type=Path, metavar="FILE", help="what `site-agent audit bundle` wrote")
    options.add_argument("--receipts", type=Path, metavar="FILE", help="the coordinator's copy, from its operator")
    told = {"metavar": "FINGERPRINT",
            "type": lambda text: re.fullmatch("[0-9a-f]{64}", text.replace(":", "").lower())[0]}  # fmt: skip
    options.add_argument("--key", **told, help="the site's ledger key, as somebody you trust told you")
    options.add_argument("--receipt-key", **told, help="the coordinator's receipt key, likewise")
    options.error = lambda why: (print(f"{options.format_usage()}error: {why}", file=sys.stderr), sys.exit(64))
    chosen = vars(options.parse_args())
    ledger, bundle = chosen.pop("ledger"), chosen.pop("bundle")
    if (ledger is None) == (bundle is None):
        options.error("give a ledger's folder, or --bundle FILE")
    code, _line, text = judge(bundle or ledger, bundle=bundle is not None, **chosen)
    sys.exit(print(text) or code)


if __name__ == "__main__":
    main()
