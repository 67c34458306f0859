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

from fl_algorithms import architectures, methods
from fl_algorithms.rows import IMAGES, MASKS, SHARE, MethodRow, ModelRow, TaskRow
from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.settings.tabular import TabularSettings
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

MODELS: Mapping[str, ModelRow] = architectures.ROWS

TABULAR = TaskRow(
    name="tabular",
    settings=TabularSettings,
    implementation="fl_algorithms.tasks.tables.tabular:TabularTask",
    metrics=("accuracy", "balanced_accuracy", "auc", "macro_f1"),
    ranges={"accuracy": SHARE, "balanced_accuracy": SHARE, "auc": SHARE, "macro_f1": SHARE},
)

IMAGE_CLASSES = TaskRow(
    name="images",
    settings=ImageSettings,
    implementation="fl_algorithms.tasks.images.classification:ImageTask",
    metrics=TABULAR.metrics,
    gives=IMAGES,
    ranges=TABULAR.ranges,
)

SEGMENTATION = TaskRow(
    name="segmentation",
    settings=SegmentationSettings,
    implementation="fl_algorithms.tasks.images.segmentation:SegmentationTask",
    metrics=("dice",),
    gives=MASKS,
    ranges={"dice": SHARE},
)


@functools.cache  # a scan of the installed distributions takes milliseconds
def tasks() -> dict[str, TaskRow]:
    """The installed tasks by name: ours, and those that other distributions bring.

    Raises:
        BadData: an entry point does not lead to a ``TaskRow`` of its name.
    """
    found = {row.name: row for row in (TABULAR, IMAGE_CLASSES, SEGMENTATION)}
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
    if table.name in rows:
        return rows[table.name]
    other: Any = architectures.library_row(table.name) if kind == "model" else None
    if other is not None:
        return other  # type: ignore[no-any-return]  # a ModelRow, as ``rows`` are
    hint = architectures.library_hint(table.name) if kind == "model" else ""
    raise BadData(f"{source}: there is no {kind} `{table.name[:60]}`", hint=hint or nearest(table.name, rows))


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint after an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(names)}"
