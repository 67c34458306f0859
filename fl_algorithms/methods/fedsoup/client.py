"""FedSoup: late in training, each site blends into its model the past global models that help it.

Chen, Jiang, Dou, Wang, Li, FedSoup: Improving Generalization and Personalization in Federated Learning via Selective
Model Interpolation, MICCAI 2023, Algorithm 1. https://arxiv.org/abs/2307.10507

The soup is a mean of k global models. After the local steps of a round r > E, with soup sum S = k s,

    a = (S + local) / (k + 1)          b = (S + global + local) / (k + 2)

If b is at least as good as a on the validation split, the global model joins the soup and b replaces the local model;
else a does. Parameters are interpolated; buffers stay those of the local model. The patched model is what is sent, and
what competes to be the site's best.

``compat`` follows the released code (https://github.com/ubc-tea/FedSoup) where it differs and can be followed: b must
be strictly better, and souping starts one round earlier. That code also chooses on the site's test rows; here it is the
validation split in either case.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Algorithm, Candidate, Context
from fl_algorithms.engine.training import Networks, flat_key
from fl_algorithms.methods.settings import Soup
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import in_parts
from wardround.tensors.manifests import MODEL, TensorSpec

SOUP = "soup"  # prefix of the kept sums
F64 = torch.float64  # in which the mean of k models is exact to one rounding
ESTIMATION_BATCH = 64


def with_soup(algorithm: Algorithm, soup: Soup) -> Algorithm:
    """``algorithm`` with ``select_and_patch`` of its shared parameters after the local steps, from round E + 1 on.

    Over the whole network of FedAvg this is FedSoup; over FENDA's shared extractor it is a soup of that alone.
    """
    if soup.start_after is None:
        raise ValueError("settings of a resolved study have `start_after`")
    first = soup.start_after if soup.compat else soup.start_after + 1

    def after_round(context: Context) -> None:
        algorithm.after_round(context)
        if context.round_number >= first:
            select_and_patch(context, soup)

    def candidates(context: Context, trained: bool) -> tuple[Candidate, ...]:
        if trained and context.round_number >= first:
            return (Candidate("patched", context.networks),)
        return algorithm.candidates(context, trained) if context.round_number <= first else ()

    def keeps(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
        specs = [
            TensorSpec(f"{SOUP}.{name}", "F64", tuple(parameter.shape))
            for name, parameter in shared_parameters(algorithm, networks).items()
        ]
        return (*algorithm.keeps(networks, study), *specs)

    return replace(algorithm, after_round=after_round, candidates=candidates, keeps=keeps)


def select_and_patch(context: Context, soup: Soup) -> None:
    """Lines 5 to 10 of Algorithm 1: the better of a and b becomes the local model. A tie counts for b."""
    parameters = shared_parameters(context.algorithm, context.networks)
    local = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    global_ = {key: _downloaded(context, key) for key in local}
    k = context.notes.get("soup_models", 0)
    sums = {key: context.kept.get(f"{SOUP}.{key}", torch.zeros_like(local[key], dtype=F64)) for key in local}

    a = {key: ((sums[key] + local[key]) / (k + 1)).to(local[key].dtype) for key in local}
    b = {key: ((sums[key] + global_[key] + local[key]) / (k + 2)).to(local[key].dtype) for key in local}
    _load(parameters, a)
    score_a = context.headline(context.networks)
    _load(parameters, b)
    score_b = context.headline(context.networks)

    if _accepts(score_a, score_b, strict=soup.compat):
        for key in local:
            context.kept[f"{SOUP}.{key}"] = sums[key] + global_[key]
        context.notes["soup_models"] = k + 1
    else:
        _load(parameters, a)
    if soup.moments == "reset":
        context.optimizers.forget()
    if soup.statistics == "estimate":
        estimate_statistics(context)


def estimate_statistics(context: Context) -> None:
    """Take the running statistics of norm layers anew from the site's training rows, as the mean over batches.

    Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, UAI 2018, section 3.2. https://arxiv.org/abs/1803.05407
    """
    norms = [
        module
        for network in context.networks.values()
        for module in network.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over what is seen
        norm.train()
    with torch.no_grad():
        for part in in_parts(context.data.train.x, ESTIMATION_BATCH):
            if len(part) > 1 and norms:
                context.algorithm.infer(context.networks, context.device.bring(part))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def shared_parameters(algorithm: Algorithm, networks: Networks) -> dict[str, nn.Parameter]:
    """The parameters among what leaves, live; by name, those of a slot other than "model" as "SLOT..NAME"."""
    found = {}
    for share in algorithm.shares:
        own = dict(networks[share.slot].named_parameters())
        for name in share.tensors(networks):
            if name in own:
                found[name if share.slot == MODEL else flat_key(f"{share.slot}/{name}")] = own[name]
    return found


def _downloaded(context: Context, key: str) -> Tensor:
    slot, _, name = key.rpartition("..")
    return context.base[slot or MODEL][name]


def _accepts(score_a: float | None, score_b: float | None, *, strict: bool) -> bool:
    if score_a is None or score_b is None:  # a score is undefined for both or for neither
        return not strict
    return score_b > score_a if strict else score_b >= score_a


def _load(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(values[key])
