"""FedSoup: late in training, each site blends into its model the past global models that help it.

Chen, Jiang, Dou, Wang, Li, FedSoup: Improving Generalization and Personalization in Federated Learning via Selective
Model Interpolation, MICCAI 2023, Algorithm 1. https://arxiv.org/abs/2307.10507

The soup is a mean of k global models. After the local steps of a round r > E, with soup sum S = k s,

    a = (S + local) / (k + 1)          b = (S + global + local) / (k + 2)

If b is at least as good as a on the validation split, the global model joins the soup and b replaces the local model;
else a does. Parameters are interpolated; buffers stay those of the local model. The patched model is what is sent, and
what competes to be the site's best.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_algorithms.client.algorithm import Algorithm, Candidate, Context, downloaded_only
from fl_algorithms.settings.methods import FedSoupSettings
from fl_algorithms.training import Networks
from wardround.tensors import MODEL, TensorSpec

SOUP = "soup"  # prefix of the kept sums
F64 = torch.float64  # in which the mean of k models is exact to one rounding


def fedsoup(settings: FedSoupSettings) -> Algorithm:
    """FedAvg, and from round E + 1 on ``select_and_patch`` after the local steps."""
    start_after = settings.start_after
    if start_after is None:
        raise ValueError("settings of a resolved study have `start_after`")

    def after_round(context: Context) -> None:
        if context.round_number > start_after:
            select_and_patch(context)

    def candidates(context: Context, trained: bool) -> tuple[Candidate, ...]:
        if trained and context.round_number > start_after:
            return (Candidate("patched", context.networks),)
        return downloaded_only(context, trained) if context.round_number <= start_after + 1 else ()

    return Algorithm(after_round=after_round, candidates=candidates, keeps=soup_specs)


def select_and_patch(context: Context) -> None:
    """Lines 5 to 10 of Algorithm 1: the better of a and b becomes the local model. A tie counts for b."""
    parameters = dict(context.networks[MODEL].named_parameters())
    local = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    global_ = {name: context.base[MODEL][name] for name in local}
    k = context.notes.get("soup_models", 0)
    soup = {name: context.kept.get(f"{SOUP}.{name}", torch.zeros_like(local[name], dtype=F64)) for name in local}

    a = {name: ((soup[name] + local[name]) / (k + 1)).to(local[name].dtype) for name in local}
    b = {name: ((soup[name] + global_[name] + local[name]) / (k + 2)).to(local[name].dtype) for name in local}
    _load(parameters, a)
    score_a = context.headline(context.networks)
    _load(parameters, b)
    score_b = context.headline(context.networks)

    if score_a is None or score_b is None or score_b >= score_a:  # a score is undefined for both or for neither
        for name in local:
            context.kept[f"{SOUP}.{name}"] = soup[name] + global_[name]
        context.notes["soup_models"] = k + 1
    else:
        _load(parameters, a)


def soup_specs(networks: Networks) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{SOUP}.{name}", "F64", tuple(parameter.shape))
        for name, parameter in networks[MODEL].named_parameters()
    )


def _load(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
