"""Faults and races: nobody attacks, and a promise could break all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from site_agent import audit
from tools import verify_ledger
from tools.evidence_tamper import SEGMENT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/files.py")
def test_verified_while_written(tmp_path: Path) -> None:
    """Both verifiers look at a healthy ledger 80 times while an agent writes it: none of them is alarmed."""
    folder = tmp_path / "ledger"
    line = [sys.executable, "-m", "tests.attacks.ledgers", str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        try:
            assert writer.stdin is not None
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            before = (folder / SEGMENT).stat().st_size
            for _ in range(80):
                writer.stdin.write(b"go on\n")
                writer.stdin.flush()
                verdict, code = audit.verify(folder)
                assert code in (audit.CONSISTENT, audit.UNRESOLVED), verdict.reason
                code, _, said = verify_ledger.judge(folder)
                assert code in (audit.CONSISTENT, audit.UNRESOLVED), said
            assert (folder / SEGMENT).stat().st_size > before
        finally:
            writer.kill()
