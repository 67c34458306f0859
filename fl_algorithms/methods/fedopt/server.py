"""A server optimizer: the mean Delta of the sites' deltas is its gradient, turned round.

    adam, yogi, adagrad    m <- b1 m + (1 - b1) Delta        theta <- theta + eta m / (sqrt(v) + tau)
    adam                   v <- b2 v + (1 - b2) Delta^2
    yogi                   v <- v - (1 - b2) Delta^2 sign(v - Delta^2)
    adagrad                v <- v + Delta^2
    momentum               m <- b1 m + Delta                 theta <- theta + eta m

m begins at zero and v at v_0, tau^2 unless a study says otherwise; neither is corrected for it. The first step of adam
is eta (1 - b1) / sqrt(1 - b2) whatever the size of Delta, where that is far above tau. All in float64 from the kept
float32. The running statistics of norm layers are means of the sites' and have no moments: a variance that a momentum
carries on becomes negative.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
https://arxiv.org/abs/2003.00295. "momentum" is FedAvgM: Hsu, Qi, Brown, 2019. https://arxiv.org/abs/1909.06335
"""

from functools import partial

import numpy as np

from fl_algorithms.methods.settings import ServerOptimizer, ServerSettings
from fl_algorithms.server.aggregator import F64, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import MODEL, TensorSpec

STATISTICS = ("running_mean", "running_var")


def fedopt(settings: ServerSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """The mean's aggregator with moments, which no site downloads."""
    server = settings.server
    if server is None:
        raise ValueError("these settings name no server optimizer")
    moved = tuple(spec for spec in upload if has_moments(spec))
    orders = (1,) if server.optimizer == "momentum" else (1, 2)
    start = {1: 0.0, 2: server.v_0 or 0.0}
    moments = tuple(Kept(moment(order, spec), value=start[order]) for order in orders for spec in moved)

    def aggregate(round_: Round) -> None:
        def kept(spec: TensorSpec, start: int, count: int) -> F64:
            return round_.kept.block(spec.key, start, count).astype(np.float64)

        def delta(spec: TensorSpec, start: int, count: int) -> F64:
            return round_.mean_delta(spec.key, start, count)

        def m(spec: TensorSpec, start: int, count: int) -> F64:
            return next_first(server, kept(moment(1, spec), start, count), delta(spec, start, count))

        def v(spec: TensorSpec, start: int, count: int) -> F64:
            return next_second(server, kept(moment(2, spec), start, count), delta(spec, start, count))

        def theta(spec: TensorSpec, start: int, count: int) -> F64:
            old = kept(spec, start, count)
            if not has_moments(spec):
                return old + delta(spec, start, count)
            step = server.learning_rate * m(spec, start, count)
            return old + (step if orders == (1,) else step / (np.sqrt(v(spec, start, count)) + server.tau))

        for spec in upload:
            write_tensor(spec, partial(theta, spec), round_.sink)
        for order in orders:
            for spec in moved:
                write_tensor(moment(order, spec), partial({1: m, 2: v}[order], spec), round_.sink)

    return ServerAggregator(
        upload, (*(Kept(spec, spec.key) for spec in upload), *moments), upload, aggregate, weighted=True
    )


def next_first(server: ServerOptimizer, m: F64, delta: F64) -> F64:
    """m of the next round."""
    return server.beta1 * m + (delta if server.optimizer == "momentum" else (1 - server.beta1) * delta)


def next_second(server: ServerOptimizer, v: F64, delta: F64) -> F64:
    """v of the next round; never negative."""
    square = delta * delta
    if server.optimizer == "adam":
        return server.beta2 * v + (1 - server.beta2) * square
    if server.optimizer == "yogi":
        return v - (1 - server.beta2) * square * np.sign(v - square)
    return v + square


def has_moments(spec: TensorSpec) -> bool:
    """Whether it is a parameter, and not a running statistic."""
    return spec.name.rpartition(".")[2] not in STATISTICS


def moment(order: int, spec: TensorSpec) -> TensorSpec:
    """The tensor in which the first or second moment of ``spec`` is kept."""
    bundle = f"moment{order}" if spec.bundle == MODEL else f"moment{order}_{spec.bundle}"
    return TensorSpec(spec.name, spec.dtype, spec.shape, bundle)
