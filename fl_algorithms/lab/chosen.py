"""What each site chose in the end, and what the choice was worth: the tables of rows with `selection`."""

from collections import Counter

from fl_algorithms.lab.evaluation import paired
from fl_algorithms.lab.results import Line, Results
from fl_algorithms.lab.tables import NONE, Cells, Stat, Table
from wardround.pages.blocks import Grid

SELECTED = "selected"  # as in fl_algorithms.engine.selection, which needs torch
MEAN = "mean"


def choices(results: Results) -> Grid | None:
    """Each row's choices, and at which site in how many runs; None where no row lets its sites choose."""
    sites, lines = list(results.record["sites"]), []
    for row in results.reported:
        counts: dict[str, Counter[str]] = {}
        for run in row.runs.values():
            for site, kinds in run["checkpoints"].items():
                if SELECTED in kinds:  # its reason begins with the names of what was chosen
                    counts.setdefault(kinds[SELECTED]["why"].partition(":")[0], Counter())[site] += 1
        for choice, at in sorted(counts.items(), key=lambda item: (-item[1].total(), item[0])):
            lines.append((row.label, choice, str(at.total()), *(str(at[site]) for site in sites)))
    return Grid(("row", "chosen", "in all", *sites), tuple(lines), 2) if lines else None


def worth(results: Results) -> Table | None:
    """`selected` minus each of the row's other kinds, run by run: the mean over the sites, and each site."""
    sites, lines = list(results.record["sites"]), []
    cells: Cells = {}
    for line in results.lines:
        if SELECTED not in line.scores:
            continue
        for kind in (kind for kind in results.kinds if kind in line.scores and kind != SELECTED):
            found = {column: _difference(line, kind, column) for column in (MEAN, *sites)}
            if (mean := found[MEAN]) is None:
                continue
            cells |= {(line.name, kind, f"{at}: selected minus"): one for at, one in found.items() if one is not None}
            lines.append((line.label, kind, *map(_text, found.values()), f"{mean.wins} of {mean.runs}"))
    grid = Grid(("row", "selected minus", MEAN, *sites, "wins"), tuple(lines), 2)
    return Table("selection", results.metric, grid, cells) if lines else None


def _difference(line: Line, kind: str, column: str) -> Stat | None:
    """Over the runs in which both are defined; ``column`` is a site, or the mean over them."""
    ours, theirs = _by_run(line, SELECTED, column), _by_run(line, kind, column)
    if not (both := sorted(ours.keys() & theirs.keys())):
        return None
    found = paired([ours[seed] for seed in both], [theirs[seed] for seed in both])
    return Stat(found.n, found.mean, found.ci95, None, found.wins)


def _by_run(line: Line, kind: str, column: str) -> dict[int, float]:
    if column == MEAN:
        return line.means(kind)
    runs = line.scores[kind].items()
    return {seed: score for seed, sites in runs if (score := sites.get(column)) is not None}


def _text(stat: Stat | None) -> str:
    if stat is None:
        return NONE
    return f"{stat.mean:+.4f}" if stat.ci95 is None else f"{stat.mean:+.4f} ± {stat.ci95:.4f}"
