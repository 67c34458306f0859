"""How long the commands take to answer: the help of each, a site's `status`, and `site-agent run` until it is ready.

CPU seconds stand beside the seconds: on a machine with other work only those compare.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.processes import cpu_seconds
from bench.rounds import NAMES, tiny_tables
from tools.commands_page import PROGRAMS, summaries
from tools.world import World, command, descendants

TRIES = 3


def measure() -> Iterator[dict[str, Any]]:
    """The help of every command; `status` beside a running service; the service's own start."""
    helps = [
        (_command(lambda words=words.split(): command(*words, "--help")), words)
        for program, app in PROGRAMS.items()
        for words in (program, *(words for words, _ in summaries(app, program)))
    ]
    (seconds, cpu), slowest = max(helps)
    middle = statistics.median(cpu for (_, cpu), _ in helps)
    yield {
        "bench": "help", "commands": len(helps), "slowest": slowest, "takes_s": round(seconds, 3),
        "slowest_cpu_seconds": round(cpu, 3), "cpu_seconds": round(middle, 3),
    }  # fmt: skip
    (site,) = NAMES[:1]
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder, World(Path(folder) / "state") as world:
        world.start(tiny_tables(Path(folder) / "data", [site]), "y", [site])
        status = [_command(lambda: world.ask_site(site, "status", "--json")) for _ in range(TRIES)]
        yield _row("status", status)
        yield _row("run until ready", [_started(world, site) for _ in range(TRIES)])


def _started(world: World, site: str) -> tuple[float, float]:
    """End the agent, start it again: seconds until it says that it is ready, and CPU seconds of its processes."""
    world.agents[site].stop()
    began = time.perf_counter()
    agent = world.run_agent(site)
    seconds = time.perf_counter() - began
    return seconds, sum(map(cpu_seconds, (agent.process.pid, *descendants(agent.process.pid))))


def _command(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds and CPU seconds of what ``act`` runs to its end."""
    before, began = _used(), time.perf_counter()
    act()
    return time.perf_counter() - began, _used() - before


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _row(name: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    seconds, cpu = (statistics.median(column) for column in zip(*found, strict=True))
    return {"bench": name, "takes_s": round(seconds, 3), "cpu_seconds": round(cpu, 3)}
