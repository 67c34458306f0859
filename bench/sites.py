"""Many simulated hospitals on one coordinator: they speak the real protocol over real TLS, and train nothing.

The coordinator is a process of its own; the hospitals are threads of this one, with a channel each.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.processes import cpu_seconds, own_mib, peak_mib, threads
from coordinator.state_directory import State
from fl_algorithms.resolving import resolve
from tests.coordinator.fake_site import FakeSite
from tools.world import World
from wardround import __version__
from wardround.local import control
from wardround.records.study import StudyFile
from wardround.tensors.files import file_header
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb

WAIT_S = 600
SPECS = (TensorSpec("bias", "F32", (2,)), TensorSpec("weight", "F32", (10, 15)))  # 152 parameters
INVITED_AT_ONCE_S = 3600


def measure(sites: int, rounds: int) -> dict[str, Any]:
    """Seconds of a round with so many sites, the coordinator's CPU seconds for one, its memory and threads."""
    names = [f"site-{number:03d}" for number in range(sites)]
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder, World(Path(folder) / "state") as world:
        world.init()
        service = world.serve()
        connected: list[FakeSite] = []

        def ask(command: str, **fields: Any) -> Any:
            path = State(world.coordinator_state).control
            return control.call(path, {"command": command, **fields}, timeout_s=WAIT_S)

        try:
            for name in names:
                invited = ask("invite", site=name, expires_s=INVITED_AT_ONCE_S)
                connected.append(FakeSite(invited["invitation"]))
                connected[-1].watch()
            initial = Path(folder) / "initial.safetensors"
            initial.write_bytes(file_header(SPECS) + bytes(sum(spec.bytes for spec in SPECS)))
            ask("create", document=_study(names, rounds), initial=str(initial))
            for site in connected:
                site.work("crowd")
            pid = service.process.pid
            before = cpu_seconds(pid)
            ask("start", study="crowd")
            ask("follow", study="crowd")
            used = (cpu_seconds(pid) - before) / (rounds + 1)
            report = json.loads(world.ask_coordinator("study", "report", "crowd", "--json", ok=(0, 3)))
            peak, count = peak_mib(pid), threads(pid)
        finally:
            for site in connected:
                site.close()
    seconds = [row["seconds"] for row in report["rounds_closed"]][1:]
    return {
        "bench": "simulated sites", "sites": sites, "rounds": len(seconds),
        "served": min(len(row["contributors"]) for row in report["rounds_closed"]),
        "seconds": round(statistics.median(seconds), 4),
        "p95_seconds": round(statistics.quantiles(seconds, n=20, method="inclusive")[-1], 4),
        "coordinator_cpu_seconds": round(used, 3), "coordinator_peak_mib": round(peak, 1), "coordinator_threads": count,
    }  # fmt: skip


def connected(sites: int) -> dict[str, Any]:
    """Memory and threads of a coordinator to which so many sites are connected, and nothing is asked of them."""
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder, World(Path(folder) / "state") as world:
        world.init()
        pid = world.serve().process.pid
        waiting: list[FakeSite] = []
        try:
            for number in range(sites + 1):  # the first one loads what a connection needs
                fields = {"command": "invite", "site": f"site-{number:04d}", "expires_s": INVITED_AT_ONCE_S}
                invited = control.call(State(world.coordinator_state).control, fields, timeout_s=WAIT_S)
                waiting.append(FakeSite(invited["invitation"]))
                waiting[-1].watch()
                waiting[-1].federation.Studies(pb.StudiesRequest(agent_version=__version__), timeout=WAIT_S)
                if number == 0:
                    before, few = own_mib(pid), threads(pid)
            after, many = own_mib(pid), threads(pid)
        finally:
            for site in waiting:
                site.close()
    return {
        "bench": "connected sites", "sites": sites, "coordinator_mib": round(after, 1),
        "kib_a_site": round((after - before) * 1024 / sites, 1), "threads_a_site": round((many - few) / sites, 2),
    }  # fmt: skip


def _study(names: list[str], rounds: int) -> dict[str, Any]:
    tables = {
        "study": {"name": "crowd", "sites": names, "rounds": rounds, "round_deadline_s": 600},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg"},
        "training": {"local_steps": 1},
        "limits": {"norm_multiple": 0},
    }
    return resolve(StudyFile.model_validate(tables)).document()
