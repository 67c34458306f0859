"""The tables of a report: the same numbers as text to read and as lines for `tables.csv`.

A mean over runs stands with the radius of its 95 % interval (Student's t); undefined scores are left out of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from fl_algorithms.lab.evaluation import interval, paired
from fl_algorithms.lab.results import Results, RowResults, Score, matrix
from fl_algorithms.lab.suite import shown
from fl_algorithms.lab.tuning import Run
from wardround.pages.blocks import Grid

NONE = "–"
Cells = dict[tuple[str, str, str], "Stat"]  # (row, checkpoint, column)
Value = Callable[[Mapping[str, Any]], Score]  # out of what a run measured for a kind of checkpoint
CSV_COLUMNS = ("table", "row", "checkpoint", "column", "metric", "runs", "mean", "ci95", "sd", "wins")


@dataclass(frozen=True)
class Stat:
    """A cell: a mean over ``runs`` runs."""

    runs: int
    mean: float
    ci95: float | None
    sd: float | None
    wins: int | None = None

    def text(self) -> str:
        return f"{self.mean:.4f}" if self.ci95 is None else f"{self.mean:.4f} ± {self.ci95:.4f}"


@dataclass
class Table:
    """``grid`` shows ``cells``."""

    name: str
    metric: str
    grid: Grid
    cells: Cells = field(default_factory=dict)

    def csv_rows(self) -> Iterable[tuple[Any, ...]]:
        for (row, checkpoint, column), stat in self.cells.items():
            yield (
                self.name, row, checkpoint, column, self.metric, stat.runs, repr(stat.mean), _number(stat.ci95),
                _number(stat.sd), "" if stat.wins is None else stat.wins,
            )  # fmt: skip


def stat(values: Sequence[float]) -> Stat | None:
    """The cell of one value for each run; None for none."""
    if not values:
        return None
    found = interval(values)
    return Stat(len(values), found.mean, found.ci95, found.sd)


def main(results: Results) -> Table:
    """Every line, every kind of checkpoint: within a run the sites count alike."""
    kinds = results.kinds
    cells = {
        (line.name, kind, "mean"): found
        for line in results.lines
        for kind in kinds
        if (found := stat(list(line.means(kind).values()))) is not None
    }
    rows = []
    for line in results.lines:
        runs = len(line.row.runs)
        texts = (_text(cells.get((line.name, kind, "mean"))) for kind in kinds)
        rows.append((line.label, *texts, _of(runs, len(results.seeds))))
    return Table("main", results.metric, Grid(("row", *kinds, "runs"), tuple(rows)), cells)


def per_site(results: Results) -> Table:
    """Every line and kind of checkpoint, site by site."""
    sites = results.record["sites"]
    cells: Cells = {}
    rows = []
    for line in results.lines:
        for kind in (kind for kind in results.kinds if kind in line.scores):
            found = {site: stat(line.at(kind, site)) for site in sites}
            cells |= {(line.name, kind, site): one for site, one in found.items() if one is not None}
            rows.append((line.label, kind, *(_text(one) for one in found.values())))
    return Table("sites", results.metric, Grid(("row", "checkpoint", *sites), tuple(rows), 2), cells)


def differences(results: Results) -> Table | None:
    """Every line against the reference, run by run of the seeds that both have; None without a reference."""
    reference = results.line(results.record["reference"])
    if reference is None:
        return None
    cells: Cells = {}
    rows = []
    for line in results.lines:
        if line is reference:
            continue
        for kind in results.kinds:
            ours, theirs = line.means(kind), reference.means(kind)
            if not (both := sorted(ours.keys() & theirs.keys())):
                continue
            found = paired([ours[seed] for seed in both], [theirs[seed] for seed in both], results.metric)
            cells[line.name, kind, f"minus {reference.name}"] = Stat(
                found.n, found.mean, found.ci95, None, found.wins
            )  # fmt: skip
            radius = NONE if found.ci95 is None else f"{found.mean - found.ci95:+.4f} to {found.mean + found.ci95:+.4f}"
            rows.append((line.label, kind, f"{found.mean:+.4f}", radius, _of(found.wins, found.n)))
    grid = Grid(("row", "checkpoint", "mean difference", "95 % interval", "wins"), tuple(rows), 2)
    return Table("differences", results.metric, grid, cells)


def tuned(results: Results) -> Grid | None:
    """Every point of every grid, the chosen one marked; None where nothing was tuned."""
    rows = []
    for row in results.rows:
        if row.choice is None:
            continue
        for point, tried in enumerate(row.choice.tried):
            loss = "not finite" if tried.val_loss is None else f"{tried.val_loss:.6g}"
            mark = "chosen" if point == row.choice.point else ""
            rows.append((row.label, shown(tried.settings), mark, f"{row.choice.kind}, {row.choice.seeds} runs", loss))
    return Grid(("row", "settings", "", "judged by", "validation loss"), tuple(rows), 4) if rows else None


def local_global(results: Results) -> Table | None:
    """FedSoup's two tests, home, and away; None where it was not measured."""
    metric = results.metric
    columns: dict[str, Value] = {
        "local": lambda found: found["local"][metric],
        "global": lambda found: found["global"][metric],
        "own site": lambda found: found["diagonal"][metric],
        "other sites": lambda found: found["ood"][metric],
    }
    return _measured(results, "local_global", ("matrix", "kinds"), columns)


