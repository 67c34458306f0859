"""A summary request: the columns that a coordinator's operator asks the sites about, before there is a study.

name = "icu-columns"
title = "Which of our columns could a study read?"
sites = ["charite", "st-olav"]
label = "died"                      # the one of the columns that each site's data calls its label; may be left out
columns = [
  { name = "temperature", low = 25, high = 45 },
  { name = "ward", kind = "categorical", categories = ["icu", "surgical"] },
  { name = "died", kind = "boolean" },
]
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from wardround.errors import BadData
from wardround.records.schema import Strict, check, read_toml
from wardround.records.study import SITE_NAME
from wardround.signing import canonical

MOST_COLUMNS = 200
MOST_CATEGORIES = 50  # of one column
MOST_CELLS = 1000  # categories of all columns together
MOST_BYTES = 64 * 1024  # of a request's document
MOST_OPEN = 16  # requests that a coordinator has open at a time
KINDS = ("numeric", "categorical", "boolean", "date")
NO_AND_YES = ("no", "yes")  # the categories of a boolean

Kind = Literal["numeric", "categorical", "boolean", "date"]
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def _text(value: Any) -> Any:
    """TOML's ``categories = [1, 2, 3]`` is as good as text; a boolean is not a number here."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _named(name: str) -> str:
    if not name or name != name.strip() or not name.isprintable() or len(name) > 200:
        raise ValueError(f"{name[:60]!r} is not 1 to 200 printable characters without spaces around")
    return name


class SummaryColumn(Strict):
    """One column that is asked about, as a feature of a study is written.

    Attributes:
        categories: of a categorical column; whatever else a site has is counted together, as other.
        low, high: what a number, or a time, must lie between to count as a value.
        until, unit: of a date, to which other date the time is taken: a column, or one date YYYY-MM-DD; in years or
            days.
    """

    name: str
    kind: Kind = "numeric"
    categories: tuple[Annotated[str, BeforeValidator(_text)], ...] = Field(default=(), max_length=MOST_CATEGORIES)
    low: float | None = None
    high: float | None = None
    until: str = ""
    unit: Literal["years", "days"] | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _named(name)

    @field_validator("categories")
    @classmethod
    def _categories(cls, categories: tuple[str, ...]) -> tuple[str, ...]:
        for text in categories:
            _named(text)
        if len(set(categories)) < len(categories):
            raise ValueError("a category stands twice")
        return categories

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if (self.kind == "categorical") != bool(self.categories):
            raise ValueError(f"column `{self.name}`: `categories` belong to the kind categorical, which needs them")
        if len(self.categories) == 1:
            raise ValueError(f"column `{self.name}` needs at least 2 categories, found 1")
        if (self.kind == "date") != bool(self.until):
            raise ValueError(f"column `{self.name}`: `until` belongs to the kind date, which needs it")
        if self.unit is not None and self.kind != "date":
            raise ValueError(f"column `{self.name}`: `unit` belongs to the kind date")
        if not self.is_number and (self.low is not None or self.high is not None):
            raise ValueError(f"column `{self.name}`: `low` and `high` belong to numbers and dates")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"column `{self.name}`: `low` is {self.low:g} and `high` {self.high:g}; low is the lower")
        if self.until == self.name:
            raise ValueError(f"column `{self.name}` is counted until itself")
        if self.until:
            _named(self.until)
        return self

    @property
    def is_number(self) -> bool:
        """Whether a mean and a range can be told of it."""
        return self.kind in ("numeric", "date")

    @property
    def until_column(self) -> str:
        """The column that a date is counted to; "" where there is none."""
        return "" if _DATE.fullmatch(self.until) else self.until

    @property
    def words(self) -> tuple[str, ...]:
        """What its rows are counted by; () of a number."""
        return NO_AND_YES if self.kind == "boolean" else self.categories


