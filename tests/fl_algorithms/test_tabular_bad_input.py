"""Each way in which a hospital's file can be wrong, and the sentence for it: file, line, column, never the value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms.settings.tabular import TabularSettings
from fl_algorithms.tasks.tables.tabular import TabularTask
from tests.fl_algorithms.toys import table_source
from wardround.errors import BadData

SECRET = "Ottersen"  # stands for what a patient's row holds, and must not come out
PAIN = {"name": "pain", "kind": "categorical", "categories": ["1", "2"]}
ROWS = "".join(f"{30 + k},{1 + k % 2},{k % 2}\n" for k in range(10))


def task(**changes: Any) -> TabularTask:
    table = {"label": "ill", "classes": ["0", "1"], "features": ["age", PAIN], **changes}
    return TabularTask(TabularSettings.model_validate(table))


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., BadData]:
    """The error for a table with these bytes; its message without the folder."""

    def load(content: str | bytes, task: TabularTask = task(), label: str = "ill", **options: Any) -> BadData:
        table = tmp_path / "train.csv"
        table.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(BadData) as caught:
            task.load(table_source(table, None, label), site="a", seed=1, **{"validation_fraction": 0.2, **options})
        for text in (caught.value.message, caught.value.hint):
            assert SECRET not in text
            assert not text.endswith(".")
        assert caught.value.message.startswith(f"{tmp_path}/")
        return BadData(caught.value.message.removeprefix(f"{tmp_path}/"), hint=caught.value.hint)

    return load


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        pytest.param("", "the file is empty", "the first line names the columns, each other line is a row", id="empty"),
        pytest.param("\n\n", "the file is empty", "", id="blank lines only"),
        pytest.param("age,pain,ill\n", "has a header and no rows", "", id="header only"),
        pytest.param("Age,pain,ill\n" + ROWS, "no column `age`", "did you mean `Age`? capitals count", id="capitals"),
        pytest.param("age,pains,ill\n" + ROWS, "no column `pain`", "did you mean `pains`?", id="nearly"),
        pytest.param(
            "age,sex,bmi\n" + ROWS,
            "no column `pain` and `ill`",
            "the columns needed are: age, pain, ill",
            id="two columns missing",
        ),
        pytest.param(
            "a,b,c\n" + ROWS,
            "no column `age`, `pain` and `ill`",
            "the columns needed are: age, pain, ill",
            id="all columns missing",
        ),
        pytest.param(
            f"{SECRET},41,1\n" + ROWS,
            "no column `age`, `pain` and `ill`",
            "the first line holds numbers; it must name the columns",
            id="no header",
        ),
        pytest.param(
            "age;pain;ill\n1;1;0\n",
            "no column `age`, `pain` and `ill`",
            "the first line is separated by semicolons; export the file with commas",
            id="semicolons",
        ),
        pytest.param(
            "age\tpain\till\n1\t1\t0\n",
            "no column `age`, `pain` and `ill`",
            "the first line is separated by tabs; export the file with commas",
            id="tabs",
        ),
        pytest.param(
            "age,pain,ill,age\n1,1,0,1\n", "column `age`: stands 2 times in the header", "", id="column twice"
        ),
        pytest.param(
            f"age,pain,ill\n{ROWS}{SECRET},1\n1,1,0,{SECRET}\n",
            "line 12 has 2 cells, the header has 3 (2 rows like that)",
            "",
            id="ragged rows",
        ),
        pytest.param(
            f"age,pain,ill\n{ROWS}1,1,0,\n",
            "line 12 has 4 cells, the header has 3 (1 row like that)",
            "",
            id="ragged row",
        ),
        pytest.param(
            f'age,pain,ill\n{ROWS}"{SECRET},1,0\n',
            "line 12: not CSV: unexpected end of data",
            'a cell with a comma or a quote is written "so, ""so"""',
            id="unclosed quote",
        ),
        pytest.param(
            f'age,pain,ill\n"{SECRET}"x,1,0\n', "line 2: not CSV: ',' expected after '\"'", "", id="text after a quote"
        ),
        pytest.param(
            f'age,pain,ill\n"{SECRET * 40_000}",1,0\n',
            "line 2: not CSV: field larger than field limit",
            "",
            id="vast cell",
        ),
        pytest.param(
            "age,pain,ill\n1,1,ß\n".encode("latin-1"),
            "line 2: not UTF-8 text",
            "export it again as UTF-8 (in Excel: `CSV UTF-8`)",
            id="latin-1",
        ),
        pytest.param(
            "age,pain,ill\n".encode("utf-16-le"),
            "holds zero bytes, so it is not UTF-8 text",
            "export it again as UTF-8 (in Excel: `CSV UTF-8`)",
            id="utf-16",
        ),
    ],
)
def test_a_file_that_is_no_table_for_the_study_is_refused(
    refused: Callable[..., BadData], content: str | bytes, message: str, hint: str
) -> None:
    error = refused(content)
    assert error.message.removeprefix("train.csv: ").startswith(message)
    assert error.hint.startswith(hint)


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        pytest.param(
            f"{SECRET},1,0",
            "line 12, column `age`: text where a number belongs",
            "numbers have a decimal point and no thousands separator",
            id="text in a numeric column",
        ),
        pytest.param('"3,5",1,0', "line 12, column `age`: text where a number belongs", "", id="decimal comma"),
        pytest.param(
            "1_000,1,0", "line 12, column `age`: text where a number belongs", "", id="what only Python reads"
        ),
        pytest.param("٤٢,1,0", "line 12, column `age`: text where a number belongs", "", id="other digits"),
        pytest.param(
            "-Infinity,1,0",
            "line 12, column `age`: nan or infinity where a number belongs",
            "a missing value is written as one of: an empty cell, `?`, `n/a`, `na`, `null`",
            id="infinity",
        ),
        pytest.param("NaN,1,0", "line 12, column `age`: nan or infinity where a number belongs", "", id="nan"),
        pytest.param(
            "1e400,1,0",
            "line 12, column `age`: a number beyond any measurement",
            "the largest magnitude taken is 1e+100",
            id="beyond float64",
        ),
        pytest.param(
            f"30,{SECRET},0",
            "line 12, column `pain`: a category that the study does not know",
            "its categories are: 1, 2",
            id="unknown category",
        ),
        pytest.param(
            f"30,1,{SECRET}",
            "line 12, column `ill`: no class of the study",
            "the classes are: 0, 1",
            id="unknown class",
        ),
        pytest.param(
            "30,1,?",
            "line 12, column `ill`: no value",
            "leave these rows out of the file, or complete them",
            id="missing label",
        ),
        pytest.param("?,1,0", "line 12, column `age`: no value", "complete them", id="missing value"),
        pytest.param(
            f"{SECRET},1,0\n{SECRET},1,0",
            "lines 12 and 13, column `age`: text where a number belongs",
            "",
            id="two lines",
        ),
        pytest.param(
            f"{SECRET},1,0\n" * 9,
            "lines 12, 13, 14 and 6 more, column `age`: text where a number belongs",
            "",
            id="many lines",
        ),
    ],
)
def test_a_cell_that_means_nothing_is_refused_by_line_and_column(
    refused: Callable[..., BadData], row: str, message: str, hint: str
) -> None:
    error = refused(f"age,pain,ill\n{ROWS}{row}\n")
    assert error.message == f"train.csv: {message}"
    assert error.hint.startswith(hint)


