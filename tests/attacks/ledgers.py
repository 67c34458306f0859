"""What an insider does with a ledger, a copy of the receipts or a bundle, and what both verifiers say to it."""

import io
import json
import sys
import tarfile
import uuid
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent import audit
from site_agent.audit import bundle
from site_agent.gateway.exit.ledger import Ledger
from tools import verify_ledger
from tools.evidence_egress import SITE, write_study
from tools.evidence_tamper import HEADS, SEGMENT, Made, joined
from tools.world import Service, World
from wardround.records.ledger.entries import ControlEntry, IdentityEntry, UploadEntry
from wardround.records.receipts import ACCEPTED, EMPTY_HEAD, LedgerHead, Receipt, line_hash, next_head
from wardround.signing import canonical

Said = tuple[int, int | None]  # exit code, first bad line


def both(folder: Path, receipts: Path | None = None, *, key: str = "", receipt_key: str = "") -> Said:
    """What both verifiers say of a folder; they must say the same."""
    verdict, code = audit.verify(folder, receipts, audit.Pins(key, receipt_key))
    theirs = verify_ledger.judge(folder, receipts=receipts, key=key or None, receipt_key=receipt_key or None)
    assert (code, verdict.first_bad) == theirs[:2], (verdict.reason, theirs[2])
    return code, verdict.first_bad


def both_of_bundle(path: Path, receipts: Path | None = None, *, receipt_key: str = "") -> tuple[int, str]:
    """What both verifiers say of a bundle: the code, and the first one's reason."""
    verdict, code = bundle.verify_bundle(path, receipts, audit.Pins(receipt_key=receipt_key))
    theirs = verify_ledger.judge(path, bundle=True, receipts=receipts, receipt_key=receipt_key or None)
    assert (code, verdict.first_bad) == theirs[:2], (verdict.reason, theirs[2])
    return code, verdict.reason


def forged(key: Ed25519PrivateKey, receipt_key: str, continues: dict[str, Any] | None) -> tuple[bytes, bytes]:
    """A ledger of three lines that says nothing, and its signed head: the two files."""
    records: list[dict[str, Any]] = [
        {"type": "genesis", "ledger_id": uuid.uuid4().hex, "ledger_key": key.public_key().public_bytes_raw().hex()},
        {"type": "identity", "event": "reopened", "site": "st-olav", "federation": "f", "receipt_key": receipt_key},
        {"type": "session", "event": "opened", "peer": "127.0.0.1:9000"},
    ]
    if continues is not None:
        records[0]["continues"] = continues
    lines, head = [], EMPTY_HEAD
    for seq, record in enumerate(records):
        lines.append(canonical.dumps({"v": 1, "seq": seq, "ts": "2026-01-09T00:00:00.000Z", "prev": head, **record}))
        head = next_head(head, line_hash(lines[-1]))
    signed = LedgerHead(records[0]["ledger_id"], len(lines), head).sign(key)
    return joined(lines), joined([canonical.dumps(signed.document())])


def written(
    folder: Path, key: Ed25519PrivateKey, records: list[dict[str, Any]], heads: tuple[bytes, ...] = ()
) -> LedgerHead:
    """Write a ledger of these records as whoever has its key can, and ``heads`` after the signed head over all of it.
    Returns that head."""
    lines, head = [], EMPTY_HEAD
    for seq, record in enumerate(records):
        lines.append(canonical_of_any({"v": 1, "seq": seq, "ts": "2026-01-09T00:00:00.000Z", "prev": head, **record}))
        head = next_head(head, line_hash(lines[-1]))
    covered = LedgerHead(records[0]["ledger_id"], len(lines), head)
    folder.mkdir(parents=True)
    (folder / SEGMENT).write_bytes(joined(lines))
    (folder / HEADS).write_bytes(joined([canonical.dumps(covered.sign(key).document()), *heads]))
    return covered


