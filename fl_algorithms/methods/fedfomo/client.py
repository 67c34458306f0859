"""FedFomo: a site downloads other sites' models and moves towards those that do better on its validation split.

    w_n = (L(theta_i) - L(theta_n)) / ||theta_n - theta_i||        theta_i <- theta_i + sum_n ŵ_n (theta_n - theta_i)

with ŵ = max(w, 0) divided by its sum, over what the site itself last sent, theta_i, and the peers' models theta_n. Then
it trains. Its trained model and the raw w leave. The mixed model is what is judged, also in the closing round.

Zhang, Sapra, Fidler, Yeung, Alvarez, Personalized Federated Learning with First Order Model Optimization, ICLR 2021,
equations 3 and 4. https://arxiv.org/abs/2012.08565
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Algorithm, Context, Share, Uplink, frozen_copy, load_shared, shared_deltas
from fl_algorithms.engine.training import Networks
from fl_algorithms.methods.fedfomo import FedFomoSettings
from fl_algorithms.methods.fedfomo.server import AFFINITY, PEERS, WEIGHTS, peer
from fl_algorithms.study import SiteStudy
from wardround.errors import BadData
from wardround.tensors.manifests import MODEL, TensorSpec

Model = Mapping[str, Tensor]


def fedfomo(settings: FedFomoSettings) -> Algorithm:
    """FedAvg of the whole network at the site, but for what is received."""

    def receive(context: Context) -> None:
        load_shared(context)
        peers = downloaded_peers(context)
        weights = raw_weights(context, peers, settings.norm_guard)
        move(Share().tensors(context.networks), peers, normalized(weights))
        context.scratch[WEIGHTS] = weights

    return Algorithm(extras=_affinity, receive=receive, to_send=model_and_weights)


def downloaded_peers(context: Context) -> dict[int, Model]:
    """The peers' models by the sites' positions."""
    peers: dict[int, Model] = {}
    for place, number in context.base.get(PEERS, {}).items():
        position = int(number.item())
        if position in (*peers, context.position) or not 0 <= position < len(context.study.study.sites):
            raise BadData(f"the round's model says that `{PEERS}/{place}` is site {position}, which is no peer")
        peers[position] = context.base[peer(int(place))]
    return peers


def raw_weights(context: Context, peers: Mapping[int, Model], guard: float) -> dict[int, float]:
    """w of each peer. One whose loss is not finite counts for nothing."""
    network = context.networks[MODEL]
    own_loss, parameters = context.validation_loss(context.networks), dict(network.named_parameters())
    weights = {}
    for position, model in peers.items():
        loss = context.validation_loss({MODEL: frozen_copy(network, model)})
        squares = [((model[n].double() - p.detach().double()) ** 2).sum() for n, p in parameters.items() if n in model]
        weight = (own_loss - loss) / (math.sqrt(float(torch.stack(squares).sum())) + guard)
        weights[position] = weight if math.isfinite(weight) else 0.0
    return weights


def normalized(weights: Mapping[int, float]) -> dict[int, float]:
    """The positive ones, divided by their sum; {} where no peer is better."""
    positive = {position: weight for position, weight in weights.items() if weight > 0}
    total = math.fsum(positive.values())
    return {position: weight / total for position, weight in positive.items()}


def move(own: Mapping[str, Tensor], peers: Mapping[int, Model], weights: Mapping[int, float]) -> None:
    """theta_i + sum_n ŵ_n (theta_n - theta_i), in float64, in place."""
    if not weights:
        return
    for name, tensor in own.items():
        old = tensor.detach().double()
        step = sum((weight * (peers[n][name].double() - old) for n, weight in weights.items()), torch.zeros_like(old))
        tensor.detach().copy_(old + step)


def model_and_weights(context: Context) -> Uplink:
    """h8: the delta against what this site sent last, and w as it is, 0 for itself and for whom it has not seen."""
    weights = context.scratch[WEIGHTS]
    row = [weights.get(position, 0.0) for position in range(len(context.study.study.sites))]
    return {**shared_deltas(context), AFFINITY: {WEIGHTS: torch.tensor(row, dtype=torch.float32)}}


def _affinity(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return (TensorSpec(WEIGHTS, "F32", (len(study.study.sites),), AFFINITY),)
