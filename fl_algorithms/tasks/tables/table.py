"""A hospital's CSV file as columns of text, or a sentence that says what is wrong with it. No torch, no numpy.

What a cell means is decided in ``encoding``. No message holds a cell: it names the file, the line and the column. Nor
does one quote the header, which in a file without a header is a patient's row; it quotes the study's names.
"""

import csv
import difflib
import hashlib
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fl_algorithms.tasks.findings import DoesNotFit, Finding, listed, refuse, rows_of
from wardround.errors import BadData
from wardround.signing import canonical

NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
MAX_CELL_CHARACTERS = 131_072  # an unclosed quote swallows the file up to here, not into one cell of a gigabyte


@dataclass(frozen=True)
class Table:
    """The wanted columns of a file: ``columns[name][i]`` is a stripped cell of the row that begins in ``lines[i]``.

    Attributes:
        here: what this site calls a column, by the study's name, where that differs.
        absent: what is to be said of the wanted columns that the file lacks.
    """

    path: Path
    sha256: str
    columns: dict[str, list[str]]
    lines: list[int]
    here: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[Finding, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def without(self, rows: Collection[int]) -> "Table":
        """The table without the rows of these indices."""
        keep = [row for row in range(len(self)) if row not in rows]
        columns = {name: [cells[row] for row in keep] for name, cells in self.columns.items()}
        return replace(self, columns=columns, lines=[self.lines[row] for row in keep])

    def finding(self, column: str, what: str, rows: Sequence[int], hint: str = "") -> Finding:
        """What is so in the ``rows`` (indices) of a column."""
        lines = tuple(self.lines[row] for row in rows)
        return Finding(self.path, column, what, lines, hint, here=self.here.get(column, ""))


def data_digest(
    table_sha256: str, test_sha256: str | None, label: str, *, patient: str = "", mapping_sha256: str | None = None
) -> str:
    """What a site's approval pins (hex): the bytes of its files and its mapping, and which columns are whose."""
    beside = {"patient": patient, "mapping": mapping_sha256}
    given = {key: value for key, value in beside.items() if value}
    return canonical.digest({"label": label, "table": table_sha256, "test": test_sha256, **given})


def read_table(path: Path, wanted: Sequence[str]) -> Table:
    """Read ``path``, once, and keep the ``wanted`` columns; others are skipped.

    The format is comma-separated UTF-8 (a byte order mark is tolerated), quoted as RFC 4180 says, with a header line.
    Blank lines are skipped. The hash is of the same bytes that were parsed.

    Raises:
        BadData: the file cannot be read, is no such text, lacks a wanted column or has it twice, has a row that is
            longer or shorter than the header, or has no rows.
    """
    table = read_present(path, wanted)
    refuse(table.absent)
    return table


def read_present(path: Path, wanted: Sequence[str]) -> Table:
    """``read_table``, of the wanted columns that are there; ``absent`` says which are not, or stand there twice.

    Raises:
        BadData: as ``read_table``, but for that.
    """
    data = _read(path)
    lines, rows = _parse(path, _decode(path, data))
    header = [name.strip() for name in rows[0]]
    places, absent = _find(path, header, wanted)
    if not places and absent:
        raise DoesNotFit(absent)
    ragged = [(line, row) for line, row in zip(lines[1:], rows[1:], strict=True) if len(row) != len(header)]
    if ragged:
        line, row = ragged[0]
        like_that = f"({rows_of(len(ragged))} like that)"
        fault = f"line {line} has {len(row)} cells, the header has {len(header)} {like_that}"
        raise DoesNotFit([*absent, Finding(path, "", fault)])
    if len(rows) == 1:
        raise DoesNotFit([*absent, Finding(path, "", "has a header and no rows")])
    columns = {name: [row[place].strip() for row in rows[1:]] for name, place in places.items()}
    return Table(path, hashlib.sha256(data).hexdigest(), columns, lines[1:], absent=absent)


def header_of(path: Path) -> list[str]:
    """The names in the first line, whatever they are: for the hospital's own files, and for no message.

    Raises:
        BadData: as ``read_table``.
    """
    _, rows = _parse(path, _decode(path, _read(path)))
    return [name.strip() for name in rows[0]]


def _parse(path: Path, text: str) -> tuple[list[int], list[list[str]]]:
    """Each row that is not blank, the header first, and the line in which it begins."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    rows: list[list[str]] = []
    lines: list[int] = []
    begins = 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(begins)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise BadData(
            f"{path}: line {begins}: not CSV: {error}", hint='a cell with a comma or a quote is written "so, ""so"""'
        ) from None
    if not rows:
        raise BadData(f"{path}: the file is empty", hint="the first line names the columns, each other line is a row")
    return lines, rows


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise BadData(f"{path}: not a file")
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None


def _decode(path: Path, data: bytes) -> str:
    hint = "export it again as UTF-8 (in Excel: `CSV UTF-8`)"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadData(f"{path}: line {line}: not UTF-8 text", hint=hint) from None
    if "\0" in text:
        raise BadData(f"{path}: holds zero bytes, so it is not UTF-8 text", hint=hint)
    return text


def _find(path: Path, header: list[str], wanted: Sequence[str]) -> tuple[dict[str, int], tuple[Finding, ...]]:
    """Where each wanted column stands, and what is to be said of the others."""
    missing = [name for name in wanted if name not in header]
    twice = [name for name in wanted if header.count(name) > 1]
    found = [Finding(path, name, f"stands {header.count(name)} times in the header") for name in twice]
    if missing:
        hint = _hint(header, wanted, missing[0])
        found.insert(0, Finding(path, "", f"no column {listed(missing)}", hint=hint))
    return {name: header.index(name) for name in wanted if name not in (*missing, *twice)}, tuple(found)


def _hint(header: list[str], wanted: Sequence[str], name: str) -> str:
    """What may be wrong with a header that lacks ``name``; quotes it only where it is surely not a patient's row."""
    for separator, called in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and separator in header[0]:
            return f"the first line is separated by {called}; export the file with commas"
    if any(NUMBER.fullmatch(cell) for cell in header):
        return "the first line holds numbers; it must name the columns"
    for cell in header:
        if cell.casefold() == name.casefold():
            return f"did you mean `{cell}`? capitals count"
    is_header = 2 * sum(column in header for column in wanted) >= len(wanted)
    close = difflib.get_close_matches(name, header, n=1) if is_header else []
    if close:
        return f"did you mean `{close[0]}`?"
    if len(wanted) == 1:
        return f"the first line has {len(header)} columns; none is called that"
    return "the columns needed are: " + ", ".join(wanted)
