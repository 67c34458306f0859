"""LC-Fed's server aggregator: the mean of the sites' bodies, each counted once; every head is kept and sent to all.

A site that did not answer keeps the head that it had. The client is ``fl_algorithms.methods.lcfed.client``.

Wang, Jin, Wang, Personalizing Federated Medical Image Segmentation via Local Calibration, ECCV 2022.
https://arxiv.org/abs/2207.04655
"""

from functools import partial

import numpy as np

from fl_algorithms.methods.lcfed import LcFedSettings
from fl_algorithms.server.aggregator import F64, BlockSource, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import TensorSpec

HEAD = "head"  # bundle: this site's own
HEADS = "heads"  # bundle: heads/I.NAME is the head's NAME of the study's site number I


def lcfed(settings: LcFedSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """The body is kept once, a head once for each site; without calibration no head leaves a site."""
    sites = study.study.sites
    body = tuple(spec for spec in upload if spec.bundle != HEAD)
    head = tuple(spec for spec in upload if spec.bundle == HEAD)
    of_sites = [Kept(of_site(position, spec), spec.key) for position in range(len(sites)) for spec in head]
    keeps = (*(Kept(spec, spec.key) for spec in body), *of_sites)
    download = (*upload, *(kept.spec for kept in of_sites))

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        own = sites.index(site)
        return tuple(of_site(own, spec).key if spec.bundle == HEAD else spec.key for spec in download)

    def aggregate(round_: Round) -> None:
        sent = {update.site: update.deltas for update in round_.updates}

        def mean(spec: TensorSpec, start: int, count: int) -> F64:
            base = round_.kept.block(spec.key, start, count)
            return round_.uniform_delta(spec.key, start, count) + base

        def trained(position: int, spec: TensorSpec, start: int, count: int) -> F64:
            old = round_.kept.block(of_site(position, spec).key, start, count).astype(np.float64)
            deltas = sent.get(sites[position])
            return old if deltas is None else old + deltas.block(spec.key, start, count)

        for spec in body:
            write_tensor(spec, partial(mean, spec), round_.sink)
        for position in range(len(sites)):
            for spec in head:
                write_tensor(of_site(position, spec), partial(trained, position, spec), round_.sink)

    return ServerAggregator(upload, keeps, download, aggregate, chosen)


def of_site(position: int, spec: TensorSpec) -> TensorSpec:
    """The tensor ``spec`` of the head of one of the study's sites."""
    return TensorSpec(f"{position}.{spec.name}", spec.dtype, spec.shape, HEADS)
