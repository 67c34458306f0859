"""One run of a study, with one seed: the data read, the federation, and what is kept of it.

What `fl-lab run` does for each seed, in this process or in a worker's. Importing this needs no torch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.participation import EVERYONE, Participation
from fl_algorithms.lab.run_folder import FORMAT, SeedFolder, refuse_other
from fl_algorithms.study import ResolvedStudy

if TYPE_CHECKING:
    from torch import Tensor

    from fl_algorithms.engine.session import Checkpoint
    from fl_algorithms.engine.weights import OwnWeights
    from fl_algorithms.lab.federation import Outcome
    from fl_algorithms.tasks.base import SiteData, Task

Progress = Callable[[float, int], None]


@dataclass(frozen=True)
class Request:
    """A run to be made.

    Attributes:
        study: resolved, with the run's seed.
        folder: one folder for each site.
        weights: the shared tensors start from these.
        keep: where it is kept, and goes on from; None: nowhere.
        private_weights: so do each site's own tensors, from these.
        like: versions and data of the other seeds' runs, which this one must have.
    """

    study: ResolvedStudy
    folder: Path
    hardware: Hardware = field(default_factory=Hardware)
    weights: Path | None = None
    participation: Participation = EVERYONE
    keep: Path | None = None
    like: Mapping[str, Any] = field(default_factory=dict)
    private_weights: Path | None = None

    @property
    def seed(self) -> int:
        return self.study.study.seed


@dataclass(frozen=True)
class SeedResult:
    """A run that was made.

    Attributes:
        record: what result.json has, plain JSON.
        curves: empty where they are in a folder.
        models: site -> kind -> a safetensors file's bytes; {} where they are in a folder.
        shared: the shared model, alike; b"" where nothing is shared.
    """

    record: dict[str, Any]
    curves: Curves = field(default_factory=Curves)
    models: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    shared: bytes = b""


def run_seed(request: Request, progress: Progress | None = None) -> SeedResult:
    """Read the sites' data and make the run, from where it was if it is kept somewhere.

    Raises:
        BadData: as ``load_sites`` and ``run_federation``; or what is kept there was made of something else.
        UsageProblem: the device is not there.
    """
    from fl_algorithms.engine.device import deterministic
    from fl_algorithms.engine.partition import task_of
    from fl_algorithms.lab.site_data import load_sites

    wall = time.perf_counter()
    with deterministic(request.study.study.threads):  # sums over the rows, too
        task = task_of(request.study)
        return run_read(request, task, load_sites(request.study, task, request.folder), progress, wall)


def run_read(
    request: Request,
    task: "Task",
    sites: "Mapping[str, SiteData]",
    progress: Progress | None = None,
    begun: float | None = None,
) -> SeedResult:
    """The same of data that is read. ``begun``: when that began, on ``time.perf_counter``."""
    from fl_algorithms.engine.device import device_for
    from fl_algorithms.engine.partition import specs_of
    from fl_algorithms.lab.federation import manifest, run_federation
    from fl_algorithms.lab.runs import versions

    wall, study = time.perf_counter() if begun is None else begun, request.study
    device = device_for(request.hardware)
    made_of: dict[str, Any] = {
        "versions": versions(device) | {"threads": str(study.study.threads)},
        "data": {site: data.digest for site, data in sites.items()},
    }
    if request.like:
        refuse_other(request.like, made_of, request.keep or request.folder)
    made_of["study"] = study.document() | {"participation": request.participation.document()}
    curves, kept = Curves(), None if request.keep is None else SeedFolder(request.keep)
    start = start_of(request)
    made_of["initial"] = manifest(start, specs_of(start)).digest()
    own = _own(request)
    if own:
        made_of["private_weights"] = next(iter(own.values())).digest
    outcome = run_federation(
        study,
        task,
        sites,
        progress,
        start,
        device,
        participation=request.participation,
        curves=curves,
        state=None if kept is None else kept.resume(made_of),
        keep=None if kept is None else lambda _, make: kept.keep(curves, made_of, make),
        own={site: weights.tensors for site, weights in own.items()},
    )
    return kept_result(request, task, outcome, sites, made_of, curves, time.perf_counter() - wall)


def kept_result(
    request: Request,
    task: "Task",
    outcome: "Outcome",
    sites: "Mapping[str, SiteData]",
    made_of: Mapping[str, Any],
    curves: Curves,
    seconds: float,
) -> SeedResult:
    """The result of a run that has ended, written into its folder if it has one."""
    record = _record(request, task, outcome, sites, made_of, seconds)
    if request.keep is None:
        return SeedResult(record, curves, *_files(outcome))
    SeedFolder(request.keep).finish(record, curves, outcome, sites)
    return SeedResult(record)


def run_together(requests: Sequence[Request], progress: Progress | None = None) -> list[SeedResult]:
    """Make the runs as one, by the batched engine; none of them goes on from where it was.

    Raises:
        BadData: as ``run_seed``; or the study is not one for the batched engine.
    """
    from fl_algorithms.engine.device import CPU
    from fl_algorithms.engine.partition import task_of
    from fl_algorithms.lab.batched import run_batched
    from fl_algorithms.lab.runs import versions
    from fl_algorithms.lab.site_data import load_sites

    wall, studies = time.perf_counter(), [request.study for request in requests]
    task = task_of(studies[0])
    data = [load_sites(request.study, task, request.folder) for request in requests]
    own = versions(CPU) | {"threads": str(studies[0].study.threads), "engine": "batched"}
    made_of = [{"versions": own, "data": {site: one.digest for site, one in sites.items()}} for sites in data]
    for request, mine in zip(requests, made_of, strict=True):
        if request.like:
            refuse_other(request.like, mine, request.keep or request.folder)
    for request in requests:
        if request.keep is not None:
            SeedFolder(request.keep).begin()
    curves = [Curves() for _ in requests]
    outcomes = run_batched(studies, task, data, progress, [start_of(request) for request in requests], curves)
    seconds = (time.perf_counter() - wall) / len(requests)
    return [
        kept_result(request, task, outcome, sites, mine, own_curves, seconds)
        for request, outcome, sites, mine, own_curves in zip(requests, outcomes, data, made_of, curves, strict=True)
    ]


def data_digests(study: ResolvedStudy, folder: Path) -> dict[str, str]:
    """Site -> digest of its data. Raises BadData: as ``load_sites``."""
    from fl_algorithms.engine.partition import task_of
    from fl_algorithms.lab.site_data import load_sites

    return {site: data.digest for site, data in load_sites(study, task_of(study), folder).items()}


def checkpoints_of(record: Mapping[str, Any]) -> "dict[str, dict[str, Checkpoint]]":
    """Site -> kind -> the checkpoint, without its tensors."""
    from fl_algorithms.lab.run_state import checkpoint_from

    return {
        site: {kind: checkpoint_from(kind, document, {}) for kind, document in kinds.items()}
        for site, kinds in record["checkpoints"].items()
    }


def start_of(request: Request) -> "dict[str, Tensor]":
    if request.weights is None:
        from fl_algorithms.engine.partition import initial_model

        return initial_model(request.study)
    from fl_algorithms.lab.weights import weighted

    return weighted(request.study, request.weights).tensors


def _own(request: Request) -> "dict[str, OwnWeights]":
    """Site -> what its private tensors begin with; {} where they are drawn."""
    if request.private_weights is None:
        return {}
    from fl_algorithms.engine.weights import own_weights

    study, path = request.study, request.private_weights
    return {site: own_weights(study.at(site), site, path) for site in study.study.sites}


def _record(
    request: Request,
    task: "Task",
    outcome: "Outcome",
    sites: "Mapping[str, SiteData]",
    made_of: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    from fl_algorithms.lab.baseline import baseline
    from fl_algorithms.lab.federation import limits_summary
    from fl_algorithms.lab.round_sums import range_summary
    from fl_algorithms.lab.run_state import card
    from fl_algorithms.lab.runs import rows_of

    return {
        "format": FORMAT,
        "seed": request.seed,
        "study_digest": request.study.digest(outcome.initial_digest),
        "initial_digest": outcome.initial_digest,
        "model_digest": outcome.digest,
        "best_round": outcome.best_round,
        "versions": made_of["versions"],
        "data": made_of["data"],
        "rows": {site: rows_of(data) for site, data in sites.items()},
        "baseline": baseline(task, sites),
        "warnings": [f"{site}: {warning}" for site, data in sites.items() for warning in data.warnings],
        "limits": limits_summary(outcome.accounts),
        "range": range_summary(request.study, outcome.accounts),
        "seconds": seconds,
        "checkpoints": {
            site: {kind: card(kinds[kind]) for kind in sorted(kinds)}
            for site, kinds in sorted(outcome.checkpoints.items())
        },
    }


def _files(outcome: "Outcome") -> tuple[dict[str, dict[str, bytes]], bytes]:
    import safetensors.torch

    models = {
        site: {kind: safetensors.torch.save(checkpoint.tensors) for kind, checkpoint in kinds.items()}
        for site, kinds in outcome.checkpoints.items()
    }
    return models, safetensors.torch.save(outcome.shared) if outcome.shared else b""
