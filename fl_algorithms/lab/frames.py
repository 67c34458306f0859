"""Records of runs as pandas frames. pandas is of the extra `lab`, and imported when a frame is asked for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fl_algorithms.lab.curves import Curves, Step
from fl_algorithms.lab.evaluation import interval, paired
from wardround.errors import NeedsPerson, UsageProblem

if TYPE_CHECKING:
    import pandas as pd

SCORES = ("row", "seed", "site", "checkpoint", "metric", "split", "value")


def pandas() -> Any:
    """The module. Raises NeedsPerson: it is not installed."""
    try:
        import pandas
    except ImportError:
        raise NeedsPerson("pandas is not installed", hint="`pip install 'wardround[lab]'`") from None
    return pandas


def scores(records: Iterable[tuple[str, Mapping[str, Any]]]) -> "pd.DataFrame":
    """Each metric of each checkpoint: a line for each run, site, checkpoint and metric; None is undefined.

    Args:
        records: (the row's name, a run's record).
    """
    lines = [
        (row, record["seed"], site, kind, metric, document["split"], value)
        for row, record in records
        for site, kinds in record["checkpoints"].items()
        for kind, document in kinds.items()
        for metric, value in document["scores"].items()
    ]
    frame: pd.DataFrame = pandas().DataFrame(lines, columns=list(SCORES))
    return frame.astype({"value": "float64"})


def curves(by_seed: Mapping[int, Curves]) -> "pd.DataFrame":
    """A line for each seed, round and site, a column for each name; see ``fl_algorithms.lab.curves``."""
    lines = [(seed, *point) for seed, found in by_seed.items() for point in found.points]
    frame = pandas().DataFrame(lines, columns=["seed", "round", "site", "name", "value"]).astype({"value": "float64"})
    wide: pd.DataFrame = frame.pivot(index=["seed", "round", "site"], columns="name", values="value")
    return wide.rename_axis(columns=None).reset_index()


def steps(by_seed: Mapping[int, Curves]) -> "pd.DataFrame":
    """The loss of each training step: a line for each."""
    lines = [(seed, *step) for seed, found in by_seed.items() for step in found.steps]
    frame: pd.DataFrame = pandas().DataFrame(lines, columns=["seed", *Step._fields])
    return frame


def table(found: "pd.DataFrame", metric: str, checkpoint: str, reference: str) -> "pd.DataFrame":
    """A line for each row of ``scores``: mean over its runs, 95 % interval, and how much it exceeds ``reference``.

    Within a run the sites count alike, and an undefined score is left out; differences are taken seed by seed.

    Raises:
        UsageProblem: there is no such metric, checkpoint or row.
    """
    for what, name, column in (("metric", metric, "metric"), ("checkpoint", checkpoint, "checkpoint")):
        _known(what, name, sorted(found[column].unique()))
    rows = list(dict.fromkeys(found["row"]))
    chosen = found[(found["metric"] == metric) & (found["checkpoint"] == checkpoint)].dropna(subset="value")
    means = {row: chosen[chosen["row"] == row].groupby("seed")["value"].mean().to_dict() for row in rows}
    if reference:
        _known("row", reference, rows)
    lines = [
        _line(row, means[row], means[reference] if reference and row != reference else None, metric) for row in rows
    ]
    frame: pd.DataFrame = pandas().DataFrame(lines).set_index("row")
    return frame


def _line(row: str, mine: Mapping[int, float], theirs: Mapping[int, float] | None, metric: str) -> dict[str, Any]:
    over = interval([mine[seed] for seed in sorted(mine)]) if mine else None
    line: dict[str, Any] = {"row": row, "runs": len(mine), "mean": over and over.mean, "ci95": over and over.ci95}
    both = sorted(mine.keys() & (theirs or {}).keys())
    if theirs is not None and both:
        against = paired([mine[seed] for seed in both], [theirs[seed] for seed in both], metric)
        line |= {"difference": against.mean, "difference_ci95": against.ci95, "better_in": against.wins}
    return line


def _known(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UsageProblem(f"there is no {what} `{name}`", hint=f"there are: {', '.join(known)}")
