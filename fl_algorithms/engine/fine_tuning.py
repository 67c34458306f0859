"""Fine-tuning: after the last round a site goes on alone, on a copy, with the task's plain loss and a fresh optimizer.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, Federated Evaluation of On-device Personalization, 2019.
https://arxiv.org/abs/1910.10252
"""

import copy

from torch import nn

from fl_algorithms.engine.algorithm import Context, kinds_of, loss_of
from fl_algorithms.engine.training import (
    Batches,
    Networks,
    Optimizers,
    clip_gradients,
    only_trainable,
    run_steps,
    seeded,
    trainable_parameters,
)
from fl_algorithms.methods.settings import FineTuning
from fl_algorithms.streams import stream_seed

PHASE = "fine_tuning"


def fine_tuned(context: Context, networks: Networks, tuning: FineTuning) -> dict[str, nn.Module]:
    """A tuned copy of ``networks``, in evaluation mode; nothing of ``context`` changes.

    The same networks and amount give the same bits, whatever was tuned before.
    """
    copies = {slot: copy.deepcopy(network) for slot, network in networks.items()}
    study, train = context.study, context.data.train
    kinds = kinds_of(context)
    batches = Batches(train.x, train.y, study, context.site, context.round_number, PHASE, {}, context.device, kinds)
    steps = tuning.steps if tuning.steps is not None else (tuning.epochs or 0) * batches.per_epoch
    parameters = trainable_parameters(copies, [f"*/{pattern}" for pattern in tuning.train])
    optimizer = Optimizers(study.training).get(PHASE, parameters, tuning.learning_rate)
    noise = stream_seed(study.study.seed, context.site, context.round_number, f"noise.{PHASE}")
    with seeded(noise), only_trainable(copies, parameters):
        run_steps(
            batches,
            steps,
            optimizer,
            lambda batch: loss_of(context, context.algorithm.infer(copies, batch.x), batch),
            lambda batch: clip_gradients(parameters.values(), study.training.clip_norm),
            device=context.device,
        )
    return copies
