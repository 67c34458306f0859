"""FedBABU: the federation trains the body under a head that never moves; afterwards each site fine-tunes.

Oh, Kim, Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
https://arxiv.org/abs/2106.06042

The head is the same random one at every site, so until it is fine-tuned there is one model for all.
"""

from fl_algorithms.engine.algorithm import Algorithm, Context, Share, all_but, matching, parameters_of
from fl_algorithms.engine.training import Phase
from fl_algorithms.methods.fedbabu import FedBabuSettings


def fedbabu(settings: FedBabuSettings) -> Algorithm:
    """FedAvg of the body; no optimizer is given the head, so no weight decay or momentum moves it."""
    body = all_but(matching(*settings.head))

    def phases(context: Context) -> tuple[Phase, ...]:
        return (Phase(trainable=parameters_of(context, body)),)

    return Algorithm(shares=(Share(names=body),), phases=phases)
