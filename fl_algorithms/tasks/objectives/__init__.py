"""What is learned of rows, whatever they are rows of: losses, scores, and what a model's outputs mean.

Imports torch, and no reader of files: a task is a reader and one of these. Refuses rows that teach nothing.
"""

from fl_algorithms.settings.targets import ClassTarget, LabelsTarget, NumberTarget, OrdinalTarget, SurvivalTarget
from fl_algorithms.tasks.objectives.base import Objective
from fl_algorithms.tasks.objectives.classes import ClassObjective
from fl_algorithms.tasks.objectives.labels import LabelsObjective
from fl_algorithms.tasks.objectives.numbers import NumberObjective
from fl_algorithms.tasks.objectives.ordinal import OrdinalObjective
from fl_algorithms.tasks.objectives.survival import SurvivalObjective


def objective_of(settings: object) -> Objective:
    """The objective that the settings of a task ask for. Not for settings without a target."""
    if isinstance(settings, ClassTarget):
        return ClassObjective(settings)
    if isinstance(settings, OrdinalTarget):
        return OrdinalObjective(settings)
    if isinstance(settings, LabelsTarget):
        return LabelsObjective(settings)
    if isinstance(settings, NumberTarget):
        return NumberObjective(settings)
    assert isinstance(settings, SurvivalTarget)
    return SurvivalObjective(settings)
