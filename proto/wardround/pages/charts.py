"""A line chart as places on a canvas: title, axes with their units, ticks at round numbers, and the same as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 76, 18, 40, 56
TICKS = 6  # at most so many steps along an axis
MOST_DOTS = 120  # points that are also drawn as dots
FLAT = 1e-9  # of the larger end: a smaller span is drawn as a level line
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Tick:
    """``at`` is a place along its axis, in the canvas' units."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    text: str
    marked: bool


@dataclass(frozen=True)
class FurtherLine:
    """A thinner, broken line beside the chart's own."""

    name: str
    line: str


@dataclass(frozen=True)
class LineChart:
    """What the template draws; made by ``line_chart``."""

    kind: ClassVar[str] = "chart"
    width: ClassVar[int] = WIDTH
    height: ClassVar[int] = HEIGHT
    left: ClassVar[int] = LEFT
    right: ClassVar[int] = WIDTH - RIGHT
    top: ClassVar[int] = TOP
    bottom: ClassVar[int] = HEIGHT - BOTTOM
    title: str
    note: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    line: str  # "x,y x,y ..."
    dots: tuple[Dot, ...]
    heads: tuple[str, ...]  # of the table of points: the counts, the chart's own line, and the further ones
    rows: tuple[tuple[str, ...], ...]  # the points as text, in order
    further: tuple[FurtherLine, ...] = ()


def line_chart(
    title: str,
    points: Points,
    *,
    x_label: str,
    y_label: str,
    note: str = "",
    from_zero: bool = False,
    marked: int | None = None,
    further: Mapping[str, Points] = {},
) -> LineChart | None:
    """A chart of ``points`` in the order given; None where fewer than two can be drawn on one scale.

    Args:
        points: a count and its value, such as a round and a loss; values that are not finite are left out.
        x_label, y_label: what an axis counts, with its unit.
        from_zero: the values' axis begins at 0, as lengths need it; none of them is negative.
        marked: the count whose points are drawn with a ring.
        further: thinner lines by their names, on the same axes.
    """
    drawn = [(count, value) for count, value in points if math.isfinite(value)]
    if len(drawn) < 2:
        return None
    beside = {name: [point for point in own if math.isfinite(point[1])] for name, own in further.items()}
    everything = [*drawn, *(point for own in beside.values() for point in own)]
    counts, values = [count for count, _ in everything], [value for _, value in everything]
    ends = _ends(min(values), max(values), from_zero)
    if ends is None:
        return None
    low, high = ends
    step = nice_step(high - low)
    low, high = math.floor(low / step + FLAT) * step, math.ceil(high / step - FLAT) * step
    first, last = min(counts), max(counts)

    def across(count: float) -> float:
        return LEFT + (count - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    def placed(points: Points) -> list[tuple[float, float]]:
        return [(round(across(count), 1), round(up(value), 1)) for count, value in points]

    places = placed(drawn)
    dots = tuple(
        Dot(x, y, f"{count}: {value:.4g}", count == marked)
        for (x, y), (count, value) in zip(places, drawn, strict=True)
        if len(drawn) <= MOST_DOTS or count == marked
    )
    counted = max(1, round(nice_step(max(1, last - first))))
    ticked = range(-(-first // counted) * counted, last + 1, counted)
    return LineChart(
        title=title,
        note=note,
        x_label=x_label,
        y_label=y_label,
        x_ticks=tuple(Tick(round(across(count), 1), str(count)) for count in ticked),
        y_ticks=tuple(
            Tick(round(up(low + index * step), 1), _number(low + index * step, step))
            for index in range(round((high - low) / step) + 1)
        ),
        line=_line(places),
        dots=dots,
        heads=(x_label, y_label, *beside),
        rows=_rows(drawn, list(beside.values())),
        further=tuple(FurtherLine(name, _line(placed(own))) for name, own in beside.items() if len(own) > 1),
    )


def _line(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _rows(
    drawn: Sequence[tuple[int, float]], beside: Sequence[Sequence[tuple[int, float]]]
) -> tuple[tuple[str, ...], ...]:
    """Each point, and beside it those of the further lines at its count; then the counts that these alone have."""
    others = [dict(own) for own in beside]
    own = {count for count, _ in drawn}
    alone = sorted({count for points in others for count in points} - own)

    def row(count: int, text: str) -> tuple[str, ...]:
        return (str(count), text, *(f"{points[count]:.4g}" if count in points else "" for points in others))

    return (*(row(count, f"{value:.4g}") for count, value in drawn), *(row(count, "") for count in alone))


def nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that ``span`` (> 0) has at most ``TICKS`` of it."""
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    return next(power * factor for factor in (1, 2, 5, 10) if span <= power * factor * TICKS * (1 + FLAT))


def _ends(low: float, high: float, from_zero: bool) -> tuple[float, float] | None:
    """The ends of the values' axis before they are rounded; None where no scale holds both."""
    if from_zero:
        low, high = 0.0, high or 1.0
    largest = max(abs(low), abs(high))
    if not 1e-100 < largest < 1e100:
        return (-1.0, 1.0) if largest == 0 else None
    if high - low < largest * FLAT:
        return low - largest / 2, high + largest / 2
    return low, high


def _number(value: float, step: float) -> str:
    """A tick's number, with the digits that tell it from its neighbors."""
    if not (1e-5 <= step < 1e6 and abs(value) < 1e7):
        return f"{value:.4g}"
    text = f"{value:.{max(0, -math.floor(math.log10(step) + FLAT))}f}"
    return text.lstrip("-") if float(text) == 0 else text