def tent(results: Results) -> Table | None:
    """The scores of a model that adapts to the rows it is asked about."""
    metric = results.metric
    columns: dict[str, Value] = {
        "local": lambda found: found["local"][metric],
        "global": lambda found: found["global"][metric],
    }
    return _measured(results, "tent", ("tent",), columns)


def sharpness(results: Results) -> Table | None:
    """The largest eigenvalue of the loss's Hessian, and its median over the sites."""

    def at(site: str) -> Value:
        return lambda found: found["sites"].get(site)

    columns: dict[str, Value] = {"median": lambda found: found["median"]}
    columns |= {site: at(site) for site in results.record["sites"]}
    return _measured(results, "sharpness", ("sharpness",), columns, "eigenvalue")


def personalisation(results: Results) -> Table | None:
    """Local and global score after each amount of fine-tuning."""

    def at(test: str, amount: str) -> Value:
        return lambda found: found[amount][test][results.metric]

    protocol = results.record["suite"]["protocol"]
    amounts = ["0", *map(str, protocol["personalisation"])]
    columns = {f"{test} at {amount}": at(test, amount) for test in ("local", "global") for amount in amounts}
    return _measured(results, "personalisation", ("personalisation",), columns)


def leave_one_out(results: Results) -> Table | None:
    """The score at a site that took no part, and its mean over the sites."""
    metric = results.metric
    cells: Cells = {}
    rows = []
    sites = results.record["sites"]
    for row in results.reported:
        for kind in results.kinds:
            found = {
                column: stat(row.values(partial(_unseen, site=site, kind=kind, metric=metric)))
                for column, site in (("mean", ""), *zip(sites, sites, strict=True))
            }
            if any(one is not None for one in found.values()):
                cells |= {(row.name, kind, column): one for column, one in found.items() if one is not None}
                rows.append((row.label, kind, *(_text(one) for one in found.values())))
    columns = ("row", "checkpoint", "mean", *sites)
    return Table("leave_one_out", metric, Grid(columns, tuple(rows), 2), cells) if rows else None


def undefined(results: Results) -> list[str]:
    """What is left out, a sentence each: a metric at a site, in how many runs of which rows."""
    found: dict[tuple[str, str], dict[str, set[int]]] = {}
    for row in results.reported:
        for seed, run in row.runs.items():
            for site, kinds in run["checkpoints"].items():
                for checkpoint in kinds.values():
                    for metric, score in checkpoint["scores"].items():
                        if score is None:
                            found.setdefault((metric, site), {}).setdefault(row.name, set()).add(seed)
    sentences = []
    for (metric, site), rows in sorted(found.items()):
        where = ", ".join(f"{row} in {_of(len(seeds), len(results.seeds))} runs" for row, seeds in rows.items())
        sentences.append(f"{metric} is undefined at {site} and left out of every mean: {where}.")
    return sentences


