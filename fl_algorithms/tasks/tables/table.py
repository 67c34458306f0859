"""A hospital's CSV file as columns of text, or a sentence that says what is wrong with it. No torch, no numpy.

What a cell means is decided in ``encoding``. No message holds a cell: it names the file, the line and the column. Nor
does one quote the header, which in a file without a header is a patient's row; it quotes the study's names.
"""

import csv
import difflib
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wardround.errors import BadData
from wardround.signing import canonical

NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
MAX_CELL_CHARACTERS = 131_072  # an unclosed quote swallows the file up to here, not into one cell of a gigabyte
SHOWN_LINES = 3


@dataclass(frozen=True)
class Table:
    """The wanted columns of a file: ``columns[name][i]`` is a stripped cell of the row that begins in ``lines[i]``."""

    path: Path
    sha256: str
    columns: dict[str, list[str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def without(self, rows: set[int]) -> "Table":
        """The table without the rows of these indices."""
        keep = [row for row in range(len(self)) if row not in rows]
        columns = {name: [cells[row] for row in keep] for name, cells in self.columns.items()}
        return Table(self.path, self.sha256, columns, [self.lines[row] for row in keep])


def where(lines: Sequence[int]) -> str:
    """ "line 7", "lines 7 and 9", "lines 7, 9, 12 and 40 more"."""
    if len(lines) == 1:
        return f"line {lines[0]}"
    shown = [str(line) for line in lines[:SHOWN_LINES]]
    if len(lines) > SHOWN_LINES:
        return f"lines {', '.join(shown)} and {len(lines) - SHOWN_LINES} more"
    return f"lines {', '.join(shown[:-1])} and {shown[-1]}"


def data_digest(table_sha256: str, test_sha256: str | None, label: str) -> str:
    """What a site's approval pins (hex): the bytes of its files and which column is the label."""
    return canonical.digest({"label": label, "table": table_sha256, "test": test_sha256})


def read_table(path: Path, wanted: Sequence[str]) -> Table:
    """Read ``path``, once, and keep the ``wanted`` columns; others are skipped.

    The format is comma-separated UTF-8 (a byte order mark is tolerated), quoted as RFC 4180 says, with a header line.
    Blank lines are skipped. The hash is of the same bytes that were parsed.

    Raises:
        BadData: the file cannot be read, is no such text, lacks a wanted column or has it twice, has a row that is
            longer or shorter than the header, or has no rows.
    """
    data = _read(path)
    text = _decode(path, data)
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
    header = [name.strip() for name in rows[0]]
    places = _find(path, header, wanted)
    ragged = [(line, row) for line, row in zip(lines[1:], rows[1:], strict=True) if len(row) != len(header)]
    if ragged:
        line, row = ragged[0]
        raise BadData(
            f"{path}: line {line} has {len(row)} cells, the header has {len(header)} ({_rows(len(ragged))} like that)"
        )
    if len(rows) == 1:
        raise BadData(f"{path}: has a header and no rows")
    columns = {name: [row[place].strip() for row in rows[1:]] for name, place in places.items()}
    return Table(path, hashlib.sha256(data).hexdigest(), columns, lines[1:])


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


def _find(path: Path, header: list[str], wanted: Sequence[str]) -> dict[str, int]:
    """Where each wanted column stands."""
    missing = [name for name in wanted if name not in header]
    if missing:
        raise BadData(
            f"{path}: no column `{missing[0]}`{_others(len(missing))}", hint=_hint(header, wanted, missing[0])
        )
    for name in wanted:
        if header.count(name) > 1:
            raise BadData(f"{path}: column `{name}` stands {header.count(name)} times in the header")
    return {name: header.index(name) for name in wanted}


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


def _others(missing: int) -> str:
    if missing == 1:
        return ""
    return f" nor {missing - 1} other{'s' if missing > 2 else ''} that {'are' if missing > 2 else 'is'} needed"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
