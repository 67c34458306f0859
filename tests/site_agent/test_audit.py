"""What an auditor does with a ledger: hold it against the coordinator's copy and a counter, export, report, bundle."""

import csv
import hashlib
import html
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent import audit
from site_agent.audit import bundle, export, report, second_verifier
from site_agent.audit.files import RawLines, in_folder
from site_agent.audit.form import lines, read
from site_agent.audit.reconcile import Count, count_from, reconcile
from site_agent.audit.show import chosen, words
from tests import commands
from tests.attacks.ledgers import cut
from tools import verify_ledger
from tools.evidence_tamper import HEADS, SEGMENT, Made, joined
from wardround import __version__
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.local import outputs
from wardround.records.ledger.entries import UploadEntry
from wardround.records.ledger.lines import Line
from wardround.records.receipt_copy import Statement
from wardround.records.receipts import EMPTY_HEAD, LedgerHead, line_hash, next_head
from wardround.signing import canonical, dsse
from wardround.terminal import escaped


@pytest.fixture(scope="module")
def made() -> Made:
    return Made(20)


@pytest.fixture
def state(tmp_path: Path, made: Made) -> Path:
    """A state directory with a ledger, and the coordinator's copy of the receipts beside it."""
    made.write(tmp_path / "site" / "ledger")
    (tmp_path / "receipts.jsonl").write_bytes(made.copy())
    return tmp_path / "site"


@pytest.fixture
def receipts(state: Path) -> Path:
    return state.parent / "receipts.jsonl"


def cut_and_signed_again(state: Path, made: Made, keep: int) -> None:
    """What a thief of the ledger key would do: drop the last lines and sign the new end."""
    lines = made.lines[:keep]
    head = EMPTY_HEAD
    for line in lines:
        head = next_head(head, line_hash(line))
    signed = LedgerHead(json.loads(lines[0])["ledger_id"], keep, head).sign(made.ledger_key)
    (state / "ledger" / SEGMENT).write_bytes(joined(lines))
    (state / "ledger" / HEADS).write_bytes(canonical.dumps(signed.document()) + b"\n")


def test_the_coordinators_copy_agrees_with_a_whole_ledger(state: Path, receipts: Path) -> None:
    verdict, code = audit.verify(state / "ledger", receipts)
    assert (code, verdict.compared) == (audit.VERIFIED, 5)


def test_a_ledger_cut_short_and_signed_again_is_found_by_the_coordinators_copy(
    state: Path, receipts: Path, made: Made
) -> None:
    cut_and_signed_again(state, made, 13)
    assert audit.verify(state / "ledger")[1] == audit.CONSISTENT
    verdict, code = audit.verify(state / "ledger", receipts)
    assert (code, verdict.first_bad) == (audit.TAMPERED, 14)
    assert "names a ledger of 15 lines, this one has 13: it was cut short" in verdict.reason


def test_a_receipt_that_only_the_coordinator_has_for_an_open_upload_is_no_fault(
    state: Path, receipts: Path, made: Made
) -> None:
    cut_and_signed_again(state, made, 18)
    verdict, code = audit.verify(state / "ledger", receipts)
    assert (code, verdict.unresolved, verdict.compared) == (audit.UNRESOLVED, 1, 5)


def test_an_older_copy_of_the_receipts_agrees(state: Path, receipts: Path, made: Made) -> None:
    receipts.write_bytes(made.copy(3, time="2025-12-24T00:00:00Z"))
    verdict, code = audit.verify(state / "ledger", receipts)
    assert (code, verdict.compared, verdict.copied, verdict.tail) == (audit.VERIFIED, 3, "2025-12-24T00:00:00Z", 8)
    receipts.write_bytes(made.copy(0))  # from before the first update
    verdict, code = audit.verify(state / "ledger", receipts)
    assert (code, verdict.compared, verdict.tail) == (audit.VERIFIED, 0, 20)


