"""FedFomo: a site moves from where it was towards the models that do better on its validation split, also its own.

    w_n = (L(theta_i) - L(theta_n)) / ||theta_n - theta_i||        theta_i <- theta_i + sum_n ŵ_n (theta_n - theta_i)

with ŵ = max(w, 0) divided by its sum. theta_i is the site's model before its last training; the models theta_n are what
that training made of it, which the site itself has sent, and the peers' models. So what a site has learned counts by
the same measure as what others have, and is dropped only where it made the model worse. Then it trains. Its trained
model leaves, and the raw w of its peers. The mixed model is what is judged, also in the closing round.

Zhang, Sapra, Fidler, Yeung, Alvarez, Personalized Federated Learning with First Order Model Optimization, ICLR 2021,
equations 4 to 6. https://arxiv.org/abs/2012.08565
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
BEFORE = "before"  # prefix of what is kept: the model that the last training began with


def fedfomo(settings: FedFomoSettings) -> Algorithm:
    """FedAvg of the whole network at the site, but for what is received."""

    def receive(context: Context) -> None:
        load_shared(context)
        live = Share().tensors(context.networks)
        trained = {name: tensor.detach().clone() for name, tensor in live.items()}
        for name, tensor in live.items():
            tensor.detach().copy_(context.kept.get(f"{BEFORE}.{name}", tensor))
        candidates = {context.position: trained, **downloaded_peers(context)}
        weights = raw_weights(context, candidates, settings.norm_guard)
        move(live, candidates, normalized(weights))
        context.scratch[WEIGHTS] = weights

    return Algorithm(
        extras=_affinity, keeps=_before, receive=receive, before_round=keep_before, to_send=model_and_weights
    )


def keep_before(context: Context) -> None:
    """h2: the mixed model, from which the round's training starts."""
    context.kept |= {
        f"{BEFORE}.{name}": tensor.detach().clone() for name, tensor in Share().tensors(context.networks).items()
    }


def downloaded_peers(context: Context) -> dict[int, Model]:
    """The peers' models by the sites' positions."""
    peers: dict[int, Model] = {}
    for place, number in context.base.get(PEERS, {}).items():
        position = int(number.item())
        if position in (*peers, context.position) or not 0 <= position < len(context.study.study.sites):
            raise BadData(f"the round's model says that `{PEERS}/{place}` is site {position}, which is no peer")
        peers[position] = context.base[peer(int(place))]
    return peers


def raw_weights(context: Context, models: Mapping[int, Model], guard: float) -> dict[int, float]:
    """w of each model against the network as it is. One whose loss is not finite counts for nothing."""
    network = context.networks[MODEL]
    loss_before, parameters = context.validation_loss(context.networks), dict(network.named_parameters())
    weights = {}
    for position, model in models.items():
        loss = context.validation_loss({MODEL: frozen_copy(network, model)})
        squares = [((model[n].double() - p.detach().double()) ** 2).sum() for n, p in parameters.items() if n in model]
        weight = (loss_before - loss) / (math.sqrt(float(torch.stack(squares).sum())) + guard)
        weights[position] = weight if math.isfinite(weight) else 0.0
    return weights


def normalized(weights: Mapping[int, float]) -> dict[int, float]:
    """The positive ones, divided by their sum; {} where no model is better."""
    positive = {position: weight for position, weight in weights.items() if weight > 0}
    total = math.fsum(positive.values())
    return {position: weight / total for position, weight in positive.items()}


def move(own: Mapping[str, Tensor], models: Mapping[int, Model], weights: Mapping[int, float]) -> None:
    """theta_i + sum_n ŵ_n (theta_n - theta_i), in float64, in place."""
    if not weights:
        return
    for name, tensor in own.items():
        old = tensor.detach().double()
        step = sum((weight * (models[n][name].double() - old) for n, weight in weights.items()), torch.zeros_like(old))
        tensor.detach().copy_(old + step)


def model_and_weights(context: Context) -> Uplink:
    """h8: the delta against what this site sent last, and w as it is, 0 for itself and for whom it has not seen."""
    weights = {**context.scratch[WEIGHTS], context.position: 0.0}
    row = [weights.get(position, 0.0) for position in range(len(context.study.study.sites))]
    return {**shared_deltas(context), AFFINITY: {WEIGHTS: torch.tensor(row, dtype=torch.float32)}}


def _affinity(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return (TensorSpec(WEIGHTS, "F32", (len(study.study.sites),), AFFINITY),)


def _before(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{BEFORE}.{name}", "F32", tuple(tensor.shape)) for name, tensor in Share().tensors(networks).items()
    )
