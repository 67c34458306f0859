"""A round's mean from integer sums, with or without masks: the numbers of secure aggregation, for lab and coordinator.

What is summed of a site is its update, times its rows where the method weights by rows; these rows; and its metrics,
times the rows that they are on. Without masks the sum is the same integers, so a study without masks has the same
digests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from fl_algorithms.server.aggregator import F64, BlockSource, ServerAggregator, Specs
from fl_algorithms.server.combining import Combined
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.records import secure_round
from wardround.secure.layout import ELEMENTS, Layout, Numbers
from wardround.secure.quantizing import U32, largest_of


@dataclass(frozen=True)
class Vector:
    """What one site adds to a sum. ``metrics``: name -> value, rows; one that is undefined is not in it."""

    site: str
    deltas: BlockSource
    weight: int
    metrics: Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class Sum:
    """What everyone may know of a round. ``tensors``: the elements of all of them, end to end."""

    layout: Layout
    tensors: U32
    numbers: Numbers

    def mean(self, key: str, start: int, count: int) -> F64:
        """sum_i w_i delta_i / sum_i w_i of one block."""
        first = self.layout.place(key) + start
        return self.layout.quantizer.mean(self.tensors[first : first + count], self.numbers.weight)

    @property
    def combined(self) -> Combined:
        """In place of the mean of single updates. Raises BadData: no site counts for anything."""
        if self.numbers.weight < 1:
            raise BadData("the sites of this round count for no rows together, so their sum has no mean")
        return Combined(self.mean)


Add = Callable[[Layout, Sequence[Vector]], Sum]


def layout_of(study: ResolvedStudy, aggregator: ServerAggregator, upload: Specs | None = None) -> Layout:
    """The form of a study's vectors. upload: other tensors than those of every round; () for a closing validation."""
    return secure_round.layout_of(
        study.file, aggregator.upload if upload is None else upload, largest_weight(study, aggregator)
    )


def largest_weight(study: ResolvedStudy, aggregator: ServerAggregator) -> int:
    """The most that a site counts for: 1 where all count alike."""
    section = study.secure_aggregation
    assert section is not None
    return section.largest_weight if aggregator.weighted and study.reported.counts != "uniform" else 1


def vector(
    study: ResolvedStudy,
    aggregator: ServerAggregator,
    site: str,
    deltas: BlockSource,
    num_examples: int,
    metrics: Mapping[str, float | None],
    num_validation: int,
) -> Vector:
    """What a site adds, with counts and metrics in the form in which the study reports them. A metric that is "null"
    there, or on no rows, is not in it.
    """
    form = study.reported
    rows = form.count(num_validation)
    told = {name: form.metric(name, metrics.get(name)) for name in form.metrics}
    values = {name: (float(text), rows) for name, text in told.items() if text != "null" and rows > 0}
    weight = form.count(num_examples) if aggregator.weighted else 1
    return Vector(site, deltas, weight, values)


def added(layout: Layout, vectors: Sequence[Vector]) -> Sum:
    """The sum without any mask.

    Raises:
        BadData: a site's value is beyond the study's range, or its rows beyond the largest weight; the message names
            the site, and the tensor.
    """
    total, numbers = np.zeros(layout.elements, np.uint32), np.zeros(1 + 2 * len(layout.metrics), np.uint64)
    for one in vectors:
        with of_site(one.site):
            for first in range(0, layout.elements, ELEMENTS):
                count = min(ELEMENTS, layout.elements - first)
                total[first : first + count] += layout.quantized(one.deltas.block, one.weight, first, count)
            numbers += layout.numbers(one.weight, one.metrics)
    return Sum(layout, total, layout.read_numbers(numbers))


@contextmanager
def of_site(site: str) -> Iterator[None]:
    """Whatever is wrong in it is said to be wrong at that site."""
    try:
        yield
    except BadData as error:
        raise BadData(f"site {site}: {error.message}", hint=error.hint) from None


def largest_value(layout: Layout, vectors: Sequence[Vector]) -> float:
    """The largest size of a value in the sites' updates: what a study's range must hold."""
    largest = 0.0
    for one in vectors:
        for key, size in layout.tensors:
            for start in range(0, size, ELEMENTS):
                block = one.deltas.block(key, start, min(ELEMENTS, size - start))
                largest = max(largest, largest_of(block))
    return largest
