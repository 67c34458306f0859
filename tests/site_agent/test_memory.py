"""How much memory a trainer takes for a large model: a count of the copies that lie there at one time."""

import subprocess
import sys
from pathlib import Path

import pytest

MODEL_MIB = 64.1  # two hidden layers of 4096
COPIES = {  # the model, the download, a checkpoint, and the gradient or the update; of AdamW two moments more
    "sgd": 4.6,
    "adamw": 6.6,
}
LOOK = """
import resource, sys
from pathlib import Path
from tests.site_agent.trainer_world import NETWORKS, Hospital

NETWORKS["fedavg"] = {"name": "mlp", "hidden": [4096, 4096]}
hospital = Hospital.make(Path(sys.argv[1]), "fedavg")
hospital.study = hospital.study.changed(training={"local_steps": 2, "optimizer": sys.argv[2]})
hospital.requests.preload()
for number in (1, 2):
    request = hospital.round(number)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    hospital.answer(request)
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    print(number, before, int(lines["VmHWM"].split()[0]) * 1024)
    hospital.commit(number)
"""


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.chaos)])
def test_a_round_keeps_each_part_of_a_large_model_once(tmp_path: Path, optimizer: str) -> None:
    """Of FedAvg. The second round has the first one's session in memory, and keeps checkpoints."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, tmp_path, optimizer], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [[int(field) for field in line.split()] for line in done.stdout.splitlines()]
    assert [number for number, _, _ in rows] == [1, 2]
    idle = rows[0][1]
    copies = {number: (peak - idle) / (MODEL_MIB * 2**20) for number, _, peak in rows}
    assert max(copies.values()) < COPIES[optimizer], copies
