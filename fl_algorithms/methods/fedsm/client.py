"""FedSM: a global network, a personal one for each site, and a selector that says for each row whose it looks like.

The super model answers a row with the personal network of the site that the selector is surest of, if its probability
is above gamma; else with the global one. It can be asked about rows of any hospital, so it is what is judged.

A site trains the global and its own personal network on its task, one after the other, and the selector to say its own
number. Each site has a single class for the selector, so it would run away at each: it takes one Adam step on all rows
for each of its epochs, with moments that the coordinator averages as it does the weights.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu, Closing the Generalization Gap of Cross-silo Federated
Medical Image Segmentation, CVPR 2022. https://arxiv.org/abs/2203.10144
"""

import itertools
from functools import partial
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import (
    Algorithm,
    Context,
    Share,
    load_bundle,
    load_shared,
    loss_of_slot,
    one_slot,
    shared_deltas,
    study_network,
)
from fl_algorithms.engine.judging import evaluation_parts
from fl_algorithms.engine.training import Networks, Phase
from fl_algorithms.methods.fedsm import FedSmSettings
from fl_algorithms.methods.fedsm.server import PERSONAL, PERSONALS
from fl_algorithms.models.mlp import Mlp
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Task
from wardround.errors import BadData
from wardround.tensors.manifests import MODEL, TensorSpec

CONVOLUTIONS: dict[int, type[nn.Conv2d] | type[nn.Conv3d]] = {3: nn.Conv2d, 4: nn.Conv3d}  # by dimensions of a shape
SELECTOR, MOMENTS = "selector", ("selector_m", "selector_v")
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's own


def fedsm(settings: FedSmSettings) -> Algorithm:
    """Slots: the global network "model", the own "personal", "selector", and "personals" as they come."""

    def selector(study: SiteStudy, task: Task) -> nn.Module:
        shape, sites = task.input_shape, len(study.study.sites)
        kind = settings.selector or ("convolutional" if len(shape) > 1 else "mlp")
        if kind == "convolutional":
            return ConvolutionalSelector(shape, sites, settings.selector_widths)
        layers = Mlp(prod(shape), sites, settings.selector_hidden, dropout=0.0, norm="none")
        return layers if len(shape) == 1 else nn.Sequential(nn.Flatten(), layers)

    def personals(study: SiteStudy, task: Task) -> nn.Module:
        return nn.ModuleList(study_network(study, task) for _ in study.study.sites)

    return Algorithm(
        slots={MODEL: study_network, PERSONAL: study_network, SELECTOR: selector, PERSONALS: personals},
        shares=(Share(), Share(PERSONAL), Share(SELECTOR)),
        extras=_moments,
        receive=receive,
        phases=lambda context: (
            Phase(trainable=(f"{MODEL}/*",), loss=loss_of_slot(MODEL)),
            Phase(PERSONAL, (f"{PERSONAL}/*",), optimizer=PERSONAL, loss=loss_of_slot(PERSONAL)),
        ),
        after_round=lambda context: train_selector(context, settings),
        to_send=lambda context: {**shared_deltas(context), **context.scratch["moment_deltas"]},
        infer=one_slot(PERSONAL) if settings.answer == "personal" else partial(super_model, gamma=settings.gamma),
    )


class ConvolutionalSelector(nn.Module):
    """Convolutions that halve the sides, the mean over what is left, and a layer: logits (n, sites).

    Without norm layers and dropout, so that its gradient over all rows is the sum of its pieces'.
    """

    def __init__(self, shape: tuple[int, ...], sites: int, widths: tuple[int, ...]) -> None:
        """Raises BadData: ``shape`` is not an image's."""
        super().__init__()
        if len(shape) not in CONVOLUTIONS:
            raise BadData(
                "`selector` in [algorithm] is `convolutional`, which is for images",
                hint='leave it out, or `selector = "mlp"`',
            )
        convolution, channels = CONVOLUTIONS[len(shape)], (shape[0], *widths)
        self.body = nn.Sequential(
            *(
                layer
                for before, after in itertools.pairwise(channels)
                for layer in (convolution(before, after, 3, stride=2, padding=1), nn.ReLU())
            )
        )
        self.head = nn.Linear(channels[-1], sites)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(2).mean(dim=2))
        return logits


def receive(context: Context) -> None:
    """h1: what is shared, and every site's personal network."""
    load_shared(context)
    load_bundle(context, Share(PERSONALS))


def super_model(networks: Networks, x: Tensor, gamma: float) -> Tensor:
    """Logits (n, outputs): for each row those of personal network argmax p if max p > gamma, else the global one's."""
    probability, choice = F.softmax(networks[SELECTOR](x), dim=1).max(dim=1)
    logits: Tensor = networks[MODEL](x)
    for position, network in enumerate(networks[PERSONALS].children()):
        rows = (choice == position) & (probability > gamma)
        if rows.any():
            logits = torch.where(rows.reshape(-1, *(1 for _ in logits.shape[1:])), network(x), logits)
    return logits


def train_selector(context: Context, settings: FedSmSettings) -> None:
    """h7: for each epoch a step of Adam on the mean cross-entropy of all training rows with the site's own number."""
    parameters = dict(context.networks[SELECTOR].named_parameters())
    m, v = ({name: context.base[bundle][name].clone() for name in parameters} for bundle in MOMENTS)
    for epoch in range(1, settings.selector_epochs + 1):
        step = (context.round_number - 1) * settings.selector_epochs + epoch
        for name, gradient in selector_gradient(context).items():
            m[name] = BETA1 * m[name] + (1 - BETA1) * gradient
            v[name] = BETA2 * v[name] + (1 - BETA2) * gradient**2
            corrected = (v[name] / (1 - BETA2**step)).sqrt() + EPSILON
            rate = settings.selector_learning_rate / (1 - BETA1**step)
            parameters[name].detach().sub_(rate * m[name] / corrected)
    context.scratch["moment_deltas"] = {
        bundle: {name: (tensor - context.base[bundle][name]).contiguous() for name, tensor in moments.items()}
        for bundle, moments in zip(MOMENTS, (m, v), strict=True)
    }


def selector_gradient(context: Context) -> dict[str, Tensor]:
    """The gradient over all training rows, in pieces of bounded size."""
    selector, rows = context.networks[SELECTOR], context.data.train.x
    names = [name for name, _ in selector.named_parameters()]
    total = [torch.zeros_like(parameter) for parameter in selector.parameters()]
    for part in map(context.device.bring, evaluation_parts(rows)):
        own = torch.full((len(part),), context.position, device=part.device)
        loss = F.cross_entropy(selector(part), own, reduction="sum") / len(rows)
        parts = torch.autograd.grad(loss, list(selector.parameters()))
        total = [so_far + gradient for so_far, gradient in zip(total, parts, strict=True)]
    return dict(zip(names, total, strict=True))


def _moments(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, "F32", tuple(parameter.shape), bundle)
        for bundle in MOMENTS
        for name, parameter in networks[SELECTOR].named_parameters()
    )
