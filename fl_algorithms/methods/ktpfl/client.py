"""KT-pFL: each site learns from a mixture of all sites' softened predictions that is made for it alone.

Before its first exchange a site trains on its own patients alone (``initial``). In a round it fits softmax(logits / T)
to its mixture (Kullback-Leibler, mean over the rows), trains on its own patients, and sends softmax(logits / T) of the
next round's rows. ``server`` makes the mixtures.

Zhang, Guo, Ma, Wang, Xu, Wu, Parameterized Knowledge Transfer for Personalized Federated Learning, NeurIPS 2021.
https://arxiv.org/abs/2111.02625
"""

from fl_algorithms.engine.algorithm import Algorithm, nothing
from fl_algorithms.engine.training import Phase
from fl_algorithms.methods.distillation.client import (
    class_probabilities,
    distil,
    divergence,
    initial,
    remember,
    send_probabilities,
)
from fl_algorithms.methods.ktpfl import KtPflSettings
from fl_algorithms.methods.ktpfl.server import MIXTURE


def ktpfl(settings: KtPflSettings) -> Algorithm:
    """A private network, and its softened probabilities."""
    loss = divergence(MIXTURE, settings.temperature)
    return Algorithm(
        shares=(),
        extras=class_probabilities,
        receive=nothing,
        phases=lambda context: (*initial(context, settings.initial), *distil(context, loss), Phase()),
        after_round=remember,
        to_send=send_probabilities(settings.temperature),
    )
