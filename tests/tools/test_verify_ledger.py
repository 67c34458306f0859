"""Two verifiers that share no code, over ledgers changed in every way: both find it, and name the same line."""

import ast
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from site_agent import audit
from tools import evidence_tamper, verify_ledger
from tools.evidence_tamper import HEADS, SEGMENT, Made, Tally, joined
from wardround import canonical
from wardround.receipts import EMPTY_HEAD, line_hash, next_head

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


def test_a_long_ledger_with_an_unsigned_tail_is_judged_alike_by_both(tmp_path: Path) -> None:
    nothing_slipped_through(evidence_tamper.sampled(tmp_path, Made(300, tail=10), 10, 60, seed=1))


def test_the_evidence_does_not_take_a_missed_change_for_a_found_one(tmp_path: Path, twenty: Made) -> None:
    tally = Tally()
    twenty.write(tmp_path)
    tally.judge("nothing", "nothing was changed", tmp_path)
    assert tally.missed == ["nothing was changed: 0 "]


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
    pytest.param(3, {"type": "gossip"}, id="an unknown type"),
    pytest.param(3, {"type": "genesis", "ledger_id": "x"}, id="a second beginning"),
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
    assert (code, verdict.first_bad) == (audit.TAMPERED, at), verdict.reason
    assert verify_ledger.judge(tmp_path)[:2] == (audit.TAMPERED, at)


LATER = [
    {"type": "policy", "event": "changed", "sha256": "ab" * 32},
    {"type": "held", "study": "hearts", "revision": 1, "round": 2, "attempt": 1, "update": "cd" * 32},
    {"type": "released", "study": "hearts", "revision": 1, "round": 2, "by": {"name": "dpo", "uid": 1000}},
    {"type": "rejected", "study": "hearts", "revision": 1, "round": 3, "by": {"name": "dpo", "uid": 1000}},
    {"type": "blocked", "study": "hearts", "revision": 1, "round": 3, "rule": "deny", "what": "head.weight"},
    {"type": "left", "by": {"name": "dpo", "uid": 1000}},
    {"type": "session", "event": "closed", "peer": "x", "bytes_up": 0, "something_new": ["x"]},
]


def test_every_type_of_record_and_fields_of_a_later_version_pass_both(tmp_path: Path, twenty: Made) -> None:
    first = [json.loads(line) for line in twenty.lines[:4]]
    common = {"v": 1, "ts": "2026-01-01T00:00:00.000Z"}
    (tmp_path / SEGMENT).write_bytes(joined(relinked([*first, *({**common, **record} for record in LATER)])))
    verdict, code = audit.verify(tmp_path)
    assert (code, verdict.unsigned_tail) == (audit.UNRESOLVED, 11), verdict.reason
    assert verify_ledger.judge(tmp_path)[0] == audit.UNRESOLVED


def second(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", str(SECOND), *line], capture_output=True, text=True)


def test_the_second_verifier_says_its_verdict_and_exits_with_it(tmp_path: Path, twenty: Made) -> None:
    twenty.write(tmp_path)
    done = second(str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "20 lines, 5 uploads, 320 payload bytes\nVERIFIED\n")
    (tmp_path / HEADS).write_bytes(joined(twenty.heads[:-1]))
    done = second(str(tmp_path))
    assert done.returncode == 2
    assert "UNRESOLVED: 0 uploads without a receipt, 1 lines that no signed head covers" in done.stdout
    (tmp_path / SEGMENT).write_bytes(joined(twenty.lines[1:]))
    done = second(str(tmp_path))
    assert (done.returncode, done.stdout.split(" has")[0]) == (1, "TAMPERED: line 0")
    done = second(str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (3, f"CANNOT VERIFY: there is no ledger in {tmp_path / 'nowhere'}\n")
    assert second().returncode == 64


def test_the_second_verifier_is_short_and_needs_the_standard_library_and_cryptography_alone() -> None:
    text = SECOND.read_text()
    assert len(text.splitlines()) < 340
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                     [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        if name is not None
    }  # fmt: skip
    assert imported - set(sys.stdlib_module_names) == {"cryptography"}


def test_the_verifier_in_a_bundle_runs_alone(tmp_path: Path, twenty: Made) -> None:
    from site_agent.audit import bundle

    twenty.write(tmp_path / "ledger")
    bundle.write(tmp_path, twenty.ledger_key, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    done = subprocess.run(
        [sys.executable, "-I", "VERIFY.py", "ledger"], cwd=tmp_path / "out", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VERIFIED")


def test_a_reopened_ledger_goes_on_from_the_receipts_of_the_one_it_cites(tmp_path: Path) -> None:
    Made(20, after="ef" * 32).write(tmp_path)
    assert audit.verify(tmp_path)[1] == audit.VERIFIED
    assert verify_ledger.judge(tmp_path)[0] == audit.VERIFIED
