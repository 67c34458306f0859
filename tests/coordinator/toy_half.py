"""A server aggregator that keeps state and gives every site another view: what the mean never asks of the coordinator.

The coordinator keeps for each site a model of its own, to which it adds the site's deltas; and one tensor that counts
the examples of all rounds, which no site ever sends. A site downloads its own model, that counter, and the bias of a
neighbour: in odd rounds of the site after it, in even rounds of the one before.
"""

import numpy as np

from fl_algorithms.server.aggregator import BlockSource, Kept, Round, ServerAggregator, Specs, write_tensor
from wardround.records.study import StudyFile
from wardround.tensors.manifests import TensorSpec

COUNT = TensorSpec("examples", "F32", (1,), "state")
BIAS = "layer.bias"


def toy_half(study: StudyFile, leaves: Specs) -> ServerAggregator:
    """For ``server_aggregator``."""
    sites = study.study.sites
    own = [
        Kept(TensorSpec(spec.name, "F32", spec.shape, site), spec.key) for site in sites for spec in reversed(leaves)
    ]
    bias = next(spec for spec in leaves if spec.key == BIAS)
    comes = (*leaves, TensorSpec(BIAS, "F32", bias.shape, "neighbour"), COUNT)

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        assert kept.block(COUNT.key, 0, 1)[0] >= 10 * (round_number - 1)  # what is kept can be read
        return (*(f"{site}/{spec.key}" for spec in leaves), f"{neighbour(sites, site, round_number)}/{BIAS}", COUNT.key)

    def aggregate(given: Round) -> None:
        sent = {update.site: update for update in given.updates}
        told = sum(update.num_examples for update in given.updates)

        for kept in own:

            def plus(start: int, count: int, spec: TensorSpec = kept.spec) -> np.ndarray:  # type: ignore[type-arg]
                before = given.kept.block(spec.key, start, count).astype(np.float64)
                update = sent.get(spec.bundle)
                return before if update is None else before + update.deltas.block(spec.name, start, count)

            write_tensor(kept.spec, plus, given.sink)
        before = given.kept.block(COUNT.key, 0, 1).astype(np.float64)
        write_tensor(COUNT, lambda start, count: before + told, given.sink)

    return ServerAggregator(leaves, (*own, Kept(COUNT)), comes, aggregate, chosen)


def neighbour(sites: tuple[str, ...], site: str, round_number: int) -> str:
    return sites[(sites.index(site) + (1 if round_number % 2 else -1)) % len(sites)]
