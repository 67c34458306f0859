"""Training alone: the same network and the same steps, and nothing is shared. The lab's yardstick, not a federation."""

from fl_algorithms.engine.algorithm import Algorithm
from fl_algorithms.methods.settings import MethodSettings


def silo(settings: MethodSettings) -> Algorithm:
    """FedAvg that shares no tensor."""
    return Algorithm(shares=())
