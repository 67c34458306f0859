"""``coordinator study metrics``: what each site reported over the rounds, as a table, a curve of text, or CSV."""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask
from coordinator.cli.options import State
from coordinator.cli.printing import print_table
from wardround.cli import Json, print_json, say
from wardround.errors import UsageProblem

if TYPE_CHECKING:
    from coordinator.metric_answers import StudyMetrics

MEAN = "all sites"
BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 40  # of a curve; of more models every so many is drawn, and the last
WIDTH = 160  # of a table where nobody looks at a terminal
HEADS = (
    "study", "revision", "site", "model", "round", "attempt", "closing", "metric", "value", "rows", "validation_rows",
    "seconds",
)  # fmt: skip
Points = Sequence[tuple[int, float]]


def metrics(
    study: Annotated[str, typer.Argument(metavar="ID", help="The study's name.")],
    state: State,
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This metric alone; again for more.")] = None,
    every: Annotated[bool, typer.Option("--every", help="Every model's numbers, not the curve.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all that was reported as CSV on stdout.")] = False,
    as_json: Json = False,
) -> None:
    """Show what each site reported of each model on its own validation rows: first, last, best, and the curve.

    With secure aggregation nobody knows a site's numbers: it shows the mean over all rows of the sites in each sum.
    """
    from coordinator.requests import ShowReport
    from coordinator.studies.metrics import metrics_of
    from coordinator.study_answers import StudyReport

    known = metrics_of(ask(state, ShowReport(study=study), StudyReport))
    names = _chosen(known, metric)
    if as_json:
        print_json(known.document())
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(HEADS)
        writer.writerows(csv_rows(known, names))
    elif not known.means:
        say(f"No site has reported anything of study `{study}` yet")
    else:
        print_metrics(known, names, every=every)


def _chosen(known: "StudyMetrics", wanted: list[str] | None) -> tuple[str, ...]:
    """Raises UsageProblem: a metric that the study does not report."""
    for name in wanted or []:
        if name not in known.metrics:
            raise UsageProblem(
                f"study `{known.id}` reports no `{name[:64]}`", hint=f"it reports: {', '.join(known.metrics)}"
            )
    return tuple(wanted or known.metrics)


def csv_rows(known: "StudyMetrics", names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One row for each number that a site reported, as it was sent; see ``HEADS``. Of sums one for each, whose site is
    "sum of N"."""
    if known.sums_alone:
        for one in known.means:
            for name in (name for name in names if name in one.metrics):
                closing, number = one.model >= known.rounds, str(one.model + 1)
                yield (
                    known.id, str(known.revision), f"sum of {one.sites}", str(one.model), number, "",
                    "yes" if closing else "no", name, f"{one.metrics[name]:.9g}", "", "", "",
                )  # fmt: skip
    for row in known.reported:
        for name in names:
            if name in row.metrics:
                yield (
                    known.id, str(known.revision), row.site, str(row.model), str(row.round), str(row.attempt),
                    "yes" if row.closing else "no", name, row.metrics[name], str(row.rows), str(row.validation_rows),
                    "" if row.seconds is None else f"{row.seconds:g}",
                )  # fmt: skip


def print_sums(known: "StudyMetrics", names: Sequence[str], *, every: bool) -> None:
    """One table for each metric, of its means over the sites in each sum."""
    about = f"{known.id}, revision {known.revision}"
    print(f"{about}: sums over {known.summed} hospitals of each model; model 0 is the initial one")
    for name in names:
        print(f"\n{name}")
        curves = {f"sum of {known.summed}": known.mean_curve(name)}
        print_every(curves) if every else print_curves(curves)
    print(
        "a number is the mean over all validation rows of the sites in a sum: with secure aggregation none knows more"
    )


def print_metrics(known: "StudyMetrics", names: Sequence[str], *, every: bool = False) -> None:
    """One table for each metric: a row for each site, or with ``every`` a row for each model."""
    if known.sums_alone:
        print_sums(known, names, every=every)
        return
    print(f"{known.id}, revision {known.revision}: what the sites reported of each model; model 0 is the initial one")
    for name in names:
        print(f"\n{name}")
        curves = {site: known.curve(name, site) for site in known.sites} | {MEAN: known.mean_curve(name)}
        print_every(curves) if every else print_curves(curves)
    print(f"`{MEAN}` is the mean by validation rows ({known.counts}), under the study's limit of one site's share")


def print_curves(curves: Mapping[str, Points]) -> None:
    """Each curve on one line. All have the same scale, so that their heights can be compared."""
    values = [value for points in curves.values() for _, value in points]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    rows = []
    for name, points in curves.items():
        if not points:
            rows.append((name, "", "", "", "", "nothing that is a number"))
            continue
        own = [value for _, value in points]
        ends = (f"{points[0][1]:.4g}", f"{points[-1][1]:.4g} ({points[-1][0]})", f"{min(own):.4g}", f"{max(own):.4g}")
        rows.append((name, *ends, bars(own, low, high)))
    print_table(("site", "first", "last (model)", "lowest", "highest", "curve"), rows, WIDTH)


def print_every(curves: Mapping[str, Points]) -> None:
    """A row for each model, a column for each site."""
    by_model = {name: dict(points) for name, points in curves.items()}
    models = sorted({model for points in by_model.values() for model in points})
    rows = [
        (str(model), *(f"{points[model]:.4g}" if model in points else "" for points in by_model.values()))
        for model in models
    ]
    print_table(("model", *by_model), rows, WIDTH)


def bars(values: Sequence[float], low: float, high: float) -> str:
    """The values as bars of eight heights from ``low`` to ``high``; level where all are the same."""
    step = -(-len(values) // MOST_BARS)
    drawn = list(values[::step]) if step > 1 else list(values)
    if step > 1 and (len(values) - 1) % step:
        drawn.append(values[-1])
    span = high - low
    if not 0 < span < float("inf"):
        return BARS[3] * len(drawn)
    return "".join(BARS[min(7, int((value - low) / span * 8))] for value in drawn)
