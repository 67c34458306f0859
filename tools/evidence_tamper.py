"""Changes ledgers in every way and in many, and asks both verifiers: `python -m tools.evidence_tamper [--samples N]`.

Exhaustive over a ledger of 20 lines: every single bit flipped, every line deleted, doubled, inserted elsewhere or
exchanged with another, and every truncation to a byte; of the lines, of the signed heads, of an older ledger that it
continues, and of the coordinator's copy of the receipts. Every cut of lines and heads at the same place, with that
copy. One bit in each byte of a bundle, each of its files edited, left out and added. Then N sampled mutations of a
ledger of 100 lines. Both verifiers must give the same exit code and the same first bad line, and every change before
the last signed head must be found.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent import audit
from site_agent.audit import chain, receipts
from site_agent.audit.bundle import archive, make, read_bundle, verify_bundle
from tools import verify_ledger
from wardround.records.receipt_copy import Statement
from wardround.records.receipts import ACCEPTED, EMPTY_HEAD, LedgerHead, Receipt, line_hash, next_head
from wardround.signing import canonical

MANIFEST_FIELDS = ("bundle", "name", "dtype", "shape", "encoding", "bytes", "sha256")
SEGMENT, HEADS = "000001.jsonl", "heads.jsonl"
READ = (audit.UNRESOLVED, audit.CONSISTENT)  # of a ledger that holds together, and is shown without receipts
EXHAUSTIVE = ("lines", "heads", "again", "older", "receipts", "bundle", "secure", "agreed")
SECURE = ("peer", "keys", "agreed", "opened", "sum_checked")
CHAIN = ("v", "seq", "prev", "type")
LONG = 100  # lines of the ledger that is changed at random
FOUND = (audit.TAMPERED, audit.CANNOT_VERIFY)


class Made:
    """A ledger written by nobody: throw-away keys, rounds of control, upload and receipt, signed as an agent signs.

    ``tail`` lines at the end are under no signed head. ``before``: the ledger that it continues, with the same keys.
    ``again``: each upload is sent twice. ``secure``: with secure aggregation. ``change``: a line's number from 0, and
    what it says otherwise; the chain, heads and receipts are made with it. Everything comes of ``seed``, the keys too:
    two makings are the same bytes.
    """

    def __init__(
        self, lines: int, *, tail: int = 0, tensors: int = 2, seed: int = 7, before: "Made | None" = None,
        again: bool = False, secure: bool = False, change: tuple[int, Mapping[str, Any]] = (0, {}),
    ) -> None:  # fmt: skip
        self._random = random.Random(seed)
        self.ledger_key = Ed25519PrivateKey.from_private_bytes(self._random.randbytes(32))
        self.receipt_key = Ed25519PrivateKey.from_private_bytes(self._random.randbytes(32))
        if before is not None:
            self.ledger_key, self.receipt_key = before.ledger_key, before.receipt_key
        self._tensors = tensors
        self.before = before
        self.head = EMPTY_HEAD
        self.previous = before.previous if before is not None else EMPTY_HEAD  # the last receipt
        self._again, self._secure, self._change = again, secure, change
        self.lines: list[bytes] = []
        self.heads: list[bytes] = []
        self.receipts: list[bytes] = list(before.receipts) if before is not None else []
        self.ledger_id = self._random.randbytes(16).hex()
        self._begin()
        while len(self.lines) + 3 + again + 4 * secure <= lines - tail:
            self._round()
        while len(self.lines) < lines - tail:
            self._line("session", event="opened", peer="127.0.0.1:9000")
        self._sign()
        for _ in range(tail):
            self._line("session", event="opened", peer="127.0.0.1:9000")

    def write(self, folder: Path) -> None:
        """The ledger into ``folder``, and the one that it continues beside it, as `audit rollover` leaves them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SEGMENT).write_bytes(joined(self.lines))
        (folder / HEADS).write_bytes(joined(self.heads))
        if self.before is not None:
            self.before.write(folder.parent / f"ledger-{self.before.ledger_id}")

    def copy(self, receipts: int | None = None, time: str = "2026-02-01T00:00:00Z") -> bytes:
        """The coordinator's copy of the first so many receipts, with its statement: the bytes of the file."""
        chosen = self.receipts[:receipts]
        last = hashlib.sha256(json.loads(chosen[-1])["payload"].encode()).hexdigest() if chosen else EMPTY_HEAD
        said = Statement("f", "st-olav", _hex(self.ledger_key), len(chosen), last, 0, time).sign(self.receipt_key)
        return joined([*chosen, canonical.dumps(said.document())])

    def _begin(self) -> None:
        cited = {}
        if self.before is not None:
            cited["continues"] = {
                "ledger_id": self.before.ledger_id, "lines": len(self.before.lines), "head": self.before.head,
            }  # fmt: skip
        self._line("genesis", ledger_id=self.ledger_id, ledger_key=_hex(self.ledger_key), software="wardround", **cited)
        self._line("identity", event="issued", site="st-olav", federation="f", receipt_key=_hex(self.receipt_key))
        self._line("session", event="opened", peer="127.0.0.1:9000")
        by = {"name": "dpo", "uid": 1000}
        self._line("consent", event="approved", study="hearts", revision=1, study_digest="ab" * 32, by=by)
        if self._secure:
            self._line("policy", event="seen", sha256="cd" * 32)
            for site in ("bergen", "charite"):
                fingerprint = hashlib.sha256(site.encode()).hexdigest()
                self._line("peer", event="known", site=site, fingerprint=fingerprint, by=by)

    def _round(self) -> None:
        self._line("control", methods=[{"method": "Declare", "count": 1, "bytes": 90}], bytes=90)
        rows: list[dict[str, Any]] = [
            {"bundle": "model", "name": f"shared.{index}.weight", "dtype": "F32", "shape": [4, 2], "encoding": "raw",
             "bytes": 32, "sha256": self._random.randbytes(32).hex(), "l2": "1.250000000e-01",
             "max_abs": "1.000000000e-01", "nonfinite": 0}
            for index in range(self._tensors)
        ]  # fmt: skip
        manifest = [{key: row[key] for key in MANIFEST_FIELDS} for row in rows]
        facts = {"study": "hearts", "revision": 1, "round": 1 + len(self.receipts), "attempt": 1,
                 "manifest_sha256": canonical.digest(manifest), "payload_bytes": 32 * len(rows)}  # fmt: skip
        upload_id = self._random.randbytes(16).hex()
        about = {name: facts[name] for name in ("study", "revision", "round", "attempt")}
        about |= {"study_sha256": "ab" * 32, "context": hashlib.sha256(upload_id.encode()).hexdigest()}
        if self._secure:
            self._line("keys", base="01" * 32, roster="02" * 32, **about)
        told = {**facts, "metrics": [{"name": "val_loss", "value": "0.6931"}], "study_digest": "ab" * 32,
                "kind": "train", "num_examples": 120, "num_validation": 30,
                "destination": "spiffe://x/coordinator"}  # fmt: skip
        update = canonical.digest({name: told[name] for name in told if name != "payload_bytes"})
        masked = {"context": about["context"], "group": "03" * 32, "blocks": "04" * 32, "plain": "05" * 32,
                  "weighting": "rows", "bits": 20}  # fmt: skip
        whole: dict[str, Any] = {"masked": masked} if self._secure else {"update": update}
        self._line("upload", upload_id=upload_id, tensors=rows, **whole, **told)
        if self._again:
            place = {name: facts[name] for name in ("study", "revision", "round", "attempt", "payload_bytes")}
            self._line("resend", upload_id=upload_id, sent=10, **{"try": 2}, **place)
        self._sign()
        head = LedgerHead(self.ledger_id, len(self.lines), self.head)
        receipt = Receipt(
            receipt_id=self._random.randbytes(16).hex(), federation="f", site="st-olav", upload_id=upload_id,
            decision=ACCEPTED, code="", tensor="", time="2026-01-01T00:00:00Z", ledger=head, previous=self.previous,
            ledger_key=_hex(self.ledger_key), **facts,
        ).sign(self.receipt_key)  # fmt: skip
        self.previous = hashlib.sha256(receipt.payload).hexdigest()
        self.receipts.append(canonical.dumps(receipt.document()))
        self._line("receipt", upload_id=upload_id, envelope=receipt.document())
        if self._secure:
            sites = ["bergen", "charite", "st-olav"]
            self._line("agreed", group="03" * 32, base="01" * 32, chosen="06" * 32, sites=sites, known=sites[:2],
                       threshold=3, min_sites=3, min_known=2, policy_sha256="cd" * 32, **about)  # fmt: skip
            self._line("opened", chosen="06" * 32, self_masks=sites, mask_keys=["dublin"], **about)
            self._line("sum_checked", chosen="06" * 32, model="07" * 32, looked_at=[0, 3], of=9, result="same", **about)
        self._sign()

    def _line(self, kind: str, /, **fields: Any) -> None:
        common = {"v": 1, "seq": len(self.lines), "ts": "2026-01-01T00:00:00.000Z", "type": kind, "prev": self.head}
        at, changed = self._change
        record = {**common, **fields, **(changed if at == len(self.lines) else {})}
        self.lines.append(canonical.dumps({name: value for name, value in record.items() if value is not None}))
        self.head = next_head(self.head, line_hash(self.lines[-1]))

    def _sign(self) -> None:
        head = LedgerHead(self.ledger_id, len(self.lines), self.head)
        envelope = canonical.dumps(head.sign(self.ledger_key).document())
        if not self.heads or self.heads[-1] != envelope:
            self.heads.append(envelope)


