"""The rows of a comparison with the best mean first: what a reader asks before the tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_algorithms.lab import tables
from fl_algorithms.lab.plots import KIND_LABELS
from fl_algorithms.lab.results import PREFERRED, Results
from fl_algorithms.lab.tables import NONE, Stat
from fl_algorithms.settings.targets import SMALLER_IS_BETTER
from wardround.pages.blocks import Answer, Claim, Grid

NAMED = 6  # labels in one sentence


@dataclass(frozen=True)
class Ranked:
    """A row with the one kind of checkpoint that is shown of it. ``difference``: from the reference, seed by seed."""

    label: str
    checkpoint: str
    federated: bool
    stat: Stat
    difference: Stat | None


def ranked(results: Results) -> list[Ranked]:
    """Every line that has a score, the best mean first; of equal ones, the one that the suite names first."""
    means = tables.main(results).cells
    against = tables.differences(results)
    differences = against.cells if against is not None else {}
    found = []
    for line in results.lines:
        kind = next((kind for kind in PREFERRED if (line.name, kind, "mean") in means), None)
        if kind is None:
            continue
        difference = differences.get((line.name, kind, f"minus {results.record['reference']}"))
        found.append(
            Ranked(line.label, kind, line.row.kind == "federated", means[line.name, kind, "mean"], difference)
        )  # fmt: skip
    sign = 1 if results.metric in SMALLER_IS_BETTER else -1
    return sorted(found, key=lambda row: sign * row.stat.mean)


def answer(rows: Sequence[Ranked], results: Results, warnings: int) -> Answer:
    """Which row is highest, by how much, and how far that can be believed."""
    if not rows:
        return Answer("open", f"No row has a defined {results.metric}.")
    best, *others = rows
    runs = f"{best.stat.runs} of {len(results.seeds)} runs"
    most = "Lowest" if results.metric in SMALLER_IS_BETTER else "Highest"
    text = f"{most} mean {results.metric}: {best.label}, {best.stat.text()} ({KIND_LABELS[best.checkpoint]}, {runs})"
    claims = []
    federated = next((row for row in rows if row.federated), None)
    if federated not in (None, best):
        assert federated is not None
        claims.append(Claim("Best federated row", "plain", f"{federated.label}, {federated.stat.text()}"))
    if best.difference is not None:
        reference = results.line(results.record["reference"])
        assert reference is not None  # else there would be no difference from it
        claims.append(Claim(f"Against {reference.label}", "plain", _difference(best.difference)))
    missing = sum(len(row.missing) for row in results.rows)
    of = len(results.rows) * len(results.seeds)
    complete = f"all {of} are here" if not missing else f"{of - missing} of {of} are here"
    claims.append(Claim("Runs", "open" if missing else "good", complete))
    if warnings:
        claims.append(Claim("Warnings", "open", f"{warnings}: read them before the numbers"))
    return Answer("open" if warnings else "plain", text, _doubt(best, others, results.metric), tuple(claims))


def grid(rows: Sequence[Ranked], results: Results) -> Grid:
    """A line for each row, with its checkpoint, mean and difference from the reference."""
    lines = tuple(
        (
            str(place), row.label, KIND_LABELS[row.checkpoint], row.stat.text(),
            NONE if row.difference is None else _difference(row.difference),
        )
        for place, row in enumerate(rows, 1)
    )  # fmt: skip
    reference = results.line(results.record["reference"])
    if reference is None:
        return Grid(("", "row", "checkpoint", "mean"), tuple(line[:-1] for line in lines), numbers=(0, 3))
    return Grid(("", "row", "checkpoint", "mean", f"against {reference.label}"), lines, numbers=(0, 3, 4))


def _doubt(best: Ranked, others: Sequence[Ranked], metric: str) -> str:
    """What the interval of the best mean does not decide."""
    if not others or best.stat.ci95 is None:
        return ""
    reach = {row.label: abs(row.stat.mean - best.stat.mean) - (row.stat.ci95 or 0.0) for row in others}
    near = [label for label, apart in reach.items() if apart <= best.stat.ci95]
    if not near:
        return f"No interval of the other {len(others)} rows reaches its own."
    more = f" and {len(near) - NAMED} more" if len(near) > NAMED else ""
    return (
        f"Its interval overlaps that of {', '.join(near[:NAMED])}{more}: differences run by run, below, tell them "
        f"apart better. The {'lowest' if metric in SMALLER_IS_BETTER else 'highest'} of {len(others) + 1} means is "
        "flattered by chance."
    )


def _difference(stat: Stat) -> str:
    if stat.ci95 is None:
        return f"{stat.mean:+.4f}"
    return f"{stat.mean:+.4f} ({stat.mean - stat.ci95:+.4f} to {stat.mean + stat.ci95:+.4f})"
