"""What each site of the lab would use in the end, where the study asks it to choose."""

from collections.abc import Mapping

from fl_algorithms.engine.partition import task_at
from fl_algorithms.engine.selection import Kept, selected
from fl_algorithms.engine.session import Checkpoint
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Task


def choice(study: ResolvedStudy, task: Task, site: str, data: SiteData, kept: Mapping[str, Checkpoint]) -> Checkpoint:
    """The selected checkpoint of ``site``, of those that it kept. On the CPU, as the trainer of a site asks models."""
    models = {kind: Kept(found.round, found.tensors) for kind, found in kept.items()}
    return selected(study.at(site), task_at(study, task, site).at(data), data, models)
