"""LC-Fed: a shared U whose channels each site chooses by its code, a private head, and a correction of its answer where
the sites' heads disagree.

A round: first the head alone, then the body alone, both with the task's loss; then the correction, on what these two
give. So that sites can see where their heads disagree, each one's head is shown to all the others; without
``calibration`` it is not. The body is averaged with equal weights.

Wang, Jin, Wang, Personalizing Federated Medical Image Segmentation via Local Calibration, ECCV 2022.
https://arxiv.org/abs/2207.04655. In the published code head and body share an epoch, of which the head takes the first
batches, so that the body of a small site never moves; here each has an amount of its own.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import (
    Algorithm,
    Builder,
    Context,
    Share,
    load_bundle,
    load_shared,
    loss_of,
    study_network,
)
from fl_algorithms.engine.training import Batch, Networks, Phase
from fl_algorithms.methods.lcfed import LcFedSettings
from fl_algorithms.methods.lcfed.server import HEAD, HEADS
from fl_algorithms.methods.settings import Amount
from fl_algorithms.models.adapters import CONVOLUTIONS
from fl_algorithms.models.lcnet import Calibration, SelectingBody
from fl_algorithms.models.unet import UnetBody
from fl_algorithms.settings.vision import UnetSettings
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Task
from wardround.tensors.manifests import MODEL

CALIBRATION = "calibration"


def lcfed(settings: LcFedSettings) -> Algorithm:
    """Slots: the shared body "model", the own "head"; and with calibration "heads" as they come and "calibration"."""
    slots: dict[str, Builder] = {MODEL: partial(body, settings), HEAD: head}
    shares: tuple[Share, ...] = (Share(),)
    if settings.calibration:
        slots |= {HEADS: heads, CALIBRATION: partial(calibration, settings)}
        shares = (*shares, Share(HEAD))

    def phases(context: Context) -> tuple[Phase, ...]:
        parts = [
            _phase("head", HEAD, settings.train_head, "head", loss),
            _phase("body", MODEL, settings.train_body, "main", loss),
        ]
        if settings.calibration:
            parts.append(_phase(CALIBRATION, CALIBRATION, settings.train_calibration, CALIBRATION, corrected_loss))
        return tuple(parts)

    def loss(context: Context, batch: Batch) -> Tensor:
        network = context.networks[MODEL]
        assert isinstance(network, SelectingBody)
        if not settings.alpha:
            return loss_of(context, context.networks[HEAD](network(batch.x)), batch)
        features, distance = network.with_distance(batch.x)
        return loss_of(context, context.networks[HEAD](features), batch) - settings.alpha * distance

    return Algorithm(
        slots=slots,
        shares=shares,
        receive=partial(receive, settings),
        phases=phases,
        loss=loss,
        infer=corrected if settings.calibration else plain,
    )


def body(settings: LcFedSettings, study: SiteStudy, task: Task) -> nn.Module:
    """That of the study's U."""
    network, sizes = study_network(study, task), study.model.settings
    found = network.get_submodule("body")
    assert isinstance(found, UnetBody)
    assert isinstance(sizes, UnetSettings)
    sites = len(study.study.sites) if settings.selection else 0
    return SelectingBody(found, sizes.widths, sites, settings.reduction)


def head(study: SiteStudy, task: Task) -> nn.Module:
    sizes = study.model.settings
    assert isinstance(sizes, UnetSettings)
    return CONVOLUTIONS[len(task.input_shape) - 1](sizes.widths[0], _outputs(task), 1)


def heads(study: SiteStudy, task: Task) -> nn.Module:
    """Every site's, in site order; nobody trains them."""
    return nn.ModuleList(head(study, task) for _ in study.study.sites).requires_grad_(False)


def calibration(settings: LcFedSettings, study: SiteStudy, task: Task) -> nn.Module:
    sizes = study.model.settings
    assert isinstance(sizes, UnetSettings)
    dimensions = len(task.input_shape) - 1
    return Calibration(sizes.widths[0], _outputs(task), dimensions, blur=settings.blur, sigma=settings.blur_sigma)


def receive(settings: LcFedSettings, context: Context) -> None:
    """h1: what is shared, every site's head, and which of them this site is."""
    load_shared(context)
    context.networks[MODEL].get_buffer("position").fill_(context.position)
    if settings.calibration:
        load_bundle(context, Share(HEADS))


def plain(networks: Networks, x: Tensor) -> Tensor:
    """h9, without calibration: the site's own head."""
    logits: Tensor = networks[HEAD](networks[MODEL](x))
    return logits


def corrected(networks: Networks, x: Tensor) -> Tensor:
    """h9: the own head's answer, corrected."""
    features = networks[MODEL](x)
    logits: Tensor = networks[CALIBRATION](features, networks[HEAD](features), other_logits(networks, features))
    return logits


def other_logits(networks: Networks, features: Tensor) -> list[Tensor]:
    """What the other sites' heads say of this site's features."""
    own = int(networks[MODEL].get_buffer("position"))
    return [other(features) for place, other in enumerate(networks[HEADS].children()) if place != own]


def corrected_loss(context: Context, batch: Batch) -> Tensor:
    """h4 of the correction alone: features and answers are as they are."""
    networks = context.networks
    with torch.no_grad():
        features = networks[MODEL](batch.x)
        own, others = networks[HEAD](features), other_logits(networks, features)
    return loss_of(context, networks[CALIBRATION](features, own, others), batch)


def _phase(
    name: str, slot: str, amount: Amount | None, optimizer: str, loss: Callable[[Context, Batch], Tensor]
) -> Phase:
    steps, epochs = (None, None) if amount is None else (amount.steps, amount.epochs)
    return Phase(name, (f"{slot}/*",), steps, epochs, optimizer, loss=loss)


def _outputs(task: Task) -> int:
    return task.outputs
