"""``data``, ``models`` and ``predict`` as a person gives them."""

import io
import json
import os
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from site_agent import handoff
from site_agent.cli import data, progress
from site_agent.state.directory import Offer, Site, SiteState
from site_agent.trainer.data import sources
from site_agent.trainer.rounds.predictions import ids_in
from tests.site_agent.trainer_world import NAME, STUDY_DIGEST, Hospital
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.records.trainer import GetStatus, Predict, Predicted, Progress
from wardround.tensors.manifests import Manifest

app = typer.Typer()
app.add_typer(data.data_app, name="data")
app.add_typer(data.models_app, name="models")
app.command("predict")(data.predict)


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital.make(tmp_path)


def give(hospital: Hospital, *words: str | Path) -> Result:
    """The command's output; its error is raised as itself."""
    result = CliRunner().invoke(app, [*map(str, words), "--state", str(hospital.state)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def add(hospital: Hospital, name: str, *more: str | Path) -> Result:
    return give(hospital, "data", "add", name, "--table", hospital.table, "--label", "ill", *more)


def trained(hospital: Hospital) -> None:
    for number in (1, 2):
        hospital.train(number)
        hospital.commit(number)


def offer(hospital: Hospital) -> None:
    state = SiteState(hospital.state)
    state.save_offer(Offer(NAME, 1, STUDY_DIGEST, "waiting", hospital.document, Manifest(())))
    state.save_site(Site("north", "demo", "127.0.0.1:1", "00", "00", 0))


def test_data_is_added_with_absolute_paths_and_a_digest(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    (hospital.state / "data.toml").unlink()
    monkeypatch.chdir(hospital.table.parent)
    result = give(hospital, "data", "add", "patients", "--table", "train.csv", "--label", "ill", "--test", "test.csv")
    assert result.stdout == ""
    assert "Data `patients`: 60 rows, 4 columns, and 20 rows held out for scores" in result.stderr
    assert "next: `site-agent studies`" in result.stderr
    written = tomllib.loads((hospital.state / "data.toml").read_text())
    source = sources.sources(hospital.state)["patients"]
    assert written == {
        "patients": {
            "table": str(hospital.table), "test": str(hospital.test), "label": "ill",
            "digest": sources.digest_now(source),
        }
    }  # fmt: skip


def test_digest_of_a_named_table_is_the_one_that_the_task_finds(hospital: Hospital) -> None:
    said = hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert said["digest"] == sources.sources(hospital.state)["patients"].digest


def test_data_of_the_same_name_is_replaced_only_when_it_is_said(hospital: Hospital) -> None:
    other = hospital.table.with_name("other.csv")
    other.write_text(hospital.table.read_text())
    hospital.table = other
    with pytest.raises(UsageProblem, match=r"data `patients` is already .*train\.csv") as refused:
        add(hospital, "patients")
    assert "`--replace`" in refused.value.hint
    add(hospital, "patients", "--replace")
    assert sources.sources(hospital.state)["patients"].table == str(other)


def test_data_added_again_unchanged_is_no_error(hospital: Hospital) -> None:
    add(hospital, "patients", "--test", hospital.test)


@pytest.mark.parametrize("name", ["a b", "", "x" * 65, "a]\nb"])
def test_name_of_another_form_is_refused(hospital: Hospital, name: str) -> None:
    with pytest.raises(UsageProblem, match="is not a name of 1 to 64 of A-Z, a-z, 0-9, _ and -"):
        add(hospital, name)


def test_table_without_the_label_is_refused_by_the_columns_name(hospital: Hospital) -> None:
    with pytest.raises(BadData, match=r"train\.csv: no column `disease`"):
        give(hospital, "data", "add", "p", "--table", hospital.table, "--label", "disease")


def test_odd_paths_and_labels_come_back_from_data_toml(hospital: Hospital) -> None:
    odd = 'C:\\a "b"\tc\x01\u2028é\U0001f3e5'
    source = sources.DataSource(table=f"/srv/{odd}.csv", label=odd, digest="0" * 64)
    sources.add(hospital.state, "odd", source, replace=False)
    assert sources.sources(hospital.state)["odd"] == source
    with pytest.raises(UsageProblem, match=r"a path that is not UTF-8 cannot be kept in data\.toml"):
        sources.add(hospital.state, "x", source.model_copy(update={"table": "/srv/\udcff"}), replace=False)


def test_data_toml_edited_by_hand_is_refused_with_the_key(hospital: Hospital) -> None:
    (hospital.state / "data.toml").write_text('[patients]\ntabel = "/x"\n')
    with pytest.raises(BadData, match=r"data\.toml: ") as refused:
        give(hospital, "data", "list")
    assert "`table`" in refused.value.message + refused.value.hint


def test_data_list_shows_what_has_a_name(hospital: Hospital) -> None:
    assert str(hospital.table) in give(hospital, "data", "list").stdout
    listed = json.loads(give(hospital, "data", "list", "--json").stdout)["data"]
    assert [row["name"] for row in listed] == ["patients"]


def test_data_check_says_rows_classes_and_warnings(hospital: Hospital) -> None:
    offer(hospital)
    hospital.table.write_text("\n".join(hospital.table.read_text().splitlines()[:41]) + "\n")
    result = give(hospital, "data", "check", "patients", "--study", NAME)
    assert "40 rows: 32 to train, 8 to validate; 20 held out for scores" in result.stdout
    assert "classes: no: " in result.stdout
    assert "warning: the files of `patients` have changed since `data add`" in result.stdout
    assert "next: `site-agent approve small --data patients`" in result.stderr


def test_data_check_for_a_study_that_was_not_offered_is_refused(hospital: Hospital) -> None:
    offer(hospital)
    with pytest.raises(UsageProblem, match="no study `other` has been offered to this site"):
        give(hospital, "data", "check", "patients", "--study", "other")


def test_models_are_listed_with_their_scores(hospital: Hospital) -> None:
    trained(hospital)
    listed = json.loads(give(hospital, "models", "list", NAME, "--json").stdout)["checkpoints"]
    assert [row["kind"] for row in listed] == ["best_local", "latest"]
    shown = give(hospital, "models", "list", NAME).stdout
    assert all(row["path"] in shown and row["kind"] in shown for row in listed)


def test_models_of_a_study_without_any_are_an_error(hospital: Hospital) -> None:
    with pytest.raises(UsageProblem, match="study `small` has no models here yet"):
        give(hospital, "models", "list", NAME)


def test_model_is_exported_with_all_that_predicting_needs(
    hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(hospital)
    monkeypatch.setattr(
        handoff, "one_shot", lambda state, asked, tell=lambda step: None: hospital.requests.answer(asked, tell)
    )
    out = tmp_path / "model"
    result = give(hospital, "models", "export", NAME, "--checkpoint", "latest", "--out", out)
    names = "card.json preprocessing.json study.json MODEL_CARD.md model.safetensors model.py predict.py"
    assert result.stdout.split() == [str(out / name) for name in names.split()]
    assert "was computed from patients" in result.stderr
    assert f"next: {out}/MODEL_CARD.md says what it is" in result.stderr.replace("\n", "")
    page = (out / "MODEL_CARD.md").read_text()
    assert "not known here before the study has ended" in page
    assert "checkpoint: latest, of round 1 of 4" in page
    assert "| accuracy | test |" in page

    # The program says what `predict` says; tests/fl_algorithms/test_portable.py asks it where none of ours is.
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    give(hospital, "predict", NAME, "--checkpoint", "latest", "--table", hospital.test, "--out", ours)
    runpy.run_path(str(out / "predict.py"))["main"](hospital.test, theirs)
    assert ours.read_text() == theirs.read_text()


def test_export_says_why_it_has_no_program(hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(hospital)

    def without(state: Path, request: object) -> None:
        raise BadData("this network has no text", hint="build it yourself")

    monkeypatch.setattr(handoff, "one_shot", without)
    out = tmp_path / "model"
    result = give(hospital, "models", "export", NAME, "--checkpoint", "latest", "--out", out)
    assert "warning: without a program: this network has no text" in result.stderr
    assert (out / "MODEL_CARD.md").exists()
    said = give(hospital, "models", "export", NAME, "--checkpoint", "latest", "--out", out, "--force", "--json")
    assert json.loads(said.stdout)["without_program"] == "this network has no text"
    with pytest.raises(NeedsPerson) as refused:
        give(hospital, "models", "export", NAME, "--checkpoint", "latest", "--out", out, "--force", "--onnx")
    assert refused.value.message == "the weights are written, and ONNX is not: this network has no text"
    assert refused.value.hint == "build it yourself"


def test_program_is_written_beside_its_own_weights_alone(hospital: Hospital, tmp_path: Path) -> None:
    trained(hospital)
    with pytest.raises(UsageProblem, match="holds no export of checkpoint `latest` of study `small`"):
        hospital.ask("write_program", study=NAME, checkpoint="latest", out=str(tmp_path))


def test_predictions_are_written_by_an_isolated_child(hospital: Hospital, tmp_path: Path) -> None:
    trained(hospital)
    out = tmp_path / "out.csv"
    options = ["--checkpoint", "best_local", "--table", hospital.test, "--out", out]
    said = json.loads(give(hospital, "predict", NAME, *options, "--json").stdout)
    (note,) = said.pop("notes")
    assert said == {"rows": 20, "out": str(out)}
    assert note in give(hospital, "predict", NAME, *options, "--force").stderr.replace("\n", " ")
    assert out.read_text().splitlines()[0] == "line,predicted,probability_no,probability_yes"
    assert out.stat().st_mode & 0o777 == 0o600


def test_predictions_carry_a_column_of_the_table_that_says_who_it_is(hospital: Hospital, tmp_path: Path) -> None:
    trained(hospital)
    rows = hospital.test.read_text().splitlines()
    table, out = tmp_path / "new.csv", tmp_path / "out.csv"
    table.write_text(
        "\n".join(["study_id," + rows[0], *(f"=P{number}," + row for number, row in enumerate(rows[1:], 1))])
    )
    options = ["--checkpoint", "latest", "--table", table, "--out", out]
    give(hospital, "predict", NAME, *options, "--id", "study_id")
    first, second, *_ = out.read_text().splitlines()
    assert first == "line,study_id,predicted,probability_no,probability_yes"
    assert second.startswith("2,'=P1,")  # no formula for a spreadsheet
    with pytest.raises(BadData, match="nobody"):
        give(hospital, "predict", NAME, *options, "--id", "nobody", "--force")


def test_an_image_has_its_name_and_no_id(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="`--id` names a column of a table; a prediction for an image"):
        ids_in(tmp_path, "patient", is_table=False)
    assert ids_in(tmp_path, "", is_table=False) is None


def test_what_takes_long_says_how_far_it_is(hospital: Hospital, tmp_path: Path) -> None:
    trained(hospital)
    steps: list[tuple[int, int]] = []
    request = Predict(study=NAME, checkpoint="latest", table=str(hospital.test), out=str(tmp_path / "out.csv"))
    handoff.one_shot(hospital.state, request, lambda progress: steps.append((progress.step, progress.steps)))
    assert steps[-1] == (20, 20)


def test_progress_is_one_line_on_a_terminal_and_few_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log, clock = Terminal(), io.StringIO(), iter([0.0, 1.0, 11.0, 11.0])
    with progress.shown("predicting", terminal) as tell:
        tell(Progress(step=1500, steps=2000))
    assert terminal.getvalue() == "\rpredicting: 1,500 of 2,000\x1b[K\r\x1b[K"
    with progress.shown("predicting", log, lambda: next(clock)) as tell:
        tell(Progress(step=1, steps=3))  # after a second: too soon
        tell(Progress(step=2, steps=3))
    assert log.getvalue() == "predicting: 2 of 3\n"


def test_checkpoint_of_another_name_is_refused(hospital: Hospital, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="there is no checkpoint `best`") as refused:
        give(hospital, "predict", NAME, "--checkpoint", "best", "--table", hospital.test, "--out", tmp_path / "o")
    assert refused.value.hint == "there are: selected, best_local, fine_tuned, latest, best_global, alone"


def test_without_a_kind_the_selected_checkpoint_is_asked_for(hospital: Hospital, tmp_path: Path) -> None:
    trained(hospital)
    with pytest.raises(UsageProblem, match="study `small` has no checkpoint `selected`") as refused:
        give(hospital, "predict", NAME, "--table", hospital.test, "--out", tmp_path / "o")
    assert "it has: best_local, latest; `--checkpoint` says which. A site selects one when a" in refused.value.hint


def test_folder_that_is_no_state_directory_is_refused(hospital: Hospital, tmp_path: Path) -> None:
    hospital.state = tmp_path / "nowhere"
    with pytest.raises(NeedsPerson, match="nowhere is not a site's state directory"):
        add(hospital, "p")


def test_coordinators_folder_is_no_place_for_a_table(hospital: Hospital, tmp_path: Path) -> None:
    hospital.state = tmp_path / "coordinator"
    (hospital.state / "authority").mkdir(parents=True)
    with pytest.raises(NeedsPerson, match="coordinator is a coordinator's state directory"):
        add(hospital, "p")


def test_status_without_a_listener_says_what_its_worker_would_be(hospital: Hospital) -> None:
    found = handoff.ask(hospital.state, GetStatus())
    assert (found.uid, found.worker) == (os.geteuid(), None)
    assert found.isolation in ("network-namespace", "seccomp", "none")


def test_models_of_the_trainers_user_are_asked_of_its_listener(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root every folder can be read, so what the system would say is said here."""
    monkeypatch.setattr(data, "_may_read", lambda _: False)
    with pytest.raises(NeedsPerson, match="belongs to the trainer's user, and the trainer does not run") as refused:
        give(hospital, "models", "list", NAME)
    assert "--only trainer" in refused.value.hint

    asked: list[Any] = []
    monkeypatch.setattr(handoff.Trainer, "available", lambda _: True)
    monkeypatch.setattr(
        handoff.Trainer, "ask", lambda _, request, progress: asked.append(request) or Predicted(rows=1, out="o")
    )
    give(hospital, "predict", NAME, "--checkpoint", "latest", "--table", hospital.test, "--out", "/srv/o", "--json")
    assert asked == [Predict(study=NAME, checkpoint="latest", table=str(hospital.test), out="/srv/o")]
