"""The four hooks of a method's server half, and the halves by name. Most methods are the mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fl_algorithms.server.mean import BlockSource, block_mean
from wardround.tensors import TensorSpec

Specs = tuple[TensorSpec, ...]


def as_given(template: Specs) -> Specs:
    return template


def all_the_same(kept: Specs, site: str, round_number: int) -> Specs:
    return kept


def nothing_more(round_number: int) -> None:
    return None


@dataclass(frozen=True)
class ServerHalf:
    """What the coordinator does for a method; the defaults are FedAvg's.

    Attributes:
        init: (the shared tensors of the initial model) -> the tensors that the coordinator keeps.
        to_broadcast: (kept tensors, site, round) -> those of them that this site downloads; sites may differ.
        aggregate: ``block_mean`` or another rule of its signature.
        after_aggregate: (round); for a server optimizer's moments, distillation, coefficients.
    """

    init: Callable[[Specs], Specs] = as_given
    to_broadcast: Callable[[Specs, str, int], Specs] = all_the_same
    aggregate: Callable[
        [BlockSource, Sequence[tuple[int, BlockSource]], Sequence[TensorSpec], Callable[[bytes], object]], None
    ] = block_mean
    after_aggregate: Callable[[int], None] = nothing_more


HALVES: Mapping[str, ServerHalf] = {"mean": ServerHalf()}