def test_receipts_that_are_no_whole_copy_cannot_be_compared(state: Path, receipts: Path, made: Made) -> None:
    other = Made(20, seed=8)
    *_, closing = made.copy().splitlines()
    stranger = canonical.dumps(
        Statement("f", "oslo", "00" * 32, 0, EMPTY_HEAD, 0, "").sign(made.receipt_key).document()
    )
    cases = {
        joined([made.receipts[0], made.receipts[2], closing]): "line 2: it does not follow the one before it",
        joined([*made.receipts[:4], closing]): "it has 4 receipts, the coordinator's statement is about 5",
        joined(made.receipts): "line 5: signed as 'application/vnd.wardround.receipt.v1+json', wanted",
        made.copy()[:-1]: "the copy is not whole: it ends within a line",
        b"": "the copy is not whole: it ends within a line",
        other.copy(): "line 6: it is signed by a key that no `identity` line of this ledger names",
        b"{}\n": "line 1: not a signed envelope",
        joined([stranger]): "the copy is of site `oslo`, this ledger is of `st-olav`",
        joined([made.receipts[0], stranger]): "line 1: it is for site `st-olav` with another key or federation",
    }
    for data, said in cases.items():
        receipts.write_bytes(data)
        verdict, code = audit.verify(state / "ledger", receipts)
        assert code == audit.CANNOT_VERIFY
        assert said in verdict.reason
    assert "cannot be read (No such file" in audit.verify(state / "ledger", state / "none")[0].reason


PAYLOAD, CONTROL = 5 * 64, 5 * 90


def test_what_the_ledger_accounts_for_is_payload_and_control(state: Path) -> None:
    found = reconcile(state / "ledger", Count(PAYLOAD + CONTROL + 5000))
    assert found.ok
    assert (found.expected, found.payload, found.control, found.calls) == (PAYLOAD + CONTROL, PAYLOAD, CONTROL, 5)
    assert found.unexplained == 5000


def test_a_leak_of_64_kib_is_not_explained_by_framing(state: Path) -> None:
    found = reconcile(state / "ledger", Count(PAYLOAD + CONTROL + 3000 + 64 * 1024, connections=1, seconds=60))
    assert not found.ok
    assert "bytes more left than the ledger accounts for; framing explains at most" in found.reason


def test_fewer_bytes_than_the_ledger_says_left_are_a_fault_too(tmp_path: Path) -> None:
    Made(2000).write(tmp_path)
    found = reconcile(tmp_path, Count(100))
    assert not found.ok
    assert "bytes fewer were counted than the ledger says left" in found.reason


def test_only_what_was_recorded_since_counting_began_is_expected(state: Path) -> None:
    assert reconcile(state / "ledger", Count(0, began="2027-01-01T00:00:00.000Z")).expected == 0


def test_a_count_is_a_number_or_a_relays_file(tmp_path: Path) -> None:
    assert count_from("123").up == 123
    path = tmp_path / "count.json"
    path.write_text("456\n")
    assert count_from(str(path)).up == 456
    one = {"number": 1, "opened": "2026-01-01T00:00:00.000Z", "closed": None, "up": 7, "down": 8}
    told = {"up": 7, "down": 8, "began": "2026-01-01T00:00:00.000Z", "until": "2026-01-01T00:01:00.000Z"}
    path.write_text(json.dumps({**told, "connections": [one]}))
    assert count_from(str(path)) == Count(7, 8, 1, 60.0, "2026-01-01T00:00:00.000Z")
    for wrong, said in (("{}", "lacks what"), ("x", "neither a number nor")):
        path.write_text(wrong)
        with pytest.raises(BadData, match=said):
            count_from(str(path))
    with pytest.raises(Unavailable, match="cannot be read"):
        count_from(str(tmp_path / "none"))


