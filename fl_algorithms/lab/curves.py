"""Learning curves of a run: what each site and round gave, and the loss of each training step. No torch.

Long tables, so that any method's names fit:

    points   round, site, name, value
    steps    round, site, phase, step, loss

A point is of the model *after* its round: ``val_loss`` and the task's metrics, on the site's validation rows, of model
``round`` with the site's private parts (0: the initial model). Beside them are ``train_loss``, the mean over the
round's steps; ``bytes_sent`` and ``bytes_received``; and ``averaged``, 1 where the site's update is in the model.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

TRAIN_LOSS, SENT, RECEIVED, AVERAGED = "train_loss", "bytes_sent", "bytes_received", "averaged"


class Point(NamedTuple):
    """``value``: None where a metric is undefined."""

    round: int
    site: str
    name: str
    value: float | None


class Step(NamedTuple):
    """``step``: from 1, of the phase in this round. ``phase``: "" where the method has but one."""

    round: int
    site: str
    phase: str
    step: int
    loss: float


@dataclass
class Curves:
    """The rows so far, in the order in which they were made."""

    points: list[Point] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def judged(self, model_round: int, site: str, metrics: Mapping[str, float | None]) -> None:
        """What a site's validation rows said of model ``model_round``."""
        self.points += [Point(model_round, site, name, value) for name, value in metrics.items()]

    def trained(self, round_number: int, site: str, losses: Mapping[str, Sequence[float]]) -> None:
        """Phase -> the loss of each of its steps."""
        for phase, values in losses.items():
            self.steps += [Step(round_number, site, phase, step, loss) for step, loss in enumerate(values, start=1)]
        if every := [loss for values in losses.values() for loss in values]:
            self.points.append(Point(round_number, site, TRAIN_LOSS, fmean(every)))

    def moved(self, round_number: int, site: str, *, sent: int, received: int) -> None:
        """How many bytes of tensors."""
        self.points += [Point(round_number, site, SENT, sent), Point(round_number, site, RECEIVED, received)]

    def averaged(self, round_number: int, sites: Iterable[str], inside: Iterable[str]) -> None:
        """Of all the study's sites, whose updates are in the round's model."""
        chosen = set(inside)
        self.points += [Point(round_number, site, AVERAGED, float(site in chosen)) for site in sites]


def written(rows: Sequence[Point] | Sequence[Step]) -> bytes:
    """Rows as CSV, without a header: None is empty, a number is what gives the same bits."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue().encode()


def header(kind: type[Point] | type[Step]) -> bytes:
    return (",".join(kind._fields) + "\n").encode()


def read_points(text: str) -> list[Point]:
    """What ``written`` made of points, after the header."""
    rows = csv.reader(io.StringIO(text))
    next(rows, None)
    return [Point(int(number), site, name, float(value) if value else None) for number, site, name, value in rows]


def read_steps(text: str) -> list[Step]:
    """What ``written`` made of steps, after the header."""
    rows = csv.reader(io.StringIO(text))
    next(rows, None)
    return [Step(int(number), site, phase, int(step), float(loss)) for number, site, phase, step, loss in rows]
