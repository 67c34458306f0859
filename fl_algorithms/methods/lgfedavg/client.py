"""LG-FedAvg: each site represents its patients in its own way, and the head on top is shared: FedPer's mirror image.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, Think Locally, Act Globally: Federated Learning with
Local and Global Representations, 2020. https://arxiv.org/abs/2001.01523

The authors' code begins with a network that FedAvg trained, and counts all sites alike; here it begins from scratch,
and sites count by their number of samples.
"""

from fl_algorithms.engine.algorithm import Algorithm, Share, matching
from fl_algorithms.methods.settings import HeadSettings


def lg_fedavg(settings: HeadSettings) -> Algorithm:
    """FedAvg of the head alone; everything is trained together."""
    return Algorithm(shares=(Share(names=matching(*settings.head)),))
