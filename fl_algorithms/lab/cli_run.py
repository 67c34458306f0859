"""`fl-lab run`: what it says while it runs, and the table at its end."""

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import usefulness
from fl_algorithms.lab.executors import ExecutorName
from fl_algorithms.lab.grouping import grouped
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.progress import rounds_shown
from fl_algorithms.lab.results import PREFERRED
from fl_algorithms.lab.seeds import SeedResult, checkpoints_of
from fl_algorithms.lab.study_run import EngineName, Plan, run_study, side_by_side
from fl_algorithms.study import ResolvedStudy
from wardround.cli import INTERRUPTED, print_json, say

LEFT_OUT = ("balanced_accuracy", "accuracy")  # of the second table: `--json` has every metric
BESIDE = ("brier", "mae", "rmse", "integrated_brier")  # shown with a constant's, which no reader knows by heart

if TYPE_CHECKING:
    from rich.console import Console


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
    engine: EngineName = "plain",
) -> None:
    """Run a resolved study, say how it goes, and print its scores."""
    command = shlex.join(["fl-lab", *sys.argv[1:]])
    asked = Plan(
        study, data, seeds, out, hardware, weights, participation, executor=executor, command=command, engine=engine,
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
    scores, constants = usefulness.of_runs(records, kind := shown_kind(records))
    return {
        "method": study.method.name,
        "model": study.model.name,
        "study_digest": records[0]["study_digest"],
        "seeds": [record["seed"] for record in records],
        "digests": [record["model_digest"] for record in records],
        "best_rounds": [record["best_round"] for record in records],
        "scores": summary([checkpoints_of(record) for record in records]),
        "usefulness": {
            "checkpoint": kind,
            "metrics": scores,
            "constant": constants,
            "thresholds": usefulness.thresholds(records, kind),
            "rows": {site: own["counts"] for site, own in records[0].get("baseline", {}).items()},
            "warnings": usefulness.warnings(usefulness.behind(kind, scores, constants)),
        },
        "device": records[0]["versions"]["device"],
        "engine": records[0]["versions"].get("engine", "plain"),
    }


def shown_kind(records: Sequence[Mapping[str, Any]]) -> str:
    """The kind of checkpoint of which all is shown."""
    kinds = next(iter(records[0]["checkpoints"].values()))
    return next(kind for kind in PREFERRED if kind in kinds)


def _say(study: ResolvedStudy, result: SeedResult, done: int, seeds: int) -> None:
    record = result.record
    for warning in grouped(record["warnings"]) if done == 1 else ():
        say(f"warning: {warning}")
    for sentence in record["limits"]:
        say(f"warning: {sentence}")
    if record.get("range"):
        say(f"seed {record['seed']}: {record['range']}")
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
    table.add_column(f"{some['split']} rows")
    for kind in found:
        table.add_column(kind, justify="right")
    constants = {site: own.get(some["metric"]) for site, own in result["usefulness"]["constant"].items()}
    table.add_column("a constant", justify="right")
    for site in some["per_site"]:
        scores = (_shown(row["per_site"].get(site)) for row in found.values())
        table.add_row(site, _scored(result["usefulness"]["rows"].get(site, {})), *scores, _shown(constants.get(site)))
    table.add_section()
    table.add_row("mean", "", *(_shown(row["mean"]) for row in found.values()), _shown(_mean(constants.values())))
    if len(result["seeds"]) > 1:
        table.add_row("± 95 % CI", "", *(_shown(row["ci95"]) for row in found.values()), "")
    console.print(table)
    _print_usefulness(console, result["usefulness"], some["metric"])
    undefined = sorted({site for row in found.values() for site in row["undefined_at"]})
    if undefined:
        console.print(f"{some['metric']} is undefined at {', '.join(undefined)}, which are left out of the means")
    console.print(f"shared model {result['digests'][0] or 'none: nothing is shared'}", highlight=False)
    console.print(f"study        {result['study_digest']}", highlight=False)
    console.print(f"device       {result['device']}", highlight=False)
    if result["engine"] == "batched":
        console.print(
            "engine       batched: the bits are not those of a run alone, nor of a federation", highlight=False
        )


def _print_usefulness(console: "Console", found: Mapping[str, Any], headline: str) -> None:
    """The other metrics of one kind of checkpoint at each site, the Brier score beside a constant's."""
    from rich.table import Table

    metrics = [metric for metric in usefulness.columns(found["metrics"]) if metric not in (headline, *LEFT_OUT)]
    chosen = found["thresholds"]
    if metrics:
        names = (metric.removeprefix("calibration_") for metric in metrics)
        title = f"{found['checkpoint']}: how good its probabilities are; in brackets a constant's"
        table = Table("site", *names, *(["threshold"] if chosen else []), title=title, title_justify="left")
        for site, own in found["metrics"].items():
            constant = found["constant"].get(site, {})
            cells = [
                usefulness.beside(own.get(metric), constant.get(metric) if metric in BESIDE else None)
                for metric in metrics
            ]
            cells += [f"{chosen[site]:.2f}" if site in chosen else "–"] if chosen else []
            table.add_row(site, *cells)
        console.print(table)
    if chosen:
        console.print("slope 1 and intercept 0: probabilities are right; thresholds are chosen on validation rows")
    for sentence in found["warnings"]:
        console.print(f"warning: {sentence}", style="yellow", highlight=False, markup=False)


def _scored(counts: Mapping[str, Mapping[str, int]]) -> str:
    """How many of the scored rows are of each kind."""
    rows = counts.get("test") or counts.get("validation") or {}
    return ", ".join(f"{kind}: {count}" for kind, count in rows.items()) or "–"


def _mean(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
