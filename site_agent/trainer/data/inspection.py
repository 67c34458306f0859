"""What can be said of a hospital's data without a study. Reads patients, so it runs in the trainer alone. No torch."""

import csv
from collections.abc import Callable
from pathlib import Path

from fl_algorithms.tasks.tables.mapping import load_mapping
from fl_algorithms.tasks.tables.table import data_digest, read_table
from site_agent.trainer.data import layouts
from site_agent.trainer.data.sources import DataSource, digest_now, weights_now
from wardround.records.schema import check
from wardround.records.trainer import DataFiles, Inspected

UNKNOWN = "0" * 64  # where a digest will stand


def inspect(files: DataFiles, tell: Callable[[int, int], object] = lambda done, of: None) -> Inspected:
    """Read what ``files`` names.

    Args:
        tell: of images, called with how far it is: first their headers, then every byte of them.

    Raises:
        BadData: it cannot be trained on by any study; the message has file, line and column, never a value.
    """
    given = {key: value for key, value in files.model_dump().items() if value}
    named = check(DataSource, {**given, "digest": UNKNOWN}, "the data")
    weights = weights_now(named)
    if named.layout is layouts.TABLE:
        return _of_table(named, weights)
    if named.layout is layouts.OWN:
        digest = digest_now(named)  # what is in the files, only a plug-in knows
        return Inspected(digest=digest, rows=None, test_rows=None, columns=None, patients=None, weights=weights)
    from fl_algorithms.tasks.images.survey import survey

    trained = survey(named.source, test=False, tell=tell)
    assert trained is not None
    tested = survey(named.source, test=True, tell=tell)
    return Inspected(
        digest=digest_now(named, tell), rows=trained.images, test_rows=None if tested is None else tested.images,
        columns=None, patients=trained.patients, weights=weights,
        forms={name: dict(counts) for name, counts in trained.forms.items()},
    )  # fmt: skip


def _of_table(named: DataSource, weights: str) -> Inspected:
    wanted = [named.label, *([named.patient] if named.patient else [])]
    table, test = named.paths["table"], named.paths.get("test")
    read = read_table(table, wanted)
    tested = None if test is None else read_table(test, wanted)
    mapping = load_mapping(named.paths["mapping"]) if "mapping" in named.paths else None
    digest = data_digest(
        read.sha256, None if tested is None else tested.sha256, named.label,
        patient=named.patient, mapping_sha256=None if mapping is None else mapping.sha256,
    )  # fmt: skip
    return Inspected(
        digest=digest, rows=len(read), test_rows=None if tested is None else len(tested), columns=_width(table),
        patients=len(set(read.columns[named.patient])) if named.patient else None, weights=weights,
    )  # fmt: skip


def _width(table: Path) -> int:
    """How many columns the header names; ``read_table`` has read the file as CSV."""
    with table.open(encoding="utf-8-sig", newline="") as file:
        return len(next(row for row in csv.reader(file) if row))