def test_payload_that_no_line_let_out_is_a_fault_although_the_session_counts_it(tmp_path: Path) -> None:
    """What a session says was sent must lie within what `upload` and `resend` lines let out until then."""
    made = Made(12, again=True)
    let_out = 2 * 2 * 64
    for sent, ok in ((let_out, True), (let_out + 1, False)):
        records = [json.loads(line) for line in made.lines]
        common = {"v": 1, "ts": "2026-01-01T00:00:00.000Z", "type": "session", "event": "closed"}
        data = joined(
            [*made.lines, canonical.dumps({**common, "seq": len(records), "prev": "00" * 32, "bytes_up": sent})]
        )
        (tmp_path / SEGMENT).write_bytes(data)
        found = reconcile(tmp_path, Count(sent + 2 * 90))
        assert found.ok is ok, found
    assert found.reason == "1 payload bytes more left than the ledger's `upload` and `resend` lines let out"
    assert found.sent_again == let_out + 1 - 2 * 64


def test_records_are_chosen_by_study_round_and_tensor(state: Path) -> None:
    ledger = state / "ledger"
    assert [line.type for line in chosen(ledger, round_=2)] == ["upload", "receipt"]
    assert {line.type for line in chosen(ledger, study="hearts")} == {"consent", "upload", "receipt"}
    assert list(chosen(ledger, study="lungs")) == []
    for line in chosen(ledger, tensor="*.1.*"):
        assert isinstance(line.entry, UploadEntry)
        assert [row.name for row in line.entry.tensors] == ["shared.1.weight"]


def line_of(record: dict[str, Any]) -> Line:
    return Line.from_document({"v": 1, "seq": 0, "ts": "2026-01-01T00:00:00.000Z", "prev": EMPTY_HEAD, **record})


AGAIN = {
    "type": "resend", "upload_id": "ab" * 16, "study": "s", "revision": 1, "round": 3, "attempt": 1,
    "payload_bytes": 640,
}  # fmt: skip
SAID = [
    (
        {"type": "control", "bytes": 90, "methods": [{"method": "Watch", "count": 2, "bytes": 90}]},
        "90 B beside updates: Watch 2x",
    ),
    (
        {"type": "blocked", "study": "s", "round": 3, "what": "head.weight", "rule": "deny"},
        "s round 3: nothing left: head.weight: deny",
    ),
    ({"type": "released", "study": "s", "round": 3, "by": {"name": "dpo", "uid": 1}}, "s round 3 released by dpo"),
    ({"type": "held", "study": "s", "round": 3}, "s round 3 held"),
    ({"type": "policy", "event": "changed", "sha256": "ab" * 32}, "changed abababababab"),
    (
        {**AGAIN, "try": 2, "sent": 64},
        "s round 3.1: try 2, 640 B at most; 64 B were sent before it",
    ),
    (
        {**AGAIN, "try": 3},
        "s round 3.1: try 3, 640 B at most",
    ),
    ({"type": "left", "by": {"name": "dpo", "uid": 1}}, "the membership ended by dpo"),
    ({"type": "recovered", "torn_bytes": 4}, "4 torn bytes cut"),
    ({"type": "of_a_later_version"}, "written by a newer version"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "said"), SAID)
def test_each_record_is_said_in_a_few_words(record: dict[str, Any], said: str) -> None:
    assert words(line_of(record)) == said


def test_a_spreadsheet_runs_nothing_of_what_a_ledger_holds(made: Made) -> None:
    hostile = ['=cmd|"/c calc"!A1', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]
    base = json.loads(made.lines[3])
    rows = list(
        csv.DictReader(io.StringIO(export.as_csv([line_of({**base, "study": text}) for text in hostile]), newline=""))
    )
    assert [row["study"] for row in rows] == ["'" + escaped(text) for text in hostile]
    assert not any(cell.startswith(outputs.FORMULA) for row in rows for cell in row.values())


