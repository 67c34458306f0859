"""MOON: FedAvg whose features are drawn to those of the global network, and away from the site's own of last round.

Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, equation 3. https://arxiv.org/abs/2103.16257

The features are what the network's head sees: its ``body``'s output. The paper puts a projection head between.
"""

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor

from fl_algorithms.engine.algorithm import Algorithm, Context, frozen_copy, loss_of
from fl_algorithms.engine.partition import DTYPES
from fl_algorithms.engine.training import Batch, Networks
from fl_algorithms.methods.moon import MoonSettings
from fl_algorithms.study import SiteStudy
from wardround.tensors.manifests import MODEL, TensorSpec

PREVIOUS = "previous"  # prefix of the kept tensors: the network as the site's last round of training left it


def moon(settings: MoonSettings) -> Algorithm:
    """FedAvg plus mu times ``contrast``; with mu = 0 it is FedAvg, bit for bit, and keeps nothing."""
    if settings.mu == 0:
        return Algorithm()

    def before_round(context: Context) -> None:
        """In a site's first round the network before is the one as downloaded."""
        network = context.networks[MODEL]
        before = {name: context.kept[key] for name, key in kept_names(context.networks) if key in context.kept}
        context.scratch |= {"global": frozen_copy(network), PREVIOUS: frozen_copy(network, before)}

    def loss(context: Context, batch: Batch) -> Tensor:
        network = context.networks[MODEL]
        features = network.body(batch.x)  # type: ignore[operator]
        with torch.no_grad():
            toward = context.scratch["global"].body(batch.x)
            away = context.scratch[PREVIOUS].body(batch.x)
        logits: Tensor = network.head(features)  # type: ignore[operator]
        return loss_of(context, logits, batch) + settings.mu * contrast(features, toward, away, settings.temperature)

    def after_round(context: Context) -> None:
        state = context.networks[MODEL].state_dict()
        context.kept |= {key: state[name].detach().clone() for name, key in kept_names(context.networks)}

    def keeps(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
        state = networks[MODEL].state_dict()
        return tuple(
            TensorSpec(key, DTYPES[state[name].dtype], tuple(state[name].shape)) for name, key in kept_names(networks)
        )

    return Algorithm(before_round=before_round, loss=loss, after_round=after_round, keeps=keeps)


def contrast(features: Tensor, toward: Tensor, away: Tensor, temperature: float) -> Tensor:
    """The mean over the batch of -log(exp(p) / (exp(p) + exp(q))): p, q = cosine to ``toward``, ``away`` / temperature.

    Each (b, width). Of a batch whose ``toward`` and ``away`` are the same it is log 2.
    """
    p, q = (F.cosine_similarity(features, other, dim=1) / temperature for other in (toward, away))
    return F.softplus(q - p).mean()


def kept_names(networks: Networks) -> list[tuple[str, str]]:
    """(name in the network's state, name among the kept tensors) of each tensor."""
    return [(name, f"{PREVIOUS}.{name}") for name in networks[MODEL].state_dict()]
