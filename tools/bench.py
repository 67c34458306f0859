"""`make bench`: what one round costs, over real processes, beside the floor of the same bytes.

Each line of the output is one JSON object. ``seconds`` is the median round of a study whose training does nothing
(zero local steps), with four site agents, their trainers and one coordinator as separate processes: download,
validation on a small table, hashing, ledger, upload, receipts, aggregation, all durable. ``floor_seconds`` is the
median of the same bytes down and up for the same number of sites over bare gRPC with mutual TLS in two processes,
plus one weighted sum: no hashing, no disk, no ledger. ``cpu_seconds`` is what all processes of the federation use for
one round, and the peaks are of the largest process of a role. The two are measured in one run, one after the other,
because a machine's speed drifts.

The first line is the cost of a local step in the lab beside bare PyTorch: ``tools.step_cost``.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools import step_cost
from tools.floor import floor_round_seconds
from tools.world import World, descendants

SITES = ("alpha", "bravo", "charlie", "delta")
PAYLOADS = {"tiny": "bytes = 600\ntensors = 2", "resnet18": 'layout = "resnet18"'}
STUDY = """
[study]
name = "bench-{payload}"
sites = {sites}
rounds = {rounds}
round_deadline_s = 300

[task]
name = "tabular"
label = "y"
classes = ["0", "1"]
features = [{{ name = "x", kind = "numeric" }}]

[model]
name = "ballast"
{ballast}

[algorithm]
name = "fedavg"

[training]
local_steps = 0
batch_size = 8
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--payloads", nargs="+", choices=sorted(PAYLOADS), default=["tiny", "resnet18"])
    parser.add_argument("--rounds", type=int, default=12, help="of each study; the first two are not counted")
    options = parser.parse_args()
    print(json.dumps(step_cost.measure()), flush=True)
    for payload in options.payloads:
        print(json.dumps(measure(payload, options.rounds)), flush=True)


def measure(payload: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder:
        root = Path(folder)
        data = tiny_tables(root / "data")
        study = root / "study.toml"
        study.write_text(
            STUDY.format(payload=payload, sites=json.dumps(SITES), rounds=rounds, ballast=PAYLOADS[payload])
        )
        with World(root / "state") as world:
            world.start(data, "y", SITES)
            name = world.create_study(study)
            world.approve(name, SITES)
            before = cpu_of(role_processes(world))
            world.ask_coordinator("study", "start", name)
            world.finish(name, timeout_s=600)
            report = json.loads(world.ask_coordinator("study", "report", name, "--json"))
            processes = role_processes(world)
            peaks = {role: max(peak_mib(pid) for pid in pids) for role, pids in processes.items()}
            cpu = (cpu_of(processes) - before) / rounds
            preview = world.site_json(SITES[0], "preview", name)
        counted = [round_["seconds"] for round_ in report["rounds_closed"]][2:]
        floor = floor_round_seconds(len(SITES), preview["bytes_per_round"], rounds=8)
        return {
            "bench": "round", "sites": len(SITES), "payload": payload,
            "seconds": round(statistics.median(counted), 4), "floor_seconds": round(floor, 4),
            "ratio": round(statistics.median(counted) / floor, 2), "rounds": len(counted),
            "bytes_each_way": preview["bytes_per_round"], "cpu_seconds": round(cpu, 3),
            "coordinator_peak_mib": peaks["coordinator"], "gateway_peak_mib": peaks["gateway"],
            "trainer_peak_mib": peaks["trainer"], "fsync_ms": round(fsync_ms(root), 3),
        }  # fmt: skip


def tiny_tables(folder: Path) -> Path:
    for site in SITES:
        (folder / site).mkdir(parents=True)
        rows = "".join(f"{index % 7},{index % 2}\n" for index in range(20))
        (folder / site / "train.csv").write_text("x,y\n" + rows)
    return folder


def role_processes(world: World) -> dict[str, list[int]]:
    """The processes of each role, by what their command lines say."""
    assert world.coordinator is not None
    roles: dict[str, list[int]] = {"coordinator": [world.coordinator.process.pid], "gateway": [], "trainer": []}
    for agent in world.agents.values():
        roles["gateway"].append(agent.process.pid)
        roles["trainer"] += descendants(agent.process.pid)
    return roles


def cpu_of(processes: dict[str, list[int]]) -> float:
    return sum(cpu_seconds(pid) for pids in processes.values() for pid in pids)


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024, 1)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fsync_ms(folder: Path) -> float:
    """Median of 4 KiB written and fsynced where the states lie: what this disk's promises cost."""
    times = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(50):
            file.write(os.urandom(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
