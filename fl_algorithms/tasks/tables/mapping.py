"""A hospital's own words for a study's columns: names, codes, units, dates, and what stands for a missing value.

A mapping is a TOML file that lies at the site and never leaves it; its digest is part of the data's digest. It makes of
a table with the site's columns one with the study's, cell by cell, as text, before anything is read of it. No torch.

    missing = ["unknown", "-9999"]      # in every column
    [columns.temperature]               # the study's name
    column = "temp_f"                   # this site's; left out where it is the same
    unit = "fahrenheit -> celsius"      # or: factor = 0.5556, offset = -17.78
    [columns.sex]
    values = { m = "male", w = "female" }
    [columns.age]
    column = "birth_date"
    date = "%d.%m.%Y"
    until = "admission_date"            # a column of this site's, or one date such as "2024-06-30"
    unit = "years"
"""

import datetime
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from fl_algorithms.settings.tabular import check_column, iso_date
from fl_algorithms.settings.targets import Level, level
from fl_algorithms.tasks.findings import DoesNotFit, Finding
from fl_algorithms.tasks.tables.reading import DAYS_A_YEAR, MISSING, number_of
from fl_algorithms.tasks.tables.table import Table, read_present
from wardround.errors import BadData
from wardround.records.schema import Strict, check, parse_toml

UNITS: dict[str, tuple[float, float]] = {  # name -> factor, offset
    "fahrenheit -> celsius": (5 / 9, -160 / 9),
    "celsius -> fahrenheit": (9 / 5, 32.0),
    "kelvin -> celsius": (1.0, -273.15),
    "pounds -> kg": (0.45359237, 0.0),
    "g -> kg": (0.001, 0.0),
    "inches -> cm": (2.54, 0.0),
    "m -> cm": (100.0, 0.0),
    "months -> years": (1 / 12, 0.0),
    "days -> years": (1 / DAYS_A_YEAR, 0.0),
    "kPa -> mmHg": (7.500617, 0.0),
    "mmHg -> kPa": (1 / 7.500617, 0.0),
    "share -> percent": (100.0, 0.0),
    "percent -> share": (0.01, 0.0),
    "g/dL -> g/L": (10.0, 0.0),
    "g/L -> g/dL": (0.1, 0.0),
    "glucose mg/dL -> mmol/L": (1 / 18.016, 0.0),
    "glucose mmol/L -> mg/dL": (18.016, 0.0),
    "cholesterol mg/dL -> mmol/L": (1 / 38.67, 0.0),
    "cholesterol mmol/L -> mg/dL": (38.67, 0.0),
    "triglycerides mg/dL -> mmol/L": (1 / 88.57, 0.0),
    "triglycerides mmol/L -> mg/dL": (88.57, 0.0),
    "creatinine mg/dL -> umol/L": (88.42, 0.0),
    "creatinine umol/L -> mg/dL": (1 / 88.42, 0.0),
    "bilirubin mg/dL -> umol/L": (17.104, 0.0),
    "bilirubin umol/L -> mg/dL": (1 / 17.104, 0.0),
    "urea nitrogen mg/dL -> urea mmol/L": (0.357, 0.0),
    "calcium mg/dL -> mmol/L": (0.2495, 0.0),
    "lactate mg/dL -> mmol/L": (0.111, 0.0),
}
SPANS = ("years", "days")
_FORMAT = re.compile(r"(?:%[dmYyHMSf]|[^%A-Za-z])+")


