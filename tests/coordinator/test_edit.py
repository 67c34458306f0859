"""A new revision of a study that is not over, in one step: what changed, where it goes on, and who approves again."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli.main import app
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import write_initial
from tests.coordinator.test_rounds import model_bytes
from wardround.errors import BadData, NeedsPerson
from wardround.records.schema import toml_bytes

PAIR = ["alpha", "bravo"]
STUDY: dict[str, dict[str, object]] = {
    "study": {"name": "trial", "sites": PAIR, "rounds": 2, "round_deadline_s": 60},
    "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
    "model": {"name": "mlp"},
    "algorithm": {"name": "fedavg"},
    "training": {"local_steps": 1},
}


def edit(place: Place, *words: str | Path) -> Result:
    return CliRunner().invoke(app, ["study", "edit", "trial", *map(str, words), "--state", str(place.state.root)])


def said(result: Result) -> list[str]:
    assert result.exit_code == 0, result.exception
    return [line.split(" --state")[0] for line in result.stderr.splitlines()]


def test_a_running_study_goes_on_from_its_newest_model_and_says_who_approves_again(place: Place) -> None:
    alpha, bravo = place.begin(sites=PAIR, rounds=5)
    for site in (alpha, bravo):
        site.answer(site.next_assignment())
    place.until(lambda status: status["round"] == 2)
    trained = model_bytes(place)
    made = edit(place, "--set", "study.round_deadline_s=120", "--set", "study.quorum=1")
    assert said(made)[:4] == [
        "Study `trial`, revision 2: begins from the model of round 1, 4 rounds", "changed: study.rounds: 5 -> 4",
        "changed: study.quorum: none -> 1", "changed: study.round_deadline_s: 60 -> 120",
    ]  # fmt: skip
    assert said(made)[4] == "must approve again: alpha, bravo"
    assert said(made)[-1].startswith("It waits for them: `coordinator study status trial --follow")
    status = place.status()
    assert (status["revision"], status["state"], status["rounds"]) == (2, "waiting", 4)
    assert made.stdout == f"trial {status['study_digest']}\n"
    assert model_bytes(place) == trained
    for site in (alpha, bravo):
        site.declare("trial", revision=2)
    assert place.until(lambda status: status["state"] == "running")["round"] == 1


def test_a_waiting_study_keeps_its_rounds_and_names_new_sites_and_those_that_are_gone(place: Place) -> None:
    alpha = place.join("alpha")
    place.create(sites=PAIR, rounds=5)
    alpha.declare("trial")
    lines = said(edit(place, "--set", 'study.sites=["alpha", "charlie"]', "--set", "study.rounds=9"))
    assert "Study `trial`, revision 2: begins from its first model, 9 rounds" in lines
    assert "changed: study.sites: alpha, bravo -> alpha, charlie" in lines
    assert lines[3:6] == [
        "must approve again: alpha", "had not approved, and must now: charlie", "not in it any more: bravo"
    ]  # fmt: skip
    assert lines[-1].startswith("then: `coordinator study start trial")
    assert place.status()["state"] == "created"


def test_a_study_file_is_the_new_revision_where_one_is_given(place: Place, tmp_path: Path) -> None:
    place.create(sites=PAIR)
    file = tmp_path / "study.toml"
    file.write_bytes(toml_bytes(STUDY | {"study": {**STUDY["study"], "title": "another title"}}))
    assert any(line.startswith("changed: study.title: ") for line in said(edit(place, file)))
    assert place.status()["title"] == "another title"


def test_other_tensors_need_another_initial_model(place: Place, tmp_path: Path) -> None:
    place.create(sites=PAIR)
    refused = edit(place, "--set", "model.hidden=[3]")
    assert isinstance(refused.exception, BadData)
    assert refused.exception.message == (
        "study `trial` would share other tensors than now, so its models are no beginning for it"
    )
    assert refused.exception.hint.endswith("`coordinator study edit trial FILE --initial initial.safetensors`")
    assert place.status()["revision"] == 1
    assert place.status()["state"] == "created"
    write_initial(tmp_path / "other.safetensors")
    said(edit(place, "--set", "model.hidden=[3]", "--initial", tmp_path / "other.safetensors"))
    assert place.status()["revision"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "nothing is to be changed", id="no setting"),
        pytest.param(
            ["--set", "study.rounds=2"], "study `trial` says exactly this at revision 1: there is nothing to change",
            id="as it is",
        ),
        pytest.param(
            ["--set", "study.name=other"], "the file is of study `other`, not `trial`", id="another study"
        ),
        pytest.param(
            ["--set", "algorithm.name=fedprox"],
            "another algorithm has other settings: write them into a study file", id="another algorithm",
        ),
    ],
)  # fmt: skip
def test_what_is_no_change_is_refused_and_nothing_happens(place: Place, words: list[str], message: str) -> None:
    place.create(sites=PAIR)
    assert str(edit(place, *words).exception) == message
    assert (place.status()["revision"], place.status()["state"]) == (1, "created")


def test_a_study_that_is_over_cannot_be_edited(place: Place) -> None:
    place.create(sites=PAIR)
    place.ask("stop", study="trial")
    refused = edit(place, "--set", "study.rounds=7").exception
    assert isinstance(refused, NeedsPerson)
    assert refused.message == "study `trial` is stopped: there is nothing to go on with"
