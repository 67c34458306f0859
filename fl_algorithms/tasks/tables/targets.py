"""What is to be learned of a table's rows: which columns that is, and their cells as arrays. No torch."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import (
    MultilabelSettings,
    RegressionSettings,
    SurvivalSettings,
    TableSettings,
    TabularSettings,
)
from fl_algorithms.tasks.tables.encoding import classes_of, numbers_of
from fl_algorithms.tasks.tables.table import Table, where
from wardround.errors import BadData

Y = NDArray[Any]
LARGEST = 1e30  # its square has no room in float32, but no network meets it unscaled


class Target(Protocol):
    """What is to be learned."""

    def columns(self, label: str) -> tuple[str, ...]:
        """The columns of a site that calls the study's one label ``label``; "" for the study's own.

        Raises:
            BadData: the study has more than one.
        """

    def read(self, table: Table, columns: tuple[str, ...]) -> Y:
        """What ``Split.y`` holds, of each row.

        Raises:
            BadData: a cell is not what it must be; the message has its line and never its value.
        """


def target_of(settings: TableSettings) -> Target:
    """What the settings of a table's task say is to be learned."""
    if isinstance(settings, TabularSettings):
        return ClassColumn(settings)
    if isinstance(settings, RegressionSettings):
        return NumberColumn(settings)
    if isinstance(settings, MultilabelSettings):
        return LabelColumns(settings)
    assert isinstance(settings, SurvivalSettings)
    return TimeAndEvent(settings)


@dataclass(frozen=True)
class ClassColumn:
    """int64 (n,): the index of the class."""

    settings: TabularSettings

    def columns(self, label: str) -> tuple[str, ...]:
        return (label or self.settings.label,)

    def read(self, table: Table, columns: tuple[str, ...]) -> Y:
        return classes_of(table, columns[0], self.settings.classes)


@dataclass(frozen=True)
class NumberColumn:
    """float32 (n,): the number."""

    settings: RegressionSettings

    def columns(self, label: str) -> tuple[str, ...]:
        return (label or self.settings.label,)

    def read(self, table: Table, columns: tuple[str, ...]) -> Y:
        found = numbers_of(table, columns[0], self.settings.missing.blanks)
        low = -LARGEST if self.settings.lowest is None else self.settings.lowest
        high = LARGEST if self.settings.highest is None else self.settings.highest
        outside = [line for line, value in zip(table.lines, found, strict=True) if not low <= value <= high]
        if outside:
            raise BadData(
                f"{table.path}: {where(outside)}: label column `{columns[0]}` is not from {low:g} to {high:g}, which "
                "the study says it is",
                hint="look at the unit, and at codes such as -9 that stand for a missing value",
            )
        return found.astype(np.float32)


@dataclass(frozen=True)
class LabelColumns:
    """float32 (n, labels): 1 where it is there, 0 where not."""

    settings: MultilabelSettings

    def columns(self, label: str) -> tuple[str, ...]:
        return _own_names(self.settings.labels, label)

    def read(self, table: Table, columns: tuple[str, ...]) -> Y:
        levels = self.settings.target_levels
        return np.stack([classes_of(table, column, levels) for column in columns], axis=1).astype(np.float32)


@dataclass(frozen=True)
class TimeAndEvent:
    """float32 (n, 2): the time, and 1 where the event happened then."""

    settings: SurvivalSettings

    def columns(self, label: str) -> tuple[str, ...]:
        return _own_names(self.settings.targets, label)

    def read(self, table: Table, columns: tuple[str, ...]) -> Y:
        time, event = columns
        times = numbers_of(table, time, self.settings.missing.blanks)
        if early := [line for line, value in zip(table.lines, times, strict=True) if not 0 < value <= LARGEST]:
            raise BadData(
                f"{table.path}: {where(early)}: column `{time}` is 0 or below, and a time counts from the first moment "
                "of observation",
                hint="leave out rows whose event came before the observation; enter half a day for the same day",
            )
        events = classes_of(table, event, self.settings.target_levels)
        return np.stack([times, events], axis=1).astype(np.float32)


def _own_names(columns: tuple[str, ...], label: str) -> tuple[str, ...]:
    if label and label not in columns:
        raise BadData(
            f"this site calls the label `{label}`, and the study reads {len(columns)} columns: {', '.join(columns)}",
            hint="name one of these as the label, and give the columns of the table the study's names",
        )
    return columns
