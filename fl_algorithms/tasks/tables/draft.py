"""A first mapping, drafted from a site's table: what fits as it is, what could be meant, and what a person must say.

It has this site's column names and codes in it, so it is written at the site, for the hospital alone. Where a name is
the study's but for its spelling, the draft takes it; a guess about numbers stands in a comment.
"""

import datetime
import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fl_algorithms.settings.tabular import Feature
from fl_algorithms.settings.targets import level
from fl_algorithms.tasks.source import Draft
from fl_algorithms.tasks.tables.mapping import UNITS
from fl_algorithms.tasks.tables.reading import NO, YES, date_of, number_of, range_text
from fl_algorithms.tasks.tables.table import NUMBER, Table, header_of, read_table
from wardround.errors import BadData
from wardround.records.schema import toml_bytes, toml_value

MOST_CODES = 30  # more different texts in a column are hardly codes
MOST_CHARACTERS = 60  # of one code
SHARE = 0.9  # of the numbers that a guess must bring into the study's range
FORMS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d", "%Y%m%d", "%d.%m.%y", "%Y-%m-%d %H:%M:%S")
ALIKE = 0.45  # of two names, as difflib counts, for one to be suggested for the other
SENTINEL = re.compile(r"-?(?:9{2,6}|1|8{3,6})(?:\.0*)?")


@dataclass(frozen=True)
class _Column:
    """One column's part of the draft."""

    name: str
    wants: str
    rule: dict[str, Any]
    comments: tuple[str, ...] = ()
    is_open: bool = False


def draft(
    path: Path,
    features: Sequence[Feature],
    blanks: frozenset[str],
    labels: Mapping[str, tuple[str, Sequence[str]]],
    patient: tuple[str, str] | None,
    *,
    here: Mapping[str, str] = MappingProxyType({}),
    open_ended: bool = False,
) -> Draft:
    """A mapping of the table at ``path``.

    Args:
        blanks: what is written for a missing value, case-folded.
        labels: the study's column of a target -> this site's ("" is the same), and the study's classes.
        patient: the same of the patient's column.
        here: what this site calls a feature, where that is known.
        open_ended: whether a text that is none of a feature's categories has a place all the same.

    Raises:
        BadData: the file cannot be read as a table, or its first line does not name the columns.
    """
    header = header_of(path)
    if any(NUMBER.fullmatch(cell) for cell in header):
        raise BadData(f"{path}: the first line holds numbers; it must name the columns")
    unique = [name for name in header if name and header.count(name) == 1]
    table = read_table(path, unique)
    columns = []
    for feature in features:
        own = here.get(feature.name) or _match(feature.name, unique)
        columns.append(_of_feature(table, feature, own, blanks, open_ended=open_ended))
        if feature.until_column:
            columns.append(_of_date(table, feature.until_column, _match(feature.until_column, unique), blanks))
    for name, (own, classes) in labels.items():
        columns.append(_of_codes(table, name, own or _match(name, unique), classes, "one of: ", blanks))
    if patient is not None:
        name, own = patient
        columns.append(_named(name, own or _match(name, unique), "who it is, in any code"))
    seen = {column.name: column for column in columns}
    parts = [_text(column, unique) for column in seen.values() if column.rule]
    fitting = [column.name for column in seen.values() if not column.rule]
    head = 'missing = []  # what stands for a missing value in every column here, as in ["unknown", "-9999"]\n'
    if fitting:
        head += f"\n# As they are: {', '.join(fitting)}\n"
    hints = [f"# {column.name}: {text}\n" for column in seen.values() if not column.rule for text in column.comments]
    still_open = sum(column.is_open for column in seen.values())
    return Draft("\n".join([head + "".join(hints), *parts]), len(seen), len(fitting), still_open)


def _text(column: _Column, header: Sequence[str]) -> str:
    comments = [f"# The study wants {column.wants}", *(f"# {text}" for text in column.comments)]
    if column.rule.get("column") == "":
        close = difflib.get_close_matches(
            column.name.casefold(), [name.casefold() for name in header], n=3, cutoff=0.45
        )
        likely = [name for name in header if name.casefold() in close]
        listed = ", ".join(map(toml_value, likely or header[:MOST_CODES]))
        comments.append(f"# Open: this site's column; {'perhaps' if likely else 'there are'} {listed}")
    body = toml_bytes({"columns": {column.name: column.rule}}).decode().removeprefix("[columns]\n").strip()
    return "\n".join([*comments, body]) + "\n"


def _match(name: str, header: Sequence[str]) -> str:
    """The one column of this name, or of this name but for its spelling; "" where there is none."""
    if name in header:
        return name
    alike = [cell for cell in header if _letters(cell) == _letters(name)]
    return alike[0] if len(alike) == 1 and _letters(name) else ""


