"""What can be said of a hospital's data without a study. Reads patients, so it runs in the trainer alone. No torch."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fl_algorithms.tasks.tables.table import data_digest, read_table
from site_agent.trainer.data import kinds
from site_agent.trainer.data.sources import DataSource, digest_now, weights_now
from wardround.records.schema import check

UNKNOWN = "0" * 64  # where a digest will stand


@dataclass(frozen=True)
class Inspection:
    """``columns`` is of tables alone, ``patients`` of images whose column of patients is named; ``weights`` is the
    digest of the file of weights, "" where none is named.
    """

    digest: str
    rows: int
    test_rows: int | None
    columns: int | None = None
    patients: int | None = None
    weights: str = ""


def inspect(fields: Mapping[str, Any]) -> Inspection:
    """Look at what ``fields``, the keys of a ``DataSource`` but for the digest, name.

    Raises:
        BadData: it cannot be trained on by any study; the message has file, line and column, never a value.
    """
    given = {key: value for key, value in fields.items() if value}
    named = check(DataSource, {**given, "digest": UNKNOWN}, "the data")
    weights = weights_now(named)
    if named.kind is kinds.TABLE:
        return replace(_of_table(named.paths["table"], named.paths.get("test"), named.label), weights=weights)
    from fl_algorithms.tasks.images.survey import survey

    found = survey(named.files, test=False)
    assert found is not None
    tested = survey(named.files, test=True)
    return Inspection(
        digest_now(named),
        found.images,
        None if tested is None else tested.images,
        patients=found.patients,
        weights=weights,
    )


def _of_table(table: Path, test: Path | None, label: str) -> Inspection:
    read = read_table(table, [label])
    tested = None if test is None else read_table(test, [label])
    digest = data_digest(read.sha256, None if tested is None else tested.sha256, label)
    return Inspection(digest, len(read), None if tested is None else len(tested), _width(table))


def _width(table: Path) -> int:
    """How many columns the header names; ``read_table`` has found the file to be CSV."""
    with table.open(encoding="utf-8-sig", newline="") as file:
        return len(next(row for row in csv.reader(file) if row))
