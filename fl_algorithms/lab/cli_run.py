"""`fl-lab run`: what it says while it runs, and the table at its end."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab.executors import ExecutorName
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.progress import rounds_shown
from fl_algorithms.lab.seeds import SeedResult, checkpoints_of
from fl_algorithms.lab.study_run import Plan, run_study, side_by_side
from fl_algorithms.study import ResolvedStudy
from wardround.cli import INTERRUPTED, print_json, say


def run_and_print(
    study: ResolvedStudy,
    data: Path,
    seeds: int,
    out: Path | None,
    hardware: Hardware,
    weights: Path | None,
    private_weights: Path | None,
    participation: Participation,
    jobs: int | None,
    executor: ExecutorName,
    per_card: int,
    as_json: bool,
) -> None:
    """Run a resolved study, say how it goes, and print its scores."""
    command = shlex.join(["fl-lab", *sys.argv[1:]])
    asked = Plan(
        study, data, seeds, out, hardware, weights, participation, executor=executor, command=command,
        private_weights=private_weights,
    )  # fmt: skip
    plan = side_by_side(asked, jobs, per_card)
    try:
        with rounds_shown(seeds, study.study.rounds) as rounds_told:
            results = run_study(plan, lambda result, done: _say(study, result, done, seeds), rounds_told)
    except KeyboardInterrupt:
        if out is None:
            raise
        say(f"stopped: what was done is kept in {out}")
        say(f"next: `{command}` goes on")
        raise typer.Exit(INTERRUPTED) from None
    result = overview(study, results)
    if as_json:
        print_json(result)
    else:
        _print_table(study, result)
    if out is not None:
        say(f"kept in {out}: curves and models of each seed")
        say(f"next: `from fl_algorithms.lab import load; load({str(out)!r}).curves`")


def overview(study: ResolvedStudy, results: Sequence[SeedResult]) -> dict[str, Any]:
    """What `--json` prints."""
    from fl_algorithms.lab.evaluation import summary

    records = [result.record for result in results]
    return {
        "method": study.method.name,
        "model": study.model.name,
        "study_digest": records[0]["study_digest"],
        "seeds": [record["seed"] for record in records],
        "digests": [record["model_digest"] for record in records],
        "best_rounds": [record["best_round"] for record in records],
        "scores": summary([checkpoints_of(record) for record in records]),
        "device": records[0]["versions"]["device"],
    }


def _say(study: ResolvedStudy, result: SeedResult, done: int, seeds: int) -> None:
    record = result.record
    for warning in record["warnings"] if done == 1 else ():
        say(f"warning: {warning}")
    for sentence in record["limits"]:
        say(f"warning: {sentence}")
    say(f"{study.method.name}: seed {record['seed']}, {study.study.rounds} rounds ({done} of {seeds} seeds)")


def _print_table(study: ResolvedStudy, result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    found = {kind: row for kind, row in result["scores"].items() if row is not None}
    over = f"{len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else f"seed {result['seeds'][0]}"
    some = next(iter(found.values()))
    title = f"{study.study.title or study.study.name}: {result['method']}, {some['metric']} on {some['split']}, {over}"
    table = Table(title=title, title_justify="left")
    table.add_column("site")
    for kind in found:
        table.add_column(kind, justify="right")
    for site in some["per_site"]:
        table.add_row(site, *(_shown(row["per_site"].get(site)) for row in found.values()))
    table.add_section()
    table.add_row("mean", *(_shown(row["mean"]) for row in found.values()))
    if len(result["seeds"]) > 1:
        table.add_row("± 95 % CI", *(_shown(row["ci95"]) for row in found.values()))
    console.print(table)
    undefined = sorted({site for row in found.values() for site in row["undefined_at"]})
    if undefined:
        console.print(f"{some['metric']} is undefined at {', '.join(undefined)}, which are left out of the means")
    console.print(f"shared model {result['digests'][0] or 'none: nothing is shared'}", highlight=False)
    console.print(f"study        {result['study_digest']}", highlight=False)
    console.print(f"device       {result['device']}", highlight=False)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
