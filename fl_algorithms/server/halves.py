"""The hooks of a method's server half, and the half of each study. Most methods are the mean.

Three lists of tensors, which for the mean are one:

    leaves   what a site sends: deltas against the downloaded tensor of that name; against zero where there is none
    keeps    what the coordinator keeps between rounds, in one file
    comes    what a site downloads: for each, the kept tensor that it is, which may differ from site to site

Where the sites' networks are unlike each other, what each sends is also what it downloads, and ``unlike`` has its list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fl_algorithms import catalog
from fl_algorithms.settings.methods import ServerSettings
from wardround.errors import BadData
from wardround.study import StudyFile
from wardround.tensors import TensorSpec

BLOCK = 65536  # elements; the arithmetic is elementwise, so the result does not depend on it
Specs = tuple[TensorSpec, ...]
Sink = Callable[[bytes], object]
F64 = NDArray[np.float64]


class BlockSource(Protocol):
    """Tensors that are read in pieces: a ``wardround.tensors.TensorFile``, or ``InMemory``."""

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
    """An accepted update: all that the site sends. The number of examples is as the site tells it."""

    site: str
    num_examples: int
    deltas: BlockSource


@dataclass(frozen=True)
class Round:
    """What an aggregation is given.

    Attributes:
        kept: the kept tensors as the round opened.
        updates: at least one, **in site order**: the sums are the same bits whoever came first.
        sink: takes the payload of the next kept tensors, in the order of ``keeps``.
        common: the common set, for a half that distils: the path of the coordinator's copy, or the set as read.
    """

    number: int
    kept: BlockSource
    updates: Sequence[Update]
    sink: Sink
    common: object = None


def everything(kept: BlockSource, site: str, round_number: int) -> None:
    """``sources`` of a half whose sites all download the tensors of the same name."""


@dataclass(frozen=True)
class ServerHalf:
    """What the coordinator does for a method.

    Attributes:
        sources: (kept tensors, site, round) -> for each of ``comes`` the key of the kept tensor that this site
            downloads; None: those of the same key. May read small tensors; asked again it says the same.
        aggregate: writes the next kept tensors. Raises BadData: a value is beyond float32.
        unlike: site -> its own list, in place of ``leaves`` and ``comes``: these are then the whole initial model's.
    """

    leaves: Specs
    keeps: tuple[Kept, ...]
    comes: Specs
    aggregate: Callable[[Round], None]
    chosen: Callable[[BlockSource, str, int], tuple[str, ...] | None] = everything
    unlike: Mapping[str, Specs] = field(default_factory=dict)

    @cached_property
    def kept_specs(self) -> Specs:
        return tuple(kept.spec for kept in self.keeps)

    @cached_property
    def passes(self) -> bool:
        """Whether a site downloads the kept tensors as they are, and these begin as the initial model."""
        alike = self.kept_specs == self.comes == self.leaves and not self.unlike
        return alike and all(kept.source == kept.spec.key for kept in self.keeps)

    def leaves_of(self, site: str) -> Specs:
        """What ``site`` sends."""
        return self.unlike.get(site, self.leaves)

    def comes_to(self, site: str) -> Specs:
        """What ``site`` downloads."""
        return self.unlike.get(site, self.comes)

    def sources(self, kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        """For each of ``comes_to(site)`` the key of the kept tensor that this site downloads for this round."""
        return self.chosen(kept, site, round_number) or tuple(spec.key for spec in self.comes)

    def start(self, initial: BlockSource, sink: Sink) -> None:
        """Write the kept tensors as they are before the first round."""

        for kept in self.keeps:

            def begin(start: int, count: int, kept: Kept = kept) -> F64:
                if kept.source:
                    return initial.block(kept.source, start, count).astype(np.float64)
                return np.full(count, kept.value)

            write_tensor(kept.spec, begin, sink)


def server_half(study: StudyFile, leaves: Specs) -> ServerHalf:
    """The server half of a resolved study.

    Args:
        leaves: what its initial model holds, and each update too, unless networks are unlike.
    """
    _, _, settings = catalog.settings_of(study)
    implementation = catalog.method(study).server
    if isinstance(settings, ServerSettings) and settings.server is not None:
        implementation = "fl_algorithms.server.fedopt:fedopt"
    whole = catalog.method(study).common == catalog.COORDINATOR  # it makes networks, of which the study tells
    half: ServerHalf = catalog.load(implementation)(settings, study if whole else study.study.sites, leaves)
    return half


def write_tensor(spec: TensorSpec, compute: Callable[[int, int], F64], sink: Sink) -> None:
    """Write a float32 tensor, each value rounded once from float64, in blocks: memory does not grow with the model.

    Args:
        compute: (first element, count) -> the values of that block.

    Raises:
        BadData: a value is beyond float32; the message names the tensor.
    """
    size = prod(spec.shape)
    for start in range(0, size, BLOCK):
        with np.errstate(over="ignore", invalid="ignore"):
            new = compute(start, min(BLOCK, size - start)).astype("<f4")
        if not np.isfinite(new).all():
            raise BadData(f"`{spec.key}` would be beyond float32, though each update is finite")
        sink(new.tobytes())


def mean_delta(updates: Sequence[Update], key: str, start: int, count: int, *, uniform: bool = False) -> F64:
    """sum_i n_i delta_i / sum_i n_i of one block, summed in float64 in site order; with ``uniform`` every n_i is 1.

    Raises:
        ValueError: no update, or one that counts for less than 1.
    """
    weights = [1 if uniform else update.num_examples for update in updates]
    if not updates or min(weights) < 1:
        raise ValueError(f"a mean needs updates that each count for at least 1, got {weights}")
    total = np.zeros(count, dtype=np.float64)
    for weight, update in zip(weights, updates, strict=True):
        total += float(weight) * update.deltas.block(key, start, count).astype(np.float64)
    return total / float(sum(weights))
