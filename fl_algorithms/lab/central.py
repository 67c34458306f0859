"""Central: the sites' tables pooled into one, the yardstick that no federation is allowed."""

from pathlib import Path
from typing import Literal

from fl_algorithms.lab.federation import Outcome, Progress
from fl_algorithms.tasks.base import Task
from wardround.study import StudyFile

Normalisation = Literal["matched", "site"]


def run_central(
    study: StudyFile,
    task: Task,
    folder: Path,
    normalisation: Normalisation = "matched",
    progress: Progress | None = None,
    *,
    site: str = "central",
) -> Outcome:
    """Train the study's network on the pooled tables of ``folder/SITE/train.csv`` with its [training] and rounds.

    The outcome's ``checkpoints`` have each of the study's sites, with the one model's scores on that site's test rows;
    its ``sessions`` have the pool alone, as ``site``.

    Args:
        normalisation: "matched": test rows on the pool's scale; "site": on the site's own, as FENDA-FL's authors did.
        site: names the pool's random streams.
    """
    raise NotImplementedError
