"""A study file to begin with, from the names of a table's columns and nothing else of it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli.main import app
from fl_algorithms.resolving import resolve
from fl_algorithms.settings import new_study
from wardround.errors import BadData, UsageProblem
from wardround.records import study as study_files
from wardround.records.study import StudyFile

HEADER = "age,sex,blood pressure,patient,died\n"
GIVEN = ("--name", "heart", "--label", "died", "--patient", "patient", "--site", "bravo", "--site", "alpha")


def new(folder: Path, header: str | bytes, *words: str) -> Result:
    table = folder / "table.csv"
    table.write_bytes(header.encode() if isinstance(header, str) else header)
    return CliRunner().invoke(app, ["study", "new", str(table), *words])


def resolved(folder: Path, text: str) -> StudyFile:
    (folder / "study.toml").write_text(text)
    return resolve(study_files.load(folder / "study.toml")).file


def test_a_header_gives_a_study_that_is_whole(tmp_path: Path) -> None:
    made = new(tmp_path, HEADER, *GIVEN)
    assert made.exit_code == 0, made.exception
    study = resolved(tmp_path, made.stdout)
    assert (study.study.name, study.study.sites) == ("heart", ("alpha", "bravo"))
    task = study.document()["task"]
    assert [row["name"] for row in task["features"]] == ["age", "sex", "blood pressure"]
    assert (task["label"], task["classes"], task["patient"]) == ("died", ["0", "1"], "patient")
    assert "every column is drafted as a number: edit those that are none" in made.stderr
    assert made.stderr.rstrip().endswith("next: edit it, then `coordinator study check FILE`")


def test_nothing_but_the_first_line_is_read(tmp_path: Path) -> None:
    made = new(tmp_path, HEADER.encode() + b"77,f,\xff\xfe not text at all", *GIVEN)
    assert made.exit_code == 0
    assert "77" not in made.stdout


@pytest.mark.parametrize("header", ["age;died\n", "age\tdied", "\ufeffage,died\r\n", '"age","died"\n'])
def test_each_usual_separator_is_taken(tmp_path: Path, header: str) -> None:
    made = new(tmp_path, header, "--name", "heart", "--label", "died", "--class", "no", "--class", "yes")
    assert '{ name = "age" },' in made.stdout
    assert 'classes = ["no", "yes"]' in made.stdout


def test_what_is_left_open_is_for_the_person_and_check_says_so(tmp_path: Path) -> None:
    made = new(tmp_path, HEADER, "--name", "heart")
    assert '# label = ""     # which column is to be predicted; take it out of the features' in made.stdout
    assert "sites = []                   # the sites' names, as they were invited" in made.stdout
    with pytest.raises(BadData, match="sites"):
        resolved(tmp_path, made.stdout)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        pytest.param("age,age,died\n", "the column 'age' stands twice in the first line", id="twice"),
        pytest.param("age\n", "its first line names 1 columns", id="one"),
        pytest.param(b"\xff\xff,x\n", "its first line does not name the columns: no CSV text", id="no text"),
        pytest.param(
            "age,,died\n",
            "its first line does not name the columns: column '' is not 1 to 200 printable characters without spaces "
            "around",
            id="no name",
        ),
    ],
)
def test_a_first_line_that_names_no_columns_is_refused(tmp_path: Path, header: str | bytes, message: str) -> None:
    refused = new(tmp_path, header, *GIVEN).exception
    assert isinstance(refused, BadData)
    assert refused.message == f"{tmp_path / 'table.csv'}: {message}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--label", "dead"), "--label dead: the header has no such column"),
        (("--patient", "id"), "--patient id: the header has no such column"),
        (("--label", "died", "--class", "yes"), "a label has at least two classes"),
    ],
)
def test_an_option_that_names_no_column_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    refused = new(tmp_path, HEADER, "--name", "heart", *words).exception
    assert isinstance(refused, UsageProblem)
    assert refused.message == message


def test_what_it_writes_beside_the_task_is_what_a_study_has_anyway_where_a_line_says_so() -> None:
    """The values are the defaults of the settings, but for those that a study must choose."""
    chosen = {"name", "title", "sites", "rounds", "optimizer", "learning_rate", "local_epochs", "metrics", "batch_size"}
    text = new_study.STUDY + new_study.REST
    written = dict(re.findall(r"^([a-z_]+) = (\S+)", text, re.MULTILINE))
    sections = {name: field.annotation for name, field in StudyFile.model_fields.items()}
    defaults = {
        key: field.default
        for section in sections.values()
        for key, field in getattr(section, "model_fields", {}).items()
    }
    for key in written.keys() - chosen - {"hidden"}:
        assert written[key].strip('"') == str(defaults[key]), key