class ColumnRule(Strict):
    """How one column of the study is made of this site's.

    Attributes:
        column: this site's name; "" is still open, None is the study's own name.
        values: code of this site -> the study's category, class, or yes and no; "" is still open. Codes that are not
            named stay as they are.
        missing: what stands for a missing value, beside the mapping's own list; "-9999" is also "-9999.0".
        decimal: what stands before the decimals.
        unit: a name of ``UNITS``; of dates with ``until``, one of ``SPANS``.
        factor, offset: the study's number is factor * this site's + offset.
        date: the form of this site's dates: %d, %m, %Y, %y, %H, %M, %S, %f, and what stands between them.
        until: makes of the date the time to this other date: a column of this site's, or one date YYYY-MM-DD.
    """

    column: str | None = None
    values: dict[str, Level] = Field(default_factory=dict)
    missing: tuple[Level, ...] = ()
    decimal: str = Field(default=".", pattern=r"^[.,]$")
    unit: str = ""
    factor: float | None = None
    offset: float | None = None
    date: str = ""
    until: str = ""

    @field_validator("column", "until")
    @classmethod
    def _column(cls, name: str | None) -> str | None:
        return check_column(name, "the column") if name else name

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.unit and self.unit not in (SPANS if self.date else UNITS):
            known = ", ".join(f"`{name}`" for name in (SPANS if self.date else UNITS))
            raise ValueError(f"there is no unit `{self.unit[:60]}`; there are: {known}; or give `factor` and `offset`")
        if self.unit and (self.factor is not None or self.offset is not None):
            raise ValueError("`unit` says what `factor` and `offset` are; give one or the other")
        if self.factor == 0:
            raise ValueError("a `factor` of 0 makes every number the same")
        if self.date and not _FORMAT.fullmatch(self.date):
            raise ValueError("`date` is made of %d, %m, %Y, %y, %H, %M, %S and %f, as in %d.%m.%Y")
        numbers = {"values": self.values, "factor": self.factor, "offset": self.offset, "decimal": self.decimal == ","}
        if self.date and (beside := [key for key, given in numbers.items() if given]):
            raise ValueError(f"`date` does not go with `{beside[0]}`")
        if self.until and not self.date:
            raise ValueError("`until` needs `date`: the form of the dates, as in %d.%m.%Y")
        if self.date and bool(self.unit) != bool(self.until):
            raise ValueError('a `date` has both or neither of `until` and `unit` ("years" or "days")')
        if len({level(code) for code in self.values}) < len(self.values):
            raise ValueError("`values` has one code twice")
        return self

    @property
    def until_column(self) -> str:
        """The column of this site's that ``until`` is; "" where there is none."""
        return self.until if iso_date(self.until) is None else ""

    @property
    def line(self) -> tuple[float, float] | None:
        """Factor and offset; None where numbers stay as they are."""
        if self.unit and not self.date:
            return UNITS[self.unit]
        if self.factor is None and self.offset is None:
            return None
        return (1.0 if self.factor is None else self.factor), (self.offset or 0.0)


class SiteMapping(Strict):
    """A site's mapping: see the module."""

    missing: tuple[Level, ...] = ()
    columns: dict[str, ColumnRule] = Field(default_factory=dict)


@dataclass(frozen=True)
class ReadMapping:
    """A mapping and the digest (hex) of the file that it was read from."""

    path: Path
    rules: SiteMapping
    sha256: str


