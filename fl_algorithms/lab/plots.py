"""The pictures of a report, as PNG and SVG. Colors are Okabe and Ito's, which color-blind readers tell apart; every
series has its own marker too. The same numbers give the same bytes with the same matplotlib.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_algorithms.lab.tables import Stat
from wardround.errors import NeedsPerson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
KIND_LABELS = {
    "latest": "latest", "best_local": "best local", "best_global": "best global", "fine_tuned": "fine-tuned",
    "alone": "alone", "selected": "selected",
}  # fmt: skip
STYLE: Any = {
    "font.size": 10, "axes.titlesize": 10.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd", "grid.linewidth": 0.8, "legend.frameon": False,
    "svg.hashsalt": "wardround", "figure.dpi": 110, "savefig.dpi": 160,
}  # fmt: skip
UNBOUNDED = ("mae", "rmse", "r2", "calibration_slope", "calibration_intercept")  # metrics that are no share
WIDTH = 8.2  # inches
LINES_APART = 0.19  # of a row's height, between the kinds of one row


@dataclass(frozen=True)
class Picture:
    png: bytes
    svg: bytes


def axis_of(metric: str) -> str:
    """An axis' name, with its range where a metric has one."""
    return metric if metric in UNBOUNDED else f"{metric} (0 to 1)"


@contextmanager
def style() -> Iterator[None]:
    """Draw inside this.

    Raises:
        NeedsPerson: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise NeedsPerson(
            "the plots of a report need matplotlib, which is not installed", hint="`pip install 'wardround[lab]'`"
        ) from None
    with matplotlib.rc_context(STYLE):
        yield


def dots(
    rows: Sequence[str], series: Mapping[str, Mapping[str, Stat]], axis: str, *, zero: bool = False
) -> Picture:  # fmt: skip
    """A line for each row that has a mean, a dot with its interval for each kind of checkpoint.

    Args:
        series: kind -> row -> its mean.
        zero: mark 0, for differences.
    """
    rows = [row for row in rows if any(row in found for found in series.values())]
    figure, axes = _figure(0.9 + len(rows) * (0.22 + 0.13 * len(series)))
    if zero:
        axes.axvline(0, color="#444444", linewidth=1)
    for number, (kind, found) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * LINES_APART
        present = [(place, found[row]) for place, row in enumerate(rows) if row in found]
        axes.errorbar(
            [stat.mean for _, stat in present],
            [place + shift for place, _ in present],
            xerr=[stat.ci95 or 0.0 for _, stat in present],
            linestyle="none", capsize=2.5, markersize=5.5, elinewidth=1.3, label=KIND_LABELS.get(kind, kind),
            **_look(number),
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    for place in range(1, len(rows)):
        axes.axhline(place - 0.5, color="#eeeeee", linewidth=0.8)
    axes.set_xlabel(axis)
    figure.legend(loc="outside upper center", ncols=len(series))
    return _picture(figure)


def matrices(sites: Sequence[str], panels: Mapping[str, Sequence[Sequence[float | None]]], metric: str) -> Picture:
    """A square for each row of the suite: site j's model (down) on site i's rows (across)."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(0.6 + 2.7 * across, 0.5 + 2.5 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    values = [value for matrix in panels.values() for row in matrix for value in row if value is not None]
    scale, colors = Normalize(min(values), max(max(values), min(values) + 1e-9)), colormaps["cividis"]
    for axes, title in zip(grid.flat, [*panels, *[""] * (across * down - len(panels))], strict=True):
        if not title:
            axes.set_axis_off()
            continue
        matrix = panels[title]
        axes.imshow(
            [[float("nan") if value is None else value for value in row] for row in matrix], cmap=colors, norm=scale
        )
        for j, row in enumerate(matrix):
            for i, value in enumerate(row):
                dark = value is not None and scale(value) < 0.55
                axes.text(
                    i, j, "–" if value is None else f"{value:.3f}", ha="center", va="center", fontsize=8.5,
                    color="white" if dark else "black",
                )  # fmt: skip
        axes.set_xticks(range(len(sites)), sites, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(sites)), sites)
        axes.grid(visible=False)
        axes.tick_params(length=0, labelsize=8.5)
        axes.set_title(title)
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(ScalarMappable(scale, colors), ax=grid, shrink=0.8, pad=0.02)
    bar.set_label(axis_of(metric))
    bar.outline.set_visible(False)
    figure.supxlabel("tested on the rows of", fontsize=10)
    figure.supylabel("model of", fontsize=10)
    return _picture(figure)


def curves(
    amounts: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[Stat | None]]], unit: str, metric: str
) -> Picture:
    """A square for each row: how its scores move with the amount of fine-tuning.

    Args:
        panels: row -> test -> a mean for each amount.
    """
    from matplotlib.figure import Figure

    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(max(4.2, 0.6 + 2.0 * across), 0.9 + 2.0 * down), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, tests) in zip(grid.flat, panels.items(), strict=False):
        for number, (test, found) in enumerate(tests.items()):
            shift = (number - (len(tests) - 1) / 2) * 0.12  # so that intervals at one amount stand side by side
            there = [(place, stat) for place, stat in enumerate(found) if stat is not None]
            axes.errorbar(
                [place + shift for place, _ in there],
                [stat.mean for _, stat in there],
                yerr=[stat.ci95 or 0.0 for _, stat in there],
                capsize=2.5, markersize=4.5, linewidth=1.3, label=test, **_look(number),
            )  # fmt: skip
        axes.set_xticks(range(len(amounts)), [str(amount) for amount in amounts])
        axes.tick_params(labelbottom=True)
        axes.set_title(title)
    figure.supxlabel(f"fine-tuning ({unit})", fontsize=10)
    figure.supylabel(axis_of(metric), fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return _picture(figure)


def _figure(height: float) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _look(number: int) -> dict[str, Any]:
    """The color and the marker of series ``number``."""
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def _picture(figure: "Figure") -> Picture:
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(png.getvalue(), svg.getvalue())