def canonical_of_any(value: Any) -> bytes:
    """Canonical JSON, whatever its depth."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def first_lines(key: Ed25519PrivateKey, receipt_key: str, **genesis: Any) -> list[dict[str, Any]]:
    """The first two records of a ledger under ``key``."""
    public = key.public_key().public_bytes_raw().hex()
    return [
        {"type": "genesis", "ledger_id": uuid.uuid4().hex, "ledger_key": public, **genesis},
        {"type": "identity", "event": "issued", "site": "st-olav", "federation": "f", "receipt_key": receipt_key},
    ]


def cut(folder: Path, made: Made, keep: int) -> None:
    """Cut lines and signed heads at the same place, without any key."""
    heads = [head for head in made.heads if json.loads(json.loads(head)["payload"])["lines"] <= keep]
    (folder / SEGMENT).write_bytes(joined(made.lines[:keep]))
    (folder / HEADS).write_bytes(joined(heads))


def cut_and_sign(folder: Path, made: Made, keep: int, more: int = 0) -> str:
    """Cut as whoever has the ledger key would: with so many other lines instead, and a new head signed over what there
    is then. Returns that head."""
    head, lines = EMPTY_HEAD, list(made.lines[:keep])
    for line in lines:
        head = next_head(head, line_hash(line))
    for seq in range(keep, keep + more):
        record = {"v": 1, "seq": seq, "ts": "2026-01-02T00:00:00.000Z", "type": "session", "event": "opened"}
        lines.append(canonical.dumps({**record, "prev": head}))
        head = next_head(head, line_hash(lines[-1]))
    signed = LedgerHead(made.ledger_id, len(lines), head).sign(made.ledger_key)
    (folder / SEGMENT).write_bytes(joined(lines))
    (folder / HEADS).write_bytes(joined([canonical.dumps(signed.document())]))
    return head


def study_of_two_rounds(world: World) -> Service:
    """A coordinator, one site and its finished study of two rounds; returns the site's agent, which still runs."""
    study, table = write_study(world.state.parent / "study", rounds=2, payload=600)
    world.init()
    world.serve()
    world.join(SITE)
    world.add_data(SITE, table, "y")
    agent = world.run_agent(SITE)
    name = world.create_study(study)
    world.approve(name, [SITE])
    world.ask_coordinator("study", "start", name)
    world.finish(name)
    world.heard(SITE, name)
    return agent


def cut_at_the_second_head(folder: Path) -> None:
    """Cut lines and signed heads where the second head ends."""
    heads = (folder / HEADS).read_bytes().splitlines(keepends=True)[:2]
    keep = json.loads(json.loads(heads[-1])["payload"])["lines"]
    lines = (folder / SEGMENT).read_bytes().splitlines(keepends=True)
    (folder / SEGMENT).write_bytes(b"".join(lines[:keep]))
    (folder / HEADS).write_bytes(b"".join(heads))


def files_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]


def pack(files: dict[str, bytes], link: str = "") -> bytes:
    """An archive in the form that `audit bundle` writes; ``link``: with a symbolic link of that name in it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry)
    return out.getvalue()


def write_when_told(folder: Path) -> None:
    """A writer as an agent is one: for each line on stdin, three rounds of an upload and its receipt, each signed."""
    receipt_key, previous = Ed25519PrivateKey.generate(), EMPTY_HEAD
    ledger = Ledger(folder, Ed25519PrivateKey.generate())
    ledger.begin()
    public = receipt_key.public_key().public_bytes_raw().hex()
    ledger.append(IdentityEntry(event="issued", site="st-olav", federation="f", receipt_key=public))
    print("ready", flush=True)
    row = {"bundle": "model", "name": "w", "dtype": "F32", "shape": [2], "encoding": "raw", "bytes": 8,
           "sha256": "ab" * 32}  # fmt: skip
    facts = {"study": "s", "revision": 1, "attempt": 1, "payload_bytes": 8, "manifest_sha256": canonical.digest([row])}
    for number in (3 * told + more for told, _ in enumerate(sys.stdin) for more in (1, 2, 3)):
        upload_id = uuid.uuid4().hex
        ledger.append(ControlEntry(methods=(), bytes=90))
        upload = {"upload_id": upload_id, "round": number, "tensors": [row], "metrics": [], **facts}
        ledger.append(UploadEntry.from_document(upload))
        head = ledger.statement().head
        receipt = Receipt(
            receipt_id=uuid.uuid4().hex, federation="f", site="st-olav", upload_id=upload_id, round=number,
            decision=ACCEPTED, code="", tensor="", time="2026-01-01T00:00:00Z", ledger=head, previous=previous, **facts,
        ).sign(receipt_key)  # fmt: skip
        previous = line_hash(receipt.payload).hex()
        ledger.resolve(upload_id, receipt)


if __name__ == "__main__":
    write_when_told(Path(sys.argv[1]))