def load_mapping(path: Path) -> ReadMapping:
    """The mapping in ``path``.

    Raises:
        BadData: it cannot be read, or is no mapping; the message has the key.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    try:
        tables = parse_toml(data)
    except BadData as error:
        raise BadData(f"{path}: {error.message}") from None
    return ReadMapping(path, check(SiteMapping, tables, path.name), hashlib.sha256(data).hexdigest())


def read_mapped(path: Path, wanted: Mapping[str, str], rules: SiteMapping | None) -> Table:
    """The ``wanted`` columns of a site's table, under the study's names and with the study's words.

    ``Table.absent`` has what is missing or still open, and cells that the mapping cannot read.

    Args:
        wanted: the study's column -> what this site calls it where no mapping says so; "" is the same.

    Raises:
        BadData: as ``read_present``.
    """
    rules = rules if rules is not None else SiteMapping()
    used = {name: rules.columns.get(name, ColumnRule()) for name in wanted}
    here = {name: rule.column or wanted[name] or name for name, rule in used.items() if rule.column != ""}
    ends = [used[name].until_column for name in here if used[name].until_column]
    to_do = [*_open(path, used), *_contradictions(path, used, wanted)]
    try:
        raw = read_present(path, list(dict.fromkeys([*here.values(), *ends])))
    except DoesNotFit as error:
        raise DoesNotFit([*error.findings, *to_do]) from None
    table = replace(
        raw, columns={}, here={name: own for name, own in here.items() if own != name}, absent=(),
    )  # fmt: skip
    found = [*raw.absent, *to_do]
    for name, own in here.items():
        rule = used[name]
        if own not in raw.columns or (rule.until_column and rule.until_column not in raw.columns):
            continue
        cells, unread = _mapped(rule, raw.columns[own], raw.columns.get(rule.until_column), rules.missing)
        table.columns[name] = cells
        if unread:
            hint = f"the mapping says that dates here are written as {rule.date}"
            found.append(table.finding(name, "no date of the mapping's form", unread, hint))
    return replace(table, absent=tuple(found))


def unused(rules: SiteMapping, known: Sequence[str]) -> list[str]:
    """The columns of a mapping that the study does not have."""
    return [name for name in rules.columns if name not in known]


def _open(path: Path, used: Mapping[str, ColumnRule]) -> list[Finding]:
    """What the hospital has not yet filled in."""
    found = [
        Finding(path, name, "still open in the mapping: this site's column", hint="fill in `column`, or delete it")
        for name, rule in used.items()
        if rule.column == ""
    ]
    for name, rule in used.items():
        if count := sum(1 for text in rule.values.values() if not text):
            what = f"still open in the mapping: {count} of {len(rule.values)} codes"
            hint = "say which of the study's words each is, or list it under `missing`"
            found.append(Finding(path, name, what, hint=hint))
    return found


def _contradictions(path: Path, used: Mapping[str, ColumnRule], wanted: Mapping[str, str]) -> list[Finding]:
    return [
        Finding(path, name, "the data and its mapping name two different columns", hint="`site-agent data list`")
        for name, rule in used.items()
        if rule.column and wanted[name] and rule.column != wanted[name]
    ]


def _mapped(
    rule: ColumnRule, cells: Sequence[str], ends: Sequence[str] | None, missing: Sequence[str]
) -> tuple[list[str], list[int]]:
    """The study's cells, and the rows whose date cannot be read."""
    blanks = {_plain(token) for token in (*missing, *rule.missing)}
    if rule.date:
        return _dates(rule, cells, ends, lambda cell: not cell or _plain(cell) in blanks)
    codes = {level(code): text for code, text in rule.values.items()}
    line = rule.line

    def read(cell: str) -> str:
        if _plain(cell) in blanks:
            return MISSING
        if codes and (text := codes.get(level(cell))) is not None:
            return text
        if rule.decimal == ",":
            cell = cell.replace(",", ".", 1)
        if line is None or isinstance(number := number_of(cell), str):
            return cell
        return repr(line[0] * number + line[1])

    meaning = {cell: read(cell) for cell in set(cells)}
    return [meaning[cell] for cell in cells], []


def _dates(
    rule: ColumnRule, cells: Sequence[str], ends: Sequence[str] | None, is_blank: Callable[[str], bool]
) -> tuple[list[str], list[int]]:
    def day(cell: str) -> datetime.date | None:
        try:
            return datetime.datetime.strptime(cell, rule.date).date()
        except ValueError:
            return None

    until = iso_date(rule.until)
    lasts = ends if ends is not None else [""] * len(cells)
    known = {cell: day(cell) for cell in {*cells, *lasts}}
    mapped: list[str] = []
    unread: list[int] = []
    for row, (cell, last) in enumerate(zip(cells, lasts, strict=True)):
        start, end = known[cell], known[last] if until is None else until
        if is_blank(cell) or (ends is not None and is_blank(last)):
            mapped.append(MISSING)
        elif start is None or (rule.until and end is None):
            mapped.append(MISSING)
            unread.append(row)
        elif end is None:
            mapped.append(start.isoformat())
        else:
            days = (end - start).days
            mapped.append(repr(float(days) if rule.unit == "days" else days / DAYS_A_YEAR))
    return mapped, unread


def _plain(cell: str) -> str:
    """A token in the form in which two are compared: "-9999.0" is "-9999"."""
    return level(cell).casefold()
