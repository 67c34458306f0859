"""FedFomo's server aggregator: it keeps each site's model, averages none, and sends some sites' models to others.

For each site it sums what the others' models were worth to it, the affinities P. A site downloads, beside its own
model, those of the M sites of the highest P, each pick being drawn at random instead with a chance that falls from
round to round; of all others where there are no more than M. The client is ``fl_algorithms.methods.fedfomo.client``.

Zhang, Sapra, Fidler, Yeung, Alvarez, Personalized Federated Learning with First Order Model Optimization, ICLR 2021,
section 3.2. https://arxiv.org/abs/2012.08565
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.methods.fedfomo import FedFomoSettings
from fl_algorithms.server.aggregator import F64, BlockSource, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import MODEL, TensorSpec

AFFINITY, WEIGHTS = "affinity", "weights"  # a site sends affinity/weights (N,); a sum of these for each site is kept
PEERS = "peers"  # peers/J (1,): which of the study's sites the model in bundle peer_J is, by position


def peer(place: int) -> str:
    """The bundle of a downloaded model, from 0 to M - 1."""
    return f"peer_{place}"


def fedfomo(settings: FedFomoSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """Every site's model, number and affinities are kept; they begin alike."""
    sites = study.study.sites
    model = [spec for spec in upload if spec.bundle == MODEL]
    peers = min(settings.peers, len(sites) - 1)
    rows: list[tuple[Kept, str, str]] = []  # what is kept, the site that moves it, by which tensor of its update
    for position, site in enumerate(sites):
        rows.append((Kept(TensorSpec(str(position), "F32", (1,), "numbers"), value=float(position)), site, ""))
        affinity = TensorSpec(str(position), "F32", (len(sites),), AFFINITY)
        rows.append((Kept(affinity), site, f"{AFFINITY}/{WEIGHTS}"))
        rows += [(Kept(_in(f"site_{position}", spec), spec.key), site, spec.key) for spec in model]
    download = list(model)
    for place in range(peers):
        download += [TensorSpec(str(place), "F32", (1,), PEERS), *(_in(peer(place), spec) for spec in model)]

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        own = sites.index(site)
        affinities = kept.block(f"{AFFINITY}/{own}", 0, len(sites))
        chance = settings.explore - settings.explore_decay * (round_number - 1)
        rng = np.random.default_rng(stream_seed(study.study.seed, site, round_number, "peers"))
        sources = [f"site_{own}/{spec.name}" for spec in model]
        for position in choose_peers(affinities, own, peers, chance, rng):
            sources += [f"numbers/{position}", *(f"site_{position}/{spec.name}" for spec in model)]
        return tuple(sources)

    def aggregate(round_: Round) -> None:
        sent = {update.site: update.deltas for update in round_.updates}

        def new(key: str, site: str, moved_by: str, start: int, count: int) -> F64:
            old = round_.kept.block(key, start, count).astype(np.float64)
            return old + sent[site].block(moved_by, start, count) if moved_by and site in sent else old

        for kept, site, moved_by in rows:
            write_tensor(kept.spec, partial(new, kept.spec.key, site, moved_by), round_.sink)

    return ServerAggregator(upload, tuple(kept for kept, _, _ in rows), tuple(download), aggregate, chosen)


def choose_peers(
    affinities: NDArray[np.float32], own: int, peers: int, chance: float, rng: np.random.Generator
) -> list[int]:
    """Positions of ``peers`` other sites, ascending: the next best or, with ``chance``, any. Ties are drawn."""
    others = [int(position) for position in rng.permutation(len(affinities)) if position != own]
    if peers == len(others):
        return sorted(others)
    others.sort(key=lambda position: -affinities[position])
    picked = []
    for _ in range(peers):
        place = int(rng.integers(len(others))) if rng.random() < chance else 0
        picked.append(others.pop(place))
    return sorted(picked)


def _in(bundle: str, spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, spec.shape, bundle)
