"""FENDA-FL: a shared extractor beside a private one, and a private head on both, trained together.

Fatemi Tavakoli, Ayromlou, Emerson, et al., FENDA-FL: Personalized Federated Learning on Heterogeneous Clinical
Datasets, 2023. https://arxiv.org/abs/2309.16825
"""

from fl_algorithms.engine.algorithm import Algorithm, Share, matching
from fl_algorithms.methods.settings import MeanSettings


def fenda(settings: MeanSettings) -> Algorithm:
    """FedAvg of the shared extractor alone."""
    return Algorithm(shares=(Share(names=matching("shared_extractor.*")),))
