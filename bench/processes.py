"""What the system says of a process: its CPU seconds, memory and threads."""

import os
from pathlib import Path

from tools.world import World, descendants


def role_processes(world: World) -> dict[str, list[int]]:
    """The processes of each role."""
    assert world.coordinator is not None
    roles: dict[str, list[int]] = {"coordinator": [world.coordinator.process.pid], "gateway": [], "trainer": []}
    for agent in world.agents.values():
        roles["gateway"].append(agent.process.pid)
        roles["trainer"] += descendants(agent.process.pid)
    return roles


def cpu_by_role(processes: dict[str, list[int]]) -> dict[str, float]:
    """Seconds that they have used, all processes of a role together."""
    return {role: sum(cpu_seconds(pid) for pid in pids) for role, pids in processes.items()}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """The most memory that it ever had resident, files that it maps counted too."""
    return _kib(pid, "status", "VmHWM") / 1024


def own_mib(pid: int) -> float:
    """Its share of the memory that it has now: of what several map, each has a part."""
    return _kib(pid, "smaps_rollup", "Pss:") / 1024


def threads(pid: int) -> int:
    return _kib(pid, "status", "Threads")


def has_mapped(pid: int, name: str) -> bool:
    """Whether a file with this in its path is mapped, as a library that is loaded."""
    return name in Path(f"/proc/{pid}/maps").read_text()


def _kib(pid: int, file: str, key: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