def test_ocsf_events_have_the_required_fields_of_api_activity(state: Path) -> None:
    events = [json.loads(line) for line in export.as_ocsf(lines(state / "ledger")).splitlines()]
    assert len(events) == 20
    for event in events:
        assert (event["category_uid"], event["class_uid"]) == (6, 6003)
        assert event["type_uid"] == 600300 + event["activity_id"]
        assert isinstance(event["time"], int)
        assert set(event) >= {"actor", "api", "metadata", "severity_id", "src_endpoint", "activity_id"}
        assert event["metadata"]["product"]["vendor_name"]
    assert events[5]["unmapped"]["type"] == "upload"
    assert events[5]["src_endpoint"] == {"name": "st-olav"}


def test_a_receipt_of_a_refusal_is_a_failure_in_ocsf(made: Made) -> None:
    record = json.loads(made.lines[6])
    payload = {**json.loads(record["envelope"]["payload"]), "decision": "refused", "code": "NOT_FINITE"}
    record["envelope"]["payload"] = canonical.dumps(payload).decode()
    event = json.loads(export.as_ocsf([line_of(record)]))
    assert (event["status_id"], event["severity_id"], event["status_code"]) == (2, 3, "NOT_FINITE")


def page_of(state: Path, copy: audit.Copy | None = None) -> str:
    return html.unescape(bundle.look(state, copy).page())


def test_the_report_says_what_left_and_runs_nothing(state: Path) -> None:
    page = page_of(state)
    assert "What left st-olav" in page
    assert "Unchanged since it was written. From 2026-01-01 00:00 UTC to 2026-01-01 00:00 UTC." in page
    assert "Not shown:" in page
    assert "no copy of the coordinator's receipts was given" in page
    assert page.count("shared.0.weight") == 1
    assert "<svg" in page
    assert "approved by dpo" in page
    lowered = page.lower()
    for never in ("<script", "javascript:", "onload", "http://", "https://", "<img", "<link", "@import", "url("):
        assert never not in lowered
    assert page == page_of(state)


def test_the_page_calls_the_closing_validation_by_its_name(state: Path) -> None:
    found = audit.verify(state / "ledger")
    path = state / "ledger" / SEGMENT
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert ">closing<" not in page_of(state)
    for line in lines:
        if line["type"] == "upload" and line["round"] == 2:
            line["kind"] = "validate"
    path.write_bytes(joined([canonical.dumps(line) for line in lines]))
    assert report.page([in_folder(state / "ledger")], {}, *found).count(">closing<") == 1


def test_a_verified_page_names_site_dates_key_and_when_the_receipts_were_copied(state: Path, made: Made) -> None:
    page = page_of(state, audit.Copy(made.copy(time="2026-03-04T05:06:07Z"), "the coordinator's", True))
    for said in (
        "Verified from 2026-01-01 00:00 UTC to 2026-01-01 00:00 UTC: unchanged, complete by the coordinator's receipts "
        "of 2026-03-04 05:06 UTC, under this site's key.",
        "<dt>Site</dt><dd>st-olav</dd>",
        "<dt>Federation</dt><dd>f</dd>",
        "5 of the coordinator's, copied 2026-03-04 05:06 UTC by its clock; 2 lines at its end are newer",
        f"{dsse.keyid(made.ledger_key.public_key())}, the site's by the coordinator's receipts",
    ):
        assert said in page
    assert "Not shown:" not in page
    kept = page_of(state, audit.Copy(made.copy(), "the receipts kept here", False))
    assert "the receipts kept here, copied at 2026-02-01T00:00:00Z, agree, but came from the site" in kept


def test_the_report_lists_what_stayed_and_escapes_every_name(state: Path) -> None:
    (state / "consents").mkdir()
    stays = [{"name": "<b>private</b>", "dtype": "F32", "shape": [8, 8], "bytes": 256, "why": "private"}]
    (state / "consents" / "hearts.json").write_text(json.dumps({"leaves": [], "stays": stays}))
    page = bundle.look(state).page()
    assert "&lt;b&gt;private&lt;/b&gt;" in page
    assert "<b>" not in page


