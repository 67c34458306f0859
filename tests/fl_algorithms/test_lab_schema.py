"""`fl-lab schema`: a first [task], or a summary request, from a table's columns."""

import csv
import random
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms.lab.cli import app
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.drafting import DraftColumn, plausible, task_text
from wardround.errors import BadData, UsageProblem
from wardround.records.schema import parse_toml
from wardround.records.study import StudyFile
from wardround.records.summaries.request import SummaryRequest

HEADER = ["mrn", "age", "sex", "temp", "ward", "died", "cp", "note", "born", "lactate", "empty"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    draw = random.Random(1)
    rows: list[list[Any]] = [
        [
            100_000 + n, round(draw.gauss(60, 12)), draw.choice(["male", "female"]),
            round(draw.gauss(37, 1), 1) if n % 10 else "", f"unit {n}" if n < 4 else draw.choice(["icu", "surgical"]),
            "no" if n % 3 else "yes", draw.choice([1, 2, 3, 4]), f"note {n}", f"2020-01-{n % 28 + 1:02}",
            round(draw.gauss(2, 0.5), 2) if n % 20 else "n.d.", "",
        ]
        for n in range(400)
    ]  # fmt: skip
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    return path


def run(*line: object) -> Any:
    return CliRunner().invoke(app, ["schema", *map(str, line)])


def test_a_draft_has_kinds_categories_ranges_and_what_is_missing(table: Path) -> None:
    drafted = run(table, "--label", "died", "--patient", "mrn").stdout
    lines = [line.strip() for line in drafted.splitlines()]
    assert lines[0].startswith("# Drafted from table.csv: read it and edit it before a study has it.")
    for line in (
        'label = "died"',
        'classes = ["no", "yes"]',
        'patient = "mrn"',
        '{ name = "sex", kind = "categorical", categories = ["female", "male"] },',
        '{ name = "cp", kind = "categorical", categories = ["1", "2", "3", "4"] },  # codes, or a number?',
        '# "note" is left out: 400 different texts: free text, or an identifier?',
        '# "empty" is left out: it has no value',
        '# { name = "born", kind = "date" },  # a date: until which other date, as `until`?',
    ):
        assert line in lines
    assert "# unit?; about 10 % missing" in drafted
    assert 'categories = ["icu", "surgical", "other"], other = "other" },  # `other` is for 4 texts of fewer' in drafted
    assert re.search(r'\{ name = "age", low = 0, high = 1[0-9]0 \},  # unit\?\n', drafted)
    assert "unit 1" not in drafted
    assert "note 1" not in drafted
    task = parse_toml(drafted.encode())
    assert task["task"]["missing"]["tokens"][-1] == "n.d."
    assert task["task"]["missing"]["indicators"] == ["temp", "lactate"]
    study = {
        "study": {"name": "drafted", "sites": ["a"], "rounds": 1}, "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg"}, "training": {"local_steps": 1}, **task,
    }  # fmt: skip
    resolve(StudyFile.model_validate(study))


def test_without_a_label_the_draft_leaves_it_to_the_person(table: Path) -> None:
    drafted = run(table).stdout
    assert '# label = ""     # which column is to be predicted; take it out of the features' in drafted
    assert '# "mrn" is left out: almost every row has another whole number: an identifier?' in drafted
    assert "# classes = []    # or another task, such as regression" in run(table, "--label", "age").stdout


def test_a_summary_request_is_drafted_of_the_same_columns(table: Path) -> None:
    made = run(table, "--request", "icu-columns", "--patient", "mrn")
    assert "next: fill in `sites`, then `coordinator summary create FILE.toml`" in made.output
    request = SummaryRequest.from_document({**parse_toml(made.stdout.encode()), "sites": ["a"]})
    assert [column.name for column in request.columns] == ["age", "sex", "temp", "ward", "died", "cp", "lactate"]
    assert request.columns[3].categories == ("icu", "surgical")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("1,2\n3,4\n", "the first line holds numbers; it must name the columns", id="no header"),
        pytest.param("a,\n3,4\n", "the first line has 1 cells without a name", id="a column without a name"),
        pytest.param("a,a\n3,4\n", "stands 2 times in the header", id="a name twice"),
        pytest.param("a,b\n3\n", "line 2 has 1 cells, the header has 2", id="a short row"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    made = run(tmp_path / "t.csv")
    assert isinstance(made.exception, BadData)
    assert said in made.exception.message


def test_options_that_do_not_go_together_or_name_no_column_are_refused(table: Path) -> None:
    for line, said in (
        (["--label", "dead"], "--label dead: the table has no such column"),
        (["--patient", "id"], "--patient id: the table has no such column"),
        (["--request", "x", "--label", "died"], "--request goes without --label"),
    ):
        made = run(table, *line)
        assert isinstance(made.exception, UsageProblem)
        assert said in made.exception.message


def test_a_code_that_may_stand_for_a_missing_value_is_asked_about(tmp_path: Path) -> None:
    draw = random.Random(2)
    cells = [f"{draw.gauss(5, 1):.2f}" if n % 9 else "-9999" for n in range(300)]
    (tmp_path / "t.csv").write_text("\n".join(["glucose", *cells]) + "\n")
    drafted = run(tmp_path / "t.csv").stdout
    assert '{ name = "glucose", low = 0, high = 11 },  # unit?; does -9999 stand for a missing value?' in drafted


@pytest.mark.parametrize(
    ("ends", "wide"), [((40, 80), (0, 120)), ((36, 39), (33, 42)), ((-2, 3), (-7, 8)), ((0.1, 0.4), (0, 0.7))]
)
def test_plausible_bounds_are_wider_by_as_much_on_either_side(
    ends: tuple[float, float], wide: tuple[float, float]
) -> None:
    assert plausible(*ends) == wide


def test_a_name_that_toml_must_quote_is_quoted() -> None:
    text = task_text([DraftColumn('a "b"'), DraftColumn("c", "categorical", ("x",))], "x")
    assert parse_toml(text.encode())["task"]["features"] == [{"name": 'a "b"'}]
