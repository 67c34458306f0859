"""DS-FL: sites exchange class probabilities of public rows; the sharpened mean is what each learns from.

A site fits its probabilities to what came (Kullback-Leibler), trains on its own patients, and predicts the next round's
rows. Its own network is what is judged; the coordinator trains none.

Itahara, Nishio, Koda, Morikura, Yamamoto, Distillation-Based Semi-Supervised Federated Learning for Communication-
Efficient Collaborative Training with Non-IID Private Data, IEEE TMC 22(1), 2023. https://arxiv.org/abs/2008.06180
"""

from fl_algorithms.engine.algorithm import Algorithm, nothing
from fl_algorithms.engine.training import Phase
from fl_algorithms.methods.distillation.client import class_probabilities, distil, divergence, send_probabilities
from fl_algorithms.methods.dsfl import DsFlSettings
from fl_algorithms.methods.fedmd.server import CONSENSUS


def dsfl(settings: DsFlSettings) -> Algorithm:
    """A private network, and its probabilities."""
    loss = divergence(CONSENSUS, temperature=1.0)
    return Algorithm(
        shares=(),
        extras=class_probabilities,
        receive=nothing,
        phases=lambda context: (*distil(context, loss), Phase()),
        to_send=send_probabilities(temperature=1.0),
    )
