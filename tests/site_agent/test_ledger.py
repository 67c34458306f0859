"""The ledger as it is written, torn and repaired, and as it is judged from the files alone."""

import hashlib
import json
import logging
import shutil
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from site_agent import audit
from site_agent.audit import show
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.upload import UploadTry
from site_agent.gateway.exit.egress import PendingUpload, send
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.ledger_state import Digests
from tools import verify_ledger
from wardround.errors import BadData, NeedsPerson
from wardround.local import durable
from wardround.local.rate_limit import BURST, PER_MINUTE, RateLimitedLog
from wardround.records.ledger.entries import (
    BlockedEntry,
    DeclareEntry,
    IdentityEntry,
    PolicyEntry,
    ReceiptEntry,
    ResendEntry,
    SessionEntry,
    SignedText,
    TensorRow,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.receipts import (
    ACCEPTED,
    EMPTY_HEAD,
    MAX_NEW_LINES,
    NOT_RECEIVED,
    LedgerHead,
    Receipt,
    head_after,
    line_hash,
    next_head,
)
from wardround.records.update import LedgerStatement, UploadHeader
from wardround.signing import canonical
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import Manifest
from wardround.tensors.tags import Tag

LEDGER_KEY = Ed25519PrivateKey.generate()

RECEIPT_KEY = Ed25519PrivateKey.generate()

SEGMENT, HEADS = "000001.jsonl", "heads.jsonl"


def test_of_lines_that_a_peer_can_cause_without_end_some_are_left_out_and_counted(tmp_path: Path) -> None:
    now = 0.0
    ledger = Ledger(tmp_path, LEDGER_KEY, lambda: now)
    ledger.begin()
    written = [ledger.append_often(declined(n)) for n in range(BURST + 5)]
    assert written == [True] * BURST + [False] * 5
    assert ledger.append_often(OPENED)  # each kind has room of its own
    now += 60 / PER_MINUTE
    assert ledger.append_often(declined(100))
    assert not ledger.append_often(declined(101))
    assert not ledger.append_often(declined(102))
    ledger.close()
    found = [(entry.round, entry.left_out) for entry in ledger.entries(DeclareEntry)]
    assert found[BURST:] == [(100, 5), (102, 1)]
    assert found[:BURST] == [(n, None) for n in range(BURST)]
    now += 10 * 60 * BURST
    again = Ledger(tmp_path, LEDGER_KEY, lambda: now)
    assert [again.append_often(BlockedEntry(study="s")) for _ in range(BURST + 1)] == [True] * BURST + [False]
    again.close()
    assert audit.verify(tmp_path)[0].consistent
    assert verify_ledger.judge(tmp_path)[0] == audit.CONSISTENT


def test_a_log_of_what_a_peer_can_cause_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    caplog.set_level(logging.INFO)
    log = RateLimitedLog(logging.getLogger("site_agent.test"), lambda: now)
    for number in range(BURST + 3):
        log.warning("declined %d", number)
    log.info("of another kind")
    now += 60 / PER_MINUTE
    log.warning("declined %d", 99)
    said = [one.getMessage() for one in caplog.records]
    assert said[BURST - 1 :] == [
        f"declined {BURST - 1}", "of another kind", "declined 99 (3 more like it were not logged)",
    ]  # fmt: skip


OPENED = SessionEntry(event="opened", peer="x")


def declined(round_: int) -> DeclareEntry:
    return DeclareEntry(study="s", standing="declined", round=round_)


class Written:
    """A ledger with an identity, uploads and receipts, as an agent leaves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder, LEDGER_KEY)
        self.previous = EMPTY_HEAD
        self.ledger.begin()
        key = RECEIPT_KEY.public_key().public_bytes_raw().hex()
        self.ledger.append(IdentityEntry(event="issued", site="a", receipt_key=key))

    def upload(self, round_: int) -> str:
        rows = [{"bundle": "model", "name": "w", "dtype": "F32", "shape": [2], "encoding": "raw", "bytes": 8,
                 "sha256": hashlib.sha256(bytes([round_])).hexdigest(), "l2": "1.0e+00"}]  # fmt: skip
        manifest = [{key: row[key] for key in row if key != "l2"} for row in rows]
        upload_id = uuid.uuid4().hex
        self.ledger.append(UploadEntry(
            upload_id=upload_id, study="s", revision=1, round=round_, attempt=1, payload_bytes=8,
            manifest_sha256=canonical.digest(manifest), tensors=tuple(map(TensorRow.from_document, rows)), metrics=(),
        ))  # fmt: skip
        self.ledger.sign()
        return upload_id

    def receipt(self, of: str, **changed: Any) -> Receipt:
        upload = self.ledger.unresolved[of]
        names = ("study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes")
        receipt = Receipt(
            receipt_id=uuid.uuid4().hex, federation="f", site="a", upload_id=of, decision=ACCEPTED, code="",
            tensor="", time="2026-01-01T00:00:00Z", ledger=self.ledger.head, previous=self.previous,
            **{name: getattr(upload, name) for name in names},
        )  # fmt: skip
        return replace(receipt, **changed)

    def resolve(self, upload_id: str, receipt: Receipt, key: Ed25519PrivateKey = RECEIPT_KEY) -> None:
        envelope = receipt.sign(key)
        self.previous = hashlib.sha256(envelope.payload).hexdigest()
        self.ledger.resolve(upload_id, envelope)

    def force(self, upload_id: str, receipt: Receipt, key: Ed25519PrivateKey = RECEIPT_KEY) -> None:
        """Append a receipt without asking whether it may stand there, as whoever has the ledger's key can."""
        state = self.ledger._state
        entry = ReceiptEntry(upload_id=upload_id, envelope=SignedText.of(receipt.sign(key)))
        line = Line(state.lines, "2026-01-01T00:00:00.000Z", state.head.head, entry).encoded()
        self.ledger._lines.append(line + b"\n")
        state.heads.append(bytes.fromhex(next_head(state.head.head, line_hash(line))))
        state.hashes.append(line_hash(line))
        self.ledger.sign()

    def rounds(self, count: int) -> "Written":
        for round_ in range(1, count + 1):
            upload_id = self.upload(round_)
            self.resolve(upload_id, self.receipt(upload_id))
        return self


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def lines_of(folder: Path) -> list[bytes]:
    return (folder / SEGMENT).read_bytes().split(b"\n")[:-1]


def put(folder: Path, lines: list[bytes]) -> None:
    (folder / SEGMENT).write_bytes(b"".join(line + b"\n" for line in lines))


def test_a_whole_ledger_verifies(folder: Path) -> None:
    Written(folder).rounds(3).ledger.close()
    verdict, code = audit.verify(folder)
    assert (verdict.consistent, verdict.ok, code) == (True, False, audit.CONSISTENT)  # not complete, nor whose
    assert (verdict.lines, verdict.uploads, verdict.accepted, verdict.bytes) == (8, 3, 3, 24)


def test_what_the_coordinator_does_not_know_is_shown_with_its_study_and_round(folder: Path) -> None:
    """Such a receipt names neither, so that `audit show --study` left it out."""
    made = Written(folder)
    sent = made.upload(3)
    nothing: dict[str, Any] = dict.fromkeys(("revision", "round", "attempt", "payload_bytes"), 0)
    unknown = made.receipt(
        sent, decision=NOT_RECEIVED, code="NOT_RECEIVED", study="", manifest_sha256="", ledger=None, **nothing
    )
    made.ledger.resolve(sent, unknown.sign(RECEIPT_KEY))
    made.ledger.close()
    for lines in (show.chosen(folder, "s"), show.chosen(folder, "s", 3)):
        upload, receipt = lines
        assert (upload.type, receipt.type) == ("upload", "receipt")
    assert show.words(receipt) == f"upload {sent[:12]}…: not_received: the coordinator does not know it"
    assert not list(show.chosen(folder, "another")) + list(show.chosen(folder, "s", 2))


class Answers:
    """A session with a coordinator that answers one upload, and what it is asked about the others."""

    times_connected = 1

    def __init__(self, receipt: Envelope, others: dict[str, Envelope | None]) -> None:
        self.receipt, self.others, self.uploads = receipt, others, 0

    @contextmanager
    def use(self) -> Iterator["Answers"]:
        yield self

    def upload(
        self, header: UploadHeader, file: Path | None, sent: UploadTry, interrupt: Interrupt, tag: Tag | None
    ) -> Envelope:
        sent.answered = True
        self.uploads += 1
        return self.receipt

    def show_ledger(self, page: LedgerStatement) -> int:
        return page.head.lines

    def inquire(self, upload_id: str) -> Envelope | None:
        return self.others[upload_id]


def digest_of(envelope: Envelope) -> str:
    return hashlib.sha256(envelope.payload).hexdigest()


@pytest.mark.parametrize("lie", [False, True])
def test_a_receipt_that_is_in_the_ledger_stands_whatever_is_said_of_others(
    folder: Path, lie: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The receipt of this upload follows that of another, which is asked for and taken. What was said of two more made
    the sending begin again, which ended in a KeyError: the site declined a round that it had a receipt for."""
    made = Written(folder)
    first, later, undecided, mine = (made.upload(round_) for round_ in (1, 2, 3, 4))
    before = made.receipt(first).sign(RECEIPT_KEY)
    receipt = made.receipt(mine, previous=digest_of(before)).sign(RECEIPT_KEY)
    of_later = made.receipt(later, previous="12" * 32).sign(LEDGER_KEY if lie else RECEIPT_KEY)
    session = Answers(receipt, {first: before, later: of_later, undecided: None})
    header = UploadHeader(mine, "s", 1, "00" * 32, 4, 1, Manifest(()), (), 1, 1, made.ledger.statement())
    given = cast(Any, SimpleNamespace())
    got = send(PendingUpload(header, None, "00" * 32), cast(Any, session), made.ledger, given, given, Interrupt())
    assert (got.upload_id, got.decision, session.uploads) == (mine, ACCEPTED, 1)
    assert set(made.ledger.unresolved) == {later, undecided}
    assert made.ledger.disputed("s", 1) is lie
    said = "cannot stand in the ledger" if lie else "the coordinator decided uploads in another order than it tells of"
    assert said in caplog.text


def test_the_head_is_the_one_that_anyone_computes_from_the_lines(folder: Path) -> None:
    ledger = Written(folder).rounds(2).ledger
    head = EMPTY_HEAD
    for line in lines_of(folder):
        assert json.loads(line)["prev"] == head
        head = next_head(head, line_hash(line))
    assert ledger.head == LedgerHead(ledger.ledger_id, 6, head)


def test_an_upload_carries_the_hashes_of_the_lines_since_the_last_receipt(folder: Path) -> None:
    written = Written(folder)
    assert list(written.ledger.statement().new_lines) == [line_hash(line) for line in lines_of(folder)]
    upload_id = written.upload(1)
    seen = written.ledger.head.lines
    written.resolve(upload_id, written.receipt(upload_id))
    assert list(written.ledger.statement().new_lines) == [line_hash(line) for line in lines_of(folder)[seen:]]
    written.ledger.close()
    again = Ledger(folder, LEDGER_KEY)
    assert list(again.statement().new_lines) == [line_hash(line) for line in lines_of(folder)[seen:]]


def test_a_receipt_is_added_once(folder: Path) -> None:
    written = Written(folder)
    upload_id = written.upload(1)
    receipt = written.receipt(upload_id)
    written.resolve(upload_id, receipt)
    with pytest.raises(BadData, match="has a receipt already, or is not in this ledger"):
        written.resolve(upload_id, receipt)
    assert len(lines_of(folder)) == 4


def test_an_upload_without_a_receipt_is_unresolved_also_after_a_restart(folder: Path) -> None:
    written = Written(folder)
    upload_id = written.upload(1)
    written.ledger.close()
    assert list(Ledger(folder, LEDGER_KEY).unresolved) == [upload_id]
    verdict, code = audit.verify(folder)
    assert (verdict.unresolved, code, verdict.ok) == (1, audit.UNRESOLVED, False)
    assert verdict.reason == "1 uploads have no receipt and may have left"


def test_a_last_line_torn_at_any_byte_is_cut_kept_and_recorded(folder: Path, tmp_path: Path) -> None:
    written = Written(folder).rounds(1)
    written.ledger.append(OPENED)
    *before, last = lines_of(folder)
    for length in range(1, len(last) + 1):
        copy = tmp_path / f"torn-{length}"
        shutil.copytree(folder, copy)
        (copy / SEGMENT).write_bytes(b"".join(line + b"\n" for line in before) + last[:length])
        Ledger(copy, LEDGER_KEY).close()
        *same, recovered = lines_of(copy)
        assert same == before
        assert json.loads(recovered)["type"] == "recovered"
        assert json.loads(recovered)["torn_bytes"] == length
        (kept,) = (copy / "torn").iterdir()
        assert kept.read_bytes() == last[:length]
        assert audit.verify(copy)[1] == audit.CONSISTENT


def test_a_torn_line_that_a_signed_head_covers_is_not_cut(folder: Path) -> None:
    Written(folder).rounds(1).ledger.close()
    whole = (folder / SEGMENT).read_bytes()
    (folder / SEGMENT).write_bytes(whole[:-5])
    with pytest.raises(NeedsPerson) as refused:
        Ledger(folder, LEDGER_KEY)
    said = "it has 3 whole lines and a torn one, a signed head covers 4; nothing was sent or changed"
    assert said in refused.value.message
    assert "site-agent audit verify" in refused.value.hint
    assert (folder / SEGMENT).read_bytes() == whole[:-5]


def test_a_ledger_broken_in_the_middle_is_not_opened(folder: Path) -> None:
    Written(folder).rounds(1).ledger.close()
    lines = lines_of(folder)
    put(folder, [lines[0], lines[2], lines[1], lines[3]])
    with pytest.raises(NeedsPerson, match="line 2 of 4 does not continue the one before it"):
        Ledger(folder, LEDGER_KEY)


def test_a_rewritten_ledger_is_not_opened_under_its_old_heads(folder: Path, tmp_path: Path) -> None:
    Written(folder).rounds(1).ledger.close()
    Written(tmp_path / "other").rounds(1).ledger.close()
    shutil.copy(tmp_path / "other" / SEGMENT, folder / SEGMENT)
    with pytest.raises(NeedsPerson, match="are not those that the signed head covers"):
        Ledger(folder, LEDGER_KEY)


def test_a_torn_signature_is_made_again(folder: Path) -> None:
    Written(folder).rounds(1).ledger.close()
    heads = (folder / HEADS).read_bytes()
    (folder / HEADS).write_bytes(heads[:-9])
    Ledger(folder, LEDGER_KEY).close()
    assert audit.verify(folder)[1] == audit.CONSISTENT


def test_a_full_disk_leaves_the_ledger_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Written(folder).rounds(1).ledger
    before = (folder / SEGMENT).read_bytes()

    def full(descriptor: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_all", full)
    with pytest.raises(durable.CannotWrite, match="No space left on device"):
        ledger.append(OPENED)
    monkeypatch.undo()
    assert (folder / SEGMENT).read_bytes() == before
    ledger.append(OPENED)
    ledger.close()
    assert audit.verify(folder)[1] == audit.CONSISTENT


def test_the_first_line_torn_leaves_an_empty_ledger_to_begin(folder: Path) -> None:
    folder.mkdir()
    (folder / SEGMENT).write_bytes(b'{"half":')
    ledger = Ledger(folder, LEDGER_KEY)
    ledger.begin()
    ledger.close()
    assert audit.verify(folder)[1] == audit.CONSISTENT


def edited(line: bytes) -> bytes:
    """The same record, canonical, with another time."""
    return canonical.dumps({**json.loads(line), "ts": "1999-01-01T00:00:00.000Z"})


def swap(lines: list[bytes], at: int) -> list[bytes]:
    return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


MUTATIONS: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "edited": lambda lines, at: [*lines[:at], edited(lines[at]), *lines[at + 1 :]],
    "not canonical": lambda lines, at: [*lines[:at], lines[at].replace(b":", b": ", 1), *lines[at + 1 :]],
    "deleted": lambda lines, at: [*lines[:at], *lines[at + 1 :]],
    "swapped": swap,
}


@pytest.mark.parametrize("mutation", [pytest.param(name, id=name) for name in MUTATIONS])
def test_every_changed_line_is_found_by_its_number(folder: Path, mutation: str) -> None:
    Written(folder).rounds(3).ledger.close()
    whole = lines_of(folder)
    for at in range(len(whole) - (mutation == "swapped")):
        put(folder, MUTATIONS[mutation](whole, at))
        verdict, code = audit.verify(folder)
        assert (code, verdict.ok, verdict.first_bad) == (audit.TAMPERED, False, at + 1), (mutation, at, verdict.reason)
        assert verdict.reason


def test_a_line_twice_is_found_by_its_number(folder: Path) -> None:
    Written(folder).rounds(3).ledger.close()
    whole = lines_of(folder)
    for at in range(len(whole)):
        put(folder, [*whole[: at + 1], *whole[at:]])
        verdict, code = audit.verify(folder)
        assert (code, verdict.first_bad) == (audit.TAMPERED, at + 2)


def test_every_flipped_byte_is_found(folder: Path) -> None:
    Written(folder).rounds(1).ledger.close()
    whole = (folder / SEGMENT).read_bytes()
    for at in range(0, len(whole), 7):
        (folder / SEGMENT).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert audit.verify(folder)[1] in (audit.TAMPERED, audit.CANNOT_VERIFY), at


def test_a_cut_ledger_is_found_at_every_line(folder: Path) -> None:
    Written(folder).rounds(2).ledger.close()
    whole = lines_of(folder)
    for keep in range(1, len(whole)):
        put(folder, whole[:keep])
        verdict, code = audit.verify(folder)
        assert code == audit.TAMPERED
        assert verdict.first_bad == keep + 1
        assert verdict.reason.startswith(f"the ledger has {keep} lines, a signed head covers")


def rewritten(lines: list[bytes], at: int, **changed: Any) -> list[bytes]:
    """An edit of line ``at`` with the whole chain after it made anew, as an intruder would."""
    head, out = EMPTY_HEAD, []
    for number, line in enumerate(lines):
        record = {**json.loads(line), "prev": head, **(changed if number == at else {})}
        out.append(canonical.dumps(record))
        head = next_head(head, line_hash(out[-1]))
    return out


def test_a_chain_made_anew_does_not_fit_the_receipts(folder: Path) -> None:
    Written(folder).rounds(2).ledger.close()
    put(folder, rewritten(lines_of(folder), 1, event="renewed"))
    verdict, code = audit.verify(folder)
    assert (code, verdict.first_bad) == (audit.TAMPERED, 4)
    assert "the receipt names a head of 3 lines that this ledger never had" in verdict.reason


def test_a_chain_made_anew_without_receipts_does_not_fit_the_signed_heads(folder: Path) -> None:
    written = Written(folder)
    written.ledger.append(OPENED)
    written.ledger.close()
    put(folder, rewritten(lines_of(folder), 2, peer="y"))
    verdict, code = audit.verify(folder)
    assert (code, verdict.first_bad) == (audit.TAMPERED, 1)
    assert verdict.reason == "the lines from 1 to 3 are not those that a signed head covers"


BAD_RECEIPTS = [
    pytest.param({"manifest_sha256": "00" * 32}, "the receipt's manifest_sha256 is not that of upload", id="manifest"),
    pytest.param({"round": 9}, "the receipt's round is not that of upload", id="round"),
    pytest.param({"payload_bytes": 9}, "the receipt's payload_bytes is not that of upload", id="bytes"),
    pytest.param({"upload_id": "00" * 16}, "is for an upload that no line before it records", id="upload"),
    pytest.param({"previous": "11" * 32}, "does not follow the one before it: one is missing", id="previous"),
    pytest.param({"ledger": LedgerHead("x", 3, "22" * 32)}, "a head of 3 lines that this ledger never had", id="head"),
    pytest.param({"ledger": LedgerHead("x", 99, "22" * 32)}, "a head of 99 lines that this ledger never", id="long"),
    pytest.param({"site": "b"}, "the receipt's site is not that of this ledger", id="site"),
    pytest.param({"ledger_key": "55" * 32}, "the receipt's ledger_key is not that of this ledger", id="key"),
    pytest.param(
        {"decision": "refused", "code": "TENSOR_NORM", "tensor": "v"}, "names a tensor that upload", id="tensor"
    ),
    pytest.param({"decision": "maybe"}, "signed, but not a receipt: decision", id="decision"),
    pytest.param({"code": "TENSOR_NORM"}, "signed, but not a receipt: code", id="accepted with a code"),
    pytest.param({"decision": "refused"}, "signed, but not a receipt: code", id="refused without a code"),
    pytest.param({"decision": "refused", "code": "free text"}, "signed, but not a receipt: code", id="a code in words"),
    pytest.param({"round": True}, "signed, but not a receipt: round", id="a bool for a number"),
    pytest.param({"receipt_id": "\x1b[2J"}, "signed, but not a receipt: receipt_id", id="control characters"),
    pytest.param({"time": "x" * 301}, "signed, but not a receipt: time", id="a long text"),
    pytest.param({"previous": "zz" * 32}, "signed, but not a receipt: previous", id="previous is no digest"),
    pytest.param({"ledger": LedgerHead("x", True, "22" * 32)}, "signed, but not a receipt: ledger", id="lines: true"),
    pytest.param({"ledger": LedgerHead("x", 1, "22")}, "signed, but not a receipt: ledger", id="a short head"),
]


def test_a_receipt_of_another_key_is_found(folder: Path) -> None:
    written = Written(folder)
    upload_id = written.upload(1)
    forged = Ed25519PrivateKey.generate()
    with pytest.raises(BadData, match="signed by key"):
        written.resolve(upload_id, written.receipt(upload_id), forged)
    written.force(upload_id, written.receipt(upload_id), forged)
    written.ledger.close()
    verdict, code = audit.verify(folder)
    assert (code, verdict.first_bad) == (audit.TAMPERED, 4)
    assert "signed by key" in verdict.reason


def test_lines_after_the_last_signed_head_are_an_unsigned_tail(folder: Path) -> None:
    written = Written(folder).rounds(1)
    written.ledger.append(OPENED)
    verdict, code = audit.verify(folder)
    assert (verdict.unsigned_tail, code) == (1, audit.UNRESOLVED)
    assert verdict.reason == "no signed head covers the last 1 lines"


def test_no_ledger_and_no_key_cannot_be_verified(folder: Path, tmp_path: Path) -> None:
    verdict, code = audit.verify(folder)
    assert (code, verdict.reason) == (audit.CANNOT_VERIFY, f"there is no ledger in {folder}")
    Ledger(folder, LEDGER_KEY).begin()
    genesis = json.loads(lines_of(folder)[0])
    del genesis["ledger_key"]
    put(folder, [canonical.dumps(genesis)])
    verdict, code = audit.verify(folder)
    assert (code, verdict.reason) == (audit.CANNOT_VERIFY, "the first line holds no ledger key")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / SEGMENT).write_bytes(b"")
    assert audit.verify(empty)[0].reason == "the ledger has no whole line"


def again(written: Written, upload_id: str, number: int, sent: int | None = None) -> None:
    written.ledger.append(ResendEntry(
        upload_id=upload_id, study="s", revision=1, round=1, attempt=1, payload_bytes=8, try_=number, sent=sent,
    ))  # fmt: skip


def test_what_was_sent_again_counts_also_after_a_restart(folder: Path) -> None:
    """Each line counts for all that it lets out, until the next one says what was sent under it."""
    written = Written(folder)
    part = ("s", 1, 1)
    upload_id = written.upload(1)
    assert (written.ledger.payload_bytes(part), written.ledger.tries(upload_id)) == (8, 1)
    written.ledger.sent(upload_id, 3)
    assert written.ledger.payload_bytes(part) == 3
    again(written, upload_id, 2, sent=3)
    assert (written.ledger.payload_bytes(part), written.ledger.tries(upload_id)) == (11, 2)
    again(written, upload_id, 3)  # after a crash nobody knows what was sent: all of it counts
    assert written.ledger.payload_bytes(part) == 19
    day = json.loads(lines_of(folder)[-1])["ts"][:10]
    assert written.ledger.payload_bytes(day) == 19
    written.ledger.close()
    after = Ledger(folder, LEDGER_KEY)
    assert (after.payload_bytes(part), after.payload_bytes(day), after.tries(upload_id)) == (19, 19, 3)
    after.close()


@pytest.mark.parametrize("before", [0, 1])
def test_a_backlog_is_shown_in_pages_and_what_is_left_goes_with_the_upload(folder: Path, before: int) -> None:
    """What the pages and the upload say is together what one long statement would say."""
    written = Written(folder).rounds(before)
    seen = written.ledger.statement().head.lines - len(written.ledger.statement().new_lines)
    written.ledger.append_all([PolicyEntry(event="changed", sha256=f"{n:064x}") for n in range(2700)])
    shown: list[bytes] = []

    def show(page: LedgerStatement) -> int:
        head = page.head
        assert len(page.new_lines) <= MAX_NEW_LINES
        shown.extend(page.new_lines)
        head.verify(page.signature, LEDGER_KEY.public_key())
        assert head.head == head_after(EMPTY_HEAD, [line_hash(line) for line in lines_of(folder)[: head.lines]])
        return head.lines

    written.ledger.catch_up(show)
    rest = written.ledger.statement()
    assert len(rest.new_lines) <= MAX_NEW_LINES
    assert [*shown, *rest.new_lines] == [line_hash(line) for line in lines_of(folder)[seen:]]
    assert rest.head.lines == len(lines_of(folder))


def test_a_backlog_that_the_coordinator_does_not_take_is_cut_so_that_its_receipt_says_why(folder: Path) -> None:
    written = Written(folder)
    written.ledger.append_all([PolicyEntry(event="changed", sha256=f"{n:064x}") for n in range(2700)])
    asked: list[int] = []

    def refuse(page: LedgerStatement) -> int:
        asked.append(page.head.lines)
        return 0

    written.ledger.catch_up(refuse)
    assert asked == [MAX_NEW_LINES]
    assert len(written.ledger.statement().new_lines) == MAX_NEW_LINES


def test_a_coordinator_that_knows_more_lines_than_there_are_is_told_none(folder: Path) -> None:
    """The site was restored from a backup: the upload is refused, with a receipt."""
    written = Written(folder)
    written.ledger.append_all([PolicyEntry(event="changed", sha256=f"{n:064x}") for n in range(2700)])
    written.ledger.catch_up(lambda page: 1_000_000)
    assert written.ledger.statement().new_lines == ()


@pytest.mark.parametrize(("changed", "said"), BAD_RECEIPTS)
def test_a_receipt_that_says_something_else_is_not_appended_and_found_where_it_is(
    folder: Path, changed: dict[str, Any], said: str
) -> None:
    written = Written(folder)
    upload_id = written.upload(1)
    receipt = written.receipt(upload_id, **changed)
    with pytest.raises(BadData) as refused:
        written.ledger.resolve(upload_id, receipt.sign(RECEIPT_KEY))
    assert said in refused.value.message
    written.force(upload_id, receipt)
    written.ledger.close()
    verdict, code = audit.verify(folder)
    assert (code, verdict.first_bad) == (audit.TAMPERED, 4)
    assert said in verdict.reason
    assert verify_ledger.judge(folder)[:2] == (audit.TAMPERED, 4)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=9), st.integers(-12, 12), st.integers(-12, 12))
def test_digests_in_a_row_are_a_list_of_them(digests: list[bytes], first: int, last: int) -> None:
    row = Digests(digests[:4])
    for digest in digests[4:]:
        row.append(digest)
    assert len(row) == len(digests)
    assert list(row) == digests
    assert row[first:last] == digests[first:last]
    if -len(digests) <= first < len(digests):
        assert row[first] == digests[first]
    else:
        with pytest.raises(IndexError):
            row[first]


def test_a_receipt_is_found_in_a_long_ledger_without_holding_the_file(tmp_path: Path) -> None:
    written = Written(tmp_path)
    ids = [written.upload(round_) for round_ in range(1, 40)]
    for upload_id in ids:
        written.resolve(upload_id, written.receipt(upload_id))
    size = written.ledger._segment.stat().st_size
    tracemalloc.start()
    try:
        found = written.ledger.receipt(ids[-1])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.upload_id == ids[-1]
    assert most < size / 2


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    """The receipts are read while another thread may write: half a line ended the connection."""
    written = Written(tmp_path)
    ids = [written.upload(round_) for round_ in (1, 2)]
    for upload_id in ids:
        written.resolve(upload_id, written.receipt(upload_id))
    segment = written.ledger._segment
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1])
    read = written.ledger.entries(ReceiptEntry)
    assert next(read).upload_id == ids[0]
    assert list(read) == []
    segment.write_bytes(whole[:-20])
    assert [entry.upload_id for entry in written.ledger.entries(ReceiptEntry)] == ids[:1]
    segment.write_bytes(whole)
    assert [entry.upload_id for entry in written.ledger.entries(ReceiptEntry)] == ids