def _letters(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _named(name: str, own: str, wants: str, **more: Any) -> _Column:
    """``more``: further keys of the rule."""
    rule = {**({} if own == name else {"column": own}), **more}
    return _Column(name, wants, rule, is_open=not own)


def _of_feature(table: Table, feature: Feature, own: str, blanks: frozenset[str], *, open_ended: bool) -> _Column:
    match feature.kind:
        case "categorical":
            other = feature.other or ("other" if open_ended else None)
            wants = "one of: " if other is None else f"one of (anything else is `{other}`): "
            open_ends = other is not None
            return _of_codes(table, feature.name, own, feature.categories, wants, blanks, open_ends=open_ends)
        case "boolean":
            return _of_codes(table, feature.name, own, ("yes", "no"), "yes or no: ", blanks, known=YES | NO)
        case "date":
            return _of_date(table, feature.name, own, blanks)
        case "numeric":
            return _of_number(table, feature, own, blanks)


def _of_codes(
    table: Table,
    name: str,
    own: str,
    words: Sequence[str],
    wants: str,
    blanks: frozenset[str],
    *,
    known: frozenset[str] = frozenset(),
    open_ends: bool = False,
) -> _Column:
    """``open_ends``: whether a code that is not mapped has a place all the same."""
    wants += ", ".join(map(toml_value, words)) if words else "a number"
    if not own or not words:
        return _named(name, own, wants)
    counts = Counter(cell for cell in table.columns[own] if cell.casefold() not in blanks)
    by_level = {level(word): word for word in words}
    codes = [cell for cell in counts if level(cell) not in by_level and level(cell).casefold() not in known]
    if not codes:
        return _named(name, own, wants)
    if len(codes) > MOST_CODES or any(len(code) > MOST_CHARACTERS for code in codes):
        rule = {"column": own}
        return _Column(name, wants, rule, (f"{len(codes)} different texts here are none of these: the right column?",))
    folded = {word.casefold(): word for word in words}
    values = {code: folded.get(code.casefold(), "") for code in sorted(codes)}
    if open_ends:
        values = {code: word for code, word in values.items() if word}
    comments = tuple(f"{toml_value(code)}: {counts[code]} rows" for code in values)
    more = {"values": values} if values else {}
    column = _named(name, own, wants, **more)
    return _Column(name, wants, column.rule, comments, is_open="" in values.values())


def _of_date(table: Table, name: str, own: str, blanks: frozenset[str]) -> _Column:
    wants = "a date such as 2024-01-31"
    if not own:
        return _named(name, own, wants)
    cells = {cell for cell in table.columns[own] if cell.casefold() not in blanks}
    if all(date_of(cell) is not None for cell in cells):
        return _named(name, own, wants)
    fitting = [form for form in FORMS if all(_has_form(cell, form) for cell in cells)]
    if len(fitting) == 1:
        return _named(name, own, wants, date=fitting[0])
    column = _named(name, own, wants, date=fitting[0] if fitting else FORMS[0])
    doubt = f"could also be {toml_value(fitting[1])}" if fitting else "this form does not fit all cells: say which does"
    return _Column(name, wants, column.rule, (doubt,), is_open=True)


def _has_form(cell: str, form: str) -> bool:
    try:
        datetime.datetime.strptime(cell, form)
    except ValueError:
        return False
    return True


def _of_number(table: Table, feature: Feature, own: str, blanks: frozenset[str]) -> _Column:
    wants = "a number" + (f", {range_text(feature)}" if feature.has_range else "")
    if not own:
        return _named(feature.name, own, wants)
    cells = Counter(cell for cell in table.columns[own] if cell.casefold() not in blanks)
    rule, comments = dict(_named(feature.name, own, wants).rule), []
    if any("," in cell for cell in cells) and all(_is_number(cell.replace(",", ".", 1)) for cell in cells):
        rule = {"column": own, "decimal": ","}
        cells = Counter({cell.replace(",", ".", 1): count for cell, count in cells.items()})
    texts = [cell for cell in cells if not _is_number(cell)]
    if texts and len(texts) <= MOST_CODES and all(len(text) <= MOST_CHARACTERS for text in texts):
        listed = ", ".join(map(toml_value, sorted(texts)))
        comments.append(f"no numbers: {listed}; what stands for a missing value belongs in `missing = [...]`")
    numbers = {cell: float(cell) for cell in cells if _is_number(cell)}
    outside = {cell for cell, number in numbers.items() if not _is_inside(number, feature)}
    if suspects := sorted(cell for cell in outside if SENTINEL.fullmatch(cell)):
        rows = sum(cells[cell] for cell in suspects)
        comments.append(f"perhaps `missing = [{', '.join(map(toml_value, suspects))}]`: {rows} rows outside the range")
    rest = {cell: numbers[cell] for cell in outside - set(suspects)}
    inside_as_it_is = sum(cells[cell] for cell in numbers.keys() - outside)
    whole = inside_as_it_is + sum(cells[cell] for cell in rest)
    if rest and inside_as_it_is < SHARE * whole:
        for unit, (factor, offset) in UNITS.items():
            brought = sum(
                cells[cell]
                for cell, number in numbers.items()
                if cell not in suspects and _is_inside(factor * number + offset, feature)
            )
            if brought >= SHARE * whole:
                comments.append(f'perhaps `unit = "{unit}"`: {brought} of {whole} rows would be in the range')
    if rest and not any(text.startswith("perhaps `unit") for text in comments):
        comments.append(f"{sum(cells[cell] for cell in rest)} rows are outside the range: another unit?")
    return _Column(feature.name, wants, rule, tuple(comments), is_open=not own)


def _is_number(cell: str) -> bool:
    return not isinstance(number_of(cell), str)


def _is_inside(number: float, feature: Feature) -> bool:
    low = feature.low is None or number >= feature.low
    return low and (feature.high is None or number <= feature.high)
