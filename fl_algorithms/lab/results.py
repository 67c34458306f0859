"""What `fl-lab compare` left in a folder, read back: for each line of the tables its scores by checkpoint, seed, site.

A row of kind "silo" makes several lines: itself, each site's model at home, and one for each site's model at all sites
("Client j"), from the same runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fl_algorithms.lab.comparison import read
from fl_algorithms.lab.evaluation import KINDS
from fl_algorithms.lab.suite import TUNING_OFFSET
from fl_algorithms.lab.tuning import Choice, Run, choose
from wardround.errors import BadData, UsageProblem

Score = float | None
Scores = dict[str, dict[int, dict[str, Score]]]  # kind of checkpoint -> seed -> site -> score
PREFERRED = ("best_local", "latest", "best_global", "fine_tuned")  # of one kind to show; every method has the first two


@dataclass(frozen=True)
class RowResults:
    """A row's runs by seed, and what is not there."""

    name: str
    label: str
    kind: str
    runs: dict[int, Run]
    missing: list[int]
    failures: list[str]  # a sentence each
    choice: Choice | None
    tuned: bool

    @property
    def shown_kind(self) -> str:
        """The kind of checkpoint that is shown where there is room for one."""
        some = next(iter(next(iter(self.runs.values()))["checkpoints"].values()))
        return next(kind for kind in PREFERRED if kind in some)

    def values(self, value: Callable[[Run], Score]) -> list[float]:
        """``value`` of each run that defines it."""
        return [found for run in self.runs.values() if (found := value(run)) is not None]


@dataclass(frozen=True)
class Line:
    """A line of the tables."""

    name: str
    label: str
    row: RowResults
    scores: Scores

    def means(self, kind: str) -> dict[int, float]:
        """Seed -> the mean over the sites where the score is defined."""
        found = {}
        for seed, sites in self.scores.get(kind, {}).items():
            if defined := [score for score in sites.values() if score is not None]:
                found[seed] = fmean(defined)
        return found

    def at(self, kind: str, site: str) -> list[float]:
        """The scores at one site, run by run, where they are defined."""
        runs = self.scores.get(kind, {}).values()
        return [score for sites in runs if (score := sites.get(site)) is not None]


@dataclass(frozen=True)
class Results:
    """All of it. ``record`` is suite.json."""

    folder: Path
    record: dict[str, Any]
    seeds: tuple[int, ...]
    rows: tuple[RowResults, ...]
    metric: str
    lines: tuple[Line, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of checkpoint that any line has."""
        return [kind for kind in KINDS if any(kind in line.scores for line in self.lines)]

    @property
    def reported(self) -> list[RowResults]:
        """The rows that have a run."""
        return [row for row in self.rows if row.runs]

    def line(self, name: str) -> Line | None:
        return next((line for line in self.lines if line.name == name), None)


def load(folder: Path, metric: str = "", reference: str = "") -> Results:
    """Read a folder that `fl-lab compare` filled.

    Args:
        metric: which of the runs' scores; "" for the suite's.
        reference: the row that others are compared with; "" for the suite's.

    Raises:
        BadData: it holds no comparison, no finished run, or a file that is not one of ours.
        UsageProblem: its runs have no such metric, or it has no such row.
    """
    if not (folder / "suite.json").is_file():
        raise BadData(
            f"{folder} holds no comparison: it has no suite.json",
            hint=f"`fl-lab compare SUITE.toml --data DIR --out {folder}`",
        )
    record = read(folder / "suite.json")
    if reference and reference not in record["labels"]:
        raise UsageProblem(f"{folder} has no row `{reference}`", hint=f"it has: {', '.join(record['labels'])}")
    record["reference"] = reference or record["reference"]
    first = record["suite"]["first_seed"]
    seeds = tuple(range(first, first + record["seeds"]))
    rows = tuple(
        _row(folder / "runs" / name, name, record, seeds) for name in record["labels"]
    )  # in the order of the suite
    some = next((run for row in rows for run in row.runs.values()), None)
    if some is None:
        raise BadData(f"{folder} has no finished run yet", hint=f"`{record['command']}`")
    checkpoint = next(iter(next(iter(some["checkpoints"].values())).values()))
    if metric and metric not in checkpoint["scores"]:
        raise UsageProblem(
            f"the runs in {folder} have no metric `{metric}`", hint=f"they have: {', '.join(checkpoint['scores'])}"
        )
    metric = metric or record["metric"] or checkpoint["metric"]
    lines = tuple(line for row in rows if row.runs for line in _lines(row, metric))
    return Results(folder, record, seeds, rows, metric, lines)


def at_sites(run: Run, metric: str) -> dict[str, dict[str, Score]]:
    """Kind -> site -> score of a run's checkpoints."""
    found: dict[str, dict[str, Score]] = {}
    for site, kinds in run["checkpoints"].items():
        for kind, checkpoint in kinds.items():
            found.setdefault(kind, {})[site] = checkpoint["scores"][metric]
    return found


def matrix(run: Run, kind: str, metric: str) -> Mapping[str, Mapping[str, Score]] | None:
    """M[j][i], the score of site j's model at site i; None where it was not measured."""
    measured = run["measures"].get("matrix", {}).get("kinds", {}).get(kind)
    return measured["matrix"][metric] if measured else None


def _row(folder: Path, name: str, record: Mapping[str, Any], seeds: Sequence[int]) -> RowResults:
    described = record["suite"]["rows"][name]
    runs: dict[int, Run] = {
        seed: read(folder / f"{seed}.json") for seed in seeds if (folder / f"{seed}.json").is_file()
    }
    failures = []
    for path in sorted(folder.glob("*.failed.json")):
        failed = read(path)
        failures.append(f"{failed['run']}: {failed['message']}")
    points = len(described["points"])
    return RowResults(
        name, record["labels"][name], described["kind"], runs, [seed for seed in seeds if seed not in runs], failures,
        _choice(folder, name, points, record) if points > 1 else None, points > 1,
    )  # fmt: skip


def _choice(folder: Path, name: str, points: int, record: Mapping[str, Any]) -> Choice | None:
    """None while a tuning run is missing, or where none of them chose."""
    first = record["suite"]["first_seed"] + TUNING_OFFSET
    paths = [
        folder / f"{seed}-tuning-{point}.json"
        for seed in range(first, first + record["suite"]["tuning_seeds"])
        for point in range(points)
    ]
    if not all(path.is_file() for path in paths):
        return None
    try:
        return choose(name, [read(path) for path in paths])
    except BadData:  # no finite loss: compare has said so, and the report names the row as one without runs
        return None


def _lines(row: RowResults, metric: str) -> list[Line]:
    scores: Scores = {}
    for seed, run in row.runs.items():
        for kind, sites in at_sites(run, metric).items():
            scores.setdefault(kind, {})[seed] = sites
    lines = [Line(row.name, row.label, row, scores)]
    if row.kind == "silo":
        for site in next(iter(row.runs.values()))["checkpoints"]:
            lines.append(Line(f"{row.name}:{site}", f"{row.label}, {site}'s model", row, _client(row, site, metric)))
    return lines


def _client(row: RowResults, site: str, metric: str) -> Scores:
    scores: Scores = {}
    for seed, run in row.runs.items():
        for kind in run["checkpoints"][site]:
            measured = matrix(run, kind, metric)
            if measured is not None:
                scores.setdefault(kind, {})[seed] = dict(measured[site])
    return scores
