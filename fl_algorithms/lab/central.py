"""Central: one model of the sites' pooled records, the yardstick that needs all records in one place.

It is a federation of one site that shares nothing: method ``silo``, with the pool as its records.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.session import Checkpoint, Restored
from fl_algorithms.lab.federation import Outcome, Progress, run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.lab.sources import find, require_tests
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import Pooling, Split, Task
from wardround.errors import BadData, UsageProblem
from wardround.records.study import Named

Normalisation = Literal["matched", "site"]
POOL = "central"


def run_central(
    study: ResolvedStudy,
    task: Task,
    folder: Path,
    normalisation: Normalisation = "matched",
    progress: Progress | None = None,
    *,
    site: str = POOL,
    device: Device = CPU,
) -> Outcome:
    """Train the study's default network on what all of ``folder/SITE`` have for training, as [training] says.

    As many rounds as the study's. The checkpoints are chosen on the pool's validation split, after each round. The
    outcome's ``checkpoints`` have each of the study's sites, with the one model's scores on that site's test rows; its
    ``sessions`` have the pool alone.

    Args:
        normalisation: "matched": test rows on the pool's scale; "site": on the site's own, as FENDA-FL's authors did.
            Where the study itself gives the scale, they are the same.
        site: names the pool, and so its random streams.

    Raises:
        BadData: the task cannot pool, or a site has nothing to test; or as ``Task.load``.
    """
    if not isinstance(task, Pooling):
        raise BadData(
            f"task `{study.task.name}` cannot pool the sites' data",
            hint='leave out the rows of kind "central"; a task offers it with `load_pooled`',
        )
    sources = find(study, folder)
    require_tests(study, folder, sources)
    own = _own_tests(study, task, folder) if normalisation == "site" else {}  # before the pool is in memory
    fraction = study.checkpoints.validation_fraction
    data, matched = task.load_pooled(sources, site=site, seed=study.study.seed, validation_fraction=fraction)
    pooled = pooled_study(study, site)
    alone = {site: replace(data, test=None)}  # its tests are judged below
    outcome = run_federation(pooled, task, alone, progress, device=device)
    kinds = outcome.checkpoints[site]
    restored = {kind: Restored(pooled.at(site), task, checkpoint.tensors, device) for kind, checkpoint in kinds.items()}
    return replace(
        outcome,
        checkpoints={
            name: {kind: _judged(kinds[kind], restored[kind], test) for kind in kinds}
            for name, test in (own or matched).items()
        },
    )


def pooled_study(study: ResolvedStudy, site: str = POOL) -> ResolvedStudy:
    """The study as ``site`` would train it with everyone's records and nobody to share with."""
    if study.study.evaluators:
        raise UsageProblem(
            f"`central` pools all sites' rows to train on them, and site `{study.study.evaluators[0]}` only evaluates",
            hint="leave `central` out, or `roles` in [study]",
        )
    file = study.at("").changed(study={"sites": (site,), "quorum": None}).file
    return resolve(file.model_copy(update={"algorithm": Named(name="silo")}), lab=True)


def _own_tests(study: ResolvedStudy, task: Task, folder: Path) -> dict[str, Split]:
    """Each site's test rows on its own scale, at the size of the default network."""
    sites = load_sites(study.at(""), task, folder)
    return {name: data.test for name, data in sites.items() if data.test is not None}


def _judged(checkpoint: Checkpoint, model: Restored, test: Split) -> Checkpoint:
    """The checkpoint with its scores on ``test``; its validation loss stays the pool's."""
    scores = model.metrics(test)
    return replace(checkpoint, score=scores[checkpoint.metric], scores=scores, split="test")
