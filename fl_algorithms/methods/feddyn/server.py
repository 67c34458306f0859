"""FedDyn's server aggregator: the mean of the sites' models, moved on by h, which sums what all rounds brought.

    h <- h - alpha / m sum_{k in P} (theta_k - theta)        theta <- mean_{k in P} theta_k - h / alpha

with P the sites that answered and m all of the study's, each counting alike. No site downloads h. The running
statistics of norm layers are plain means: h would carry a variance below zero.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated Learning Based on Dynamic Regularization, ICLR 2021,
Algorithm 1. https://openreview.net/forum?id=B7v4QMR6Z9w
"""

from functools import partial

from fl_algorithms.methods.feddyn import FedDynSettings
from fl_algorithms.methods.fedopt.server import has_moments
from fl_algorithms.server.aggregator import F64, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import TensorSpec

STATE = "h"  # bundle


def feddyn(settings: FedDynSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What is kept is the model, and h of its parameters."""
    moved = tuple(spec for spec in upload if has_moments(spec))

    def aggregate(round_: Round) -> None:
        def h(spec: TensorSpec, start: int, count: int) -> F64:
            answered = len(round_.updates) / len(study.study.trainers)
            delta = round_.uniform_delta(spec.key, start, count)
            return round_.kept.block(state(spec).key, start, count) - settings.alpha * answered * delta

        def theta(spec: TensorSpec, start: int, count: int) -> F64:
            mean = round_.kept.block(spec.key, start, count) + round_.uniform_delta(spec.key, start, count)
            return mean - h(spec, start, count) / settings.alpha if spec in moved else mean

        for spec in upload:
            write_tensor(spec, partial(theta, spec), round_.sink)
        for spec in moved:
            write_tensor(state(spec), partial(h, spec), round_.sink)

    keeps = (*(Kept(spec, spec.key) for spec in upload), *(Kept(state(spec)) for spec in moved))
    return ServerAggregator(upload, keeps, upload, aggregate)


def state(spec: TensorSpec) -> TensorSpec:
    """The tensor in which h of ``spec`` is kept."""
    return TensorSpec(spec.name, spec.dtype, spec.shape, STATE)