def test_missing_values_are_counted_by_column(refused: Callable[..., BadData]) -> None:
    error = refused("age,pain,ill\n1,1,0\n,,0\n?,1,0\n1,1,0\n")
    assert error.message == "train.csv: lines 3 and 4, column `age`: no value; line 3, column `pain`: no value"
    assert error.hint == (
        "complete them or leave the rows out; or ask the study's author for "
        '`policy = "drop_row"`, or "median" with these `indicators`, in [task.missing]'
    )


def test_median_refuses_gaps_in_a_feature_without_an_indicator(refused: Callable[..., BadData]) -> None:
    error = refused("age,pain,ill\n,1,0\n1,,0\n", task(missing={"policy": "median", "indicators": ["age"]}))
    assert error.message == "train.csv: line 3, column `pain`: no value"


def test_nothing_left_after_dropping_is_refused(refused: Callable[..., BadData]) -> None:
    error = refused("age,pain,ill\n,1,0\n1,,0\n", task(missing={"policy": "drop_row"}))
    assert error.message == "train.csv: every row has a missing value, so none is left"


@pytest.mark.parametrize(
    ("rows", "fraction", "message"),
    [
        pytest.param(4, 0.2, "4 usable rows; a validation part of 0.2 needs at least 5", id="four"),
        pytest.param(1, 0.5, "1 usable row; a validation part of 0.5 needs at least 2", id="one"),
    ],
)
def test_too_few_rows_for_a_validation_part_are_refused(
    refused: Callable[..., BadData], rows: int, fraction: float, message: str
) -> None:
    error = refused("age,pain,ill\n" + "1,1,0\n" * rows, validation_fraction=fraction)
    assert error.message == f"train.csv: {message}"


