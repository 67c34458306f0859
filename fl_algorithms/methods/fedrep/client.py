"""FedRep: in each round first the private head on the body as downloaded, then the shared body under that head.

A head is of the body that it was trained on. So a site's best is judged right after its local steps, before the mean;
and after the last round each site fits its head once more, to the last body, as the authors' code does.

Collins, Hassani, Mokhtari, Shakkottai, Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, Algorithm 1. https://arxiv.org/abs/2102.07078
"""

from fl_algorithms.engine.algorithm import Algorithm, Context, Share, all_but, matching, parameters_of
from fl_algorithms.engine.training import Phase
from fl_algorithms.methods.fedrep import FedRepSettings


def fedrep(settings: FedRepSettings) -> Algorithm:
    """Two phases, the head's and the body's, each with an optimizer of its own; the other part stands still."""
    head = matching(*settings.head)
    body = all_but(head)
    first, then = settings.train_head, settings.train_body
    steps, epochs = (None, None) if then is None else (then.steps, then.epochs)

    def phases(context: Context) -> tuple[Phase, ...]:
        return (
            Phase("head", parameters_of(context, head), first.steps, first.epochs, optimizer="head"),
            Phase("body", parameters_of(context, body), steps, epochs),
        )

    return Algorithm(shares=(Share(names=body),), phases=phases)
