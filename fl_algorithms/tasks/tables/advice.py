"""What a hospital is told of its tables at its own terminal: one sentence for each thing, whatever its columns."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fl_algorithms.tasks.findings import Finding, listed, rows_of
from fl_algorithms.tasks.tables.encoding import Preprocessing
from fl_algorithms.tasks.tables.rows import Rows


def about_rows(rows: Rows) -> Iterator[str]:
    """What became of the rows that were read."""
    if rows.dropped:
        yield f"{rows.path.name}: {rows.dropped} of {rows.dropped + len(rows.y)} rows dropped for missing values"
    yield from sentences(rows.notes)


def about_columns(rows: Rows, fitted: Preprocessing) -> Iterator[str]:
    """Columns that tell nothing."""
    empty = [name for name, cells in rows.values.items() if np.isnan(cells).all()]
    same = [name for name, std in zip(fitted.columns, fitted.std, strict=True) if std == 0 and name not in empty]
    if empty:
        tell = "has no value in any row; it tells" if len(empty) == 1 else "have no value in any row; they tell"
        yield f"{rows.path.name}: {listed(empty)} {tell} nothing here"
    if same:
        tell = "is the same in every row, so it is" if len(same) == 1 else "are the same in every row, so they are"
        yield f"{rows.path.name}: {listed(same)} {tell} 0 for the model, in the test table too"


def sentences(findings: Iterable[Finding]) -> Iterator[str]:
    """A sentence for each file and thing, with all of its columns."""
    groups: dict[tuple[Path, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.path, finding.what), []).append(finding)
    for (path, what), group in groups.items():
        columns = [finding.column for finding in group if finding.column]
        counts = sum(finding.rows or 0 for finding in group)
        yield f"{path.name}: {listed(columns)}: {what} ({rows_of(counts)})" if columns else f"{path.name}: {what}"
