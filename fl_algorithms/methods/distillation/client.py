"""What the methods that exchange predictions on the study's public data set share at a site.

The rows of round r are drawn by every site from the stream (seed, "", r, "common"), so no index travels. What leaves in
round r are predictions of the trained network on the rows of round r + 1; what comes in round r + 1 is made of these.
The first download holds zeros, made of nobody's predictions: in round 1 there is nothing to distil.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor

from fl_algorithms.engine.algorithm import Context, Uplink, compute_logits
from fl_algorithms.engine.training import Batch, Networks, Phase
from fl_algorithms.methods.distillation import DistillationSettings
from fl_algorithms.methods.fedmd.server import PREDICTIONS
from fl_algorithms.methods.settings import Amount
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Classifies, Inputs, Split
from fl_algorithms.tasks.selection import chosen
from wardround.tensors.manifests import TensorSpec

LOGITS, PROBABILITIES = "logits", "probabilities"
BEGUN = "begun"  # note: this site has taken part in a round


def rows_of_round(study: SiteStudy, round_number: int) -> Tensor:
    """The places in the public data set of the rows of a round, ascending: int64 (subset,)."""
    assert study.public_data is not None
    rows, subset = study.public_data.rows, _settings(study).subset
    if subset is None:
        return torch.arange(rows)
    seed = stream_seed(study.study.seed, "", round_number, "common")
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:subset].sort().values


def public_inputs(context: Context, round_number: int) -> Inputs:
    """The rows of a round."""
    x = context.public_data.x
    return chosen(Split(x, torch.arange(len(x))), rows_of_round(context.study, round_number)).x


def class_logits(logits: Tensor) -> Tensor:
    """(n, classes): of a single logit those of both classes, the first's being 0."""
    return logits if logits.shape[1] > 1 else torch.cat((torch.zeros_like(logits), logits), dim=1)


def scores(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    """``Algorithm.extras``: the network's outputs for each row of a round."""
    classes = _classes(study)
    return (_spec(study, LOGITS, 1 if classes == 2 else classes),)


def class_probabilities(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    """``Algorithm.extras``: the probability of each class for each row of a round."""
    return (_spec(study, PROBABILITIES, _classes(study)),)


def send_scores(context: Context) -> Uplink:
    """h8: what ``scores`` announces."""
    return {PREDICTIONS: {LOGITS: _next_logits(context).contiguous()}}


def send_probabilities(temperature: float) -> Callable[[Context], Uplink]:
    """h8: what ``class_probabilities`` announces, softmax(logits / temperature)."""

    def to_send(context: Context) -> Uplink:
        assert isinstance(context.task, Classifies)  # as resolving has found
        found = context.task.probabilities(_next_logits(context) / temperature)
        return {PREDICTIONS: {PROBABILITIES: found.to(torch.float32).contiguous()}}

    return to_send


def distil(context: Context, loss: Callable[[Context, Batch], Tensor]) -> tuple[Phase, ...]:
    """h3: learn from what came, on the rows that it is of; nothing in round 1.

    Args:
        loss: sees as a batch's ``y`` the places among the round's rows.
    """
    if context.round_number == 1:
        return ()
    settings, x = _settings(context.study), public_inputs(context, context.round_number)
    return (
        Phase(
            "distil",
            steps=settings.distil.steps,
            epochs=settings.distil.epochs,
            optimizer="distil",
            learning_rate=settings.distil_learning_rate,
            loss=loss,
            rows=(x, torch.arange(len(x))),
            batch_size=settings.distil_batch_size,
        ),
    )


def initial(context: Context, amount: Amount) -> tuple[Phase, ...]:
    """h3: the site's own rows, in the first round that the site takes part in; with the optimizer of all its rounds."""
    if not amount.is_any or context.notes.get(BEGUN):
        return ()
    return (Phase("initial", steps=amount.steps, epochs=amount.epochs),)


def remember(context: Context) -> None:
    """h7: that what comes before the first exchange is done."""
    context.notes[BEGUN] = True


def divergence(bundle: str, temperature: float) -> Callable[[Context, Batch], Tensor]:
    """h4: the mean over the rows of KL(what came || softmax(logits / temperature))."""

    def loss(context: Context, batch: Batch) -> Tensor:
        logits = class_logits(context.algorithm.infer(context.networks, batch.x))
        target = context.base[bundle][PROBABILITIES][batch.y]
        return F.kl_div(F.log_softmax(logits / temperature, dim=1), target, reduction="batchmean")

    return loss


def _next_logits(context: Context) -> Tensor:
    return compute_logits(context.algorithm, context.networks, public_inputs(context, context.round_number + 1))


def _spec(study: SiteStudy, name: str, width: int) -> TensorSpec:
    assert study.public_data is not None
    return TensorSpec(name, "F32", (_settings(study).subset or study.public_data.rows, width), PREDICTIONS)


def _classes(study: SiteStudy) -> int:
    task = study.task.settings
    return len(getattr(task, "classes"))  # noqa: B009  of a row that gives classes, as resolving has found


def _settings(study: SiteStudy) -> DistillationSettings:
    settings = study.method.settings
    assert isinstance(settings, DistillationSettings)
    return settings