def identical(results: Results) -> list[str]:
    """Rows whose runs all scored the same, which distinct seeds seldom do."""
    sentences = []
    for line in results.lines:
        for kind in results.kinds:
            means = list(line.means(kind).values())
            if len(means) > 1 and len(set(means)) == 1:
                digests = {run["model_digest"] for run in line.row.runs.values()}
                bits = ", and their final models are the same bits" if len(digests) == 1 and None not in digests else ""
                sentences.append(
                    f"The {len(means)} runs of {line.label} have the same {kind} score, so its interval is 0{bits}: "
                    "check that the seeds change anything before trusting it."
                )
    return sentences


def every_score(results: Results) -> Iterable[tuple[str, int, str, str, str, str, float]]:
    """`scores.csv`: row, seed, site, checkpoint, split, metric, value. Undefined scores are left out."""
    for row in results.reported:
        for seed, run in row.runs.items():
            for site, kinds in run["checkpoints"].items():
                for kind, checkpoint in kinds.items():
                    if checkpoint["val_loss"] is not None:
                        yield row.name, seed, site, kind, "validation", "val_loss", checkpoint["val_loss"]
                    for metric, score in checkpoint["scores"].items():
                        if score is not None:
                            yield row.name, seed, site, kind, checkpoint["split"], metric, score
    for line in results.lines:
        if line.name != line.row.name:  # one site's model at every site
            for kind, runs in line.scores.items():
                for seed, sites in runs.items():
                    splits = line.row.runs[seed]["measures"]["matrix"]["splits"]
                    for site, score in sites.items():
                        if score is not None:
                            yield line.name, seed, site, kind, splits[site], results.metric, score


def split_of(results: Results) -> str:
    """Which rows were scored: "test", "validation", or both."""
    some = next(iter(results.reported[0].runs.values()))
    splits = {checkpoint["split"] for kinds in some["checkpoints"].values() for checkpoint in kinds.values()}
    return " and ".join(sorted(splits))


def mean_matrix(results: Results, row: RowResults, kind: str) -> list[list[Score]] | None:
    """M[j][i], the score of site j's model at site i, averaged over the runs; None where it was not measured."""
    found = [measured for run in row.runs.values() if (measured := matrix(run, kind, results.metric)) is not None]
    if not found:
        return None
    sites = results.record["sites"]
    return [[_mean([one[j][i] for one in found]) for i in sites] for j in sites]


def _measured(
    results: Results,
    name: str,
    path: tuple[str, ...],
    columns: Mapping[str, Value],
    metric: str = "",
) -> Table | None:
    """A table of what stands at ``path`` / kind in the runs' measures."""
    cells: Cells = {}
    rows = []
    for row in results.reported:
        for kind in results.kinds:
            where = (*path, kind)
            found = {
                column: stat(row.values(partial(_at, path=where, value=value))) for column, value in columns.items()
            }
            if any(one is not None for one in found.values()):
                cells |= {(row.name, kind, column): one for column, one in found.items() if one is not None}
                rows.append((row.label, kind, *(_text(one) for one in found.values())))
    if not rows:
        return None
    return Table(name, metric or results.metric, Grid(("row", "checkpoint", *columns), tuple(rows), 2), cells)


def _at(run: Run, path: Sequence[str], value: Value) -> Score:
    found = run["measures"]
    for key in path:
        if key not in found:
            return None
        found = found[key]
    return value(found)


def _unseen(run: Run, site: str, kind: str, metric: str) -> Score:
    measured = run["measures"].get("leave_one_out")
    if measured is None:
        return None
    kinds = measured["sites"][site]["kinds"] if site else measured["mean"]
    score: Score = kinds[kind][metric] if kind in kinds else None
    return score


def _mean(scores: Iterable[Score]) -> Score:
    defined = [score for score in scores if score is not None]
    return fmean(defined) if defined else None


def _text(stat: Stat | None) -> str:
    return NONE if stat is None else stat.text()


def _of(some: int, all_: int) -> str:
    return f"{some} of {all_}"


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)
