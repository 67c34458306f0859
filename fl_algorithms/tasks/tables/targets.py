"""What is to be predicted, read from a table's columns. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import (
    MultilabelSettings,
    OrdinalSettings,
    RegressionSettings,
    SurvivalSettings,
    TableSettings,
    TabularSettings,
)
from fl_algorithms.settings.targets import level
from fl_algorithms.tasks.findings import DoesNotFit, Finding, collected, refuse
from fl_algorithms.tasks.tables.reading import number_of
from fl_algorithms.tasks.tables.table import Table
from wardround.errors import BadData

Y = NDArray[Any]
LARGEST = 1e30  # float32 has no room for the square of more


class Target(Protocol):
    """What is to be learned of a table's rows."""

    def read(self, table: Table) -> Y:
        """What ``Split.y`` holds, of each row.

        Raises:
            DoesNotFit: a cell is not what it must be.
        """

    def strata(self, y: Y) -> list[int] | None:
        """What each row is, for parts of like shares; None where the study asks for none."""


def target_of(settings: TableSettings) -> Target:
    """What the settings of a table's task say is to be learned."""
    if isinstance(settings, TabularSettings | OrdinalSettings):
        return ClassColumn(settings)
    if isinstance(settings, RegressionSettings):
        return NumberColumn(settings)
    if isinstance(settings, MultilabelSettings):
        return LabelColumns(settings)
    assert isinstance(settings, SurvivalSettings)
    return TimeAndEvent(settings)


def names_at_site(settings: TableSettings, label: str) -> dict[str, str]:
    """The study's columns of targets -> what a site calls each that names ``label`` as its label; "" is the same.

    Raises:
        BadData: the study reads several, and the label is none of them.
    """
    targets = settings.targets
    if len(targets) == 1:
        return {targets[0]: label}
    if label and label not in targets:
        raise BadData(
            f"this site's label is `{label}`, the study predicts {len(targets)} columns: {', '.join(targets[:12])}",
            hint="name one of them as the label; a mapping gives other columns these names",
        )
    return dict.fromkeys(targets, "")


def words_of(settings: TableSettings, target: str) -> tuple[str, ...]:
    """What may stand in a column of targets; () where it holds numbers."""
    times = isinstance(settings, SurvivalSettings) and target == settings.time
    return () if times else settings.target_levels


@dataclass(frozen=True)
class ClassColumn:
    """int64 (n,): the index of the class."""

    settings: TabularSettings | OrdinalSettings

    def read(self, table: Table) -> Y:
        return classes_of(table, self.settings.label, self.settings.classes)

    def strata(self, y: Y) -> list[int] | None:
        return y.tolist() if self.settings.stratified else None


@dataclass(frozen=True)
class NumberColumn:
    """float32 (n,): the number."""

    settings: RegressionSettings

    def read(self, table: Table) -> Y:
        low = -LARGEST if self.settings.lowest is None else self.settings.lowest
        high = LARGEST if self.settings.highest is None else self.settings.highest
        found = numbers_of(table, self.settings.label)
        if outside := np.flatnonzero(~((low <= found) & (found <= high))).tolist():
            what = f"not from {low:g} to {high:g}, which is what the study predicts"
            hint = "another unit is converted by a mapping, and a code such as -9 is made a missing value by it"
            raise DoesNotFit([table.finding(self.settings.label, what, outside, hint)])
        return found.astype(np.float32)

    def strata(self, y: Y) -> list[int] | None:
        return None


@dataclass(frozen=True)
class LabelColumns:
    """float32 (n, labels): 1 where it is there, 0 where not."""

    settings: MultilabelSettings

    def read(self, table: Table) -> Y:
        levels, found = self.settings.target_levels, list[Finding]()
        columns = [
            collected(lambda name=name: classes_of(table, name, levels), found)  # type: ignore[misc]
            for name in self.settings.labels
        ]
        refuse(found)
        return np.stack([column for column in columns if column is not None], axis=1).astype(np.float32)

    def strata(self, y: Y) -> list[int] | None:
        return None


@dataclass(frozen=True)
class TimeAndEvent:
    """float32 (n, 2): the time, and 1 where the event happened then."""

    settings: SurvivalSettings

    def read(self, table: Table) -> Y:
        found: list[Finding] = []
        times = collected(lambda: self._times(table), found)
        events = collected(lambda: classes_of(table, self.settings.event, self.settings.target_levels), found)
        refuse(found)
        assert times is not None
        assert events is not None
        return np.stack([times, events], axis=1).astype(np.float32)

    def _times(self, table: Table) -> Y:
        times = numbers_of(table, self.settings.time)
        if early := np.flatnonzero(~((times > 0) & (times <= LARGEST))).tolist():
            what = "a time of 0 or below, and time counts from the first moment of observation"
            hint = "leave out rows whose event came before it; the same day may be entered as half a day"
            raise DoesNotFit([table.finding(self.settings.time, what, early, hint)])
        return times

    def strata(self, y: Y) -> list[int] | None:
        return y[:, 1].astype(int).tolist() if self.settings.stratified else None


def classes_of(table: Table, label: str, classes: Sequence[str]) -> NDArray[np.int64]:
    """The index of each row's class: (n,).

    Raises:
        DoesNotFit: a cell is none of the classes.
    """
    place = {level(text): place for place, text in enumerate(classes)}
    meaning = {cell: place.get(level(cell)) for cell in set(table.columns[label])}
    found = [meaning[cell] for cell in table.columns[label]]
    if unknown := [row for row, index in enumerate(found) if index is None]:
        hint = f"the classes are: {', '.join(classes)}"
        raise DoesNotFit([table.finding(label, "no class of the study", unknown, hint)])
    return np.array(found, dtype=np.int64)


def numbers_of(table: Table, column: str) -> NDArray[np.float64]:
    """The numbers of a column of targets, in which no value is missing: (n,).

    Raises:
        DoesNotFit: a cell is no number.
    """
    cells = table.columns[column]
    meaning = {cell: number_of(cell) for cell in set(cells)}
    faults: dict[str, list[int]] = {}
    for row, cell in enumerate(cells):
        if isinstance(fault := meaning[cell], str):
            faults.setdefault(fault, []).append(row)
    refuse(table.finding(column, fault, rows) for fault, rows in faults.items())
    return np.array([meaning[cell] for cell in cells], dtype=np.float64)
