"""Two verifiers that share no code, over ledgers changed in every way: both find it, and name the same line."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from site_agent import audit
from tools import evidence_tamper, verify_ledger
from tools.evidence_tamper import HEADS, SEGMENT, Made, Tally, joined
from tools.fuzz.examples import FullLedger
from wardround.records.receipts import EMPTY_HEAD, line_hash, next_head
from wardround.signing import canonical, dsse

SECOND = Path(__file__).parents[2] / "tools" / "verify_ledger.py"


@pytest.fixture(scope="module")
def twenty() -> Made:
    return Made(20)


def nothing_slipped_through(tally: Tally) -> None:
    assert tally.tried.total() > 0
    assert tally.missed == []
    assert tally.disagreed == []


@pytest.mark.parametrize("part", range(2))
def test_every_kind_of_change_of_the_lines_is_found_by_both_at_the_same_line(
    tmp_path: Path, twenty: Made, part: int
) -> None:
    nothing_slipped_through(evidence_tamper.exhaustive_lines(tmp_path, twenty, part=part, parts=149))


def test_every_kind_of_change_of_the_signed_heads_is_found_by_both(tmp_path: Path, twenty: Made) -> None:
    nothing_slipped_through(evidence_tamper.exhaustive_heads(tmp_path, twenty, part=3, parts=97))


def test_every_kind_of_change_of_older_ledgers_receipts_and_bundles_is_judged_alike(tmp_path: Path) -> None:
    two = Made(8, seed=8, before=Made(8))
    nothing_slipped_through(evidence_tamper.exhaustive_older(tmp_path / "a", two, part=5, parts=199))
    nothing_slipped_through(evidence_tamper.exhaustive_receipts(tmp_path / "b", Made(11), part=1, parts=149))
    nothing_slipped_through(evidence_tamper.exhaustive_bundle(tmp_path / "c", two, part=2, parts=199))


def test_every_kind_of_change_of_a_ledger_of_what_was_sent_again_is_found_by_both(tmp_path: Path) -> None:
    nothing_slipped_through(evidence_tamper.exhaustive_lines(tmp_path, Made(12, again=True), part=1, parts=97))


def test_every_kind_of_change_of_a_ledger_with_secure_aggregation_is_judged_alike_by_both(tmp_path: Path) -> None:
    secure = Made(14, secure=True)
    nothing_slipped_through(evidence_tamper.exhaustive_lines(tmp_path / "a", secure, part=1, parts=149))
    nothing_slipped_through(evidence_tamper.exhaustive_secure(tmp_path / "b", 22, part=2, parts=11))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("agreed", {"sites": ["bergen", "st-olav"]}),
        ("agreed", {"known": ["bergen"]}),
        ("agreed", {"min_known": 3}),
        ("agreed", {"policy_sha256": "ce" * 32}),
        ("agreed", {"round": 1, "chosen": "08" * 32}),
        ("opened", {"chosen": "08" * 32}),
        ("opened", {"self_masks": ["bergen", "charite", "dublin", "st-olav"]}),
        ("opened", {"mask_keys": ["bergen"]}),
        ("opened", {"round": 9}),
    ],
)
def test_what_was_agreed_or_opened_against_the_rules_is_found_by_both(
    tmp_path: Path, kind: str, said: dict[str, object]
) -> None:
    """In a chain that was made anew with the key."""
    types = [json.loads(line)["type"] for line in Made(22, secure=True).lines]
    last = len(types) - 1 - types[::-1].index(kind)
    Made(22, secure=True, change=(last, said)).write(tmp_path)
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.first_bad) == (audit.TAMPERED, last + 1)
    assert verify_ledger.judge(tmp_path)[:2] == (audit.TAMPERED, last + 1)


def test_a_long_ledger_with_an_unsigned_tail_is_judged_alike_by_both(tmp_path: Path) -> None:
    nothing_slipped_through(evidence_tamper.sampled(tmp_path, Made(300, tail=10), 10, 60, seed=1))


def test_the_evidence_does_not_take_a_missed_change_for_a_found_one(tmp_path: Path, twenty: Made) -> None:
    tally = Tally()
    twenty.write(tmp_path)
    tally.judge("nothing", "nothing was changed", tmp_path)
    assert tally.missed == ["nothing was changed: 4 "]


def relinked(records: list[dict[str, object]]) -> list[bytes]:
    """Lines with dense numbers and a whole chain, whatever the records say."""
    head, lines = EMPTY_HEAD, []
    for seq, record in enumerate(records):
        lines.append(canonical.dumps({**record, "seq": seq, "prev": head}))
        head = next_head(head, line_hash(lines[-1]))
    return lines


MALFORMED = [
    pytest.param(4, {"bytes": "90"}, id="a count that is text"),
    pytest.param(4, {"bytes": -1}, id="a negative count"),
    pytest.param(4, {"methods": [{"method": "Declare"}]}, id="a method without its count"),
    pytest.param(3, {"by": {"name": "dpo"}}, id="a person without a user id"),
    pytest.param(3, {"type": "Gossip!"}, id="a type that is no word"),
    pytest.param(3, {"type": "genesis", "ledger_id": "x"}, id="a second beginning"),
    pytest.param(3, {"type": ["consent"]}, id="a type that is a list"),
    pytest.param(3, {"v": 2}, id="another version"),
    pytest.param(2, {"ts": 5}, id="a time that is a number"),
    pytest.param(1, {"receipt_key": "zz" * 32}, id="a key that is not hexadecimal"),
    pytest.param(5, {"payload_bytes": 1}, id="bytes that the tensors do not add up to"),
    pytest.param(5, {"manifest_sha256": "0" * 64}, id="another manifest"),
    pytest.param(0, {"continues": {"ledger_id": "x", "lines": 3, "head": "short"}}, id="a cited head that is none"),
]


@pytest.mark.parametrize(("at", "changed"), MALFORMED)
def test_a_record_without_its_form_is_found_by_both_even_in_a_chain_made_anew(
    tmp_path: Path, twenty: Made, at: int, changed: dict[str, object]
) -> None:
    twenty.write(tmp_path)
    records = [json.loads(line) for line in twenty.lines]
    records[at] |= changed
    (tmp_path / SEGMENT).write_bytes(joined(relinked(records)))
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.first_bad) == (audit.TAMPERED, at + 1), verdict.reason
    assert verify_ledger.judge(tmp_path)[:2] == (audit.TAMPERED, at + 1)


AGAIN = [
    pytest.param(6, {"try": 3}, "it is try 3, the one before it was 1", id="a try is missing"),
    pytest.param(6, {"try": 1}, "it is try 1, the one before it was 1", id="a try that was made before"),
    pytest.param(6, {"sent": 65}, "more was sent under the line before it", id="more than the line let out"),
    pytest.param(6, {"sent": -1}, "not as it was written", id="fewer than nothing"),
    pytest.param(6, {"payload_bytes": 63}, "its payload_bytes is not that of upload", id="another size"),
    pytest.param(6, {"round": 9}, "its round is not that of upload", id="another round"),
    pytest.param(6, {"upload_id": "ab" * 16}, "what no line before it records", id="another upload"),
    pytest.param(5, {"update": "ab" * 32}, "does not give its `update` digest", id="another digest than was released"),
    pytest.param(5, {"num_examples": 121}, "does not give its `update` digest", id="another count than was released"),
]


@pytest.mark.parametrize(("at", "changed", "said"), AGAIN)
def test_what_was_sent_again_must_be_what_was_recorded(
    tmp_path: Path, at: int, changed: dict[str, object], said: str
) -> None:
    made = Made(12, again=True)
    made.write(tmp_path)
    records = [json.loads(line) for line in made.lines]
    assert [records[seq]["type"] for seq in (5, 6)] == ["upload", "resend"]
    records[at] |= changed
    (tmp_path / SEGMENT).write_bytes(joined(relinked(records)))
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.first_bad) == (audit.TAMPERED, at + 1)
    assert said in verdict.reason
    assert verify_ledger.judge(tmp_path)[:2] == (audit.TAMPERED, at + 1)


TOLD = [
    pytest.param({"rows": 130}, id="another number of rows"),
    pytest.param({"min_count": 5}, id="another least count"),
    pytest.param({"destination": "spiffe://y/coordinator"}, id="another destination"),
    pytest.param({"summary_sha256": "ab" * 32}, id="another digest"),
    pytest.param({"columns": []}, id="no columns"),
    pytest.param({"columns": [{"column": "age", "values": 1}]}, id="a column without one of its counts"),
    pytest.param({"columns": [{"column": "age", "values": 110, "missing": 10, "mean": "99"}]}, id="another mean"),
    pytest.param({"sources": ["years", 7]}, id="a source that is no text"),
    pytest.param({"request": 7}, id="a request that is no text"),
]


@pytest.mark.parametrize("changed", TOLD)
def test_a_changed_summary_is_found_by_both(tmp_path: Path, changed: dict[str, object]) -> None:
    made = FullLedger()
    made.write(tmp_path)
    assert audit.verify(tmp_path)[1] == verify_ledger.judge(tmp_path)[0] == 4
    records = [json.loads(line) for line in made.lines]
    (at,) = (place for place, record in enumerate(records) if record["type"] == "summary")
    records[at] |= changed
    (tmp_path / SEGMENT).write_bytes(joined(relinked(records)))
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.first_bad) == (audit.TAMPERED, at + 1), verdict.reason
    assert verify_ledger.judge(tmp_path)[:2] == (audit.TAMPERED, at + 1)


def test_what_is_sent_again_after_its_receipt_is_found_by_both(tmp_path: Path) -> None:
    made = Made(12, again=True)
    made.write(tmp_path)
    records = [json.loads(line) for line in made.lines]
    records.insert(8, {**records[6], "try": 3})
    (tmp_path / SEGMENT).write_bytes(joined(relinked(records)))
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.first_bad) == (audit.TAMPERED, 9), verdict.reason
    assert "or what has a receipt" in verdict.reason
    assert verify_ledger.judge(tmp_path)[:2] == (audit.TAMPERED, 9)


def test_both_verifiers_say_how_often_something_was_sent_again(tmp_path: Path) -> None:
    made = Made(12, again=True)
    made.write(tmp_path)
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.uploads, verdict.bytes, verdict.resends, verdict.resent_bytes) == (4, 2, 128, 2, 128)
    first, *_ = verify_ledger.judge(tmp_path)[2].splitlines()
    assert first.endswith(": 12 lines, 2 uploads, 128 payload bytes, 2 times again")


LATER = [
    {"type": "policy", "event": "changed", "sha256": "ab" * 32},
    {"type": "held", "study": "hearts", "revision": 1, "round": 2, "attempt": 1, "update": "cd" * 32},
    {"type": "released", "study": "hearts", "revision": 1, "round": 2, "by": {"name": "dpo", "uid": 1000}},
    {"type": "rejected", "study": "hearts", "revision": 1, "round": 3, "by": {"name": "dpo", "uid": 1000}},
    {"type": "blocked", "study": "hearts", "revision": 1, "round": 3, "rule": "deny", "what": "head.weight"},
    {"type": "left", "by": {"name": "dpo", "uid": 1000}},
    {"type": "session", "event": "closed", "peer": "x", "bytes_up": 0, "something_new": ["x"]},
    {"type": "of_a_later_version", "something_new": ["x"]},
]


def test_every_type_of_record_and_fields_of_a_later_version_pass_both(tmp_path: Path, twenty: Made) -> None:
    first = [json.loads(line) for line in twenty.lines[:4]]
    common = {"v": 1, "ts": "2026-01-01T00:00:00.000Z"}
    (tmp_path / SEGMENT).write_bytes(joined(relinked([*first, *({**common, **record} for record in LATER)])))
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.unsigned_tail) == (audit.UNRESOLVED, 12), verdict.reason
    assert "what lines of type of_a_later_version say: a newer version wrote them" in verdict.not_shown
    code, _, said = verify_ledger.judge(tmp_path)
    assert code == audit.UNRESOLVED
    assert "consistent: yes; lines of unknown types: of_a_later_version\n" in said


def second(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", str(SECOND), *line], capture_output=True, text=True)


def test_the_second_verifier_says_its_verdict_and_exits_with_it(tmp_path: Path, twenty: Made) -> None:
    folder, receipts = tmp_path / "ledger", tmp_path / "receipts.jsonl"
    twenty.write(folder)
    receipts.write_bytes(twenty.copy())
    done = second(str(folder), "--receipts", str(receipts))
    key = dsse.keyid(twenty.ledger_key.public_key())
    assert (done.returncode, done.stdout.splitlines()) == (0, [
        "st-olav of f, 2026-01-01T00:00:00.000Z to 2026-01-01T00:00:00.000Z: 20 lines, 5 uploads, 320 payload bytes",
        "consistent: yes",
        "complete: yes: as of 2026-02-01T00:00:00Z, 5 receipts; lines 19 to 20 are newer",
        f"whose: yes, by the receipts: ledger key {key}",
        "VERIFIED",
    ])  # fmt: skip
    done = second(str(folder), "--key", key)
    assert (done.returncode, done.stdout.splitlines()[2:]) == (4, [
        "complete: NOT SHOWN: no copy of the coordinator's receipts was given",
        f"whose: yes, by --key: ledger key {key}",
        "CONSISTENT, COMPLETENESS NOT SHOWN",
    ])  # fmt: skip
    (folder / HEADS).write_bytes(joined(twenty.heads[:-1]))
    done = second(str(folder))
    assert done.returncode == 2
    assert "UNRESOLVED: 0 uploads without a receipt, 1 lines that no signed head covers" in done.stdout
    (folder / SEGMENT).write_bytes(joined(twenty.lines[1:]))
    done = second(str(folder))
    assert (done.returncode, done.stdout.split(" has")[0]) == (1, "TAMPERED: ledger line 1")
    done = second(str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (3, "CANNOT VERIFY: there is no ledger in nowhere\n")
    for line in ((), ("--nothing",), (str(folder), "--bundle", "x")):
        done = second(*line)
        assert done.returncode == 64
        assert "error: " in done.stderr


def test_the_second_verifier_is_short_and_needs_the_standard_library_and_cryptography_alone() -> None:
    text = SECOND.read_text()
    assert len(text.splitlines()) < 500
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                     [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        if name is not None
    }  # fmt: skip
    assert imported - set(sys.stdlib_module_names) == {"cryptography"}


def test_the_copy_that_an_auditor_takes_runs_alone_on_a_bundle(tmp_path: Path, twenty: Made) -> None:
    from site_agent.audit import bundle

    twenty.write(tmp_path / "ledger")
    bundle.make(tmp_path, twenty.ledger_key, tmp_path / "b.tar", audit.Copy(twenty.copy(), "the coordinator's", True))
    (tmp_path / "own.py").write_bytes(SECOND.read_bytes())
    (tmp_path / "receipts.jsonl").write_bytes(twenty.copy())
    line = [sys.executable, "-I", "own.py", "--bundle", "b.tar", "--receipts", "receipts.jsonl"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VERIFIED"), done.stderr


def test_a_reopened_ledger_goes_on_from_the_receipts_of_the_one_it_cites(tmp_path: Path, twenty: Made) -> None:
    folder, receipts = tmp_path / "ledger", tmp_path / "receipts.jsonl"
    newer = Made(20, seed=8, before=twenty)
    newer.write(folder)
    receipts.write_bytes(newer.copy())
    verdict, code = audit.verify(folder, receipts)
    assert (code, verdict.ledgers, verdict.lines, verdict.compared) == (audit.VERIFIED, 2, 40, 10)
    assert verify_ledger.judge(folder, receipts=receipts)[0] == audit.VERIFIED


def test_lines_behind_the_head_that_a_newer_ledger_cites_are_found_by_both(tmp_path: Path, twenty: Made) -> None:
    folder = tmp_path / "ledger"
    Made(20, seed=8, before=Made(16)).write(folder)
    twenty.write(tmp_path / f"ledger-{twenty.ledger_id}")  # the same one, four lines longer
    verdict, code = audit.verify(folder)
    assert (code, verdict.first_bad, verdict.ledger) == (audit.TAMPERED, 17, f"ledger-{twenty.ledger_id}")
    assert verify_ledger.judge(folder)[:2] == (audit.TAMPERED, 17)


def test_a_closing_validation_without_tensors_is_no_fault_to_either(tmp_path: Path) -> None:
    """Its receipt names no tensor, and there is none that it could name."""
    Made(12, tensors=0).write(tmp_path)
    assert audit.verify(tmp_path)[1] == verify_ledger.judge(tmp_path)[0] == audit.CONSISTENT
