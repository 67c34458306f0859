"""What is to be predicted, read from a table's columns. No torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import level
from fl_algorithms.tasks.findings import DoesNotFit
from fl_algorithms.tasks.tables.table import Table


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
