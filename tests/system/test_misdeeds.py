"""Three things that federations elsewhere do not notice: not-a-number from a site, a kill in mid-run, an edited log."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tools.faults import Plan, write_tables
from tools.world import BIN, CommandFailed, Service, World, in_parallel, wait_until

pytestmark = pytest.mark.system

ROUNDS = 3
# Python runs a `sitecustomize` that it finds on its path before everything else. With this one a gateway puts NaN into
# its updates, and does not look at them as ours does.
DISHONEST = """
import struct
import sys

if "run" in sys.orig_argv and "trainer" not in sys.orig_argv:
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


@pytest.mark.chaos
def test_nan_is_refused_a_killed_coordinator_goes_on_and_an_edited_ledger_is_found(
    tmp_path: Path, world: World
) -> None:
    plan = Plan(sites=2, rounds=ROUNDS, quorum=1)
    study = begin(world, plan, tmp_path)
    world.ask_coordinator("study", "start", study)
    wait_until(lambda: world.study_status(study)["round"] >= 2, "round 2", 120)
    assert world.coordinator is not None
    world.coordinator.kill()
    world.serve()
    world.finish(study)
    with pytest.raises(CommandFailed) as told:
        world.ask_coordinator("study", "report", study, "--json")
    report = json.loads(told.value.stdout)
    receipts = tmp_path / "receipts.jsonl"
    world.ask_coordinator("receipts", "alpha", "--out", receipts)

    # Refused: what is not finite is in no model, and the site that sent it is named.
    model = load_file(world.coordinator_state / "blobs" / "models" / f"{report['model_digest']}.safetensors")
    assert all(np.isfinite(values).all() for values in model.values())
    assert {refused["code"] for refused in report["sites"]["bravo"]["refused"]} == {"TENSOR_NOT_FINITE"}
    assert report["sites"]["bravo"]["rounds_contributed"] == []
    assert report["sites"]["alpha"]["rounds_contributed"] == list(range(1, ROUNDS + 1))
    assert (report["incomplete"], told.value.code) == (["bravo"], 3)
    # Resumed: killed in the middle, and no round is missing.
    assert (report["state"], [row["round"] for row in report["rounds_closed"]]) == (
        "finished", list(range(1, ROUNDS + 1)),
    )  # fmt: skip
    # Found: one line less, and both verifiers say so.
    world.agents.pop("alpha").stop()
    ledger = world.state / "alpha" / "ledger"
    assert verified(ledger, receipts) == (0, 0)
    lines = (ledger / "000001.jsonl").read_bytes().splitlines(keepends=True)
    (ledger / "000001.jsonl").write_bytes(b"".join(lines[: len(lines) // 2] + lines[len(lines) // 2 + 1 :]))
    assert verified(ledger, receipts) == (1, 1)


def begin(world: World, plan: Plan, folder: Path) -> str:
    """Two sites that run, of which ``bravo`` is dishonest, and a study that both approved."""
    patch = folder / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(DISHONEST)
    dishonest = {"PYTHONPATH": ":".join([str(patch), *filter(None, sys.path)])}
    world.init()
    world.serve()
    study = folder / "study.toml"
    study.write_text(plan.study_file("misdeeds"))
    write_tables(folder / "data", plan.names)

    def admit(site: str) -> None:
        world.join(site)
        world.add_data(site, folder / "data" / site, "y")
        environment = dishonest if site == "bravo" else None
        line = ("run", "--state", world.state / site)
        world.agents[site] = Service(world.logs / f"{site}.log", "site-agent", *line, environment=environment)
        world.agents[site].wait_line("ready")

    in_parallel(admit, plan.names)
    name = world.create_study(study)
    world.approve(name, plan.names)
    return name
