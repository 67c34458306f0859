"""Three things that federations elsewhere do not notice: not-a-number from a site, a kill in mid-run, an edited log."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tools.faults import Disturbed, Plan, Template
from tools.world import BIN, CommandFailed

pytestmark = pytest.mark.system

ROUNDS = 3
# Python runs a `sitecustomize` that it finds on its path before everything else. With this one a gateway puts NaN into
# its updates, and does not look at them as ours does.
DISHONEST = """
import struct
import sys

if "gateway" in sys.orig_argv:
    from site_agent.gateway.exit import egress
    measure = egress.measure

    def spoiled(file, consent):
        with file.open("r+b") as update:
            (header,) = struct.unpack("<Q", update.read(8))
            update.seek(8 + header)
            update.write(struct.pack("<f", float("nan")))
        return measure(file, consent)

    egress.measure = spoiled
    egress._refuse_nonfinite = lambda *given: None
"""


def verified(ledger: Path, receipts: Path) -> tuple[int, int]:
    """With which codes the two verifiers end, beside the coordinator's copy of the receipts."""
    ours = [BIN / "site-agent", "audit", "verify", "--ledger", ledger]
    second = [sys.executable, Path(__file__).resolve().parents[2] / "tools" / "verify_ledger.py", ledger]
    beside = ["--receipts", receipts]
    first, other = (
        subprocess.run([*line, *beside], capture_output=True, timeout=60, check=False) for line in (ours, second)
    )
    return first.returncode, other.returncode


def test_nan_is_refused_a_killed_coordinator_goes_on_and_an_edited_ledger_is_found(tmp_path: Path) -> None:
    plan = Plan(sites=2, rounds=ROUNDS, quorum=1)
    template = Template(tmp_path, plan)
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(DISHONEST)
    study = plan.study_names[0]
    killed: list[int] = []
    with Disturbed(template.copy(), plan) as world:
        world.environments["gateway:bravo"] = {
            "PYTHONPATH": ":".join([str(tmp_path / "patch"), *filter(None, sys.path)])
        }
        world.begin()

        def kill_once() -> None:
            status = world.look(study) if not killed else None
            if status is not None and status.round >= 2:
                killed.append(status.round)
                assert world.kill("coordinator")

        status = world.until(study, lambda status: False, act=kill_once)
        report = world.report(study)
        newest = world.coordinator_state / "blobs" / "models" / f"{status.model_digest}.safetensors"
        model = load_file(newest)
        with pytest.raises(CommandFailed) as told:
            world.ask_coordinator("study", "report", study)
        receipts = tmp_path / "receipts.jsonl"
        world.ask_coordinator("receipts", "alpha", "--out", receipts)

    # Refused: what is not finite is in no model, and the site that sent it is named.
    assert {refused.code for refused in report.sites["bravo"].refused} == {"TENSOR_NOT_FINITE"}
    assert report.sites["bravo"].rounds_contributed == ()
    assert report.sites["alpha"].rounds_contributed == tuple(range(1, ROUNDS + 1))
    assert all(np.isfinite(values).all() for values in model.values())
    assert (report.incomplete, told.value.code) == (("bravo",), 3)
    # Resumed: killed in the middle, and no round is missing.
    assert killed
    assert (status.state, [row.round for row in report.rounds_closed]) == ("finished", list(range(1, ROUNDS + 1)))
    # Found: one line less, and both verifiers say so.
    ledger = world.state / "alpha" / "ledger"
    assert verified(ledger, receipts) == (0, 0)
    lines = (ledger / "000001.jsonl").read_bytes().splitlines(keepends=True)
    (ledger / "000001.jsonl").write_bytes(b"".join(lines[: len(lines) // 2] + lines[len(lines) // 2 + 1 :]))
    assert verified(ledger, receipts) == (1, 1)
