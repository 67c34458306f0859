"""FedMD: sites agree on the mean of their scores (logits) of public rows, fit them, then train on their own patients.

Networks may differ from site to site; nothing of them leaves. Before its first exchange a site learns the public data
set's own classes (``transfer``), and then its patients' (``initial``). The fit ("digest") minimises the mean absolute
difference of the logits, as the released code does.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019, Algorithm 1.
https://arxiv.org/abs/1910.03581
"""

import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor

from fl_algorithms.engine.algorithm import Algorithm, Context, nothing
from fl_algorithms.engine.training import Batch, Phase
from fl_algorithms.methods.distillation.client import BEGUN, LOGITS, distil, initial, remember, scores, send_scores
from fl_algorithms.methods.fedmd import FedMdSettings
from fl_algorithms.methods.fedmd.server import CONSENSUS
from wardround.errors import BadData


def fedmd(settings: FedMdSettings) -> Algorithm:
    """A private network, and its scores."""

    def phases(context: Context) -> tuple[Phase, ...]:
        return (*transfer(context, settings), *initial(context, settings.initial), *distil(context, distance), Phase())

    return Algorithm(
        shares=(), extras=scores, receive=nothing, phases=phases, after_round=remember, to_send=send_scores
    )


def distance(context: Context, batch: Batch) -> Tensor:
    """h4: the mean of |logits - those agreed on|."""
    logits = context.algorithm.infer(context.networks, batch.x)
    return F.l1_loss(logits, context.base[CONSENSUS][LOGITS][batch.y])


def transfer(context: Context, settings: FedMdSettings) -> tuple[Phase, ...]:
    """h3: the public data set with its own classes, in the first round that the site takes part in."""
    amount = settings.transfer
    if not amount.is_any or context.notes.get(BEGUN):
        return ()
    x, y = context.public_data.x, context.public_data.y
    if y is None:
        raise BadData("`transfer` in [algorithm] needs the public data set's classes, which were not read")
    return (
        Phase(
            "transfer",
            steps=amount.steps,
            epochs=amount.epochs,
            optimizer="transfer",
            learning_rate=settings.distil_learning_rate,
            rows=(x, y),
            batch_size=settings.distil_batch_size,
        ),
    )