@dataclass
class Tally:
    """What became of the mutations."""

    tried: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    disagreed: list[str] = field(default_factory=list)

    def judge(
        self,
        kind: str,
        what: str,
        folder: Path,
        wanted: tuple[int, ...] = (audit.TAMPERED,),
        receipts: Path | None = None,
    ) -> None:
        """Ask both verifiers about a changed folder; ``wanted`` are the exit codes that say it."""
        found = audit.verify(folder, receipts)
        self._note(kind, what, found, verify_ledger.judge(folder, receipts=receipts), wanted)

    def judge_bundle(self, kind: str, what: str, path: Path, wanted: tuple[int, ...], receipts: Path) -> None:
        """The same of a bundle."""
        found = verify_bundle(path, receipts)
        self._note(kind, what, found, verify_ledger.judge(path, bundle=True, receipts=receipts), wanted)

    def _note(
        self, kind: str, what: str, found: tuple[audit.Verdict, int], second: tuple[int, Any, str],
        wanted: tuple[int, ...],
    ) -> None:  # fmt: skip
        (verdict, code), (theirs, line, said) = found, second
        self.tried[kind] += 1
        if (code, verdict.first_bad) != (theirs, line):
            self.disagreed.append(f"{what}: {code} {verdict.first_bad} {verdict.reason}, {theirs} {line} {said}")
        if code not in wanted:
            self.missed.append(f"{what}: {code} {verdict.reason}")

    def add(self, other: "Tally") -> None:
        self.tried.update(other.tried)
        self.missed += other.missed
        self.disagreed += other.disagreed


def joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def flipped(data: bytes, bit: int) -> bytes:
    at = bit // 8
    return data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]


def moves(lines: list[bytes]) -> Iterator[tuple[str, str, list[bytes]]]:
    """Every deletion, duplication, insertion of a line elsewhere, and exchange of two: (kind, what, lines)."""
    for at in range(len(lines)):
        yield "deletion", f"line {at} deleted", lines[:at] + lines[at + 1 :]
        yield "duplication", f"line {at} doubled", lines[: at + 1] + lines[at:]
        for to in range(len(lines) + 1):
            if to not in (at, at + 1):
                yield "insertion", f"line {at} inserted at {to}", [*lines[:to], lines[at], *lines[to:]]
        for other in range(at + 1, len(lines)):
            swapped = list(lines)
            swapped[at], swapped[other] = swapped[other], swapped[at]
            yield "swap", f"lines {at} and {other} exchanged", swapped


def exhaustive_lines(folder: Path, made: Made, *, part: int = 0, parts: int = 1) -> Tally:
    """Every change of the lines of a ledger that is signed to its end. ``part`` of ``parts``: every so-manieth."""
    tally = Tally()
    made.write(folder)
    path, whole = folder / SEGMENT, joined(made.lines)
    tally.judge("unchanged", "unchanged", folder, (audit.CONSISTENT,))
    for bit in range(part, len(whole) * 8, parts):
        path.write_bytes(flipped(whole, bit))
        tally.judge("bit flip", f"bit {bit} flipped", folder)
    for kind, what, lines in islice(moves(made.lines), part, None, parts):
        path.write_bytes(joined(lines))
        tally.judge(kind, what, folder)
    for cut in range(part, len(whole), parts):
        path.write_bytes(whole[:cut])
        nothing_left = cut <= len(made.lines[0])
        tally.judge("truncation", f"cut at {cut}", folder, (audit.CANNOT_VERIFY if nothing_left else audit.TAMPERED,))
    return tally