def test_the_report_says_who_else_has_a_model_that_is_this_sites_alone(state: Path) -> None:
    assert "own model" not in page_of(state)
    found = audit.verify(state / "ledger")
    path = state / "ledger" / "000001.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        if line["type"] == "consent":
            line["exposure"] = "sites"
    path.write_bytes(b"".join(canonical.dumps(line) + b"\n" for line in lines))
    said = "In it, the coordinator keeps apart this site's own model, and sends it to the other sites."
    assert said in html.unescape(report.page([in_folder(state / "ledger")], {}, *found))


def test_the_report_of_a_changed_ledger_says_so_first(state: Path, made: Made) -> None:
    (state / "ledger" / HEADS).write_bytes(joined([made.heads[1], made.heads[0]]))
    page = page_of(state)
    assert "CHANGED: signed head 2 covers 6 lines, the one before it 7: they were moved." in page
    assert "Line 8 of ledger is not as it was written, or not what the coordinator's receipts or a given" in page
    assert not any(fact in page for fact in ("st-olav", "hearts", "accepted", "bytes"))


def opened(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]


def test_a_bundle_is_signed_whole_and_the_same_bytes_twice(state: Path, receipts: Path, made: Made) -> None:
    (state / "policy.toml").write_text("# nothing may leave\n")
    copy = audit.Copy(receipts.read_bytes(), str(receipts), True)
    assert bundle.make(state, made.ledger_key, state / "a.tar", copy)[1] == audit.VERIFIED
    bundle.make(state, made.ledger_key, state / "b.tar", copy)
    assert (state / "a.tar").read_bytes() == (state / "b.tar").read_bytes()
    files = opened(state / "a.tar")
    envelope = dsse.Envelope.from_document(json.loads(files.pop("MANIFEST.json")))
    manifest = dsse.verify(envelope, bundle.BUNDLE_TYPE, made.ledger_key.public_key())
    assert {row["path"]: row["sha256"] for row in manifest["files"]} == {
        path: hashlib.sha256(data).hexdigest() for path, data in files.items()
    }
    assert set(files) == {
        f"ledger/{SEGMENT}", f"ledger/{HEADS}", "policy.toml", "receipts.jsonl", "report.html"
    }  # fmt: skip
    assert manifest["head"] == audit.verify(state / "ledger")[0].head


def test_nothing_is_bundled_without_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="there is no ledger"):
        bundle.make(tmp_path, Ed25519PrivateKey.generate(), tmp_path / "x.tar")
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / SEGMENT).write_bytes(b"")
    with pytest.raises(BadData, match="there is nothing to report: the ledger has no whole line"):
        bundle.make(tmp_path, Ed25519PrivateKey.generate(), tmp_path / "x.tar")


def test_reading_fast_agrees_with_the_canonical_form_for_everything(made: Made) -> None:
    good = [{"a": [1, None, True, "é\u2028"], "b": {}}, [], "x", -5, 2**53 - 1]
    for value in good:
        assert read(canonical.dumps(value)) == value
    bad = [b'{"a":1,"a":1}', b'{"b":1,"a":1}', b'{"a": 1}', b"1.5", b"1e3", b"NaN", b"-Infinity", b"9007199254740992",
           b"\xff", b'"\\u00e9"', b'"\\ud800"', b"", b"[" * 100_000, b"-0", b"\xef\xbb\xbf1", b"1 "]  # fmt: skip
    for data in bad:
        with pytest.raises(BadData):
            canonical.loads(data)
        with pytest.raises(BadData):
            read(data)


def test_a_ledger_is_read_over_its_segments_and_a_torn_line_is_noticed(tmp_path: Path, made: Made) -> None:
    (tmp_path / "000001.jsonl").write_bytes(joined(made.lines[:5]))
    (tmp_path / "000002.jsonl").write_bytes(joined(made.lines[5:]) + b'{"half')
    lines = RawLines(tmp_path)
    assert list(lines) == made.lines
    assert lines.torn
    assert audit.verify(tmp_path)[0].reason.endswith("lines and a torn one")


