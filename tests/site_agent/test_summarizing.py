"""A hospital's table read for a summary request, in the trainer: by its mapping, and never who a patient is."""

from pathlib import Path
from typing import Any

import pytest

from site_agent.trainer.data import sources
from site_agent.trainer.data.sources import DataSource
from site_agent.trainer.data.summaries import summarized
from wardround.errors import BadData, UsageProblem
from wardround.records.summaries.request import SummaryRequest
from wardround.records.trainer import Summarize, Summarized, request_from

MAPPING = """\
[columns.temperature]
column = "temp_f"
unit = "fahrenheit -> celsius"
[columns.sex]
values = { m = "male", w = "female" }
[columns.lactate]
column = ""
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return table_in(tmp_path)


def table_in(folder: Path) -> Path:
    """A state directory with a table of fifty patients beside it."""
    rows = [f"{n},{96 + n % 8 / 2},{'mw'[n % 2]},{n % 2},{1000 + n // 2}" for n in range(100)]
    (folder / "table.csv").write_text("\n".join(["row,temp_f,sex,outcome,mrn", *rows]) + "\n")
    (folder / "mapping.toml").write_text(MAPPING)
    return folder


def add(state: Path, **named: Any) -> None:
    source = DataSource.model_validate(
        {"table": str(state / "table.csv"), "label": "outcome", "digest": "0" * 64, **named}
    )
    sources.add(state, "patients", source, replace=True)


def ask(state: Path, *columns: Any, **changes: Any) -> Summarized:
    request = SummaryRequest.from_document({"name": "x", "sites": ["a"], "columns": list(columns), **changes})
    asked = Summarize(request=request.document(), data="patients", min_count=10, digits=3)
    assert request_from(asked.to_document()) == asked
    answer = summarized(state, asked)
    assert asked.answer_from(answer.to_document()) == answer
    return answer


def test_a_table_is_read_in_the_requests_words(state: Path) -> None:
    add(state, mapping=str(state / "mapping.toml"))
    sex = {"name": "sex", "kind": "categorical", "categories": ["male", "female"]}
    answer = ask(state, "temperature", sex, {"name": "died", "kind": "boolean"}, "lactate", "unknown", label="died")
    temperature, sexes, died, lactate, unknown = answer.columns
    assert (answer.rows, temperature.mean, temperature.values) == (100, "36.5", 100)
    assert (sexes.categories, died.categories) == ((50, 50), (50, 50))
    assert lactate.absent
    assert unknown.absent
    assert answer.sources == ["temp_f", "sex", "outcome", "", ""]
    assert "lactate: still open in the mapping: this site's column" in answer.notes
    assert "no column `unknown`" in answer.notes


def test_the_column_of_the_patient_is_never_told_of(state: Path) -> None:
    add(state, patient="mrn")
    for column in ("mrn", {"name": "mrn", "kind": "categorical", "categories": ["1000", "1001"]}):
        with pytest.raises(BadData, match="column `mrn` of the request says here who a patient is") as caught:
            ask(state, column)
        assert caught.value.code == "DECLINED_DATA_INVALID"
    (state / "alias.toml").write_text('[columns.age]\ncolumn = "mrn"\n')
    add(state, patient="mrn", mapping=str(state / "alias.toml"))
    with pytest.raises(BadData, match="column `age` of the request says here who a patient is"):
        ask(state, "age")
    with pytest.raises(BadData, match="column `mrn` of the request says"):
        ask(state, {"name": "sex", "kind": "date", "until": "mrn"})


def test_patients_are_counted_where_the_data_names_them(state: Path) -> None:
    died = {"name": "outcome", "kind": "boolean"}
    add(state)
    assert ask(state, died).rows == 100
    add(state, patient="sex")
    answer = ask(state, died)
    assert (answer.rows, answer.columns[0].categories) == (0, (0, 0))  # two patients


def test_what_cannot_be_read_is_said(state: Path) -> None:
    with pytest.raises(UsageProblem, match="no data is called `patients` here"):
        ask(state, "age")
    add(state)
    with pytest.raises(BadData, match="no column `age`"):
        ask(state, "age")
    sources.add(state, "patients", DataSource(files=str(state), digest="0" * 64), replace=True)
    with pytest.raises(UsageProblem, match="data `patients` is no table: a summary is of the columns of one"):
        ask(state, "age")