def exhaustive_secure(folder: Path, lines: int, *, part: int = 0, parts: int = 1) -> Tally:
    """Every field of the lines of secure aggregation otherwise, in a chain that was made anew with the key: what only
    the rules of such lines can find. Not every change breaks one; the two verifiers must say the same of each.
    """
    tally, whole = Tally(), Made(lines, secure=True)
    whole.write(folder)
    tally.judge("unchanged", "unchanged", folder, (audit.CONSISTENT,))
    for index, name, value in islice(secure_changes(whole.lines), part, None, parts):
        Made(lines, secure=True, change=(index, {name: value})).write(folder)
        what = f"line {index}, {name} as {json.dumps(value)[:80]}"
        tally.judge("secure aggregation: field", what, folder, (audit.CONSISTENT, audit.TAMPERED))
    return tally


def secure_changes(lines: Sequence[bytes]) -> Iterator[tuple[int, str, Any]]:
    """(line from 0, field, another value): left out, of another form, one more or less, the value of another line."""
    records = [json.loads(line) for line in lines]
    secure = [(index, record) for index, record in enumerate(records) if record["type"] in SECURE]
    for index, record in secure:
        for name in sorted(record.keys() - set(CHAIN)):
            value = record[name]
            others: list[Any] = [None, 7, "x", [], {}, -1, [7], ["charite"], ["bergen", "x"], "ab" * 32, "AB" * 32]
            if isinstance(value, int):
                others += [value + 1, value - 1, 2**53 - 1, True]
            if isinstance(value, list):
                others += [value[1:], value * 2, [*value, value[0]], [*value, "bergen"], value[::-1]]
            others += [other[name] for _, other in secure if name in other]
            for other in others:
                if other != value or type(other) is not type(value):
                    yield index, name, other


def exhaustive_heads(folder: Path, made: Made, *, part: int = 0, parts: int = 1) -> Tally:
    """Every change of the signed heads beside the lines. Lines that lose their last signature are an unsigned tail;
    an older head may be missing, for a newer one covers what it covered."""
    tally = Tally()
    made.write(folder)
    path, whole = folder / HEADS, joined(made.heads)
    tally.judge("unchanged", "unchanged", folder, (audit.CONSISTENT,))
    for bit in range(part, len(whole) * 8, parts):
        path.write_bytes(flipped(whole, bit))
        torn = bit // 8 == len(whole) - 1
        tally.judge("head: bit flip", f"heads, bit {bit}", folder, (audit.UNRESOLVED if torn else audit.TAMPERED,))
    for kind, what, heads in islice(moves(made.heads), part, None, parts):
        path.write_bytes(joined(heads))
        wanted = audit.TAMPERED
        if kind == "deletion":
            wanted = audit.UNRESOLVED if heads == made.heads[:-1] else audit.CONSISTENT
        tally.judge(f"head: {kind}", f"heads, {what}", folder, (wanted,))
    for cut in range(part, len(whole), parts):
        path.write_bytes(whole[:cut])
        tally.judge("head: truncation", f"heads cut at {cut}", folder, (audit.UNRESOLVED,))
    return tally


