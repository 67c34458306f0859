"""Rounds of a study whose training does nothing, over real processes, beside the floor of the same bytes.

The round is download, validation on a small table, hashing, ledger, upload, receipts and aggregation, all durable,
with mutual TLS: one coordinator, and for each site an agent and its trainer. The floor is measured in the same run,
because a machine's speed drifts.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.floor import floor_round
from bench.processes import cpu_by_role, has_mapped, own_mib, peak_mib, role_processes, threads
from tools.studies import SECURE, study_text, tiny_table
from tools.world import World

NAMES = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima",
         "mike", "november", "oscar", "papa")  # fmt: skip
PAYLOADS = {
    "152": "bytes = 608\ntensors = 2",
    "1 MiB": "bytes = 1048576\ntensors = 2",
    "resnet18": 'layout = "resnet18"',
    "256 MiB": "bytes = 268435456\ntensors = 1",
    "1 GiB": "bytes = 1073741824\ntensors = 1",
}
UNCOUNTED = 2  # rounds at the beginning: the first loads, the second is the first with warm trainers


def measure(
    payload: str, sites: int, rounds: int, encoding: str = "float32", *, secure: bool = False
) -> dict[str, Any]:
    """Seconds, CPU seconds, memory and threads of a round, and the floor's. ``secure``: with secure aggregation."""
    names = NAMES[:sites]
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder:
        root = Path(folder)
        study = root / "study.toml"
        study.write_text(study_of("bench", names, rounds, PAYLOADS[payload], encoding, secure=secure))
        with World(root / "state") as world:
            world.start(tiny_tables(root / "data", names), "y", names)
            name = world.create_study(study)
            if secure:
                world.know_peers(name, names)
            world.approve(name, names)
            before = cpu_by_role(role_processes(world))
            world.ask_coordinator("study", "start", name)
            world.finish(name, timeout_s=1200)
            report = json.loads(world.ask_coordinator("study", "report", name, "--json"))
            processes = role_processes(world)
            peaks = {role: max(peak_mib(pid) for pid in pids) for role, pids in processes.items()}
            most = {role: max(threads(pid) for pid in pids) for role, pids in processes.items()}
            after = cpu_by_role(processes)
            preview = world.site_json(names[0], "preview", name)
            beside = bytes_beside(world.state / names[0] / "ledger") / (rounds + 1)
        counted = [round_["seconds"] for round_ in report["rounds_closed"]][UNCOUNTED:]
        cpu = {role: (after[role] - before[role]) / (rounds + 1) for role in after}  # the closing one is a round too
        size = preview["bytes_per_round"]
        floor = floor_round(sites, size, rounds=8 if size < 1 << 28 else 4)
        seconds = statistics.median(counted)
        return {
            "bench": "round", "sites": sites, "payload": payload, "encoding": encoding, "secure": secure,
            "bytes_up": size, "bytes_beside": round(beside), "rounds": len(counted), "seconds": round(seconds, 4),
            "floor_seconds": round(floor.seconds, 4),
            "ratio": round(seconds / floor.seconds, 2), "cpu_seconds": round(sum(cpu.values()), 3),
            "floor_cpu_seconds": round(floor.cpu_seconds, 3),
            "cpu_ratio": round(sum(cpu.values()) / floor.cpu_seconds, 2) if floor.cpu_seconds else None,
            **{f"{role}_cpu_seconds": round(seconds, 3) for role, seconds in cpu.items()},
            **{f"{role}_peak_mib": round(peak, 1) for role, peak in peaks.items()},
            **{f"{role}_threads": count for role, count in most.items()},
            "fsync_ms": round(fsync_ms(root), 3),
        }  # fmt: skip


def bytes_beside(ledger: Path) -> int:
    """What a site has sent beside its updates, as its ledger's `control` lines count it."""
    lines = [json.loads(line) for path in ledger.glob("0*.jsonl") for line in path.read_text().splitlines()]
    return sum(line["bytes"] for line in lines if line["type"] == "control")


def study_of(
    name: str, sites: Sequence[str], rounds: int, ballast: str, encoding: str = "float32", *, secure: bool = False
) -> str:
    """A study whose training does nothing. ``ballast``: the lines that say how large its model is."""
    return study_text(
        name, sites, rounds, model=f'name = "ballast"\n{ballast}', more="round_deadline_s = 600",
        tables=f'\n[encoding]\nname = "{encoding}"\n' + (SECURE if secure else ""),
    )  # fmt: skip


def idle() -> dict[str, Any]:
    """An agent that has joined and waits: the memory of all its processes together, and whether torch is in one."""
    names = NAMES[:1]
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder:
        root = Path(folder)
        with World(root / "state") as world:
            world.start(tiny_tables(root / "data", names), "y", names)
            pids = [pid for role, pids in role_processes(world).items() if role != "coordinator" for pid in pids]
            return {
                "bench": "idle agent", "processes": len(pids), "own_mib": round(sum(map(own_mib, pids)), 1),
                "torch": any(has_mapped(pid, "libtorch") for pid in pids), "threads": sum(map(threads, pids)),
            }  # fmt: skip


def tiny_tables(folder: Path, names: Sequence[str]) -> Path:
    """A table of twenty made-up rows for each site."""
    for site in names:
        tiny_table(folder / site)
    return folder


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
