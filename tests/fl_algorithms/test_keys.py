"""The keys of a study file for people: each has a range and a meaning, and the page has them all."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel, Field

from fl_algorithms.lab.keys import Key, keys
from fl_algorithms.registry import METHODS, MODELS, TASKS
from fl_algorithms.settings.libraries import LIBRARIES
from tools import study_page
from wardround.records.study import StudyFile


def tables() -> Iterator[tuple[str, type[BaseModel]]]:
    yield from study_page.SECTIONS
    for rows in (TASKS, MODELS, METHODS):
        yield from ((name, row.settings) for name, row in rows.items())
    yield from ((name, library.settings) for name, library in LIBRARIES.items())


@pytest.mark.parametrize(("name", "table"), list(tables()))
def test_every_key_of_a_study_file_has_a_range_and_a_meaning(name: str, table: type[BaseModel]) -> None:
    found = list(keys(table))
    assert [key.name for key in found if not (key.range and key.meaning)] == []


def test_every_table_of_a_study_file_stands_on_the_page() -> None:
    for name in (*StudyFile.model_fields, "variants"):
        assert f"[{name}" in study_page.page(), name


def test_the_page_is_what_the_classes_say() -> None:
    assert study_page.PAGE.read_text(encoding="utf-8") == study_page.page(), "run `python -m tools.study_page`"


class Inner(BaseModel):
    """A table in a table.

    Attributes:
        low, high: two ends,
            on two lines.
    """

    low: float = Field(default=0.5, gt=0)
    high: float | None = None


class Outer(BaseModel):
    first: int = 3  # what it is; with a "#" in it
    # what it is,
    # in two lines
    second: tuple[str, ...] = ("a#b",)
    third: bool = Field(default=False, description="nothing of ours")  # after its lines
    fourth: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()


class Narrower(Outer):
    first: int = Field(default=4, ge=2, le=9)


def found(table: type[BaseModel]) -> dict[str, Key]:
    return {key.name: key for key in keys(table)}


def test_a_meaning_is_an_attribute_or_a_comment_on_the_line_or_above_it() -> None:
    assert {name: key.meaning for name, key in found(Outer).items()} == {
        "first": 'what it is; with a "#" in it', "second": "what it is, in two lines", "third": "after its lines",
        "fourth": "", "inner": "A table in a table", "inner.low": "two ends, on two lines",
        "inner.high": "two ends, on two lines", "many": "A table in a table", "many[].low": "two ends, on two lines",
        "many[].high": "two ends, on two lines",
    }  # fmt: skip


def test_a_class_that_narrows_a_key_has_its_meaning_from_the_one_above() -> None:
    key = found(Narrower)["first"]
    assert (key.written, key.range, key.meaning) == (
        "4", "whole number, at least 2, at most 9", 'what it is; with a "#" in it',
    )  # fmt: skip


def test_what_is_needed_and_what_may_be_left_out_is_told() -> None:
    key = found(Outer)
    assert (key["fourth"].needed, key["inner"].optional, key["inner.low"].optional) == (True, True, True)
    assert (key["first"].needed, key["first"].optional) == (False, False)
    assert (key["second"].written, key["third"].written, key["inner.low"].range) == (
        '["a#b"]',
        "false",
        "number, above 0",
    )