def exhaustive_older(folder: Path, made: Made, *, part: int = 0, parts: int = 1) -> Tally:
    """Every change of a ledger that another one continues, and what becomes of the newer one without it."""
    tally, before = Tally(), made.before
    assert before is not None
    newest, receipts = folder / "ledger", folder / "receipts.jsonl"
    made.write(newest)
    receipts.write_bytes(made.copy())
    older = folder / f"ledger-{before.ledger_id}"
    tally.judge("unchanged", "unchanged", newest, (audit.VERIFIED,), receipts)
    for name, lines in ((SEGMENT, before.lines), (HEADS, before.heads)):
        whole = joined(lines)
        for bit in range(part, len(whole) * 8, parts):
            (older / name).write_bytes(flipped(whole, bit))
            torn = name == HEADS and bit // 8 == len(whole) - 1
            wanted = audit.UNRESOLVED if torn else audit.TAMPERED
            tally.judge("older: bit flip", f"older {name}, bit {bit}", newest, (wanted,), receipts)
        (older / name).write_bytes(whole)
    for kind, what, lines in islice(moves(before.lines), part, None, parts):
        (older / SEGMENT).write_bytes(joined(lines))
        tally.judge(f"older: {kind}", f"older, {what}", newest, FOUND, receipts)
    for keep in range(1 + part, len(before.lines), parts):
        before.write(older)
        cut_both(older, before, keep)
        tally.judge("older: cut", f"older cut to {keep} lines", newest, FOUND, receipts)
    shutil.rmtree(older)
    tally.judge("older: gone", "older gone", newest, (audit.CANNOT_VERIFY,), receipts)
    tally.judge("older: gone", "older gone, no receipts", newest, (audit.CONSISTENT,))
    return tally


def exhaustive_receipts(folder: Path, made: Made, *, part: int = 0, parts: int = 1) -> Tally:
    """Every change of the coordinator's copy of the receipts, and every cut of the ledger with the whole copy."""
    tally = Tally()
    ledger, path = folder / "ledger", folder / "receipts.jsonl"
    made.write(ledger)
    whole = made.copy()
    path.write_bytes(whole)
    tally.judge("unchanged", "unchanged", ledger, (audit.VERIFIED,), path)
    for bit in range(part, len(whole) * 8, parts):
        path.write_bytes(flipped(whole, bit))
        tally.judge("receipts: bit flip", f"receipts, bit {bit}", ledger, (audit.CANNOT_VERIFY,), path)
    for kind, what, lines in islice(moves(whole.splitlines()), part, None, parts):
        path.write_bytes(joined(lines))
        tally.judge(f"receipts: {kind}", f"receipts, {what}", ledger, (audit.CANNOT_VERIFY,), path)
    for cut in range(part, len(whole), parts):
        path.write_bytes(whole[:cut])
        tally.judge("receipts: truncation", f"receipts cut at {cut}", ledger, (audit.CANNOT_VERIFY,), path)
    for count in range(len(made.receipts) + 1):
        path.write_bytes(made.copy(count))
        tally.judge("receipts: an older copy", f"the first {count} receipts", ledger, (audit.VERIFIED,), path)
    path.write_bytes(whole)
    seen = json.loads(json.loads(made.receipts[-1])["payload"])["ledger"]["lines"]
    for keep in range(2 + part, len(made.lines), parts):
        cut_both(ledger, made, keep)
        tally.judge("cut without a key", f"cut to {keep} lines, no receipts", ledger, READ)
        # What is newer than the newest receipt is this site's word alone: its end can be cut, and nobody can tell.
        wanted = (audit.TAMPERED,) if keep < seen else (audit.UNRESOLVED,) if keep == seen else (audit.VERIFIED,)
        tally.judge("cut without a key", f"cut to {keep} lines", ledger, wanted, path)
    return tally


def cut_both(folder: Path, made: Made, keep: int) -> None:
    """Cut lines and signed heads at the same place, as whoever has no key can."""
    heads = [head for head in made.heads if json.loads(json.loads(head)["payload"])["lines"] <= keep]
    (folder / SEGMENT).write_bytes(joined(made.lines[:keep]))
    (folder / HEADS).write_bytes(joined(heads))


