"""A report's tests: which rows differ from the reference, and which from the best, over the seeds that all have.

The runs of two rows are paired by seed. What is sampled is seeds: initial weights, validation splits, batches; the test
rows are the same in all of them. So a small p says that the difference is not the seeds' luck, and nothing of other
patients: for those there is the bootstrap over rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fl_algorithms.lab.results import PREFERRED, Line, Results
from fl_algorithms.lab.statistics import (
    ALPHA,
    Ranks,
    Tested,
    friedman,
    holm,
    paired_t,
    percentile_interval,
    size,
    wilcoxon,
)
from fl_algorithms.settings.targets import SMALLER_IS_BETTER
from wardround.pages.blocks import Grid

NONE = "–"
TESTS_COLUMNS = ("row", "reference", "checkpoint", "metric", "test", "runs", "statistic", "p", "p_holm", "effect")


@dataclass(frozen=True)
class Compared:
    """A row against the reference. ``t_holm``, ``wilcoxon_holm``: p allowing for all rows of the table."""

    label: str
    name: str
    checkpoint: str
    difference: float
    t: Tested
    wilcoxon: Tested
    t_holm: float | None
    wilcoxon_holm: float | None

    def words(self, reference: str, metric: str) -> str:
        """What the tests show, in a sentence."""
        if self.t.p is None:
            return "no test: too few runs, or they do not differ"
        if self.t_holm is None or self.t_holm >= ALPHA:
            return f"no difference from {reference} is shown"
        higher = (self.difference > 0) != (metric in SMALLER_IS_BETTER)
        assert self.t.effect is not None
        return f"{'better' if higher else 'worse'} than {reference}; for the spread over seeds {size(self.t.effect)}"


def compared(results: Results) -> list[Compared]:
    """Every row that has runs in common with the reference, by the checkpoint that is shown of it."""
    reference = results.line(results.record["reference"])
    if reference is None:
        return []
    found: list[tuple[Line, str, float, Tested, Tested]] = []
    for line in _rows(results):
        kind = _shown(line)
        theirs_kind = kind if kind in reference.scores else _shown(reference)
        ours, theirs = line.means(kind), reference.means(theirs_kind)
        if line is reference or not (both := sorted(ours.keys() & theirs.keys())):
            continue
        a, b = [ours[seed] for seed in both], [theirs[seed] for seed in both]
        found.append((line, kind, fmean(a) - fmean(b), paired_t(a, b), wilcoxon(a, b)))
    adjusted = [holm([test.p for test in tests]) for tests in ([one[3] for one in found], [one[4] for one in found])]
    return [
        Compared(line.label, line.name, kind, difference, t, signed, of_t, of_signed)
        for (line, kind, difference, t, signed), of_t, of_signed in zip(found, *adjusted, strict=True)
    ]


def tests_grid(results: Results, found: list[Compared]) -> Grid:
    reference = results.line(results.record["reference"])
    assert reference is not None  # else nothing is compared with it
    rows = tuple(
        (
            one.label, f"{one.difference:+.4f}", _p(one.t.p), _p(one.t_holm), _p(one.wilcoxon.p), _p(one.wilcoxon_holm),
            _number(one.t.effect), _number(one.wilcoxon.effect), one.words(reference.label, results.metric),
        )
        for one in found
    )  # fmt: skip
    columns = (
        "row", "mean difference", "paired t: p", "Holm", "Wilcoxon: p", "Holm", "Cohen's d", "rank-biserial",
        "in words",
    )  # fmt: skip
    return Grid(columns, rows, numbers=tuple(range(1, 8)))


def tests_csv(results: Results, found: list[Compared]) -> list[tuple[Any, ...]]:
    """The lines of `tests.csv`."""
    reference = results.record["reference"]
    return [
        (
            one.name, reference, one.checkpoint, results.metric, test, tested.n, _cell(tested.statistic),
            _cell(tested.p), _cell(adjusted), _cell(tested.effect),
        )
        for one in found
        for test, tested, adjusted in (("paired_t", one.t, one.t_holm), ("wilcoxon", one.wilcoxon, one.wilcoxon_holm))
    ]  # fmt: skip


def ranks(results: Results) -> tuple[Ranks, dict[str, str]] | None:
    """Friedman's test over the rows that have every seed that any of them has, and the rows' labels; None for fewer
    than three such rows or two seeds.
    """
    means = {line.name: line.means(_shown(line)) for line in _rows(results)}
    seeds = sorted(set().union(*(of_line.keys() for of_line in means.values()))) if means else []
    sign = -1 if results.metric in SMALLER_IS_BETTER else 1
    whole = {name: [sign * own[seed] for seed in seeds] for name, own in means.items() if own.keys() >= set(seeds)}
    found = friedman(whole)
    return None if found is None else (found, {line.name: line.label for line in _rows(results) if line.name in whole})


def ranks_grid(found: Ranks, labels: Mapping[str, str]) -> Grid:
    """The rows by mean rank, with Nemenyi's p against the first."""
    order = sorted(found.mean, key=lambda name: found.mean[name])
    rows = tuple(
        (labels[name], f"{found.mean[name]:.2f}", NONE if name == order[0] else _p(found.nemenyi(order[0], name)))
        for name in order
    )
    return Grid(("row", "mean rank", f"Nemenyi: p against {labels[order[0]]}"), rows, numbers=(1, 2))


