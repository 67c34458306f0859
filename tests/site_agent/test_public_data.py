"""A site's copy of a study's public data set: named once, compared with the study's digest whenever it matters."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.public_data import public_data_digest
from site_agent.cli.data import data_app
from site_agent.trainer.data import sources
from tests.site_agent.trainer_world import Hospital, small_study, write_table
from wardround.errors import BadData, UsageProblem
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile

ROWS = 9


def distilling(public_data: Path, algorithm: str = "fedmd") -> ResolvedStudy:
    """The small study with a public data set."""
    tables = small_study("fedavg").file.model_dump()
    tables["task"]["features"] = [{"name": "age", "mean": 55.0, "std": 20.0}, {"name": "dose", "mean": 0.0, "std": 1.0}]
    tables |= {
        "algorithm": {"name": algorithm},
        "public_data": {"digest": public_data_digest(public_data), "rows": ROWS},
    }
    return resolve(StudyFile.model_validate(tables))


@pytest.fixture
def public_data(tmp_path: Path) -> Path:
    return write_table(tmp_path / "public_data.csv", ROWS, seed=3)


@pytest.fixture
def hospital(tmp_path: Path, public_data: Path) -> Hospital:
    made = replace(Hospital.make(tmp_path, "fedavg"), study=distilling(public_data))
    sources.name_public_data(made.state, "patients", public_data)
    return made


def round_of(hospital: Hospital, number: int) -> dict[str, Any]:
    """A round whose download is what sites agreed on."""
    path = hospital.state / "staging" / "consensus.safetensors"
    safetensors.torch.save_file({"consensus/logits": torch.full((ROWS, 1), 0.1 * number)}, path)
    with TensorFile(path) as file:
        return hospital.round(number, base=path.name, base_digest=file.manifest().digest())


def train(hospital: Hospital, number: int) -> dict[str, Any]:
    answer: dict[str, Any] = hospital.answer(round_of(hospital, number))
    return answer


def test_predictions_on_the_public_data_set_leave_and_no_tensor_of_the_network(hospital: Hospital) -> None:
    described = hospital.ask("describe", study=hospital.document, site="north")
    assert [(leaf["bundle"], leaf["name"], leaf["shape"]) for leaf in described["upload"]] == [
        ("predictions", "logits", [ROWS, 1])
    ]
    assert [(one["bundle"], one["name"]) for one in described["download"]] == [("consensus", "logits")]
    with TensorFile(hospital.state / "staging" / train(hospital, 1)["update"]) as update:
        assert [spec.key for spec in update.specs] == ["predictions/logits"]
    hospital.commit(1)
    before = hospital.update_digest(train(hospital, 2))
    assert hospital.update_digest(train(hospital.restarted(), 2)) == before


def test_a_copy_that_differs_is_refused_when_approving_and_before_each_round(
    hospital: Hospital, public_data: Path
) -> None:
    train(hospital, 1)
    hospital.commit(1)
    wanted = public_data_digest(public_data)
    public_data.write_text(public_data.read_text().replace(".", "1.", 1))
    found = public_data_digest(public_data)
    for ask in (
        lambda: hospital.ask("check", study=hospital.document, site="north", data="patients"),
        lambda: train(hospital, 2),
        lambda: train(hospital.restarted(), 2),
    ):
        with pytest.raises(BadData) as refused:
            ask()
        assert refused.value.message == (
            f"{public_data} is not the public data set of study `small`: its digest is {found[:12]}…, the study's is "
            f"{wanted[:12]}…"
        )
        assert "`site-agent data public-data patients PATH`" in refused.value.hint
        assert refused.value.code == "DECLINED_DATA_CHANGED"


def test_a_copy_that_is_gone_or_was_never_named_is_refused(hospital: Hospital, public_data: Path) -> None:
    public_data.unlink()
    with pytest.raises(BadData, match="No such file or directory") as gone:
        train(hospital, 1)
    assert gone.value.code == "DECLINED_DATA_CHANGED"
    assert "`site-agent data public-data patients PATH`" in gone.value.hint
    (hospital.state / "data.toml").unlink()
    hospital.name_data()
    with pytest.raises(
        BadData, match="study `small` needs its public data set, and data `patients` names none"
    ) as unnamed:
        train(hospital, 1)
    assert unnamed.value.code == "DECLINED_DATA_INVALID"


def test_a_set_of_another_number_of_rows_is_refused(hospital: Hospital, public_data: Path) -> None:
    assert hospital.study.public_data is not None
    more = hospital.study.public_data.model_copy(update={"rows": ROWS + 1})
    other = replace(hospital, study=ResolvedStudy(hospital.study.file.model_copy(update={"public_data": more})))
    with pytest.raises(BadData, match="9 rows, ") as refused:
        other.ask("check", study=other.document, site="north", data="patients")
    assert refused.value.code == "DECLINED_DATA_INVALID"


def test_a_study_without_a_public_data_set_does_not_look_for_one(hospital: Hospital, public_data: Path) -> None:
    public_data.unlink()
    plain = replace(hospital, study=small_study("fedavg"))
    assert plain.train(1)["num_examples"] == 48


def test_naming_the_set_keeps_the_rest_of_the_data_and_naming_the_data_again_keeps_the_set(
    hospital: Hospital, public_data: Path, tmp_path: Path
) -> None:
    assert tomllib.loads((hospital.state / "data.toml").read_text())["patients"]["public_data"] == str(public_data)
    hospital.name_data()
    named = sources.source(hospital.state, "patients")
    assert (named.public_data, named.table) == (str(public_data), str(hospital.table))
    moved = tmp_path / "moved.csv"
    told = CliRunner().invoke(data_app, ["public-data", "patients", str(moved), "--state", str(hospital.state)])
    assert told.exit_code == 0, told.exception
    assert sources.source(hospital.state, "patients") == named.model_copy(update={"public_data": str(moved)})
    with pytest.raises(UsageProblem, match="no data is called `others` here"):
        sources.name_public_data(hospital.state, "others", public_data)
