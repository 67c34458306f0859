"""Server aggregators: what the coordinator does for a method, and which one a study has. Most are the mean.

Three lists of tensors, which for the mean are one:

    upload   what a site sends: deltas against the downloaded tensor of that name; against zero where there is none
    keeps    what the coordinator keeps between rounds, in one file
    download what a site downloads: for each, the kept tensor that it is, which may differ from site to site

Where the sites' networks are unlike each other, what each sends is also what it downloads, and ``per_site`` has its
list.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fl_algorithms import registry
from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.rows import MEAN
from fl_algorithms.server.combining import Combine, Combined
from fl_algorithms.server.rules.rows import RULES
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.tensors.manifests import TensorSpec

BLOCK = 65536  # elements; the arithmetic is elementwise, so the result does not depend on it
VARIANCE = "running_var"  # the last part of its name, in torch's norm layers
FEWEST_CAPPED = 3  # updates; of two a share of one half would make their counts mean nothing
Specs = tuple[TensorSpec, ...]
Sink = Callable[[bytes], object]
F64 = NDArray[np.float64]


class BeyondFloat32(BadData):
    """The updates, each finite, give a value that no float32 can hold. ``site``: whose it is, where that is known."""

    def __init__(self, message: str, *, site: str = "") -> None:
        super().__init__(message)
        self.site = site


class BlockSource(Protocol):
    """Tensors that are read in pieces: a ``wardround.tensors.files.TensorFile``, or ``InMemory``."""

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        """``count`` elements of the flat tensor ``key`` from element ``start`` on."""
        ...


@dataclass(frozen=True)
class Kept:
    """A tensor that the coordinator keeps. It starts as ``source`` of the initial model, or as ``value`` everywhere."""

    spec: TensorSpec
    source: str = ""
    value: float = 0.0


@dataclass(frozen=True)
class Update:
    """An accepted update: all that the site sends. The number of examples is as the site tells it.

    ``norm``: of these deltas, where it was computed before; None: it is computed when it is needed.
    """

    site: str
    num_examples: int
    deltas: BlockSource
    norm: float | None = None


@dataclass(frozen=True)
class Round:
    """What an aggregation is given.

    Attributes:
        kept: the kept tensors as the round opened.
        updates: at least one, **in site order**: the sums are the same bits whoever came first.
        sink: takes the payload of the next kept tensors, in the order of ``keeps``.
        public_data: for an aggregator that distills: the path of the coordinator's copy, or the set as read.
        max_weight: the largest share of one site in a mean that is weighted by counts.
        device: an ``engine.device.Device``, where an aggregator that distills in this process does it; None: the CPU.
        combined: what the study's rule made of the updates, where that stands in place of their mean.
    """

    number: int
    kept: BlockSource
    updates: Sequence[Update]
    sink: Sink
    public_data: object = None
    max_weight: float = 1.0
    device: object = None
    combined: Combined | None = None

    def mean_delta(self, key: str, start: int, count: int, sites: Collection[str] | None = None) -> F64:
        """sum_i w_i delta_i / sum_i w_i of one block, summed in float64 in site order; see ``averaging_weights``. Where
        the study has another rule, what that gives.

        Args:
            sites: over these alone.
        """
        if self.combined is not None and self.combined.delta is not None:
            return self.combined.delta(key, start, count)
        updates = [update for update in self.updates if sites is None or update.site in sites]
        weights = averaging_weights([update.num_examples for update in updates], self.max_weight)
        return _mean(updates, weights, key, start, count)

    def uniform_delta(self, key: str, start: int, count: int) -> F64:
        """The same with each site counting alike; under secure aggregation too, where the sum is of equal weights."""
        if self.combined is not None and self.combined.delta is not None:
            return self.combined.delta(key, start, count)
        return _mean(self.updates, [1.0] * len(self.updates), key, start, count)


def everything(kept: BlockSource, site: str, round_number: int) -> None:
    """``sources`` of an aggregator whose sites all download the tensors of the same name."""


@dataclass(frozen=True)
class ServerAggregator:
    """What the coordinator does for a method.

    Attributes:
        sources: (kept tensors, site, round) -> for each of ``download`` the key of the kept tensor that this site
            downloads; None: those of the same key. May read small tensors; asked again it says the same.
        aggregate: writes the next kept tensors. Raises BeyondFloat32: a value is.
        per_site: site -> its own list, in place of ``upload`` and ``download``: these are then the whole initial
            model's.
        weighted: whether it weights sites by their counts anywhere.
        combine: what the study's rule makes of a round's updates; None: their mean, or what the method's own code does.
        fewest: the number of updates that the rule needs.
    """

    upload: Specs
    keeps: tuple[Kept, ...]
    download: Specs
    aggregate: Callable[[Round], None]
    chosen: Callable[[BlockSource, str, int], tuple[str, ...] | None] = everything
    per_site: Mapping[str, Specs] = field(default_factory=dict)
    weighted: bool = False
    combine: Combine | None = None
    fewest: int = 1

    @cached_property
    def kept_specs(self) -> Specs:
        return tuple(kept.spec for kept in self.keeps)

    @cached_property
    def passes(self) -> bool:
        """Whether a site downloads the kept tensors as they are, and these begin as the initial model."""
        alike = self.kept_specs == self.download == self.upload and not self.per_site
        return alike and all(kept.source == kept.spec.key for kept in self.keeps)

    def upload_of(self, site: str) -> Specs:
        """What ``site`` sends."""
        return self.per_site.get(site, self.upload)

    def download_of(self, site: str) -> Specs:
        """What ``site`` downloads."""
        return self.per_site.get(site, self.download)

    def sources(self, kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        """For each of ``download_of(site)`` the key of the kept tensor that this site downloads for this round."""
        return self.chosen(kept, site, round_number) or tuple(spec.key for spec in self.download)

    def start(self, initial: BlockSource, sink: Sink) -> None:
        """Write the kept tensors as they are before the first round."""

        for kept in self.keeps:

            def begin(start: int, count: int, kept: Kept = kept) -> F64:
                if kept.source:
                    return initial.block(kept.source, start, count).astype(np.float64)
                return np.full(count, kept.value)

            write_tensor(kept.spec, begin, sink)


def server_aggregator(study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """The server aggregator of a resolved study.

    Args:
        upload: what its initial model holds, and each update too, unless networks are unlike.
    """
    brought = study.brought_method
    if brought is not None and brought.aggregates == "mean":  # of a plug-in, which need not be installed here
        make, settings = registry.load(MEAN), MethodSettings()
    else:
        row, settings = study.method.row, study.method.settings
        make = registry.load(settings.server_wrapper or row.server)
    aggregator: ServerAggregator = make(settings, study, upload)
    section = study.aggregation
    if section.is_mean:
        return aggregator
    combine: Combine = registry.load(RULES[section.rule].implementation)(section)
    return replace(aggregator, combine=combine, fewest=section.fewest)


def is_variance(spec: TensorSpec) -> bool:
    """Whether it is the running variance of a norm layer. Moments and control variates are of parameters alone."""
    return spec.name.rpartition(".")[2] == VARIANCE


def write_tensor(spec: TensorSpec, compute: Callable[[int, int], F64], sink: Sink) -> None:
    """Write a float32 tensor, each value rounded once from float64, in blocks: memory does not grow with the model.

    A running variance that rounding has brought below zero is written as zero.

    Args:
        compute: (first element, count) -> the values of that block.

    Raises:
        BeyondFloat32: a value is; the message names the tensor.
    """
    size = prod(spec.shape)
    for start in range(0, size, BLOCK):
        with np.errstate(over="ignore", invalid="ignore"):
            new = compute(start, min(BLOCK, size - start)).astype("<f4")
        if is_variance(spec):
            np.maximum(new, 0, out=new)  # a nan stays one
        if not np.isfinite(new).all():
            raise BeyondFloat32(f"`{spec.key}` would be beyond float32, though each update is finite")
        sink(new.tobytes())


def averaging_weights(counts: Sequence[int], max_weight: float) -> list[float]:
    """What each update counts for in a mean: its count, cut where its share would be above ``max_weight``.

    The others keep their proportions (water-filling): a site that is cut has exactly the largest share, and cutting it
    may bring the next one above. Of fewer than three updates none is cut; where the largest share is below 1 / n, all
    count alike. Float64 in the order given: the same counts give the same bits.

    Raises:
        ValueError: no update, or one that counts for less than 1.
    """
    if not counts or min(counts) < 1:
        raise ValueError(f"a mean needs updates that each count for at least 1, got {list(counts)}")
    weights = [float(count) for count in counts]
    if len(counts) < FEWEST_CAPPED or max_weight >= 1:
        return weights
    if max_weight * len(counts) <= 1:
        return [1.0] * len(counts)
    cut: set[int] = set()
    while True:
        rest = fsum(weight for place, weight in enumerate(weights) if place not in cut)
        level = max_weight * rest / (1 - max_weight * len(cut))  # a share of max_weight, of the sum that it makes
        total = rest + len(cut) * level
        above = {place for place, weight in enumerate(weights) if place not in cut and weight > max_weight * total}
        if not above:
            return [level if place in cut else weight for place, weight in enumerate(weights)]
        cut |= above
        if len(cut) == len(counts):
            return [1.0] * len(counts)  # by rounding, where the largest share is barely above 1 / n


def _mean(updates: Sequence[Update], weights: Sequence[float], key: str, start: int, count: int) -> F64:
    if not updates:
        raise ValueError("a mean needs updates")
    total = np.zeros(count, dtype=np.float64)
    for weight, update in zip(weights, updates, strict=True):
        total += weight * update.deltas.block(key, start, count).astype(np.float64)
    return total / fsum(weights)
