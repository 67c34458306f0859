"""FedAvg: train locally, average the networks by number of samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. https://arxiv.org/abs/1602.05629
"""

from fl_algorithms.engine.algorithm import Algorithm
from fl_algorithms.methods.settings import MeanSettings


def fedavg(settings: MeanSettings) -> Algorithm:
    """Every hook's default: the whole network is shared, one phase, the task's loss."""
    return Algorithm()