class SummaryRequest(Strict):
    """What the operator asks, and whom.

    Attributes:
        label: the one of ``columns`` that a site's data may have under the name that `data add --label` gave; "": none.
        missing: what is written for a missing value, compared without case.
    """

    name: str
    title: str = Field(default="", max_length=200)
    sites: tuple[str, ...] = Field(min_length=1, max_length=256)
    label: str = ""
    missing: tuple[Annotated[str, Field(max_length=40)], ...] = Field(
        default=("", "?", "NA", "N/A", "NULL"), max_length=50
    )
    columns: tuple[SummaryColumn, ...] = Field(min_length=1, max_length=MOST_COLUMNS)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not SITE_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not 1 to 64 of a-z, 0-9 and -")
        return name

    @field_validator("title")
    @classmethod
    def _title(cls, title: str) -> str:
        if not title.isprintable():
            raise ValueError("it holds a character that cannot be printed")
        return title

    @field_validator("columns", mode="before")
    @classmethod
    def _numeric_by_name(cls, columns: Any) -> Any:
        """``"age"`` alone is a numeric column."""
        if not isinstance(columns, list | tuple):
            return columns
        return [{"name": column} if isinstance(column, str) else column for column in columns]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for site in self.sites:
            if not SITE_NAME.fullmatch(site):
                raise ValueError(f"site {site[:80]!r} is not 1 to 64 of a-z, 0-9 and -")
        if twice := _repeated(self.sites):
            raise ValueError(f"site `{twice}` stands twice")
        names = [column.name for column in self.columns]
        if twice := _repeated(names):
            raise ValueError(f"column `{twice}` stands twice")
        if self.label and self.label not in names:
            raise ValueError(f"the label `{self.label[:60]}` is none of the columns")
        if sum(len(column.categories) for column in self.columns) > MOST_CELLS:
            raise ValueError(f"the columns have more than {MOST_CELLS} categories together")
        if len(canonical.dumps(self.document())) > MOST_BYTES:
            raise ValueError(f"a request is at most {MOST_BYTES} bytes: ask about fewer columns")
        return self

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that are read for it, each once."""
        ends = (column.until_column for column in self.columns if column.until_column)
        return tuple(dict.fromkeys((*(column.name for column in self.columns), *ends)))

    def document(self) -> dict[str, JsonValue]:
        """What is sent and hashed: plain JSON, numbers with a fraction as text, a column without what it does not say.

        Raises:
            BadData: a text is no Unicode.
        """
        document: dict[str, JsonValue] = canonical.with_text_floats(self.model_dump(mode="json", exclude={"columns"}))
        document["columns"] = [
            canonical.with_text_floats({"name": column.name, **column.model_dump(mode="json", exclude_defaults=True)})
            for column in self.columns
        ]
        return document

    @property
    def digest(self) -> str:
        """SHA-256 of the document (hex)."""
        return canonical.digest(self.document())

    @classmethod
    def from_document(cls, document: object, source: str = "a summary request") -> Self:
        """The request in plain JSON.

        Raises:
            BadData: it is none; the message names the key.
        """
        return check(cls, document, source)


def load(path: Path) -> SummaryRequest:
    """The request in a file (TOML).

    Raises:
        BadData: the file cannot be read, or is no request; the message names the key.
    """
    return check(SummaryRequest, read_toml(path), path.name)


def from_bytes(data: bytes) -> SummaryRequest:
    """A request as it crosses the wire.

    Raises:
        BadData: it has not its form (MESSAGE_MALFORMED).
    """
    if len(data) > MOST_BYTES:
        raise BadData("a summary request is too long", code="MESSAGE_MALFORMED")
    try:
        document = canonical.loads(data)
        request = SummaryRequest.from_document(document)
    except BadData as error:
        raise BadData(f"a summary request has not its form: {error.message}", code="MESSAGE_MALFORMED") from None
    if request.document() != document:
        raise BadData("a summary request is not written as its digest wants it", code="MESSAGE_MALFORMED")
    return request


def _repeated(names: Sequence[str]) -> str:
    return next((name for name in names if names.count(name) > 1), "")