def agent(*line: str, code: int = 0) -> str:
    done = commands.run("site-agent", "audit", *line, env=ENV)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


ENV = {name: value for name, value in os.environ.items() if name != "WARDROUND_STATE"}


def test_the_commands_answer_from_a_copy_of_the_ledger_alone(state: Path, receipts: Path, tmp_path: Path) -> None:
    ledger = str(state / "ledger")
    said = agent("verify", "--ledger", ledger, "--receipts", str(receipts))
    assert said.startswith("verified: site st-olav of f, 2026-01-01 00:00:00 UTC to 2026-01-01 00:00:00 UTC\n")
    assert "complete: as of 2026-02-01 00:00:00 UTC, when the copy of the coordinator's 5 receipts was made" in said
    assert "whose: by the coordinator's receipts: ledger key " in said
    assert "complete: NOT SHOWN\nwhose: NOT SHOWN" in agent("verify", "--ledger", ledger, code=4)
    assert "hearts round 2.1" in agent("show", "--ledger", ledger, "--round", "2")
    assert "no line of the ledger is about that" in agent("show", "--ledger", ledger, "--study", "lungs")
    said = agent("reconcile", "--ledger", ledger, "--receipts", str(receipts), "--bytes", str(PAYLOAD + CONTROL))
    assert "5 of the coordinator's copy are in the ledger" in said
    assert said.splitlines()[-1] == "reconciled"
    assert "DIFFERENT: " in agent("reconcile", "--ledger", ledger, "--bytes", "900000", code=1)
    out = str(tmp_path / "out")
    for kind in ("json", "csv", "ocsf"):
        assert f"20 lines written to {out}" in agent(
            "export", "--ledger", ledger, "--format", kind, "--out", out, "--force"
        )
    assert f"report written to {out}" in agent("report", "--state", str(state), "--out", out, "--force")


def test_reconcile_counts_apart_what_the_ledger_has_not(tmp_path: Path, made: Made) -> None:
    """It said that all of the copy were in the ledger."""
    folder, copy = tmp_path / "site" / "ledger", tmp_path / "receipts.jsonl"
    made.write(folder)
    cut(folder, made, 18)  # the last upload is there, its receipt is not
    copy.write_bytes(made.copy())
    said = agent("reconcile", "--ledger", str(folder), "--receipts", str(copy))
    assert said.splitlines() == [
        "receipts: 4 of the 5 in the coordinator's copy are in the ledger, in order, byte for byte; not yet, for the "
        "site has not asked for them: 1",
        "1 uploads still have no receipt in the ledger",
    ]
    restored = Made(16)  # from a backup: without the last round, whose receipt the coordinator has
    restored.receipts, restored.previous = made.receipts, made.previous
    again = Made(10, before=restored, seed=8)
    again.write(tmp_path / "again" / "ledger")
    copy.write_bytes(again.copy())
    said = agent("reconcile", "--ledger", str(tmp_path / "again" / "ledger"), "--receipts", str(copy))
    assert said.splitlines() == [
        f"receipts: {len(again.receipts) - 1} of the {len(again.receipts)} in the coordinator's copy are in the "
        "ledger, in order, byte for byte; of lines that were lost before a ledger rollover: 1",
    ]


def test_a_question_without_a_ledger_is_a_usage_error(state: Path) -> None:
    said = agent("reconcile", "--ledger", str(state / "ledger"), code=64)
    assert "error: nothing to reconcile with\nhint: --receipts FILE, --bytes COUNT, or both" in said
    assert "/nowhere has not joined a federation" in agent("report", "--state", "/nowhere", "--out", "x", code=78)
    shutil.rmtree(state / "ledger")
    (state / "ledger").mkdir()
    assert "error: there is no ledger in " in agent("report", "--state", str(state), "--out", "x", code=65)


