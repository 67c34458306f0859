"""SCAFFOLD's server aggregator: uniform means, over the sites that answered, of networks and control variates.

    theta <- theta + eta_s / |S| sum_{i in S} (y_i - theta)        c <- c + 1 / N sum_{i in S} (c_i+ - c_i)

A tensor without a control variate, as the running statistics of norm layers, is the plain uniform mean: eta_s = 1.
The client is ``fl_algorithms.methods.scaffold.client``. Karimireddy et al., ICML 2020, Algorithm 1, lines 16 and 17.
"""

from functools import partial

from fl_algorithms.methods.scaffold import ScaffoldSettings
from fl_algorithms.server.aggregator import F64, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import TensorSpec

CONTROL = "control"  # bundle: of what a site sends c_i+ - c_i; of what it downloads c


def scaffold(settings: ScaffoldSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """Upload, kept tensors and download are the same list."""
    controlled = {spec.name for spec in upload if spec.bundle == CONTROL}

    def aggregate(round_: Round) -> None:
        def new(spec: TensorSpec, start: int, count: int) -> F64:
            rate = settings.server_learning_rate if spec.name in controlled else 1.0
            if spec.bundle == CONTROL:
                rate = len(round_.updates) / len(study.study.trainers)
            mean = round_.uniform_delta(spec.key, start, count)
            return round_.kept.block(spec.key, start, count) + rate * mean

        for spec in upload:
            write_tensor(spec, partial(new, spec), round_.sink)

    return ServerAggregator(upload, tuple(Kept(spec, spec.key) for spec in upload), upload, aggregate)
