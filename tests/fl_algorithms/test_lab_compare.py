"""Suites: what their file may say, their runs, what stops them, and how settings are chosen."""

import csv
import json
import subprocess
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import comparison, runs, suite, tuning
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.evaluation import paired
from tests.fl_algorithms.toys import toy_data
from wardround.errors import BadData, TryAgain, UsageProblem, WardroundError

STUDY = """
[study]
name = "toy"
sites = ["ash", "birch"]
rounds = 2
seed = 5

[task]
name = "tabular"
label = "ill"
classes = ["no", "yes"]
headline = "accuracy"
features = ["u", "v", "w"]

[model]
name = "fenda"

[algorithm]
name = "fenda"

[training]
batch_size = 4
local_steps = 3

[variants.fedavg.model]
name = "mlp"

[variants.fedavg.algorithm]
name = "fedavg"
"""
HEAD = """
[suite]
name = "toy"
study = "study.toml"
seeds = 2
tuning_seeds = 2
reference = "fedavg"
"""
FEDAVG = """
[[row]]
name = "fedavg"
variant = "fedavg"
"""
ORDERED = """set = ["task.name='ordinal'", "task.headline='kappa'", "task.classes=['no', 'some', 'yes']"]
"""
FENDA = """
[[row]]
name = "fenda"
"""
TUNED = """
[[row]]
name = "tuned"
variant = "fedavg"
[row.tune]
"training.learning_rate" = [1e-3, 0.3]
"""
CENTRAL = """
[[row]]
name = "central"
kind = "central"
variant = "fedavg"
"""


def hospitals(folder: Path, *, one_class: bool = False) -> Path:
    """Two hospitals' tables. ``one_class``: the second's test rows are all healthy."""
    for site in ("ash", "birch"):
        data = toy_data(site)
        assert data.test is not None
        (folder / site).mkdir(parents=True)
        for name, split in (("train", data.train), ("test", data.test)):
            rows = zip(split.x.tolist(), split.y.tolist(), strict=True)
            healthy_only = one_class and (site, name) == ("birch", "test")
            write_table(folder / site / f"{name}.csv", [(*x, y) for x, y in rows if not (healthy_only and y)])
    return folder


