"""A site's tables as rows of features and targets, before any scale: read, mapped, and checked as a whole. No torch."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import TableSettings
from fl_algorithms.tasks.findings import Finding, collected, listed, refuse, rows_of
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.tables.mapping import ReadMapping, SiteMapping, load_mapping, read_mapped, unused
from fl_algorithms.tasks.tables.reading import FeatureRows, Values, read_features
from fl_algorithms.tasks.tables.table import Table, data_digest
from wardround.errors import BadData
from wardround.signing import canonical

PATIENT = "patient"  # the patient's column where a site names one and the study does not

ReadTargets: TypeAlias = Callable[[Table], NDArray[Any]]  # what is to be predicted, of each row; raises DoesNotFit


@dataclass(frozen=True)
class Rows:
    """A file's usable rows.

    Attributes:
        y: what is to be predicted, (n, ...).
        patients: who each row is; () where each is a patient.
        keys: of each row, what two rows have in common that hold the same; () where many would.
        notes: what a person should know of the file.
    """

    path: Path
    sha256: str
    values: Values
    y: NDArray[Any]
    dropped: int
    patients: tuple[str, ...]
    keys: tuple[int, ...]
    notes: tuple[Finding, ...]


@dataclass(frozen=True)
class SiteRows:
    """The rows of a site's table and of its test table, the mapping that they were read by, and their digest."""

    rows: Rows
    test: Rows | None
    digest: str
    mapping: SiteMapping | None = None

    @property
    def parts(self) -> tuple[Rows, ...]:
        """The tables that there are."""
        return (self.rows,) if self.test is None else (self.rows, self.test)


def read_site(
    source: Source, settings: TableSettings, labels: Mapping[str, str], read_targets: ReadTargets
) -> SiteRows:
    """Both tables of a site.

    Args:
        labels: the study's columns of targets -> what this site calls each; "" is the same.

    Raises:
        DoesNotFit: with all that does not fit in either.
        BadData: a file cannot be read as a table at all; or a label is also a feature.
    """
    found: list[Finding] = []
    mapping = load_mapping(source.paths["mapping"]) if "mapping" in source.paths else None
    table, test = source.path("table"), source.paths.get("test")
    rows = collected(lambda: _read(table, source, settings, labels, read_targets, mapping), found)
    tested = None
    if test is not None:
        tested = collected(lambda: _read(test, source, settings, labels, read_targets, mapping), found)
    if rows is not None and not found and settings.duplicates == "refuse":
        found += repeated(rows, tested)
    refuse(found)
    assert rows is not None
    digest = data_digest(
        rows.sha256, None if tested is None else tested.sha256, source.label or next(iter(labels)),
        patient=source.patient, mapping_sha256=None if mapping is None else mapping.sha256,
    )  # fmt: skip
    return SiteRows(rows, tested, digest, None if mapping is None else mapping.rules)


def pooled(sites: Mapping[str, SiteRows]) -> SiteRows:
    """The rows of several sites as if they were one's."""
    tests = {site: both.test for site, both in sites.items() if both.test is not None}
    rows, test = _pool({site: both.rows for site, both in sites.items()}), _pool(tests) if tests else None
    return SiteRows(rows, test, canonical.digest([both.digest for both in sites.values()]))


def repeated(rows: Rows, test: Rows | None) -> Iterator[Finding]:
    """Rows that occur more than once, within a table and in both; and patients who are in both."""
    hint = "leave them out of the file"
    if test is not None and test.sha256 == rows.sha256:
        what = "the test table is the training table, so its scores will be too good"
        yield Finding(test.path, "", what, hint="hold other patients out, or name no test table")
        return
    for part in (rows, test):
        if part is None:
            continue
        again = len(part.keys) - len(set(zip(part.keys, part.patients or part.keys, strict=False)))
        if again:
            what = f"{rows_of(again)} {_are(again)} the same as another in all that the study reads"
            yield Finding(part.path, "", what, hint=hint, count=again)
    if test is None:
        return
    if both := len(set(rows.patients) & set(test.patients)):
        what = f"{both} patient{'s' if both > 1 else ''} {_are(both)} in the training table too"
        yield Finding(test.path, "", what, hint="a patient's rows are all for training or all for testing", count=both)
    known = set(rows.keys)
    if copied := sum(key in known for key in test.keys):
        what = f"{rows_of(copied)} {_are(copied)} in the training table too, so scores will be too good"
        yield Finding(test.path, "", what, hint=hint, count=copied)


def _read(
    path: Path,
    source: Source,
    settings: TableSettings,
    labels: Mapping[str, str],
    read_targets: ReadTargets,
    mapping: ReadMapping | None,
) -> Rows:
    patient = settings.patient or (PATIENT if source.patient else "")
    wanted = {**dict.fromkeys(settings.read, ""), **labels, **({patient: source.patient} if patient else {})}
    table = read_mapped(path, wanted, None if mapping is None else mapping.rules)
    _refuse_leak(table, settings, labels)
    beside = [*labels, *([patient] if patient else [])]
    read = read_features(table, settings, beside)
    found = list(read.findings)
    unread = {finding.column for finding in found}
    readable = all(label in table.columns and label not in unread for label in labels)
    y = collected(lambda: read_targets(read.table), found) if readable else None
    refuse(found)
    assert y is not None
    notes = list(read.notes)
    if mapping is not None and (idle := unused(mapping.rules, list(wanted))):
        notes.append(Finding(path, "", f"the mapping has columns that this study does not: {listed(idle)}"))
    columns = read.table.columns
    who = tuple(columns[patient]) if patient else ()
    keys = _keys(read, [*settings.read, *labels], [f.name for f in settings.features if f.is_number])
    return Rows(path, table.sha256, read.values, y, read.dropped, who, keys, tuple(notes))


def _refuse_leak(table: Table, settings: TableSettings, labels: Mapping[str, str]) -> None:
    """Raises BadData: what is to be predicted is among the features, under another name."""
    features = {table.here.get(name, name) for name in settings.read}
    for label in labels:
        own = table.here.get(label, label)
        if own in features:
            raise BadData(f"{table.path}: `{own}` is named as the label, but the study uses it as a feature")


def _keys(read: FeatureRows, names: Sequence[str], numbers: Sequence[str]) -> tuple[int, ...]:
    """Of each row the hash of its cells; of one without any number, which many may be like, one of its own."""
    table = read.table
    if not numbers:
        return ()
    known = ~np.all([np.isnan(read.values[name]) for name in numbers], axis=0)
    cells = zip(*(table.columns[name] for name in names), strict=True)
    return tuple(
        hash(row) if telling else hash((str(table.path), line))
        for row, line, telling in zip(cells, table.lines, known.tolist(), strict=True)
    )


def _pool(parts: Mapping[str, Rows]) -> Rows:
    """The rows of several sites' files after one another, called by the folder that holds them all.

    A patient is known by site and name: the same name at two sites is two people.
    """
    tables = list(parts.values())
    named = all(part.patients for part in tables)
    return Rows(
        Path(os.path.commonpath([part.path for part in tables])),
        canonical.digest([part.sha256 for part in tables]),
        {name: np.concatenate([part.values[name] for part in tables]) for name in tables[0].values},
        np.concatenate([part.y for part in tables]),
        sum(part.dropped for part in tables),
        tuple(f"{site}/{who}" for site, part in parts.items() for who in part.patients) if named else (),
        tuple(key for part in tables for key in part.keys),
        tuple(note for part in tables for note in part.notes),
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
