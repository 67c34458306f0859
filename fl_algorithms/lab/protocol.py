"""The evaluation protocol: what a run's checkpoints are worth away from home, after tuning, and how flat they lie."""

from collections.abc import Mapping
from typing import Any

from fl_algorithms.lab.federation import Outcome
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.tasks.base import SiteData, Task
from wardround.study import StudyFile


def measure(
    study: StudyFile, task: Task, data: Mapping[str, SiteData], outcome: Outcome, protocol: Protocol
) -> dict[str, Any]:
    """What ``protocol`` asks of one run, as plain JSON; {} where it asks nothing."""
    raise NotImplementedError
