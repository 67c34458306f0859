"""The schema of a tabular study: what it takes, and each sentence it refuses with."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_algorithms.settings.tabular import TabularSettings
from fl_algorithms.settings.targets import level
from wardround.errors import BadData
from wardround.records.schema import check

AGE = {"name": "age"}
PAIN = {"name": "cp", "kind": "categorical", "categories": ["1", "2", "3"]}
MEDIAN = {"policy": "median", "indicators": ["age"]}


def settings(**changes: Any) -> TabularSettings:
    table = {"label": "disease", "classes": ["0", "1"], "features": [AGE, PAIN], **changes}
    return check(TabularSettings, table, "study.toml", "task")


def test_inputs_are_features_in_order_levels_after_the_first_and_then_indicators() -> None:
    found = settings(features=[PAIN, AGE], missing={"policy": "median", "indicators": ["age", "cp"]})
    assert found.columns == ("cp=2", "cp=3", "age", "missing(age)", "missing(cp)")
    assert found.inputs == 5


def test_a_name_alone_is_a_numeric_feature_and_whole_numbers_are_categories() -> None:
    found = settings(features=["age", {**PAIN, "categories": [1, 2, 3]}], classes=[0, 1])
    assert found == settings()


def test_checked_settings_check_to_themselves() -> None:
    found = settings(missing=MEDIAN)
    assert check(TabularSettings, found.model_dump(mode="json"), "study.toml", "task") == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"features": [AGE, AGE]}, "[task]: feature `age` stands twice", id="feature twice"),
        pytest.param({"label": "age"}, "[task]: `age` is the label and a feature", id="label is a feature"),
        pytest.param(
            {"features": [{"name": "age", "mean": 50.0}]},
            "[task.features]: feature `age` has one of `mean` and `std`; a scale is both",
            id="half a scale",
        ),
        pytest.param(
            {"features": [{"name": "age", "mean": 50.0, "std": 0.0}]},
            "`std` in [task.features]: input should be greater than 0, found 0.0",
            id="no scale",
        ),
        pytest.param(
            {"features": [{**PAIN, "mean": 2.0, "std": 1.0}]},
            '[task.features]: feature `cp` has a `mean`, but its kind is "categorical"',
            id="the scale of a category",
        ),
        pytest.param({"classes": ["a", " a"]}, "[task]: `classes` has `a` twice", id="class twice"),
        pytest.param({"classes": ["a", " "]}, "[task]: `classes` has an empty entry", id="empty class"),
        pytest.param(
            {"missing": {"policy": "median", "indicators": ["bmi"]}},
            "[task]: indicator `bmi` is no feature",
            id="indicator of nothing",
        ),
        pytest.param(
            {"classes": ["?", "1"]},
            "[task]: `?` is a class or category, and also written for a missing value",
            id="a class that is a missing value",
        ),
        pytest.param(
            {"features": [PAIN, "cp=2"]}, "[task]: two inputs are called `cp=2`", id="a column called like a level"
        ),
        pytest.param(
            {"features": [" age"]},
            "`name` in [task.features]: feature ' age' is not 1 to 200 printable characters without spaces around",
            id="spaces around a name",
        ),
        pytest.param(
            {"features": [{**AGE, "categories": ["1", "2"]}]},
            '[task.features]: feature `age` has categories, but its kind is "numeric"',
            id="numeric with categories",
        ),
        pytest.param(
            {"features": [{**PAIN, "categories": ["1"]}]},
            "[task.features]: feature `cp` needs at least 2 categories, found 1",
            id="one category",
        ),
        pytest.param(
            {"features": [{**PAIN, "categories": ["3", "3.0"]}]},
            "[task.features]: feature `cp` has `3` twice",
            id="categories that are the same number",
        ),
        pytest.param(
            {"features": [{**PAIN, "categories": ["3", ""]}]},
            "[task.features]: feature `cp` has an empty entry",
            id="empty category",
        ),
        pytest.param(
            {"missing": {"policy": "median"}},
            '[task.missing]: policy "median" needs `indicators`: the features that may be missing',
            id="median without indicators",
        ),
        pytest.param(
            {"missing": {"indicators": ["age"]}},
            '[task.missing]: `indicators` belong to policy "median", the policy is "refuse"',
            id="indicators without median",
        ),
        pytest.param(
            {"missing": {"policy": "median", "indicators": ["age", "age"]}},
            "[task.missing]: indicator `age` stands twice",
            id="indicator twice",
        ),
        pytest.param({"headline": "auroc"}, "`headline` in [task]: input should be 'auc', ", id="unknown metric"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData) as caught:
        settings(**changes)
    assert caught.value.message.startswith(f"study.toml: {message}")


def test_an_unknown_key_gets_a_suggestion() -> None:
    with pytest.raises(BadData, match=r"unknown key `feature` in \[task\]") as caught:
        settings(feature=[])
    assert caught.value.hint == "did you mean `features`?"


@pytest.mark.parametrize(
    ("text", "same"), [("3", "3.0"), (" 3 ", "3."), ("03", "+3"), ("-0.50", "-0.5"), ("0", "-0.0"), ("a ", "a")]
)
def test_two_ways_to_write_a_level_are_one(text: str, same: str) -> None:
    assert level(text) == level(same)


@pytest.mark.parametrize(("text", "other"), [("3E1", "30"), ("a", "A"), ("3", "-3"), ("3.01", "3.1"), ("1,5", "1.5")])
def test_different_levels_stay_different(text: str, other: str) -> None:
    assert level(text) != level(other)


@given(st.text(max_size=20) | st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str))
def test_a_level_is_its_own_normal_form(text: str) -> None:
    assert level(level(text)) == level(text)


def test_the_schema_is_read_without_torch() -> None:
    """The coordinator checks studies, and has no torch."""
    code = "import sys, fl_algorithms.settings.tabular as t; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
