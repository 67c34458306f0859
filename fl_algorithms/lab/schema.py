"""A first schema of a table: of each column its kind, its categories or plausible range, and what stands for missing.

The draft goes into a study file that other hospitals read, so nothing of a single row is in it: a category is named
that enough rows have, a range is coarse, and of what looks like an identifier or free text only the column's name.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from fl_algorithms.settings.drafting import DraftColumn, plausible
from fl_algorithms.settings.tabular import Missing
from fl_algorithms.settings.targets import level
from fl_algorithms.tasks.tables.draft import SENTINEL
from fl_algorithms.tasks.tables.reading import NO, YES, date_of, number_of
from fl_algorithms.tasks.tables.summary import Disclosure, coarse_range, counts_off, spread
from fl_algorithms.tasks.tables.table import NUMBER, header_of, read_table
from wardround.errors import BadData

MOST_CODES = 30  # more different texts are hardly categories
FEW_NUMBERS = 5  # so many different whole numbers may be codes
NUMBERS = 0.9  # of the cells that make a column one of numbers
DIGITS = 3


def drafted(path: Path, least: int) -> tuple[list[DraftColumn], list[str]]:
    """Each column of a table, and what its number columns have that is no number and may stand for a missing value.

    Args:
        least: how many rows a category, and an end of a range, must have to be named.

    Raises:
        BadData: the file is no table, its first line does not name the columns, or a name stands twice.
    """
    header = header_of(path)
    if any(NUMBER.fullmatch(cell) for cell in header):
        raise BadData(f"{path}: the first line holds numbers; it must name the columns")
    if unnamed := header.count(""):
        raise BadData(f"{path}: the first line has {unnamed} cells without a name")
    table = read_table(path, header)
    tokens: dict[str, None] = {}
    columns = [_column(name, cells, least, tokens) for name, cells in table.columns.items()]
    return columns, list(tokens)


def _column(name: str, cells: list[str], least: int, tokens: dict[str, None]) -> DraftColumn:
    blanks = Missing().blanks
    counts = Counter(cell for cell in cells if cell.casefold() not in blanks)
    known = sum(counts.values())
    lacking = known < len(cells)
    if not known:
        return DraftColumn(name, "", note="it has no value")
    numbers = {cell: number for cell in counts if not isinstance(number := number_of(cell), str)}
    share = sum(counts[cell] for cell in numbers) / known
    if {level(cell).casefold() for cell in counts} <= YES | NO and len(counts) > 1:
        words = sorted({level(cell) for cell in counts}, key=lambda word: (word.casefold() in YES, word))
        note = _missing(lacking, known, len(cells))
        return DraftColumn(name, "boolean", tuple(words), has_missing=lacking, note=note)
    if share >= NUMBERS:
        texts = [cell for cell in counts if cell not in numbers]
        tokens.update(dict.fromkeys(text for text in texts if counts[text] >= least))
        return _of_numbers(name, counts, numbers, len(cells), least)
    if all(date_of(cell) is not None for cell in counts):
        return DraftColumn(name, "date", note="a date: until which other date, as `until`?", has_missing=lacking)
    levels = Counter[str]()
    for cell, count in counts.items():
        levels[level(cell)] += count
    named = sorted(text for text, count in levels.items() if count >= least)
    if len(levels) > MOST_CODES or len(named) < 2:
        return DraftColumn(name, "", note=f"{len(levels)} different texts: free text, or an identifier?")
    rare = len(levels) - len(named)
    other = next(text for text in ("other", "other_", "any other") if text not in named) if rare else ""
    note = _missing(lacking, known, len(cells))
    if rare:
        note = f"{note}; " * bool(note) + f"`{other}` is for {rare} texts of fewer than {least} rows each"
    return DraftColumn(
        name, "categorical", (*named, other) if other else tuple(named), other, has_missing=lacking, note=note
    )


def _of_numbers(
    name: str, counts: Counter[str], numbers: dict[str, float], rows: int, least: int
) -> DraftColumn:  # fmt: skip
    values = np.array([number for cell, number in numbers.items() for _ in range(counts[cell])])
    each = np.arange(len(values))
    lacking = len(values) < rows
    if counts_off(values):
        return DraftColumn(name, "", note="almost every row has another whole number: an identifier?")
    few = sorted(set(values.tolist()))
    if len(few) <= FEW_NUMBERS and all(number == int(number) for number in few):
        codes = tuple(str(int(number)) for number in few if (values == number).sum() >= least)
        if len(codes) >= 2:
            return DraftColumn(name, "categorical", codes, has_missing=lacking, note="codes, or a number?")
    notes = [_missing(lacking, len(values), rows)] if lacking else []
    coded = sorted({cell for cell in numbers if SENTINEL.fullmatch(cell) and counts[cell] >= least}, key=float)
    suspects = [cell for cell in coded if numbers[cell] in (few[0], few[-1])]
    notes += [f"does {cell} stand for a missing value?" for cell in suspects]
    kept = values[~np.isin(values, [numbers[cell] for cell in suspects])]
    seen = spread(kept, each[: len(kept)], Disclosure(least, DIGITS))
    ends = None if seen is None else coarse_range(kept, each[: len(kept)], seen[1], least)
    low, high = (None, None) if ends is None else plausible(*ends)
    return DraftColumn(name, low=low, high=high, has_missing=lacking, note="; ".join(["unit?", *notes]))


def _missing(lacking: bool, known: int, rows: int) -> str:
    return f"about {max(1, round(100 * (rows - known) / rows))} % missing" if lacking else ""