def write_table(path: Path, rows: list[tuple[Any, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["u", "v", "w", "ill"])
        writer.writerows([*x, ("no", "yes")[y]] for *x, y in rows)


def suite_file(folder: Path, text: str, study: str = STUDY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(study)
    (folder / "suite.toml").write_text(text)
    return folder / "suite.toml"


def threads(jobs: int) -> AbstractContextManager[Executor]:
    """A worker that costs no process."""
    return ThreadPoolExecutor(1)


def compared(path: Path, data: Path, out: Path, **options: Any) -> comparison.Tally:
    resolved = suite.load(path)
    given: dict[str, Any] = {"seeds": resolved.seeds, "jobs": 1, "command": "again", "pool": threads} | options
    return comparison.compare(resolved, data, out, **given)


def run_files(out: Path) -> dict[str, Any]:
    """Every run by its file's name, without the time that it took."""
    found = {}
    for path in sorted((out / "runs").rglob("*.json")):
        found[str(path.relative_to(out))] = json.loads(path.read_text())
        found[str(path.relative_to(out))].pop("seconds", None)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return hospitals(tmp_path / "data")


# The file


def refusal(folder: Path, text: str) -> WardroundError:
    with pytest.raises(WardroundError) as caught:
        suite.load(suite_file(folder, text))
    return caught.value


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        pytest.param(
            HEAD + FEDAVG + 'labl = "x"\n', "suite.toml: row `fedavg`: unknown key `labl`", "did you mean `label`?",
            id="unknown-key-of-a-row",
        ),
        pytest.param(
            HEAD + "sedes = 3\n" + FEDAVG, "suite.toml: unknown key `sedes` in [suite]", "did you mean `seeds`?",
            id="unknown-key-of-the-suite",
        ),
        pytest.param(
            HEAD + "[protocol]\nmatrx = true\n" + FEDAVG, "suite.toml: unknown key `matrx` in [protocol]",
            "did you mean `matrix`?", id="unknown-key-of-the-protocol",
        ),
        pytest.param(
            HEAD + FEDAVG.replace('variant = "fedavg"', 'variant = "fedavgg"'),
            "suite.toml: row `fedavg`: study.toml has no variant `fedavgg`", "it has: fedavg", id="unknown-variant",
        ),
        pytest.param(
            HEAD + FEDAVG + FEDAVG, "suite.toml: row `fedavg` stands twice",
            "tables and files call rows by their name", id="row-twice",
        ),
        pytest.param(
            HEAD + FENDA, "suite.toml: `reference` names row `fedavg`, which is not there", "did you mean `fenda`?",
            id="reference-to-no-row",
        ),
        pytest.param(
            HEAD.replace("[suite]", '[suite]\nmetric = "acuracy"') + FEDAVG,
            "suite.toml: `metric` in [suite] names `acuracy`, which the task does not have", "did you mean `accuracy`?",
            id="unknown-metric",
        ),
        pytest.param(
            HEAD + FEDAVG + 'normalisation = "site"\n',
            'suite.toml: row `fedavg`: `normalisation` belongs to kind = "central", the kind is "federated"', "",
            id="normalisation-of-a-federation",
        ),
        pytest.param(
            HEAD + FEDAVG + "[row.tune]\n'study.rounds' = [1, 2]\n",
            "suite.toml: row `fedavg`: `tune`: 'study.rounds' is no key of [model], [algorithm], [training]", "",
            id="grid-of-the-study",
        ),
        pytest.param(
            HEAD + FEDAVG + "[row.tune]\n'training.learning_rate' = [0.1, 0.1]\n",
            "suite.toml: row `fedavg`: `tune`: 'training.learning_rate' needs a list of values, each once", "",
            id="grid-with-a-value-twice",
        ),
        pytest.param(
            HEAD + FEDAVG + "[row.tune]\n'training.learning_rat' = [0.1]\n",
            "suite.toml: row `fedavg`: study.toml: unknown key `learning_rat` in [training]",
            "did you mean `learning_rate`?", id="grid-of-an-unknown-key",
        ),
        pytest.param(
            HEAD + FEDAVG + 'set = ["study.sites=[\\"ash\\"]"]\n' + FENDA,
            "suite.toml: row `fenda` has the sites ash, birch; the first row has ash",
            "rows of one suite are compared site by site", id="unlike-sites",
        ),
        pytest.param(
            HEAD + FEDAVG + FENDA + 'set = ["study.seed=6"]\n',
            "suite.toml: row `fenda` starts at seed 6, the first row at 5",
            "rows of one suite are compared seed by seed", id="unlike-seeds",
        ),
        pytest.param(
            HEAD + "[protocol]\ntent = true\n" + FEDAVG,
            "suite.toml: `tent` in [protocol] needs networks with norm layers, row `fedavg` has none",
            'model `mlp` has, with hidden layers and `norm = "batch"` in [model]', id="tent-without-norms",
        ),
        pytest.param(
            HEAD + "[protocol]\ntent = true\n" + FEDAVG + ORDERED,
            "suite.toml: `tent` in [protocol] adapts to the classes of rows, task `ordinal` of row `fedavg` has none",
            "leave `tent` out of [protocol]", id="tent-without-classes",
        ),
    ],
)  # fmt: skip
def test_a_fault_in_a_suite_is_said_with_its_row_and_key(text: str, message: str, hint: str, tmp_path: Path) -> None:
    found = refusal(tmp_path, text)
    assert (found.message, found.hint) == (message, hint)


def test_a_grid_makes_every_combination_and_keys_need_no_quotes(tmp_path: Path) -> None:
    grid = "[row.tune]\ntraining.learning_rate = [0.1, 0.2]\ntraining.optimizer = ['sgd', 'adam']\n"
    row = suite.load(suite_file(tmp_path, HEAD + FEDAVG + grid)).rows[0]
    assert [(point.study.training.learning_rate, point.study.training.optimizer) for point in row.points] == [
        (0.1, "sgd"), (0.1, "adam"), (0.2, "sgd"), (0.2, "adam"),
    ]  # fmt: skip


def test_tuning_seeds_are_never_reported_seeds(tmp_path: Path) -> None:
    resolved = suite.load(suite_file(tmp_path, HEAD.replace("seeds = 2", "seeds = 1000") + FEDAVG + TUNED))
    row = resolved.row("tuned")
    tuned = {job.seed for job in resolved.tuning_jobs(row)}
    reported = {job.seed for job in resolved.reported_jobs(row, 0, 1000)}
    assert tuned == set(range(1005, 2005))
    assert not tuned & reported


def test_a_silo_row_trains_its_network_alone_whatever_the_variant_says(tmp_path: Path) -> None:
    row = suite.load(suite_file(tmp_path, HEAD + FEDAVG + '[[row]]\nname = "alone"\nkind = "silo"\n')).row("alone")
    study = row.points[0].study
    assert (study.method.name, study.model.name) == ("silo", "fenda")


def test_titles_and_the_number_of_seeds_are_no_part_of_the_digest(tmp_path: Path) -> None:
    digest = suite.load(suite_file(tmp_path, HEAD + FEDAVG)).digest()
    said = HEAD.replace("seeds = 2\nt", 'seeds = 7\ntitle = "T"\nt') + FEDAVG + 'label = "L"\n'
    assert suite.load(suite_file(tmp_path, said)).digest() == digest
    assert suite.load(suite_file(tmp_path, HEAD + FEDAVG + 'set = ["training.learning_rate=0.5"]\n')).digest() != digest


# Runs


def test_each_run_is_a_file_that_says_what_repeats_it(tmp_path: Path, data: Path) -> None:
    tally = compared(suite_file(tmp_path, HEAD + FEDAVG), data, tmp_path / "out")
    assert (tally.wanted, tally.done, tally.failed, tally.interrupted) == (2, 2, [], False)
    files = run_files(tmp_path / "out")
    assert set(files) == {"runs/fedavg/5.json", "runs/fedavg/6.json"}
    run = files["runs/fedavg/6.json"]
    assert run["study"]["study"]["seed"] == run["seed"] == 6
    assert len(run["study_digest"]) == len(run["model_digest"]) == 64
    assert set(run["versions"]) == {"wardround", "torch", "python", "numpy", "instruction_set", "device", "threads"}
    assert run["rows"]["ash"] == {"train": 18, "validation": 4, "test": 12}  # 22 rows, a fifth rounded down
    assert set(run["checkpoints"]["birch"]) == {"latest", "best_local", "best_global"}


def test_a_run_is_what_fl_lab_run_gives(tmp_path: Path, data: Path) -> None:
    compared(suite_file(tmp_path, HEAD + FEDAVG), data, tmp_path / "out")
    lab = ["run", str(tmp_path / "study.toml"), "--data", str(data), "--variant", "fedavg", "--seeds", "2", "--json"]
    said = json.loads(CliRunner().invoke(app, lab, catch_exceptions=False).stdout)
    files = run_files(tmp_path / "out")
    assert [files[f"runs/fedavg/{seed}.json"]["model_digest"] for seed in (5, 6)] == said["digests"]
    assert files["runs/fedavg/5.json"]["study_digest"] == said["study_digest"]


def test_more_seeds_later_add_runs_and_touch_none(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG), tmp_path / "out"
    compared(path, data, out, seeds=1)
    first = (out / "runs/fedavg/5.json").stat()
    assert compared(path, data, out, seeds=3).wanted == 2
    assert (out / "runs/fedavg/5.json").stat().st_mtime_ns == first.st_mtime_ns
    assert compared(path, data, out, seeds=3).wanted == 0


def test_only_some_rows_are_run_when_they_are_named(tmp_path: Path, data: Path) -> None:
    path = suite_file(tmp_path, HEAD + FEDAVG + FENDA)
    compared(path, data, tmp_path / "out", only=["fenda"])
    assert set(run_files(tmp_path / "out")) == {"runs/fenda/5.json", "runs/fenda/6.json"}
    with pytest.raises(UsageProblem, match="has no row `fnda`") as refused:
        compared(path, data, tmp_path / "out", only=["fnda"])
    assert refused.value.hint == "did you mean `fenda`?"


def test_another_suite_in_the_same_folder_is_refused_with_what_differs(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    compared(suite_file(tmp_path, HEAD + FEDAVG), data, out)
    before = run_files(out)
    with pytest.raises(BadData) as refused:
        compared(suite_file(tmp_path, HEAD + FEDAVG, STUDY.replace("batch_size = 4", "batch_size = 5")), data, out)
    where = "rows.fedavg.points[0].study.training.batch_size"
    assert refused.value.message == f"{out} holds runs of another suite: {where} was 4, is now 5"
    assert refused.value.hint == "use another --out, or the suite as it was"
    assert run_files(out) == before


def test_other_data_in_the_same_folder_is_refused(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG), tmp_path / "out"
    compared(path, data, out)
    with pytest.raises(BadData, match="holds runs with other data: birch was"):
        compared(path, hospitals(tmp_path / "others", one_class=True), out)


def test_other_versions_in_the_same_folder_are_refused(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG), tmp_path / "out"
    compared(path, data, out)
    held = json.loads((out / "suite.json").read_text())
    mine, held["versions"]["torch"] = held["versions"]["torch"], "1.0"
    (out / "suite.json").write_text(json.dumps(held))
    with pytest.raises(BadData) as refused:
        compared(path, data, out)
    assert refused.value.message == f'{out} holds runs with other versions: torch was "1.0", is now "{mine}"'


def test_runs_on_another_device_are_refused_and_a_folder_that_names_none_is_the_cpus(
    tmp_path: Path, data: Path
) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG), tmp_path / "out"
    compared(path, data, out, seeds=1)
    held = json.loads((out / "suite.json").read_text())
    assert held["versions"].pop("device") == "cpu"
    (out / "suite.json").write_text(json.dumps(held))
    assert compared(path, data, out, seeds=2).done == 1
    held["versions"]["device"] = "cuda, a card, bfloat16"
    (out / "suite.json").write_text(json.dumps(held))
    with pytest.raises(BadData, match='device was "cuda, a card, bfloat16", is now "cpu"'):
        compared(path, data, out)


def test_two_comparisons_never_write_in_one_folder(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG), tmp_path / "out"

    def meanwhile(jobs: int) -> AbstractContextManager[Executor]:
        with pytest.raises(TryAgain, match="is in use by fl-lab compare") as refused:
            compared(path, data, out)
        assert refused.value.hint == "let it end, or use another --out"
        return threads(jobs)

    assert compared(path, data, out, pool=meanwhile).done == 2


def test_a_failing_row_is_reported_the_others_go_on_and_the_next_call_tries_again(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + CENTRAL + FEDAVG), tmp_path / "out"
    (data / "birch" / "test.csv").rename(tmp_path / "hidden.csv")
    tally = compared(path, data, out, seeds=1)
    reason = f"{data} has no test table for site `birch`: {data / 'birch' / 'test.csv'} does not exist"
    (said,) = tally.failed
    assert said.startswith(f"central: seed 5: {reason} (hint: central training is judged on each site's test rows, ")
    assert tally.done == 1
    assert json.loads((out / "runs/central/5.failed.json").read_text())["message"] == reason
    assert compared(path, data, out, seeds=1).wanted == 1


def test_a_fault_in_the_program_is_kept_with_its_trace_and_cleared_by_success(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(runs, "perform", lambda job, folder, hardware: 1 / 0)
        tally = compared(path, data, out, seeds=1)
    assert tally.failed == ["fedavg: seed 5: a fault in the program: ZeroDivisionError: division by zero"]
    assert "runs/fedavg/5.failed.json" in run_files(out)
    compared(path, data, out, seeds=1)
    assert set(run_files(out)) == {"runs/fedavg/5.json"}


def test_bad_data_is_said_once_before_any_run(tmp_path: Path, data: Path) -> None:
    (data / "ash" / "train.csv").unlink()
    with pytest.raises(BadData, match="has no table for site `ash`"):
        compared(suite_file(tmp_path, HEAD + FEDAVG), data, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.json"))


# Interruption, in real processes

LONG = STUDY.replace("rounds = 2", "rounds = 10").replace("local_steps = 3", "local_steps = 10")


STOPPED_AT_TWO = """
import os, signal
from fl_algorithms.lab import comparison
from fl_algorithms.lab.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
say = comparison.say

def say_and_stop(text):
    say(text)
    if "(2 of 13 runs)" in text:
        os.killpg(0, signal.SIGINT)  # as a terminal does: to the workers too

comparison.say = say_and_stop
main()
"""


@pytest.mark.chaos
def test_an_interrupted_comparison_leaves_whole_files_and_the_next_call_does_the_rest(
    tmp_path: Path, data: Path
) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG + FENDA + TUNED, LONG), tmp_path / "out"
    words = ["compare", str(path), "--data", str(data), "--seeds", "3", "--out", str(out), "--jobs", "1"]
    process = subprocess.run(
        [sys.executable, "-c", STOPPED_AT_TWO, *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    said = process.stderr.splitlines(keepends=True)
    assert process.returncode == 130, said
    kept = run_files(out)  # every file is whole JSON
    assert 2 <= len(kept) < 13
    assert not list(out.rglob("*.tmp"))
    assert said[-2] == f"stopped: {len(kept)} of 13 runs are done, each kept whole in {out}\n"
    assert said[-1] == f"next: `fl-lab {' '.join(words)}` does the other {13 - len(kept)}\n"

    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"{13 - len(kept)} of {13 - len(kept)} runs done" in done.stderr
    compared(path, data, tmp_path / "whole", seeds=3)
    assert run_files(out) == run_files(tmp_path / "whole")


@pytest.mark.chaos
def test_workers_end_with_the_process_that_started_them_however_it_ends(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG, LONG), tmp_path / "out"
    words = ["compare", str(path), "--data", str(data), "--seeds", "50", "--out", str(out), "--jobs", "1"]
    program = "from fl_algorithms.lab.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "(1 of 50 runs)" in process.stderr.readline()
        process.kill()
        assert process.stderr.read().count("runs)") < 49  # read to its end: no worker holds it open any more


# Tuning


def tuning_run(point: int, losses: dict[str, float | None], **more: Any) -> dict[str, Any]:
    """A run of two sites with 1 and 3 validation rows."""
    checkpoints = {
        site: {"latest": {"val_loss": 9.0}, "best_local": {"val_loss": loss}} for site, loss in losses.items()
    }
    rows = {"ash": {"validation": 1}, "birch": {"validation": 3}}
    return {
        "point": point,
        "settings": {"training.learning_rate": point},
        "checkpoints": checkpoints,
        "rows": rows,
    } | more


def test_the_point_of_lowest_weighted_validation_loss_is_chosen() -> None:
    found = tuning.choose(
        "row",
        [
            tuning_run(0, {"ash": 1.0, "birch": 2.0}),  # (1 + 3 x 2) / 4 = 1.75
            tuning_run(1, {"ash": 2.5, "birch": 1.3}),  # (2.5 + 3 x 1.3) / 4 = 1.6
            tuning_run(0, {"ash": 1.0, "birch": 1.0}),  # 1, so 1.375 in the mean
            tuning_run(1, {"ash": 1.0, "birch": 1.0}),  # 1, so 1.3 in the mean
        ],
    )
    assert (found.point, found.kind, found.seeds) == (1, "best_local", 2)
    assert [tried.val_loss for tried in found.tried] == pytest.approx([1.375, 1.3])


def test_of_equal_points_the_first_is_chosen_and_a_loss_that_is_not_finite_never() -> None:
    equal = [tuning_run(point, {"ash": 1.0, "birch": 1.0}) for point in (0, 1)]
    assert tuning.choose("row", equal).point == 0
    lost = [tuning_run(0, {"ash": None, "birch": 0.1}), tuning_run(1, {"ash": 5.0, "birch": 5.0})]
    assert tuning.choose("row", lost).point == 1
    assert tuning.choose("row", lost).tried[0].val_loss is None
    with pytest.raises(BadData, match="row `row`: no point of its grid has a finite validation loss"):
        tuning.choose("row", lost[:1])
    gone = tuning_run(0, {}, diverged=True)  # it left the finite numbers before it had a checkpoint
    assert tuning.choose("row", [gone, lost[1]]).point == 1
    assert tuning.choose("row", [gone, lost[1]]).kind == "best_local"


def test_a_row_that_ends_with_fine_tuning_is_tuned_on_the_fine_tuned_model() -> None:
    """FedBABU's head is untrained until then: the best global model says nothing of a learning rate."""
    run = tuning_run(0, {"ash": 1.0}, settings={"algorithm.fine_tuning.steps": 3})
    run["checkpoints"]["ash"]["fine_tuned"] = {"val_loss": 0.5}
    assert tuning.chosen_kind(run) == "fine_tuned"
    assert tuning.chosen_kind(run | {"settings": {"training.learning_rate": 1}}) == "fine_tuned"
    run["checkpoints"]["ash"]["best_global"] = {"val_loss": 0.1}
    assert tuning.chosen_kind(run) == "fine_tuned"
    del run["checkpoints"]["ash"]["fine_tuned"]
    assert tuning.chosen_kind(run) == "best_global"


def test_reported_runs_use_the_chosen_point(tmp_path: Path, data: Path) -> None:
    path, out = suite_file(tmp_path, HEAD + FEDAVG + TUNED), tmp_path / "out"
    compared(path, data, out)
    files = run_files(out)
    losses = {
        point: [
            tuning.site_mean(files[f"runs/tuned/{seed}-tuning-{point}.json"], "best_global") for seed in (1005, 1006)
        ]
        for point in (0, 1)
    }
    best = min((0, 1), key=lambda point: sum(loss for loss in losses[point] if loss is not None))
    assert {files[f"runs/tuned/{seed}.json"]["point"] for seed in (5, 6)} == {best}
    assert files["runs/tuned/5.json"]["study"]["training"]["learning_rate"] == ["0.001", "0.3"][best]


def test_tuning_never_reads_a_test_table(tmp_path: Path, data: Path) -> None:
    """With the test tables' labels turned round, and with tables that cannot be read at all."""
    resolved = suite.load(suite_file(tmp_path, HEAD + FEDAVG + TUNED))
    turned = hospitals(tmp_path / "turned")
    broken = hospitals(tmp_path / "broken")
    for site in ("ash", "birch"):
        split = toy_data(site).test
        assert split is not None
        rows = zip(split.x.tolist(), split.y.tolist(), strict=True)
        write_table(turned / site / "test.csv", [(*x, 1 - y) for x, y in rows])
        (broken / site / "test.csv").write_bytes(b"\xff")
    found = []
    for folder in (data, turned, broken):
        tuned = [runs.perform(job, folder) for job in resolved.tuning_jobs(resolved.row("tuned"))]
        found.append([{key: value for key, value in run.items() if key != "seconds"} for run in tuned])
    assert found[0] == found[1] == found[2]
    assert "score" not in json.dumps(found[0])
    choices = {}
    for name, folder in (("data", data), ("turned", turned)):
        compared(tmp_path / "suite.toml", folder, tmp_path / name, only=["tuned"])
        choices[name] = comparison.choice(resolved, resolved.row("tuned"), tmp_path / name)
    assert choices["data"] == choices["turned"]


def test_a_row_whose_tuning_fails_has_no_reported_runs(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runs.perform

    def perform(job: suite.Job, folder: Path, hardware: Hardware) -> dict[str, Any]:
        if job.tuning and job.point == 1 and job.seed == 1006:
            raise BadData("the second point cannot be trained")
        return real(job, folder, hardware)

    monkeypatch.setattr(runs, "perform", perform)
    tally = compared(suite_file(tmp_path, HEAD + FEDAVG + TUNED), data, tmp_path / "out")
    assert tally.failed == ["tuned: seed 1006, tuning training.learning_rate=0.3: the second point cannot be trained"]
    assert (tally.waiting, tally.done) == (["tuned"], 5)  # three tuning runs and the other row's two


# Paired differences


def test_paired_differences_count_strict_wins_and_their_interval_is_students() -> None:
    found = paired([0.8, 0.7, 0.9], [0.7, 0.7, 0.6])  # differences 0.1, 0, 0.3
    mean = 0.4 / 3
    sd = (((0.1 - mean) ** 2 + mean**2 + (0.3 - mean) ** 2) / 2) ** 0.5
    assert found.mean == pytest.approx(mean)
    assert found.ci95 == pytest.approx(4.3027 * sd / 3**0.5, rel=1e-4)  # t(0.975, 2), from a table
    assert (found.wins, found.n) == (2, 3)
    assert paired([0.5], [0.4]).ci95 is None
    assert paired([0.8, 0.7, 0.9], [0.9, 0.7, 0.6], "mae").wins == 1  # of an error the smaller one wins
