"""`fl-lab run --out`: what is kept, and that a run which was killed ends with the same bits."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.lab import cli_run, federation, models, run_folder, run_state
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.curves import AVERAGED, RECEIVED, SENT, TRAIN_LOSS, Curves, Point, Step
from fl_algorithms.lab.federation import Outcome, RunState, run_federation
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.progress import Estimate, rounds_shown, shown
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.test_lab_compare import STUDY, hospitals, write_table
from tests.fl_algorithms.toys import fit, toy_data, toy_study
from wardround.errors import BadData, TryAgain, UsageProblem
from wardround.local import durable

SEED = "seed-5"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    hospitals(tmp_path / "data")
    return tmp_path


def lab(folder: Path, *words: Any) -> Any:
    line = ["run", folder / "study.toml", "--data", folder / "data", *words]
    return CliRunner().invoke(app, [str(word) for word in line], catch_exceptions=False)


def files(out: Path) -> dict[str, bytes]:
    """All that a run kept, but for how long it took."""
    found = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    for name in [name for name in found if name.endswith("result.json")]:
        record = json.loads(found[name])
        record.pop("seconds")
        found[name] = json.dumps(record).encode()
    return {name: content for name, content in found.items() if name not in ("lock", "run.json", ".lock")}


def federate(study: ResolvedStudy, **options: Any) -> Outcome:
    data = {site: toy_data(site) for site in study.study.sites}
    return run_federation(study, task_of(study), data, **options)


# What is kept


def test_a_run_keeps_its_curves_its_models_and_its_scores(folder: Path) -> None:
    out = folder / "out"
    done = lab(folder, "--out", out, "--variant", "fedavg")
    assert f"kept in {out}: curves and models of each seed" in done.stderr
    assert json.loads((out / "run.json").read_text())["data_folder"] == str(folder / "data")
    record = json.loads((out / SEED / "result.json").read_text())
    models = out / SEED / "models"
    shared = load_file(models / "shared.safetensors")
    assert set(record["checkpoints"]["ash"]) == {path.stem for path in (models / "ash").glob("*.safetensors")}
    latest = load_file(models / "ash" / "latest.safetensors")
    assert all(torch.equal(latest[name], tensor) for name, tensor in shared.items())
    assert json.loads((models / "birch" / "preprocessing.json").read_text())
    assert not (out / SEED / "state.safetensors").exists()
    with (out / SEED / "curves.csv").open(newline="") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert {"val_loss", "accuracy", TRAIN_LOSS, SENT, RECEIVED, AVERAGED} <= names


def test_a_model_of_a_run_goes_out_with_its_program(folder: Path) -> None:
    out, place = folder / "out", folder / "model"
    lab(folder, "--out", out, "--variant", "fedavg")
    done = CliRunner().invoke(app, ["model", str(out), "--site", "ash", "--out", str(place)], catch_exceptions=False)
    names = "card.json study.json preprocessing.json MODEL_CARD.md model.safetensors model.py predict.py"
    assert done.stdout.split() == [str(place / name) for name in names.split()]
    page = (place / "MODEL_CARD.md").read_text()
    assert "no federation took part" in page
    assert "simulated in one process: ash, birch" in page
    runpy.run_path(str(place / "predict.py"))["main"](folder / "data" / "ash" / "train.csv", folder / "said.csv")
    rows = (folder / "data" / "ash" / "train.csv").read_text().splitlines()
    assert len((folder / "said.csv").read_text().splitlines()) == len(rows)

    # The same of weights that were exported where there is no torch, with what the study itself says of its scale.
    for name in ("model.py", "predict.py", "preprocessing.json"):
        (place / name).unlink()
    done = CliRunner().invoke(app, ["program", str(place)], catch_exceptions=False)
    assert done.stdout.split() == [str(place / "model.py")]
    (place / "card.json").unlink()
    with pytest.raises(BadData, match=r" has no card\.json") as refused:
        CliRunner().invoke(app, ["program", str(place)], catch_exceptions=False)
    assert refused.value.hint == "the folder that `models export` made"


def test_a_folder_without_a_run_has_no_model_to_give(folder: Path) -> None:
    with pytest.raises(BadData, match="has neither run"):
        models.export(folder / "data", "ash", "latest", None, folder / "model")


def test_curves_are_what_the_rounds_gave() -> None:
    study, curves = toy_study("fedavg"), Curves()
    outcome = federate(study, curves=curves)
    last = {point.site: point.value for point in curves.points if (point.round, point.name) == (3, "val_loss")}
    assert last == {site: kinds["latest"].val_loss for site, kinds in outcome.checkpoints.items()}
    assert [step.step for step in curves.steps if (step.round, step.site) == (2, "ash")] == [1, 2, 3, 4, 5, 6]
    mean = [point.value for point in curves.points if point[:3] == (2, "ash", TRAIN_LOSS)]
    assert mean == [pytest.approx(sum(s.loss for s in curves.steps if (s.round, s.site) == (2, "ash")) / 6)]
    size = sum(4 * tensor.numel() for tensor in outcome.shared.values())
    assert {point.value for point in curves.points if point.name in (SENT, RECEIVED)} == {size}


def test_a_method_with_several_phases_has_a_curve_of_each() -> None:
    curves = Curves()
    federate(toy_study("ditto"), curves=curves)
    assert {step.phase for step in curves.steps} == {"", "personal"}


def test_a_curve_is_the_same_after_being_written_and_read(tmp_path: Path) -> None:
    points = [Point(0, "ash", "auc", None), Point(1, "ash", "val_loss", 0.1 + 0.2)]
    steps = [Step(1, "ash", "a,b", 1, 1e-300)]
    seed = run_folder.SeedFolder(tmp_path / "s")
    assert seed.resume({}) is None
    seed._add(Curves(list(points), list(steps)))
    assert run_folder.curves_of(tmp_path / "s") == Curves(points, steps)


# Going on


def states(study: ResolvedStudy, **options: Any) -> tuple[Outcome, dict[int, bytes]]:
    kept: dict[int, bytes] = {}

    def keep(number: int, make: Any) -> None:
        kept[number] = run_state.to_document(make(), {"a": 1})

    return federate(study, keep=keep, **options), kept


def same(first: Outcome, second: Outcome) -> bool:
    def plain(outcome: Outcome) -> Any:
        return {
            (site, kind): run_state.card(one)
            for site, kinds in outcome.checkpoints.items()
            for kind, one in kinds.items()
        }

    tensors = all(
        torch.equal(tensor, second.checkpoints[site][kind].tensors[name])
        for site, kinds in first.checkpoints.items()
        for kind, one in kinds.items()
        for name, tensor in one.tensors.items()
    )
    alike = (first.digest, first.best_round, first.accounts) == (second.digest, second.best_round, second.accounts)
    return alike and tensors and plain(first) == plain(second)


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "fedsoup", "scaffold", "ditto", "fedfomo"])
@pytest.mark.parametrize("optimizer", ["adamw"])
def test_a_run_that_goes_on_in_the_middle_ends_with_the_same_bits(
    algorithm: str, optimizer: str, tmp_path: Path
) -> None:
    """Through the file, after each round; some sites are away in some rounds."""
    study = fit(algorithm, quorum=1, rounds=4)
    options: dict[str, Any] = {"participation": Participation(dropout=0.3), "curves": Curves()}
    whole, kept = states(study, **options)
    for number in (1, 3):
        (tmp_path / "state").write_bytes(kept[number])
        state, note = run_state.from_document(tmp_path / "state")
        assert (state.round, note) == (number, {"a": 1})
        curves = Curves()
        assert same(whole, federate(study, **(options | {"state": state, "curves": curves})))
        all_points = options["curves"].points
        assert curves.points == all_points[len(all_points) - len(curves.points) :]


@pytest.mark.chaos
def test_a_killed_run_goes_on_and_ends_with_the_same_bits(folder: Path) -> None:
    """kill -9, in the middle of a round."""
    words = ["--set", "study.rounds=20", "--set", "training.local_steps=8"]
    assert lab(folder, "--out", folder / "whole", *words).exit_code == 0
    out = folder / "out"
    line = ["run", folder / "study.toml", "--data", folder / "data", "--out", out, *words]
    code = "import sys; from fl_algorithms.lab.cli import main; sys.argv[0] = 'fl-lab'; main()"
    child = subprocess.Popen([sys.executable, "-c", code, *map(str, line)], stderr=subprocess.DEVNULL)
    state = out / SEED / "state.safetensors"
    while not state.exists() and child.poll() is None:
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    before = run_state.from_document(state)[0].round
    assert 1 <= before < 20
    trained: list[int] = []
    real = SiteSession.train

    def noting(session: SiteSession, number: int, *given: Any, **more: Any) -> Any:
        trained.append(number)
        return real(session, number, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteSession, "train", noting)
        assert lab(folder, "--out", out, *words).exit_code == 0
    assert trained[0] == before + 1
    assert files(out) == files(folder / "whole")


def test_what_a_killed_process_wrote_after_its_state_is_cut_off(tmp_path: Path) -> None:
    study, curves = toy_study("fedavg", rounds=3), Curves()
    seed = run_folder.SeedFolder(tmp_path / "s")
    assert seed.resume({"x": 1}) is None
    federate(study, curves=curves, keep=lambda _, make: seed.keep(curves, {"x": 1}, make))
    length = (tmp_path / "s" / "curves.csv").stat().st_size
    with (tmp_path / "s" / "curves.csv").open("a") as file:
        file.write("4,ash,torn")
    assert run_folder.SeedFolder(tmp_path / "s").resume({"x": 1}) is not None
    assert (tmp_path / "s" / "curves.csv").stat().st_size == length


def test_states_take_at_most_a_tenth_of_the_time(tmp_path: Path) -> None:
    """A second for each state, on a clock of its own, and three for each round."""
    now, number, kept = 0.0, 0, []
    seed = run_folder.SeedFolder(tmp_path / "s", clock=lambda: now)
    seed.resume({})

    def make() -> RunState:
        nonlocal now
        now += 1
        kept.append(number)
        return RunState(number, {}, federation.BestGlobal(), {}, (), {}, {})

    while number < 10:
        now, number = now + 3, number + 1
        seed.keep(Curves(), {}, make)
    assert kept == [1, 4, 7, 10]


def test_a_run_that_is_whole_is_not_made_again_and_more_seeds_are_added(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "out"
    first = json.loads(lab(folder, "--out", out, "--json").stdout)
    more = json.loads(lab(folder, "--out", out, "--seeds", 2, "--json").stdout)
    assert (more["seeds"], more["digests"][0]) == ([5, 6], first["digests"][0])
    monkeypatch.setattr(federation, "run_federation", None)
    assert json.loads(lab(folder, "--out", out, "--seeds", 2, "--json").stdout) == more
    assert run_folder.seeds_of(out) == [5, 6]


def test_a_run_that_is_stopped_says_how_it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_run, "run_study", stopped)
    monkeypatch.setattr("sys.argv", ["fl-lab", "run", "study.toml"])
    done = lab(folder, "--out", folder / "out")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[0] == f"stopped: what was done is kept in {folder / 'out'}"
    assert done.stderr.splitlines()[1] == "next: `fl-lab run study.toml` goes on"


def test_a_folder_of_another_study_or_other_data_is_refused(folder: Path) -> None:
    out = folder / "out"
    lab(folder, "--out", out)
    with pytest.raises(BadData) as refused:
        lab(folder, "--out", out, "--set", "training.batch_size=5")
    assert refused.value.message == (f"{out} holds a run of something else: study.training.batch_size was 4, is now 5")
    assert refused.value.hint == "use another --out, or the study, data and versions as they were"
    with pytest.raises(BadData, match=r"participation\.dropout was \"0\.0\", is now \"0\.1\""):
        lab(folder, "--out", out, "--dropout", 0.1)
    rows = [(*x, y) for x, y in zip(torch.zeros(9, 3).tolist(), [0, 1, 0] * 3, strict=True)]
    write_table(folder / "data" / "birch" / "train.csv", rows)
    with pytest.raises(BadData, match=r"seed-6 holds a run of something else: data\.birch was"):
        lab(folder, "--out", out, "--seeds", 2)
    with pytest.raises(BadData, match=r"out holds a run of something else: data\.birch was"):
        lab(folder, "--out", out)  # all is there, of other data


def test_a_folder_that_is_in_use_is_left_alone(folder: Path) -> None:
    durable.make_folder(folder / "out")
    with durable.StateLock(folder / "out", "fl-lab run"), pytest.raises(TryAgain) as refused:
        lab(folder, "--out", folder / "out", "--force")
    assert refused.value.hint == "let it end, or use another --out"


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"torn")
    with pytest.raises(BadData) as refused:
        run_state.from_document(tmp_path / "state")
    assert refused.value.message == f"{tmp_path / 'state'}: not the state of a run, or damaged"
    assert refused.value.hint == "remove that file: the run begins again at its first round"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "{path}: not JSON", id="no-json"),
        pytest.param('{"format": 0}', "{path}: not a file of this version of `fl-lab run`", id="another-version"),
    ],
)
def test_a_result_that_is_none_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(BadData) as refused:
        run_folder.result_of(tmp_path)
    assert refused.value.message == message.format(path=tmp_path / "result.json")


# Who is in a round


def test_a_site_that_is_away_downloads_nothing_and_the_mean_is_of_the_others() -> None:
    study, curves = toy_study("fedavg", sites=["ash", "birch", "cedar"], quorum=1, rounds=6), Curves()
    outcome = federate(study, participation=Participation(dropout=0.4), curves=curves)
    inside = {(point.round, point.site): point.value for point in curves.points if point.name == AVERAGED}
    received = {(point.round, point.site) for point in curves.points if point.name == RECEIVED}
    assert {place for place, value in inside.items() if value} == received
    assert 0 < len(received) < len(inside) == 18
    assert [set(account.norms) for account in outcome.accounts] == [
        {site for number, site in received if number == round_number} for round_number in range(1, 7)
    ]


def test_a_site_that_is_never_there_is_judged_at_the_end_and_keeps_its_private_parts() -> None:
    study = toy_study("fenda", sites=["ash", "birch", "cedar"], quorum=1, rounds=1)
    whole = federate(study, participation=Participation(sample=0.3))
    assert len(whole.accounts[0].norms) == 1
    assert all(set(kinds) == {"latest", "best_local"} for kinds in whole.checkpoints.values())


def test_everyone_in_every_round_is_what_no_word_gives() -> None:
    study = toy_study("fenda")
    assert federate(study).digest == federate(study, participation=Participation(delay_s=1.0, delay_spread=0.0)).digest


def test_a_sample_below_the_quorum_is_refused_before_anything_runs(folder: Path) -> None:
    with pytest.raises(UsageProblem, match="a round asks 1 of the 2 sites, and the study needs 2 updates"):
        lab(folder, "--sample", 0.5)
    assert lab(folder, "--sample", 0.5, "--set", "study.quorum=1").exit_code == 0


# Torch's own settings


def test_a_run_leaves_torch_as_it_found_it(folder: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    torch.manual_seed(11)
    expected = torch.rand(3)
    try:
        torch.manual_seed(11)
        lab(folder)
        assert torch.equal(torch.rand(3), expected)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 2
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])


# How long it may take


def test_the_time_left_is_of_the_pace_so_far() -> None:
    now = 100.0
    estimate = Estimate(10, clock=lambda: now)
    assert estimate.left_s(2) is None  # what was there before says nothing of the pace
    now = 130.0
    assert estimate.left_s(5) == pytest.approx(50)


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (200, "3 min"), (7800, "2 h 10 min")], ids=["s", "min", "h"]
)
def test_a_duration_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert shown(seconds) == text


def test_where_no_terminal_is_a_line_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with rounds_shown(2, 10, clock=lambda: now) as told:
        for done in range(11):
            now += 10
            told(0, done, "fedavg: seed 5")
    assert capsys.readouterr().err.splitlines() == [
        "fedavg: seed 5: round 2 of 10, about 3 min left",
        "fedavg: seed 5: round 5 of 10, about 2 min left",
        "fedavg: seed 5: round 8 of 10, about 2 min left",
    ]