def exhaustive_bundle(folder: Path, made: Made, *, part: int = 0, parts: int = 1) -> Tally:
    """One bit in each byte of a bundle; each of its files edited, left out and added under another name, with the
    archive made as `audit bundle` makes it. It is shown beside the coordinator's own copy of the receipts."""
    tally, choose = Tally(), random.Random(part)
    state, path, receipts = folder / "site", folder / "bundle.tar", folder / "receipts.jsonl"
    made.write(state / "ledger")
    (state / "consents").mkdir()
    (state / "consents" / "hearts.json").write_text('{"leaves": [], "stays": []}')
    (state / "policy.toml").write_text("# nothing may leave\n")
    receipts.write_bytes(made.copy())
    make(state, made.ledger_key, path, audit.Copy(made.copy(), "the coordinator's", True))
    whole = path.read_bytes()
    tally.judge_bundle("unchanged", "unchanged", path, (audit.VERIFIED,), receipts)
    for at in range(part, len(whole), parts):
        path.write_bytes(flipped(whole, 8 * at + choose.randrange(8)))
        tally.judge_bundle("bundle: bit flip", f"bundle, byte {at}", path, FOUND, receipts)
    path.write_bytes(whole)
    files = read_bundle(path).files
    for name, data in islice(files.items(), part, None, parts):
        rest = {other: held for other, held in files.items() if other != name}
        for kind, changed in (
            ("edited", {**files, name: flipped(data, 8 * (len(data) // 2))}),
            ("left out", rest),
            ("added", {**files, f"{name}.copy": data}),
            ("renamed", {**rest, f"a-{name}": data}),
        ):
            path.write_bytes(archive(changed))
            tally.judge_bundle(f"bundle: file {kind}", f"bundle, {name} {kind}", path, FOUND, receipts)
    for cut in range(part * 97, len(whole), parts * 97):
        path.write_bytes(whole[:cut])
        tally.judge_bundle("bundle: truncation", f"bundle cut at {cut}", path, FOUND, receipts)
    return tally


def sampled(folder: Path, made: Made, tail: int, samples: int, seed: int) -> Tally:
    """Random changes of a ledger whose last ``tail`` lines no head covers. Changes before that must be found; after
    it, an unsigned tail (2) is an answer too."""
    tally, choose = Tally(), random.Random(seed)
    made.write(folder)
    path, whole = folder / SEGMENT, joined(made.lines)
    tally.judge("unchanged", "unchanged", folder, (audit.UNRESOLVED if tail else audit.CONSISTENT,))
    count = len(made.lines)
    signed = len(joined(made.lines[: count - tail]))
    for number in range(samples):
        kind = choose.choice(("bit flip", "byte", "deletion", "duplication", "insertion", "swap", "truncation"))
        lines, at, other = list(made.lines), choose.randrange(count), choose.randrange(count)
        first = at
        if kind in ("bit flip", "byte"):
            bit = choose.randrange(len(whole) * 8)
            data = flipped(whole, bit)
            if kind == "byte":
                data = whole[: bit // 8] + choose.randbytes(1) + whole[bit // 8 + 1 :]
            first = 0 if bit // 8 < signed else count
        elif kind == "truncation":
            cut = choose.randrange(len(made.lines[0]) + 1, len(whole))
            data, first = whole[:cut], 0 if cut < signed else count
        elif kind == "deletion":
            del lines[at]
            data = joined(lines)
        elif kind == "swap":
            lines[at], lines[other] = lines[other], lines[at]
            data, first = joined(lines), min(at, other)
        else:
            to = at if kind == "duplication" else other
            lines.insert(to, lines[at])
            data, first = joined(lines), to
        if data == whole:
            continue
        path.write_bytes(data)
        wanted = (audit.TAMPERED,) if first < count - tail else (audit.TAMPERED, audit.UNRESOLVED)
        tally.judge(f"sampled {kind}", f"seed {seed}, sample {number}", folder, wanted)
    return tally


def remember() -> None:
    """Let both verifiers remember what they found about a line or a signature: most of a changed ledger is unchanged.
    Each remembers only its own findings, and these functions give the same answer to the same bytes and key."""
    chain.line_in = lru_cache(4096)(chain.line_in)  # type: ignore[attr-defined]
    verify_ledger.read_record = lru_cache(4096)(verify_ledger.read_record)
    kept = _signatures_kept(chain.signed_value, lambda envelope: envelope)
    chain.signed_value = receipts.signed_value = kept  # type: ignore[attr-defined]
    chain.receipt_in = receipts.receipt_in = _signatures_kept(  # type: ignore[attr-defined]
        chain.receipt_in, lambda envelope: envelope
    )
    verify_ledger.signed_value = _signatures_kept(verify_ledger.signed_value, lambda envelope: tuple(envelope.items()))
    verify_ledger.receipt_in = _signatures_kept(verify_ledger.receipt_in, lambda envelope: tuple(envelope.items()))


def _signatures_kept(function: Callable[..., Any], named: Callable[[Any], Any]) -> Callable[..., Any]:
    """``function(envelope, ...)`` with its answers kept by envelope and key; what it raises is not kept."""
    kept: dict[Any, Any] = {}

    def keeping(envelope: Any, *rest: Any, **more: Any) -> Any:
        plain = [item.public_bytes_raw() if hasattr(item, "public_bytes_raw") else item
                 for item in (*rest, *more.values())]  # fmt: skip
        try:
            place = (named(envelope), *plain)
            if place in kept:
                return kept[place]
        except (TypeError, AttributeError):  # no envelope at all
            return function(envelope, *rest, **more)
        kept[place] = function(envelope, *rest, **more)
        return kept[place]

    return keeping


def _part(job: tuple[str, int, int, int]) -> Tally:
    """One process's share."""
    what, part, parts, samples = job
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        if what == "lines":
            return exhaustive_lines(Path(folder), Made(20), part=part, parts=parts)
        if what == "heads":
            return exhaustive_heads(Path(folder), Made(20), part=part, parts=parts)
        if what == "again":
            return exhaustive_lines(Path(folder), Made(8, again=True), part=part, parts=parts)
        if what == "secure":
            return exhaustive_lines(Path(folder), Made(14, secure=True), part=part, parts=parts)
        if what == "agreed":
            return exhaustive_secure(Path(folder), 22, part=part, parts=parts)
        if what == "older":
            return exhaustive_older(Path(folder), Made(8, seed=8, before=Made(11)), part=part, parts=parts)
        if what == "receipts":
            return exhaustive_receipts(Path(folder), Made(20), part=part, parts=parts)
        if what == "bundle":
            return exhaustive_bundle(Path(folder), Made(8, seed=8, before=Made(8)), part=part, parts=parts)
        return sampled(Path(folder), Made(LONG, tail=20), 20, samples // parts, seed=part)


def main() -> None:
    """Print the table that docs/evidence.md holds; exit 1 if anything was missed or judged in two ways."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=100_000)
    options.add_argument("--stride", type=int, default=1, help="of the exhaustive part, only every so-manieth")
    options.add_argument("--processes", type=int, default=2)
    chosen = options.parse_args()
    pieces = 8 * chosen.stride
    jobs = [(what, part, pieces, 0) for what in EXHAUSTIVE for part in range(8)]
    jobs += [("sampled", part, 16, chosen.samples) for part in range(16)]
    total, began = Tally(), time.monotonic()
    with ProcessPoolExecutor(chosen.processes, initializer=remember) as pool:
        for tally in pool.map(_part, jobs):
            total.add(tally)
    for kind, count in sorted(total.tried.items()):
        print(f"| {kind} | {count} |")
    print(f"{total.tried.total()} changes, {len(total.missed)} not found, {len(total.disagreed)} judged in two ways, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    for line in [*total.missed, *total.disagreed][:20]:
        print(line)
    sys.exit(1 if total.missed or total.disagreed else 0)


def _hex(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


if __name__ == "__main__":
    main()