def test_a_fingerprint_pins_the_key_and_a_wrong_one_is_no_verdict_of_a_third_kind(
    state: Path, receipts: Path, made: Made
) -> None:
    ledger = str(state / "ledger")
    key, receipt_key = (dsse.keyid(one.public_key()) for one in (made.ledger_key, made.receipt_key))
    said = agent("verify", "--ledger", ledger, "--key", key, code=4)
    assert f"whose: by the fingerprint given: ledger key {key}" in said
    assert "whose: by receipts under the fingerprint given" in agent(
        "verify", "--ledger", ledger, "--receipt-key", receipt_key, code=4
    )
    assert f"CHANGED: the ledger's key is {key}, wanted {'00' * 32}" in agent(
        "verify", "--ledger", ledger, "--key", "00" * 32, code=1
    )
    assert f"CHANGED: line 2 names receipt key {receipt_key}, wanted {'00' * 32}" in agent(
        "verify", "--ledger", ledger, "--receipt-key", "00" * 32, code=1
    )
    assert "error: --key 'abc' is no fingerprint: 64 hexadecimal digits" in agent(
        "verify", "--ledger", ledger, "--key", "abc", code=64
    )
    assert "error: --ask goes with --state alone" in agent("verify", "--ledger", ledger, "--ask", code=64)
    assert "error: --bundle goes with neither --ledger nor --ask" in agent(
        "verify", "--ledger", ledger, "--bundle", "x", code=64
    )


def test_a_bundle_is_verified_by_command_and_by_a_known_receipt_key(state: Path, tmp_path: Path, made: Made) -> None:
    out = tmp_path / "b.tar"
    bundle.make(state, made.ledger_key, out, audit.Copy(made.copy(), "the coordinator's", True))
    said = agent("verify", "--bundle", str(out), code=4)
    assert "the receipts in the bundle, copied at 2026-02-01T00:00:00Z, agree, but came from the site" in said
    receipt_key = dsse.keyid(made.receipt_key.public_key())
    assert agent("verify", "--bundle", str(out), "--receipt-key", receipt_key).startswith("verified: ")


def test_the_second_verifier_is_handed_out_with_its_digest(tmp_path: Path) -> None:
    out = tmp_path / "verify_ledger.py"
    said = agent("verifier", "--out", str(out))
    assert out.read_bytes() == Path(verify_ledger.__file__).read_bytes()
    assert said == f"{hashlib.sha256(out.read_bytes()).hexdigest()}  verify_ledger.py of wardround {__version__}\n"