def ranks_words(found: Ranks) -> str:
    """Friedman's test in two sentences."""
    if found.p is None or found.statistic is None:
        return "Friedman's test: all rows score the same in every run."
    said = "the rows differ" if found.p < ALPHA else "no difference between the rows is shown"
    return (
        f"Friedman's test over {found.n} seeds and {len(found.mean)} rows: chi-squared {found.statistic:.2f}, "
        f"p {_p(found.p)}, Kendall's W {found.agreement:.2f}: {said}. Mean ranks nearer than "
        f"{found.critical_difference:.2f} are not told apart (Nemenyi, 5 %)."
    )


def patients(results: Results) -> Grid | None:
    """The bootstrap over rows: each row's interval, and that of its difference from the reference; None where the suite
    did not ask for it, or not for this metric.
    """
    reference = results.line(results.record["reference"])
    each = {line.name: _draws(line, results.metric) for line in _rows(results)}
    drawn = {name: draws for name, draws in each.items() if any(value is not None for value in draws)}
    rows = []
    for line in _rows(results):
        if (own := drawn.get(line.name)) is None:
            continue
        defined = [value for value in own if value is not None]
        low, high = percentile_interval(defined)
        apart = NONE
        if reference is not None and line is not reference and (theirs := drawn.get(reference.name)):
            both = [a - b for a, b in zip(own, theirs, strict=True) if a is not None and b is not None]
            if both:
                down, up = percentile_interval(both)
                apart = f"{down:+.4f} to {up:+.4f}"
        rows.append((line.label, f"{fmean(defined):.4f}", f"{low:.4f} to {high:.4f}", apart))
    if not rows:
        return None
    against = "against the reference" if reference is None else f"against {reference.label}"
    return Grid(("row", "mean", "95 % interval over patients", against), tuple(rows), numbers=(1, 2, 3))


def _draws(line: Line, metric: str) -> list[float | None]:
    """For each sample of the rows, the mean over seeds and sites where it is defined."""
    kind = _shown(line)
    each: list[list[float]] = []
    for run in line.row.runs.values():
        for scores in run["measures"].get("bootstrap", {}).get(kind, {}).get(metric, {}).values():
            each = each or [[] for _ in scores]
            for values, score in zip(each, scores, strict=True):
                values += [] if score is None else [score]
    return [fmean(values) if values else None for values in each]


def _rows(results: Results) -> list[Line]:
    """The suite's rows that have scores, without the lines that show one site's model everywhere."""
    return [line for line in results.lines if line.name == line.row.name and line.scores]


def _shown(line: Line) -> str:
    return next(kind for kind in PREFERRED if kind in line.scores)


def _p(p: float | None) -> str:
    if p is None:
        return NONE
    return "< .0001" if p < 1e-4 else f"{p:.4f}".removeprefix("0") if p < 1 else "1"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:+.2f}"


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)
