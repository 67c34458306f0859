"""What is installed: a row for each task, network and method, by one door.

Rows name their implementations as "module:attribute" and import them only when they are used, so reading the registry
needs no torch: the coordinator and every `--help` can afford it. A study chooses rows by name; it can never name a
module. ``row_of`` looks among ours first, then asks the plug-ins (``fl_algorithms.plugins``): none can take the name of
one of ours, and one that cannot be imported is met by the studies that use it alone.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fl_algorithms import architectures, methods, plugins
from fl_algorithms.plugins import Use, load
from fl_algorithms.rows import IMAGES, MASKS, MethodRow, ModelRow, TaskRow
from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.settings.tabular import (
    MultilabelSettings,
    OrdinalSettings,
    RegressionSettings,
    SurvivalSettings,
    TabularSettings,
)
from fl_algorithms.settings.targets import (
    CLASS_METRICS,
    LABEL_METRICS,
    NUMBER_METRICS,
    ORDINAL_METRICS,
    RANGES,
    SURVIVAL_METRICS,
)
from wardround.errors import BadData
from wardround.records.study import Named, StudyFile

Row = TypeVar("Row", bound=TaskRow | ModelRow | MethodRow)


def _none(name: str) -> None:
    """Of a kind that no library has."""


class Rows(dict[str, Row]):
    """Our own rows of a kind, by name; ``find`` also knows those of libraries and of plug-ins.

    Args:
        library: gives the row of a name that is a library's by its form, "timm:resnet50"; None for any other.
    """

    def __init__(
        self, kind: str, form: type[Row], own: Iterable[Row], library: Callable[[str], Row | None] = _none
    ) -> None:
        super().__init__((row.name, row) for row in own)
        self.kind = kind
        self._form, self._library = form, library

    def ours(self, name: str) -> Row | None:
        """Ours of that name, or a library's; None where a plug-in may have it."""
        return self.get(name) or self._library(name)

    def find(self, name: str) -> Row | None:
        """Ours of that name, or a plug-in's, which is imported; None where nobody has it. Raises as ``plugins.row``."""
        return self.ours(name) or plugins.row(Use(self.kind, name), self._form)

    def names(self) -> list[str]:
        """All of them. Imports no plug-in."""
        return sorted({*self, *plugins.names(self.kind)})


def _own_methods() -> Iterator[MethodRow]:
    """Those of each package in ``fl_algorithms.methods`` that has ``ROWS``."""
    for package in pkgutil.iter_modules(methods.__path__):
        if package.ispkg:
            module = importlib.import_module(f"{methods.__name__}.{package.name}")
            yield from getattr(module, "ROWS", ())


METHODS: Rows[MethodRow] = Rows("method", MethodRow, _own_methods())

MODELS: Rows[ModelRow] = Rows("model", ModelRow, architectures.ROWS.values(), architectures.library_row)

TABLES = "fl_algorithms.tasks.tables.tabular"
TABULAR = TaskRow("tabular", TabularSettings, f"{TABLES}:TabularTask", CLASS_METRICS, ranges=RANGES, classes=True)
REGRESSION = TaskRow("regression", RegressionSettings, f"{TABLES}:TableTask", NUMBER_METRICS, ranges=RANGES)
ORDINAL = TaskRow("ordinal", OrdinalSettings, f"{TABLES}:TableTask", ORDINAL_METRICS, ranges=RANGES)
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
    "segmentation", SegmentationSettings, "fl_algorithms.tasks.images.segmentation:SegmentationTask",
    ("dice", "hausdorff95"), MASKS, RANGES,
)  # fmt: skip


TASKS: Rows[TaskRow] = Rows(
    "task", TaskRow, (TABULAR, ORDINAL, REGRESSION, MULTILABEL, SURVIVAL, IMAGE_CLASSES, SEGMENTATION)
)


def row_of(rows: Rows[Row], table: Named, kind: str, source: str) -> Row:
    """The row that ``table`` names.

    Raises:
        BadData: nothing of that name is installed, or a plug-in's cannot be had: see ``plugins.row``.
    """
    row = rows.find(table.name)
    if row is None:
        hint = architectures.library_hint(table.name) if kind == "model" else ""
        raise BadData(
            f"{source}: there is no {kind} `{table.name[:60]}`", hint=hint or nearest(table.name, rows.names())
        )
    return row


def uses(study: StudyFile) -> list[Use]:
    """The rows that a study names and that are not ours. Imports nothing."""
    named = [("task", study.task), ("method", study.algorithm)]
    named += [("model", model) for model in (study.model, *study.networks.values())]
    return sorted({Use(kind, table.name) for kind, table in named if not is_ours(kind, table.name)}, key=str)


def is_ours(kind: str, name: str) -> bool:
    """Whether a name of a kind ("task", "model", "method") is taken by Wardround, so that no plug-in can have it."""
    rows: dict[str, Rows[Any]] = {"task": TASKS, "model": MODELS, "method": METHODS}
    return rows[kind].ours(name) is not None


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint after an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(names)}"


__all__ = [
    "METHODS",
    "MODELS",
    "TASKS",
    "Rows",
    "is_ours",
    "load",
    "nearest",
    "row_of",
    "uses",
]
