"""The schema of a study whose rows come from a ``torch.utils.data.Dataset`` of one's own. No torch.

A plug-in takes one of the four classes below as it is, or derives its own with further settings and defaults.
"""

from typing import Annotated

from pydantic import Field

from fl_algorithms.settings.targets import ClassTarget, LabelsTarget, NumberTarget, OrdinalTarget, SurvivalTarget
from wardround.records.schema import Strict

Side = Annotated[int, Field(ge=1, le=1_000_000)]


class DatasetSettings(Strict):
    """What [task] says of the rows' x.

    Attributes:
        shape: of each row's x: (features,), or (channels, height, width), as the network takes it.
        cache_mib: rows that fit into this are read once and kept; others are read again in each epoch.
    """

    shape: tuple[Side, ...] = Field(min_length=1, max_length=4)
    cache_mib: int = Field(default=1024, ge=0, le=2**20)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one row as a network is fed it."""
        return self.shape


class ClassDatasetSettings(DatasetSettings, ClassTarget):
    """Each row's y is the index of its class."""


class OrdinalDatasetSettings(DatasetSettings, OrdinalTarget):
    """Each row's y is the index of its class, and the classes have an order."""


class NumberDatasetSettings(DatasetSettings, NumberTarget):
    """Each row's y is a number."""


class LabelsDatasetSettings(DatasetSettings, LabelsTarget):
    """Each row's y has 0 or 1 for each label."""


class SurvivalDatasetSettings(DatasetSettings, SurvivalTarget):
    """Each row's y is a time above 0, and 1 if the event happened then, 0 if the patient was seen no longer."""
