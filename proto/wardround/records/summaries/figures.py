"""A site's figures for one summary request: counts and decimals in the request's order, and whether they have its form.

A count is a multiple of ``min_count``, or 0: fewer rows, or patients, than that, perhaps none. So nobody can tell a
count of 1 from none, nor find it as the difference of two others.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, ValidationError

from wardround.errors import BadData
from wardround.records.schema import Strict
from wardround.records.study import SITE_NAME
from wardround.records.summaries.request import MOST_CATEGORIES, MOST_COLUMNS, SummaryColumn, SummaryRequest

if TYPE_CHECKING:
    from wardround.v1 import summaries_pb2 as pb

LEAST_COUNT, LARGEST_COUNT = 5, 1000  # what a site may write for `min_count`
MOST_DIGITS = 4
MAX_MAGNITUDE = 1e100  # its square still has room in a float
BIG = 2**53 - 1
DECIMALS = ("mean", "std", "low", "high")
_DECIMAL = r"-?[0-9]{1,4}(\.[0-9]{1,7})?(e[+-][0-9]{2,3})?"  # of at most ``MOST_DIGITS`` significant digits

Count = Annotated[int, Field(ge=0, le=BIG, strict=True)]
Decimal = Annotated[str, Field(pattern=rf"^({_DECIMAL})?$")]  # "" where it is not told


class ColumnFigures(Strict):
    """What is told of one column.

    Attributes:
        absent: the site has no such column.
        values: rows with a value of the column's kind. ``unfit``: rows with something else.
        low, high: between these about nine in ten values lie, rounded outward.
        categories: rows of each of the request's categories; of a boolean, of no and yes.
        other: rows of any other category.
    """

    absent: bool = Field(default=False, strict=True)
    values: Count = 0
    missing: Count = 0
    unfit: Count = 0
    mean: Decimal = ""
    std: Decimal = ""
    low: Decimal = ""
    high: Decimal = ""
    categories: tuple[Count, ...] = Field(default=(), max_length=MOST_CATEGORIES)
    other: Count = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Every count of it."""
        return (self.values, self.missing, self.unfit, *self.categories, self.other)

    @property
    def decimals(self) -> tuple[str, ...]:
        """Every decimal that is told."""
        return tuple(text for name in DECIMALS if (text := getattr(self, name)))


class SiteFigures(Strict):
    """What a site tells. ``digest`` (hex) is of the request's document."""

    request: str = Field(pattern=f"^{SITE_NAME.pattern}$")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    min_count: int = Field(ge=LEAST_COUNT, le=LARGEST_COUNT, strict=True)
    digits: int = Field(ge=1, le=MOST_DIGITS, strict=True)
    rows: Count
    columns: tuple[ColumnFigures, ...] = Field(max_length=MOST_COLUMNS)

    @property
    def numbers(self) -> int:
        """How many numbers are told."""
        return 1 + sum(len(column.counts) + len(column.decimals) for column in self.columns if not column.absent)

    def refuse_misfit(self, request: SummaryRequest) -> None:
        """Whether these are figures for ``request``, each in the form that they say.

        Raises:
            BadData: SUMMARY_INVALID; the message names the request's column.
        """
        if (self.request, self.digest) != (request.name, request.digest):
            raise _invalid(f"they are for another request than `{request.name}` as it is now")
        if len(self.columns) != len(request.columns):
            raise _invalid(f"they are of {len(self.columns)} columns, the request has {len(request.columns)}")
        if not self._is_told(self.rows):
            raise _invalid(f"the number of rows is no multiple of {self.min_count}")
        for column, figures in zip(request.columns, self.columns, strict=True):
            if fault := next(self._faults(column, figures), ""):
                raise _invalid(f"column `{column.name}`: {fault}")

    def _faults(self, column: SummaryColumn, figures: ColumnFigures) -> Iterator[str]:
        if figures.absent and figures != ColumnFigures(absent=True):
            yield "it is absent, and something is told of it"
            return
        if not figures.absent and len(figures.categories) != len(column.words):
            yield f"{len(figures.categories)} categories, the request has {len(column.words)}"
        if column.kind != "categorical" and figures.other:
            yield "only a categorical column has others"
        if not all(map(self._is_told, figures.counts)):
            yield f"a count is no multiple of {self.min_count}"
        if max(figures.counts) > self.rows + self.min_count:
            yield "a count is larger than the number of rows"
        if figures.decimals and (not column.is_number or not figures.values):
            yield "a decimal is told of what has no numbers"
        if bool(figures.mean) != bool(figures.std) or bool(figures.low) != bool(figures.high):
            yield "one of two decimals that belong together is not told"
        if any(abs(float(text)) > MAX_MAGNITUDE for text in figures.decimals) or figures.std.startswith("-"):
            yield "a decimal is beyond any measurement"
        if figures.low and figures.high and float(figures.low) > float(figures.high):
            yield "its lower bound is above its upper one"
        if any(f"{float(text):.{self.digits}g}" != text for text in figures.decimals):
            yield f"a decimal has not its form: {self.digits} significant digits"

    def _is_told(self, count: int) -> bool:
        return count % self.min_count == 0

    def to_message(self) -> "pb.SiteSummary":
        from wardround.v1 import summaries_pb2 as pb  # a trainer and its listener send none

        return pb.SiteSummary(
            request=self.request, digest=bytes.fromhex(self.digest), min_count=self.min_count, digits=self.digits,
            rows=self.rows, columns=[pb.ColumnSummary(**column.model_dump()) for column in self.columns],
        )  # fmt: skip

    @classmethod
    def from_message(cls, message: "pb.SiteSummary") -> Self:
        """Raises BadData: MESSAGE_MALFORMED, a field is too long, too large or not of its form."""
        if len(message.columns) > MOST_COLUMNS:
            raise _malformed()
        try:
            return cls(
                request=message.request, digest=message.digest.hex(), min_count=message.min_count,
                digits=message.digits, rows=message.rows, columns=tuple(map(_column_from, message.columns)),
            )  # fmt: skip
        except ValidationError:
            raise _malformed() from None


def decimal(value: float, digits: int) -> str:
    """A number as it is told: of so many significant digits."""
    text = f"{value:.{digits}g}"
    return "0" if float(text) == 0 else text


def _column_from(message: "pb.ColumnSummary") -> ColumnFigures:
    return ColumnFigures(
        absent=message.absent, values=message.values, missing=message.missing, unfit=message.unfit, mean=message.mean,
        std=message.std, low=message.low, high=message.high, categories=tuple(message.categories), other=message.other,
    )  # fmt: skip


def _invalid(why: str) -> BadData:
    return BadData(f"these figures are not what the request asks: {why}", code="SUMMARY_INVALID")


def _malformed() -> BadData:
    return BadData("a summary has not its form", code="MESSAGE_MALFORMED")
