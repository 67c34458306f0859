"""`fl-lab compare`: what it says while it runs and at its end."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import compare, suite
from wardround.cli import INTERRUPTED, say


def run_compare(
    path: Path, data: Path, out: Path, seeds: int | None, jobs: int | None, only: Sequence[str], hardware: Hardware
) -> None:
    """Compare, and leave with 1 where a run failed and 130 where it was interrupted.

    Args:
        seeds, jobs: None: the suite's, and one for each core.
    """
    resolved = suite.load(path)
    wanted_seeds = seeds or resolved.seeds
    command = _command(path, data, out, wanted_seeds, jobs, only, hardware)
    tally = compare.compare(
        resolved,
        data,
        out,
        seeds=wanted_seeds,
        jobs=jobs or compare.cores(),
        command=command,
        only=only,
        hardware=hardware,
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


def _command(
    path: Path, data: Path, out: Path, seeds: int, jobs: int | None, only: Sequence[str], hardware: Hardware
) -> str:
    words = ["fl-lab", "compare", str(path), "--data", str(data), "--seeds", str(seeds), "--out", str(out)]
    if jobs is not None:
        words += ["--jobs", str(jobs)]
    for row in only:
        words += ["--only", row]
    return shlex.join([*words, *hardware.options])
