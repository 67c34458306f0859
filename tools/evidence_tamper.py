"""Changes ledgers in every way and in many, and asks both verifiers: `python -m tools.evidence_tamper [--samples N]`.

Exhaustive over a ledger of 20 lines: every single bit flipped, every line deleted, doubled, inserted elsewhere or
exchanged with another, and every truncation to a byte; of the lines and of the signed heads. Then N sampled mutations
of a ledger of 1,000 lines. Both verifiers must give the same exit code and the same first bad line, and every change
before the last signed head must be found.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent import audit
from tools import verify_ledger
from wardround import canonical
from wardround.receipts import ACCEPTED, EMPTY_HEAD, LedgerHead, Receipt, line_hash, next_head

SEGMENT, HEADS = "000001.jsonl", "heads.jsonl"
judge = sys.modules["site_agent.audit.verify"]  # the module, whose name the package gives to its function


class Made:
    """A ledger written by nobody: throw-away keys, rounds of control, upload and receipt, signed as an agent signs.

    ``tail`` lines at the end are under no signed head. ``after``: the last receipt of an older ledger that it
    continues. ``again``: each upload is sent twice. Everything comes of ``seed``, the keys too: two makings are the
    same bytes.
    """

    def __init__(
        self, lines: int, *, tail: int = 0, tensors: int = 2, seed: int = 7, after: str = EMPTY_HEAD,
        again: bool = False,
    ) -> None:  # fmt: skip
        self._random = random.Random(seed)
        self.ledger_key = Ed25519PrivateKey.from_private_bytes(self._random.randbytes(32))
        self.receipt_key = Ed25519PrivateKey.from_private_bytes(self._random.randbytes(32))
        self._tensors = tensors
        self._head, self._previous = EMPTY_HEAD, after
        self._reopened = after != EMPTY_HEAD
        self._again = again
        self.lines: list[bytes] = []
        self.heads: list[bytes] = []
        self.receipts: list[bytes] = []
        self._ledger_id = self._random.randbytes(16).hex()
        self._begin()
        while len(self.lines) + 3 + again <= lines - tail:
            self._round()
        while len(self.lines) < lines - tail:
            self._line("session", event="opened", peer="127.0.0.1:9000")
        self._sign()
        for _ in range(tail):
            self._line("session", event="opened", peer="127.0.0.1:9000")

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SEGMENT).write_bytes(b"".join(line + b"\n" for line in self.lines))
        (folder / HEADS).write_bytes(b"".join(line + b"\n" for line in self.heads))

    def _begin(self) -> None:
        cited = {"continues": {"ledger_id": "ab" * 16, "lines": 9, "head": "cd" * 32}} if self._reopened else {}
        self._line(
            "genesis", ledger_id=self._ledger_id, ledger_key=_hex(self.ledger_key), software="wardround", **cited
        )
        self._line("identity", event="issued", site="st-olav", receipt_key=_hex(self.receipt_key))
        self._line("session", event="opened", peer="127.0.0.1:9000")
        by = {"name": "dpo", "uid": 1000}
        self._line("consent", event="approved", study="hearts", revision=1, study_digest="ab" * 32, by=by)

    def _round(self) -> None:
        self._line("control", methods=[{"method": "Declare", "count": 1, "bytes": 90}], bytes=90)
        rows: list[dict[str, Any]] = [
            {"bundle": "model", "name": f"shared.{index}.weight", "dtype": "F32", "shape": [4, 2], "encoding": "raw",
             "bytes": 32, "sha256": self._random.randbytes(32).hex(), "l2": "1.250000000e-01",
             "max_abs": "1.000000000e-01", "nonfinite": 0}
            for index in range(self._tensors)
        ]  # fmt: skip
        manifest = [{key: row[key] for key in audit.MANIFEST_FIELDS} for row in rows]
        facts = {"study": "hearts", "revision": 1, "round": 1 + len(self.receipts), "attempt": 1,
                 "manifest_sha256": canonical.digest(manifest), "payload_bytes": 32 * len(rows)}  # fmt: skip
        upload_id = self._random.randbytes(16).hex()
        told = {**facts, "metrics": [{"name": "val_loss", "value": "0.6931"}], "study_digest": "ab" * 32,
                "kind": "train", "num_examples": 120, "num_validation": 30,
                "destination": "spiffe://x/coordinator"}  # fmt: skip
        update = canonical.digest({name: told[name] for name in told if name != "payload_bytes"})
        self._line("upload", upload_id=upload_id, tensors=rows, update=update, **told)
        if self._again:
            place = {name: facts[name] for name in ("study", "revision", "round", "attempt", "payload_bytes")}
            self._line("resend", upload_id=upload_id, sent=10, **{"try": 2}, **place)
        self._sign()
        head = LedgerHead(self._ledger_id, len(self.lines), self._head)
        receipt = Receipt(
            receipt_id=self._random.randbytes(16).hex(), federation="f", site="st-olav", upload_id=upload_id,
            decision=ACCEPTED, code="", tensor="", time="2026-01-01T00:00:00Z", ledger=head, previous=self._previous,
            **facts,
        ).sign(self.receipt_key)  # fmt: skip
        self._previous = hashlib.sha256(receipt.payload).hexdigest()
        self.receipts.append(canonical.dumps(receipt.document()))
        self._line("receipt", upload_id=upload_id, envelope=receipt.document())
        self._sign()

    def _line(self, kind: str, /, **fields: Any) -> None:
        common = {"v": 1, "seq": len(self.lines), "ts": "2026-01-01T00:00:00.000Z", "type": kind, "prev": self._head}
        self.lines.append(canonical.dumps({**common, **fields}))
        self._head = next_head(self._head, line_hash(self.lines[-1]))

    def _sign(self) -> None:
        head = LedgerHead(self._ledger_id, len(self.lines), self._head)
        envelope = canonical.dumps(head.sign(self.ledger_key).document())
        if not self.heads or self.heads[-1] != envelope:
            self.heads.append(envelope)


@dataclass
class Tally:
    """What became of the mutations."""

    tried: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    disagreed: list[str] = field(default_factory=list)

    def judge(self, kind: str, what: str, folder: Path, wanted: tuple[int, ...] = (audit.TAMPERED,)) -> None:
        """Ask both verifiers about a changed folder; ``wanted`` are the exit codes that say it."""
        verdict, code = audit.verify(folder)
        theirs, line, _ = verify_ledger.judge(folder)
        self.tried[kind] += 1
        if (code, verdict.first_bad) != (theirs, line):
            self.disagreed.append(f"{what}: {code} at {verdict.first_bad}, {theirs} at {line}: {verdict.reason}")
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
    tally.judge("unchanged", "unchanged", folder, (audit.VERIFIED,))
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


def exhaustive_heads(folder: Path, made: Made, *, part: int = 0, parts: int = 1) -> Tally:
    """Every change of the signed heads beside the lines. Lines that lose their last signature are an unsigned tail;
    an older head may be missing, for a newer one covers what it covered."""
    tally = Tally()
    made.write(folder)
    path, whole = folder / HEADS, joined(made.heads)
    tally.judge("unchanged", "unchanged", folder, (audit.VERIFIED,))
    for bit in range(part, len(whole) * 8, parts):
        path.write_bytes(flipped(whole, bit))
        torn = bit // 8 == len(whole) - 1
        tally.judge("head: bit flip", f"heads, bit {bit}", folder, (audit.UNRESOLVED if torn else audit.TAMPERED,))
    for kind, what, heads in islice(moves(made.heads), part, None, parts):
        path.write_bytes(joined(heads))
        wanted = audit.TAMPERED
        if kind == "deletion":
            wanted = audit.UNRESOLVED if heads == made.heads[:-1] else audit.VERIFIED
        tally.judge(f"head: {kind}", f"heads, {what}", folder, (wanted,))
    for cut in range(part, len(whole), parts):
        path.write_bytes(whole[:cut])
        tally.judge("head: truncation", f"heads cut at {cut}", folder, (audit.UNRESOLVED,))
    return tally


def sampled(folder: Path, made: Made, tail: int, samples: int, seed: int) -> Tally:
    """Random changes of a ledger whose last ``tail`` lines no head covers. Changes before that must be found; after
    it, an unsigned tail (2) is an answer too."""
    tally, choose = Tally(), random.Random(seed)
    made.write(folder)
    path, whole = folder / SEGMENT, joined(made.lines)
    tally.judge("unchanged", "unchanged", folder, (audit.UNRESOLVED if tail else audit.VERIFIED,))
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
    judge.record_in = lru_cache(4096)(judge.record_in)  # type: ignore[attr-defined]
    verify_ledger.read_record = lru_cache(4096)(verify_ledger.read_record)
    judge._signed = _signatures_kept(judge._signed, lambda envelope: envelope)  # type: ignore[attr-defined]
    verify_ledger.signed_value = _signatures_kept(verify_ledger.signed_value, json.dumps)


def _signatures_kept(function: Callable[..., Any], named: Callable[[Any], Any]) -> Callable[..., Any]:
    """``function(envelope, ...)`` with its answers kept by envelope and key; what it raises is not kept."""
    kept: dict[Any, Any] = {}

    def keeping(envelope: Any, *rest: Any, **more: Any) -> Any:
        plain = [item.public_bytes_raw() if hasattr(item, "public_bytes_raw") else item
                 for item in (*rest, *more.values())]  # fmt: skip
        place = (named(envelope), *plain)
        if place not in kept:
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
        return sampled(Path(folder), Made(1000, tail=20), 20, samples // parts, seed=part)


def main() -> None:
    """Print the table that docs/evidence.md holds; exit 1 if anything was missed or judged in two ways."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=100_000)
    options.add_argument("--stride", type=int, default=1, help="of the exhaustive part, only every so-manieth")
    options.add_argument("--processes", type=int, default=2)
    chosen = options.parse_args()
    pieces = 8 * chosen.stride
    jobs = [(what, part, pieces, 0) for what in ("lines", "heads") for part in range(8)]
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