def test_the_second_verifier_is_found_in_a_wheel_and_in_a_checkout(tmp_path: Path) -> None:
    """There is one copy, which the wheel takes from the checkout."""
    wheel, checkout = tmp_path / "verify_ledger.txt", tmp_path / "verify_ledger.py"
    with pytest.raises(NeedsPerson, match=r"lacks the second verifier: there is no .*verify_ledger\.txt") as refused:
        second_verifier.program((wheel, checkout))
    assert (
        refused.value.hint == "install wardround again from its wheel, or take tools/verify_ledger.py from the release"
    )
    checkout.write_bytes(b"from the checkout")
    assert second_verifier.program((wheel, checkout)) == b"from the checkout"
    wheel.write_bytes(b"from the wheel")
    assert second_verifier.program((wheel, checkout)) == b"from the wheel"
    root = Path(verify_ledger.__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    (source,) = settings["force-include"]
    assert root / source == second_verifier.CHECKOUT
    assert root / settings["force-include"][source] == second_verifier.INSTALLED


def test_the_commands_of_an_auditor_load_no_torch_and_no_network(state: Path) -> None:
    look = (
        "import sys; from pathlib import Path; import site_agent.cli.audit; from site_agent import audit; "
        "from site_agent.audit import bundle, export, report, reconcile, show; audit.verify(Path(sys.argv[1])); "
        "print({'torch', 'grpc', 'socket', 'ssl'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look, str(state / "ledger")], capture_output=True, text=True)
    assert done.stdout.strip() in ("set()", "{'socket'}"), done.stderr


def test_the_report_says_how_often_something_was_sent(tmp_path: Path) -> None:
    made = Made(12, again=True)
    made.write(tmp_path / "ledger")
    text = page_of(tmp_path)
    assert "<dd>2 times, after a broken line or a restart: 128 B at most</dd>" in text
    assert text.count('<td class="n">64</td><td class="n">2</td>') == 2  # bytes, tries
    made = Made(12)
    made.write(tmp_path / "ledger")
    assert "Sent again" not in page_of(tmp_path)


def test_the_report_answers_first_and_says_no_more_than_the_verdict(state: Path, made: Made) -> None:
    page = page_of(state, audit.Copy(made.copy(), "the coordinator's", True))
    assert '<p class="said">5 updates left, 320 B: all accepted by the coordinator.</p>' in page
    assert page.index('class="said"') < page.index("<dl") < page.index("<table")
    for claim in (
        "each line follows from the one before it, and signed heads cover every whole one",
        "nothing was cut off, by the coordinator's receipts of 2026-02-01 00:00 UTC; the last 2 lines came later and "
        "are this site's word alone",
        "the key is the site's, by the coordinator's receipts",
    ):
        assert claim in page
    unsure = page_of(state)
    assert "This ledger accounts for 5 updates, 320 B: all accepted by the coordinator." in unsure
    assert unsure.count("not shown: see below") == 2
    assert "updates left" not in unsure


def test_the_report_counts_what_has_no_answer_and_what_no_head_covers(state: Path, made: Made) -> None:
    cut_and_signed_again(state, made, 18)
    page = page_of(state, audit.Copy(made.copy(), "the coordinator's", True))
    assert "320 B: 4 accepted, 1 without an answer, which counts as having left." in page
    assert "Not fully verified: 1 uploads have no receipt and may have left." in page
    Made(20, tail=2).write(state / "ledger")
    assert "as far as signed heads go; none covers the last 2 lines" in page_of(state)


def test_nothing_left_is_said_only_where_it_is_shown(tmp_path: Path) -> None:
    made = Made(4)
    made.write(tmp_path / "ledger")
    assert "This ledger accounts for no update." in page_of(tmp_path)
    assert "This ledger has no update of this study." in page_of(tmp_path)
    page = page_of(tmp_path, audit.Copy(made.copy(), "the coordinator's", True))
    assert '<p class="said">Nothing left.</p>' in page
    assert "Nothing of this study left." in page


def test_an_approval_that_keeps_what_once_left_is_contradicted_aloud(state: Path) -> None:
    (state / "consents").mkdir()
    stays = [{"name": "shared.0.weight", "dtype": "F32", "shape": [4, 2], "bytes": 32, "why": "private"}]
    (state / "consents" / "hearts.json").write_text(json.dumps({"leaves": [], "stays": stays}))
    said = "Above, these left, under another approval than the newest, which keeps them here: shared.0.weight."
    assert said in page_of(state)


EVIL = '"><script>alert(1)</script>\u202e\x1b]0;x\x07{{ 7777 * 7 }}'


def test_names_of_strangers_are_text_on_the_page(state: Path) -> None:
    """Names in a ledger come from a study file, a trainer, a coordinator: each could try to be markup."""
    found = audit.verify(state / "ledger")
    path = state / "ledger" / SEGMENT
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        if line["type"] == "identity":
            line |= {"site": EVIL, "federation": EVIL}
        if line["type"] == "consent":
            line["by"]["name"] = EVIL
        if line["type"] in ("upload", "consent"):
            line["study"] = EVIL
        if line["type"] == "upload":
            line["metrics"][0] |= {"name": EVIL, "value": EVIL}
            line["tensors"][0]["name"] = EVIL
    path.write_bytes(joined([canonical.dumps(line) for line in lines]))
    page = report.page([in_folder(state / "ledger")], {}, *found)
    assert page.count("&lt;script&gt;") > 8
    assert not any(never in page for never in ("<script", "\u202e", "\x1b", "\x07", "54439"))
    assert "{{ 7777 * 7 }}" in page
