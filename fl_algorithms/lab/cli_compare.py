"""`fl-lab compare`: what it says while it runs and at its end."""

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import comparison, suite
from fl_algorithms.lab.executors import CARDS, ExecutorName, Pool, card_share, cores, on_ray, placement, processes
from wardround.cli import INTERRUPTED, say


def run_compare(
    path: Path,
    data: Path,
    out: Path,
    seeds: int | None,
    jobs: int | None,
    only: Sequence[str],
    hardware: Hardware,
    executor: ExecutorName = "processes",
    per_card: int = 1,
) -> None:
    """Compare, and leave with 1 where a run failed and 130 where it was interrupted.

    Args:
        seeds, jobs: None: the suite's, and one for each core, or as many as the cards take.
    """
    resolved = suite.load(path)
    wanted_seeds = seeds or resolved.seeds
    pool, at_once = _pool(resolved, jobs, hardware, executor, per_card)
    command = _command(path, data, out, wanted_seeds, jobs, only, hardware, executor, per_card)
    tally = comparison.compare(
        resolved,
        data,
        out,
        seeds=wanted_seeds,
        jobs=at_once,
        command=command,
        only=only,
        hardware=hardware,
        pool=pool,
    )
    if tally.interrupted:
        say(f"stopped: {tally.done} of {tally.wanted} runs are done, each kept whole in {out}")
        say(f"next: `{command}` does the other {tally.wanted - tally.done}")
        raise typer.Exit(INTERRUPTED)
    for failure in tally.failed:
        say(f"failed: {failure}")
    for row in tally.waiting:
        say(f"row `{row}` has no reported runs: its tuning is not complete")
    say(f"{tally.done} of {tally.wanted} runs done, kept in {out}" if tally.wanted else f"every run was there: {out}")
    if tally.failed:
        say(f"next: `{command}` tries again what failed; `fl-lab report {shlex.quote(str(out))}` shows the rest")
        raise typer.Exit(1)
    say(f"next: `fl-lab report {shlex.quote(str(out))}`")


def _pool(
    resolved: suite.Suite, jobs: int | None, hardware: Hardware, executor: ExecutorName, per_card: int
) -> tuple[Pool, int]:
    """Where the runs are made, and how many at once."""
    if executor == "ray":
        threads = max(point.study.study.threads for row in resolved.rows for point in row.points)
        return partial(on_ray, threads=threads, card=card_share(hardware, per_card)), jobs or cores()
    where = placement(hardware, per_card, os.environ.get(CARDS))
    return partial(processes, where=where), where.jobs(jobs, cores())


def _command(
    path: Path,
    data: Path,
    out: Path,
    seeds: int,
    jobs: int | None,
    only: Sequence[str],
    hardware: Hardware,
    executor: ExecutorName,
    per_card: int,
) -> str:
    words = ["fl-lab", "compare", str(path), "--data", str(data), "--seeds", str(seeds), "--out", str(out)]
    if jobs is not None:
        words += ["--jobs", str(jobs)]
    for row in only:
        words += ["--only", row]
    words += ["--executor", executor] if executor != "processes" else []
    words += ["--per-card", str(per_card)] if per_card != 1 else []
    return shlex.join([*words, *hardware.options])
