"""What a study may name. No torch: a row says where the code is, and it is imported when a study uses it."""

from fl_algorithms.rows import IMAGES, ModelRow, dataset_row
from fl_algorithms.settings.models import BODY_AND_HEAD, NetworkSettings


class BreathNetSettings(NetworkSettings):
    width: int = 8  # what [model] may say

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({BODY_AND_HEAD})


MODEL = ModelRow("breathnet", BreathNetSettings, "breaths.code:breathnet", takes=IMAGES)
TASK = dataset_row("breaths", "breaths.code:BreathTask", gives=IMAGES)
