"""FedPer: the body is shared, the head is private, and both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated Learning with Personalization Layers, 2019.
https://arxiv.org/abs/1912.00818
"""

from fl_algorithms.engine.algorithm import Algorithm, Share, all_but, matching
from fl_algorithms.methods.settings import HeadSettings


def fedper(settings: HeadSettings) -> Algorithm:
    """FedAvg of all but the head."""
    return Algorithm(shares=(Share(names=all_but(matching(*settings.head))),))
