"""Central: one model of the sites' pooled tables, the yardstick that needs all records in one place.

It is a federation of one site that shares nothing: method ``silo``, with the pool as its table.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from fl_algorithms import catalog
from fl_algorithms.client.session import Checkpoint, Restored
from fl_algorithms.device import CPU, Device
from fl_algorithms.lab.federation import Outcome, Progress, load_sites, run_federation
from fl_algorithms.tasks.base import Pooling, Split, Task
from wardround.errors import BadData
from wardround.study import Named, StudyFile

Normalisation = Literal["matched", "site"]
POOL = "central"


def run_central(
    study: StudyFile,
    task: Task,
    folder: Path,
    normalisation: Normalisation = "matched",
    progress: Progress | None = None,
    *,
    site: str = POOL,
    device: Device = CPU,
) -> Outcome:
    """Train the study's network on the pooled tables of ``folder/SITE/train.csv`` with its [training] and rounds.

    The checkpoints are chosen on the pool's validation split, after each round. The outcome's ``checkpoints`` have each
    of the study's sites, with the one model's scores on that site's test rows; its ``sessions`` have the pool alone.

    Args:
        normalisation: "matched": test rows on the pool's scale; "site": on the site's own, as FENDA-FL's authors did.
        site: names the pool, and so its random streams.

    Raises:
        BadData: the task cannot pool, or a site has no test table; or as ``Task.load``.
    """
    if not isinstance(task, Pooling):
        raise BadData(
            f"task `{study.task.name}` cannot pool the sites' tables",
            hint='leave out the rows of kind "central"; a task offers it with `load_pooled`',
        )
    data, tests = task.load_pooled(
        {name: (folder / name / "train.csv", _test_table(folder, name)) for name in study.study.sites},
        str(study.task.settings.get("label", "")),
        site=site,
        seed=study.study.seed,
        validation_fraction=study.checkpoints.validation_fraction,
    )
    if normalisation == "site":
        alike = catalog.network_of(study, site="")
        own = {name: site_data.test for name, site_data in load_sites(alike, task, folder).items()}
        tests = {name: test for name, test in own.items() if test is not None}
    pooled = pooled_study(study, site)
    outcome = run_federation(pooled, task, {site: data}, progress, device=device)
    kinds = outcome.checkpoints[site]
    restored = {kind: Restored(pooled, task, checkpoint.tensors, device) for kind, checkpoint in kinds.items()}
    return replace(
        outcome,
        checkpoints={
            name: {kind: _judged(kinds[kind], restored[kind], task, test) for kind in kinds}
            for name, test in tests.items()
        },
    )


def pooled_study(study: StudyFile, site: str = POOL) -> StudyFile:
    """The study as ``site`` would train it with everyone's records and nobody to share with."""
    study = catalog.network_of(study, site="")
    section = study.study.model_copy(update={"sites": (site,), "quorum": None})
    return catalog.resolve(study.model_copy(update={"study": section, "algorithm": Named(name="silo")}), lab=True)


def _test_table(folder: Path, site: str) -> Path:
    path = folder / site / "test.csv"
    if not path.is_file():
        raise BadData(
            f"{folder} has no test table for site `{site}`: {path} does not exist",
            hint="central training is judged on each site's test rows, for its validation rows come from the pool",
        )
    return path


def _judged(checkpoint: Checkpoint, model: Restored, task: Task, test: Split) -> Checkpoint:
    """The checkpoint with its scores on ``test``; its validation loss stays the pool's."""
    scores = task.metrics(model.logits(test.x), test.y)
    return replace(checkpoint, score=scores[checkpoint.metric], scores=scores, split="test")
