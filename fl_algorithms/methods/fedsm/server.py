"""FedSM's server aggregator: weighted means of global networks and selectors; SoftPull of the personal networks.

    theta_i <- lambda theta_i + (1 - lambda) / (N - 1) sum_{j != i} theta_j

The selector's Adam moments are averaged as it is. Each site's personal network is kept, and all of them are sent to
every site. A site that did not answer has its last one pulled. The client is ``fl_algorithms.methods.fedsm.client``.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu, Closing the Generalization Gap of Cross-silo Federated
Medical Image Segmentation, CVPR 2022. https://arxiv.org/abs/2203.10144
"""

from functools import partial

import numpy as np

from fl_algorithms.methods.fedsm import FedSmSettings
from fl_algorithms.server.aggregator import F64, BlockSource, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import TensorSpec

PERSONAL = "personal"  # bundle: this site's own
PERSONALS = "personals"  # bundle: personals/I.NAME is the personal NAME of the study's site number I


def fedsm(settings: FedSmSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What all sites have in common is kept once, what is personal once for each site."""
    sites = study.study.sites
    common = tuple(spec for spec in upload if spec.bundle != PERSONAL)
    personal = tuple(spec for spec in upload if spec.bundle == PERSONAL)
    of_sites = [Kept(of_site(position, spec), spec.key) for position in range(len(sites)) for spec in personal]
    keeps = (*(Kept(spec, spec.key) for spec in common), *of_sites)
    download = (*upload, *(kept.spec for kept in of_sites))

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        own = sites.index(site)
        return tuple(of_site(own, spec).key if spec.bundle == PERSONAL else spec.key for spec in download)

    def aggregate(round_: Round) -> None:
        sent = {update.site: update.deltas for update in round_.updates}

        def mean(spec: TensorSpec, start: int, count: int) -> F64:
            return round_.mean_delta(spec.key, start, count) + round_.kept.block(spec.key, start, count)

        def trained(position: int, spec: TensorSpec, start: int, count: int) -> F64:
            theta = round_.kept.block(of_site(position, spec).key, start, count).astype(np.float64)
            deltas = sent.get(sites[position])
            return theta if deltas is None else theta + deltas.block(spec.key, start, count)

        def pulled(position: int, spec: TensorSpec, start: int, count: int) -> F64:
            own = trained(position, spec, start, count)
            if settings.lam == 1 or len(sites) == 1:
                return own
            others = np.zeros(count)
            for other in range(len(sites)):
                if other != position:
                    others += trained(other, spec, start, count)
            return settings.lam * own + (1 - settings.lam) / (len(sites) - 1) * others

        for spec in common:
            write_tensor(spec, partial(mean, spec), round_.sink)
        for position in range(len(sites)):
            for spec in personal:
                write_tensor(of_site(position, spec), partial(pulled, position, spec), round_.sink)

    return ServerAggregator(upload, keeps, download, aggregate, chosen, weighted=True)


def of_site(position: int, spec: TensorSpec) -> TensorSpec:
    """The tensor ``spec`` of the personal network of one of the study's sites."""
    return TensorSpec(f"{position}.{spec.name}", spec.dtype, spec.shape, PERSONALS)
