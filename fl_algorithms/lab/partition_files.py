"""One file of rows, a CSV table or an .npz of arrays, written as one folder for each site."""

import csv
import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.lab.partitioning import I64, Units, held_out
from wardround.errors import BadData, UsageProblem
from wardround.local import durable
from wardround.records.study import SITE_NAME

Made = list[tuple[str, int, int]]  # site, rows in train, rows in test
SHOWN = 12


@dataclass(frozen=True)
class Table:
    """A CSV file: its cells as they are written."""

    path: Path
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    suffix: str = ".csv"

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[str]:
        """Raises UsageProblem: there is none of that name."""
        if name not in self.header:
            raise _no_column(self.path, name, self.header)
        place = self.header.index(name)
        return [row[place].strip() for row in self.rows]

    def chosen(self, places: I64) -> bytes:
        """A file of these rows."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(self.rows[place] for place in places.tolist())
        return text.getvalue().encode()


@dataclass(frozen=True)
class Arrays:
    """An .npz file, each array with a row for each sample."""

    path: Path
    arrays: dict[str, NDArray[np.generic]]
    suffix: str = ".npz"

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def column(self, name: str) -> list[str]:
        """Raises UsageProblem: there is none of that name, or it has more than one value a row."""
        if name not in self.arrays or self.arrays[name].ndim != 1:
            raise _no_column(self.path, name, tuple(key for key, array in self.arrays.items() if array.ndim == 1))
        return [str(value) for value in self.arrays[name].tolist()]

    def chosen(self, places: I64) -> bytes:
        """A file of these rows, the same bytes each time."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in self.arrays.items():
                entry = io.BytesIO()
                np.lib.format.write_array(entry, np.ascontiguousarray(array[places]), allow_pickle=False)
                info = zipfile.ZipInfo(f"{name}.npy")  # of a fixed date
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, entry.getvalue())
        return file.getvalue()


Rows = Table | Arrays


def read(path: Path) -> Rows:
    """A CSV table with a header, or an .npz file.

    Raises:
        BadData: it cannot be read, has no row, or rows of unlike length.
    """
    found = _arrays(path) if path.suffix == ".npz" else _table(path)
    if not len(found):
        raise BadData(f"{path} has no row")
    return found


def by_column(rows: Rows, name: str) -> tuple[list[str], I64]:
    """The sites that a column names, sorted, and each row's. Their names are made lower case, with - between words.

    Raises:
        UsageProblem: there is no such column.
        BadData: a value of it gives no name of a site, or two give the same.
    """
    written = rows.column(name)
    sites: dict[str, str] = {}
    for number, word in enumerate(written, start=1):
        if word in sites:
            continue
        site = re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")
        if not SITE_NAME.fullmatch(site):
            raise BadData(f"{rows.path}: row {number} has nothing in `{name}` that a site could be called")
        if site in sites.values():
            raise BadData(f"{rows.path}: two values of `{name}` both give the site `{site}`")
        sites[word] = site
    names = sorted(sites.values())
    return names, np.array([names.index(sites[word]) for word in written], dtype=np.int64)


def write(
    rows: Rows, units: Units, sites: Sequence[str], place: I64, out: Path, *, test_fraction: float, seed: int
) -> Made:
    """A folder for each site with its train file, and its test file where it has test rows; rows keep their order.

    Raises:
        BadData: a site would have no row to train with.
        CannotWrite: ``out`` cannot be written.
    """
    made: Made = []
    for number, site in enumerate(sites):
        mine = np.flatnonzero(place == number)
        test = held_out(units, mine, test_fraction, seed=seed, site=site)
        if test.all():
            raise BadData(f"site `{site}` would have no row to train with", hint="a smaller `--test-fraction`")
        durable.make_folder(out / site)
        durable.write_file(out / site / f"train{rows.suffix}", rows.chosen(mine[~test]))
        if test.any():
            durable.write_file(out / site / f"test{rows.suffix}", rows.chosen(mine[test]))
        made.append((site, int((~test).sum()), int(test.sum())))
    return made


def _table(path: Path) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [tuple(row) for row in csv.reader(file, strict=True) if row] or [()]
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise BadData(f"{path}: not a CSV table in UTF-8", hint="a CSV file with a header, or an .npz file") from None
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise BadData(f"{path}: line {number} has {len(row)} cells, the header has {len(header)}")
    return Table(path, header, tuple(rows))


def _arrays(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise BadData(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (ValueError, zipfile.BadZipFile, EOFError):
        raise BadData(f"{path}: not an .npz file of plain arrays") from None
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"`{name}` {length}" for name, length in list(lengths.items())[:SHOWN])
        raise BadData(f"{path}: its arrays have unlike numbers of rows: {shown or 'there is none'}")
    return Arrays(path, arrays)


def _no_column(path: Path, name: str, known: Sequence[str]) -> UsageProblem:
    return UsageProblem(f"{path} has no column `{name[:60]}`", hint=f"there are: {', '.join(known[:SHOWN]) or 'none'}")
