"""FedMD's server aggregator: the mean of the sites' predictions, each counting alike. It never sees the rows.

Which rows a round is about is drawn by the sites themselves, all from one stream; here row k of one is row k of all.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019, Algorithm 1.
https://arxiv.org/abs/1910.03581
"""

from fl_algorithms.methods.fedmd import FedMdSettings
from fl_algorithms.server.aggregator import F64, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import TensorSpec

PREDICTIONS = "predictions"  # bundle: what a site sends, of the next round's rows
CONSENSUS = "consensus"  # bundle: what all sites download, of this round's rows; zeros before the first


def fedmd(settings: FedMdSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What is kept is the last round's mean."""
    consensus = agreed(upload)

    def aggregate(round_: Round) -> None:
        for spec, mean in zip(upload, consensus, strict=True):

            def new(start: int, count: int, key: str = spec.key) -> F64:
                return round_.uniform_delta(key, start, count)

            write_tensor(mean, new, round_.sink)

    return ServerAggregator(upload, tuple(Kept(spec) for spec in consensus), consensus, aggregate)


def agreed(upload: Specs) -> Specs:
    """The download made of these predictions: another name, so that predictions are sent as they are and not as
    deltas.
    """
    return tuple(TensorSpec(spec.name, spec.dtype, spec.shape, CONSENSUS) for spec in upload)
