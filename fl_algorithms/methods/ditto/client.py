"""Ditto: FedAvg, and beside it at each site a private network that is pulled to the global one. The private one counts.

Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.
https://arxiv.org/abs/2012.04221
"""

from torch import Tensor

from fl_algorithms.engine.algorithm import (
    Algorithm,
    Context,
    Share,
    beginning_as_shared,
    loss_of_slot,
    one_slot,
    study_network,
)
from fl_algorithms.engine.training import Batch, Phase
from fl_algorithms.methods.ditto import DittoSettings
from fl_algorithms.methods.fedprox.client import proximal_term
from wardround.tensors.manifests import MODEL

PERSONAL = "personal"


def ditto(settings: DittoSettings) -> Algorithm:
    """v <- v - eta (grad L(v) + lambda (v - theta)), theta as downloaded; then FedAvg's own steps from theta.

    v begins as the first model that the site receives. The global steps draw FedAvg's streams: whatever lambda is, what
    leaves is FedAvg's, bit for bit.
    """
    own_loss = loss_of_slot(PERSONAL)

    def pulled_loss(context: Context, batch: Batch) -> Tensor:
        pull = proximal_term(context.networks[PERSONAL], context.base[MODEL], settings.lam)
        return own_loss(context, batch) + pull

    def phases(context: Context) -> tuple[Phase, ...]:
        loss = own_loss if settings.lam == 0 else pulled_loss
        return (
            Phase(PERSONAL, (f"{PERSONAL}/*",), optimizer=PERSONAL, loss=loss),
            Phase(trainable=(f"{MODEL}/*",), loss=loss_of_slot(MODEL)),
        )

    slots = {MODEL: study_network, PERSONAL: study_network}
    return Algorithm(
        slots=slots,
        shares=(Share(),),
        receive=beginning_as_shared(PERSONAL),
        phases=phases,
        infer=one_slot(PERSONAL),
    )
