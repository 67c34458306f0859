"""What a person wrote wrongly is said with the key, the table and a suggestion."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from wardround.errors import BadData
from wardround.records.schema import Strict, check, parse_toml, read_toml, toml_bytes, toml_value


class Inner(Strict):
    depth: int = Field(default=1, ge=1)
    width: int = 1


class Outer(Strict):
    inner: Inner
    other: Inner | None = None
    name: str = ""

    @model_validator(mode="after")
    def _not_both(self) -> "Outer":
        if self.other and self.name:
            raise ValueError("`other` and `name` exclude each other")
        return self


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        pytest.param(
            {"inner": {"dept": 2}}, "unknown key `dept` in [inner]", "did you mean `depth`?", id="near a known key"
        ),
        pytest.param(
            {"inner": {}, "other": {"x": 2}},
            "unknown key `x` in [other]",
            "known keys there: depth, width",
            id="near no known key",
        ),
        pytest.param({"iner": {}}, "unknown key `iner`", "did you mean `inner`?", id="misspelt, and therefore missing"),
        pytest.param({}, "[inner] is missing", "", id="missing table"),
        pytest.param({"inner": 5}, "[inner] is not a table", "", id="a number for a table"),
        pytest.param(5, "the whole of it is not a table", "", id="a number for everything"),
        pytest.param(
            {"inner": {"depth": 0}},
            "`depth` in [inner]: input should be greater than or equal to 1, found 0",
            "",
            id="value",
        ),
        pytest.param(
            {"inner": {"depth": "x" * 61}},
            "`depth` in [inner]: input should be a valid integer, unable to parse string as an integer",
            "",
            id="a long value is not repeated",
        ),
        pytest.param({"inner": {}, "name": 1}, "`name`: input should be a valid string, found 1", "", id="top level"),
        pytest.param(
            {"inner": {}, "other": {}, "name": "x"},
            "`other` and `name` exclude each other",
            "",
            id="a fault of the whole",
        ),
    ],
)
def test_the_first_fault_is_told(data: object, said: str, hint: str) -> None:
    with pytest.raises(BadData) as caught:
        check(Outer, data, "site.toml")
    assert caught.value.message == f"site.toml: {said}"
    assert caught.value.hint == hint


def test_a_fault_inside_a_named_table_names_the_table() -> None:
    with pytest.raises(BadData) as caught:
        check(Inner, {"dept": 1}, "study.toml", "algorithm")
    assert caught.value.message == "study.toml: unknown key `dept` in [algorithm]"
    with pytest.raises(BadData) as caught:
        check(Inner, {"depth": float("inf")}, "study.toml", "algorithm")
    assert caught.value.message.startswith("study.toml: `depth` in [algorithm]: input should be a finite number")


def test_a_table_cannot_be_changed_once_it_is_read() -> None:
    table = check(Inner, {"depth": 3}, "site.toml")
    with pytest.raises(ValueError, match="frozen"):
        table.depth = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"a = 1\nb = = 2\n", "not TOML: Invalid value (at line 2, column 5)", id="line and column"),
        pytest.param(b"a = 1\na = 2\n", "not TOML: Cannot overwrite a value (at line 2, column 6)", id="twice"),
        pytest.param(b"a = '\xff'", "not UTF-8 text", id="not UTF-8"),
    ],
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "a.toml").write_bytes(data)
    with pytest.raises(BadData) as caught:
        read_toml(tmp_path / "a.toml")
    assert caught.value.message == f"{tmp_path / 'a.toml'}: {said}"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="/nothing: No such file or directory"):
        read_toml(tmp_path / "nothing")
    with pytest.raises(BadData, match="Is a directory"):
        read_toml(tmp_path)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4),
)


@given(st.dictionaries(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=4), max_size=4))
def test_written_tables_are_read_back_whatever_the_texts_hold(tables: dict[str, Any]) -> None:
    assert parse_toml(toml_bytes(tables)) == tables


@given(VALUES)
def test_a_written_value_is_one_line_and_is_read_back(value: Any) -> None:
    text = toml_value(value)
    assert "\n" not in text
    assert parse_toml(f"value = {text}\n".encode()) == {"value": value}


def test_a_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(BadData, match="a text that is not UTF-8 cannot be written as TOML"):
        toml_bytes({"path": "/srv/\udcff"})


@pytest.mark.parametrize("module", ["site_agent.cli.main", "coordinator.cli.main", "fl_algorithms.lab.cli"])
def test_a_commands_start_loads_no_record(module: str) -> None:
    assert _records(module) == []


@pytest.mark.parametrize(
    "module",
    ["coordinator.requests", "coordinator.study_answers", "fl_algorithms.study", "site_agent.trainer.vault.cards"],
)
def test_loading_records_builds_the_validator_of_none(module: str) -> None:
    """They are built when they are first used: all of them together take longer than a help text may."""
    records = _records(module)
    assert records
    assert [name for name, complete in records if complete and name != "Request"] == []  # a generic form's own


def _records(module: str) -> list[tuple[str, bool]]:
    """The records that loading ``module`` loads, and whether each has its validator."""
    look = (
        f"import {module}, json, pydantic\n"
        "def below(form):\n"
        "    return {one for child in form.__subclasses__() for one in (child, *below(child))}\n"
        "ours = [one for one in below(pydantic.BaseModel) if one.model_fields]\n"
        "print(json.dumps([(one.__name__, one.__pydantic_complete__) for one in ours]))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    return [(name, complete) for name, complete in json.loads(done.stdout)]
