"""What is installed: a row for each task, network and method.

Rows name their implementations as "module:attribute" and import them only when they are used, so reading the registry
needs no torch: the coordinator and every `--help` can afford it. A study chooses rows by name; it can never name a
module. Tasks of other distributions come by the entry point ``wardround.tasks``, whose value is a ``TaskRow``.
"""

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fl_algorithms import methods
from fl_algorithms.rows import IMAGES, MASKS, MethodRow, ModelRow, TaskRow
from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.settings.models import (
    BallastSettings,
    FendaSettings,
    MlpSettings,
)
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.settings.tabular import (
    MultilabelSettings,
    RegressionSettings,
    SurvivalSettings,
    TabularSettings,
)
from fl_algorithms.settings.targets import CLASS_METRICS, LABEL_METRICS, NUMBER_METRICS, RANGES, SURVIVAL_METRICS
from fl_algorithms.settings.vision import (
    DenseNetSettings,
    MonaiUnetSettings,
    SqueezeNetSettings,
    UnetSettings,
    UShapeSettings,
    VggSettings,
    VisionSettings,
)
from wardround.errors import BadData
from wardround.records.study import Named


@functools.cache
def installed_methods() -> Mapping[str, MethodRow]:
    """The methods by name: each package in ``fl_algorithms.methods`` that has ``ROWS``."""
    rows: dict[str, MethodRow] = {}
    for package in pkgutil.iter_modules(methods.__path__):
        if package.ispkg:
            module = importlib.import_module(f"{methods.__name__}.{package.name}")
            rows |= {row.name: row for row in getattr(module, "ROWS", ())}
    return rows


METHODS = installed_methods()

MODELS: Mapping[str, ModelRow] = {
    row.name: row
    for row in (
        ModelRow("mlp", MlpSettings, "fl_algorithms.models.mlp:mlp"),
        ModelRow("fenda", FendaSettings, "fl_algorithms.models.fenda:fenda"),
        ModelRow("ballast", BallastSettings, "fl_algorithms.models.ballast:ballast"),
        *(
            ModelRow(name, settings, f"fl_algorithms.models.vision:{name}", IMAGES)
            for name, settings in (
                ("resnet10", VisionSettings),
                ("resnet18", VisionSettings),
                ("resnext", VisionSettings),
                ("seresnet", VisionSettings),
                ("efficientnet_b0", VisionSettings),
                ("mobilenet_v2", VisionSettings),
                ("shufflenet_v2", VisionSettings),
                ("densenet", DenseNetSettings),
                ("squeezenet", SqueezeNetSettings),
                ("vgg", VggSettings),
            )
        ),
        *(
            ModelRow(name, settings, f"fl_algorithms.models.unet:{name}", MASKS)
            for name, settings in (
                ("unet", UShapeSettings),
                ("resunet", UShapeSettings),
                ("unetpp", UnetSettings),
                ("fcn", UnetSettings),
            )
        ),
        ModelRow("monai_unet", MonaiUnetSettings, "fl_algorithms.models.monai_unet:monai_unet", MASKS),
    )
}

TABLES = "fl_algorithms.tasks.tables.tabular"
TABULAR = TaskRow("tabular", TabularSettings, f"{TABLES}:TabularTask", CLASS_METRICS, ranges=RANGES, classes=True)
REGRESSION = TaskRow("regression", RegressionSettings, f"{TABLES}:TableTask", NUMBER_METRICS, ranges=RANGES)
MULTILABEL = TaskRow("multilabel", MultilabelSettings, f"{TABLES}:TableTask", LABEL_METRICS, ranges=RANGES)
SURVIVAL = TaskRow("survival", SurvivalSettings, f"{TABLES}:TableTask", SURVIVAL_METRICS, ranges=RANGES)
IMAGE_CLASSES = TaskRow(
    "images",
    ImageSettings,
    "fl_algorithms.tasks.images.classification:ImageTask",
    CLASS_METRICS,
    IMAGES,
    RANGES,
    classes=True,
)
SEGMENTATION = TaskRow(
    "segmentation", SegmentationSettings, "fl_algorithms.tasks.images.segmentation:SegmentationTask", ("dice",), MASKS,
    RANGES,
)  # fmt: skip
TASKS = (TABULAR, REGRESSION, MULTILABEL, SURVIVAL, IMAGE_CLASSES, SEGMENTATION)


@functools.cache  # a scan of the installed distributions takes milliseconds
def tasks() -> dict[str, TaskRow]:
    """The installed tasks by name: ours, and those that other distributions bring.

    Raises:
        BadData: an entry point does not lead to a ``TaskRow`` of its name.
    """
    found = {row.name: row for row in TASKS}
    for entry in entry_points(group="wardround.tasks"):
        if entry.name in found:
            continue
        row = entry.load()
        if not isinstance(row, TaskRow) or row.name != entry.name:
            raise BadData(
                f"the installed task `{entry.name}` ({entry.value}) is not a TaskRow of that name",
                hint="uninstall that distribution, or ask whoever made it",
            )
        found[entry.name] = row
    return found


def load(implementation: str) -> Any:
    """What "module:attribute" of a row leads to. Never called with a name that came from outside the catalog."""
    module, _, attribute = implementation.partition(":")
    return getattr(importlib.import_module(module), attribute)


Row = TypeVar("Row", TaskRow, ModelRow, MethodRow)


def row_of(rows: Mapping[str, Row], table: Named, kind: str, source: str) -> Row:
    """The row that ``table`` names. Raises BadData: nothing of that name is installed."""
    if table.name not in rows:
        raise BadData(f"{source}: there is no {kind} `{table.name[:60]}`", hint=nearest(table.name, rows))
    return rows[table.name]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint after an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(names)}"