def test_a_feature_named_as_the_label_is_refused(refused: Callable[..., BadData]) -> None:
    error = refused("age,pain,ill\n" + ROWS, label="age")
    assert error.message == "train.csv: `age` is named as the label, but the study uses it as a feature"


def test_a_test_table_is_refused_under_its_own_name(tmp_path: Path) -> None:
    table, test = tmp_path / "train.csv", tmp_path / "test.csv"
    table.write_text("age,pain,ill\n" + ROWS)
    test.write_text("age,ill\n1,0\n")
    with pytest.raises(BadData, match=r"test\.csv: no column `pain`$"):
        task().load(table_source(table, test, "ill"), site="a", seed=1, validation_fraction=0.2)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.csv", "No such file or directory"), ("folder", "not a file")],
    ids=["absent", "folder"],
)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadData) as caught:
        task().load(table_source(tmp_path / name, None, "ill"), site="a", seed=1, validation_fraction=0.2)
    assert caught.value.message == f"{tmp_path / name}: {message}"


# Rows to predict.


@pytest.fixture
def fitted(tmp_path: Path) -> dict[str, Any]:
    table = tmp_path / "fitted.csv"
    table.write_text("age,pain,ill\n" + ROWS)
    data = task().load(table_source(table, None, "ill"), site="a", seed=1, validation_fraction=0.2)
    return task().fitted(data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"30,{SECRET}", "line 3, column `pain`: a category that the study does not know"),
        (f"{SECRET},1", "line 3, column `age`: text where a number belongs"),
        ("30,", "line 3, column `pain`: no value"),
    ],
    ids=["category", "text", "missing"],
)
def test_new_rows_are_refused_in_the_same_sentences(
    tmp_path: Path, fitted: dict[str, Any], row: str, message: str
) -> None:
    new = tmp_path / "new.csv"
    new.write_text(f"age,pain\n1,1\n{row}\n")
    with pytest.raises(BadData) as caught:
        task().read_new(new, fitted)
    assert caught.value.message == f"{new}: {message}"
    assert SECRET not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"columns": ["age"]}, "fitted for 1 inputs that are not the 2 of the study", id="other inputs"),
        pytest.param({"mean": ["0.0"]}, "its parts do not belong together", id="a mean too few"),
        pytest.param({"medians": {"age": "1.0"}}, "its parts do not belong together", id="a median too many"),
        pytest.param({"std": "wide"}, "`std`: input should be a valid tuple, found 'wide'", id="no numbers"),
        pytest.param({"extra": 1}, "unknown key `extra`", id="unknown key"),
    ],
)
def test_preprocessing_that_is_not_the_studys_is_refused(
    tmp_path: Path, fitted: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "new.csv").write_text("age,pain\n1,1\n")
    with pytest.raises(BadData) as caught:
        task().read_new(tmp_path / "new.csv", {**fitted, **change})
    assert caught.value.message == f"preprocessing.json: {message}"


def test_preprocessing_that_fills_with_an_unknown_category_is_refused(tmp_path: Path) -> None:
    filling = task(missing={"policy": "median", "indicators": ["pain"]})
    table = tmp_path / "train.csv"
    table.write_text("age,pain,ill\n" + ROWS)
    data = filling.load(table_source(table, None, "ill"), site="a", seed=1, validation_fraction=0.2)
    with pytest.raises(BadData) as caught:
        filling.read_new(table, {**filling.fitted(data), "commonest": {"pain": "9"}})
    assert caught.value.message == "preprocessing.json: feature `pain` is filled with no category of the study"
