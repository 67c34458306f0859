"""`fl-lab export`: what `fl-lab run --out` or `fl-lab compare` left in a folder, for other tools.

    csv, latex     the tables of a comparison; the scores of a run
    mlflow         OUT/mlflow.db, one MLflow run for each of ours: settings, learning curves, scores
    tensorboard    OUT/ROW/SEED, an event file for each of ours: learning curves and scores

All of it is written into a folder. No server is asked and nothing is sent.
"""

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_algorithms.lab import run_folder, significance, tables
from fl_algorithms.lab.latex import latex
from fl_algorithms.lab.report import SCORE_COLUMNS, as_csv
from fl_algorithms.lab.results import Results, load
from wardround.errors import BadData, CannotWrite, NeedsPerson
from wardround.local import durable
from wardround.pages.blocks import Grid

Target = Literal["csv", "latex", "mlflow", "tensorboard"]
LONGEST = 500  # of a parameter's text in MLflow
BATCH = 1000  # metrics in one call, at most
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


@dataclass(frozen=True)
class Exported:
    """One of our runs.

    Attributes:
        group: the row of the suite, or the study's method.
        settings: "training.learning_rate" -> as text.
        series: name -> (step, value), the learning curves; a score alone is of the last step.
    """

    group: str
    seed: int
    settings: dict[str, str]
    series: dict[str, list[tuple[int, float]]]

    @property
    def name(self) -> str:
        return f"{self.group}, seed {self.seed}"


def export(folder: Path, target: Target, out: Path) -> list[Path]:
    """Write ``folder``'s runs for ``target`` into ``out``; the paths of what was written.

    Raises:
        BadData: ``folder`` holds no run and no comparison.
        NeedsPerson: the target's package is not installed.
        CannotWrite: ``out`` cannot be written.
    """
    durable.make_folder(out)
    if target in ("csv", "latex"):
        files = _tables(folder, target)
        for name, text in files.items():
            durable.write_file(out / name, text)
        return [out / name for name in files]
    runs = list(exported(folder))
    return _to_mlflow(runs, out) if target == "mlflow" else _to_tensorboard(runs, out)


def exported(folder: Path) -> Iterator[Exported]:
    """The whole runs of a folder. Raises BadData: there is none."""
    if (folder / "suite.json").is_file():
        for row in load(folder).reported:
            for seed, run in row.runs.items():
                yield Exported(row.name, seed, _flat(run["study"]), _scores(run["checkpoints"], run["best_round"] or 0))
        return
    asked, seeds = _run_of(folder)
    for seed in seeds:
        path = run_folder.seed_folder(folder, seed)
        result, series = run_folder.read(path / run_folder.RESULT), dict[str, list[tuple[int, float]]]()
        for point in run_folder.curves_of(path).points:
            if point.value is not None:
                series.setdefault(f"{point.site}/{point.name}", []).append((point.round, point.value))
        last = max((step for values in series.values() for step, _ in values), default=0)
        study = asked["study"]
        yield Exported(
            study["algorithm"]["name"], seed, _flat(study), series | _scores(result["checkpoints"], last)
        )  # fmt: skip


def _run_of(folder: Path) -> tuple[dict[str, Any], list[int]]:
    if not (folder / run_folder.RUN).is_file():
        raise BadData(
            f"{folder} holds neither a comparison nor a run: it has no suite.json and no {run_folder.RUN}",
            hint="`fl-lab run STUDY.toml --data DIR --out OUT` keeps a run",
        )
    seeds = run_folder.seeds_of(folder)
    if not seeds:
        raise BadData(f"{folder} has no finished run yet", hint="the command that began it goes on with it")
    return run_folder.read(folder / run_folder.RUN), seeds


def _scores(checkpoints: Mapping[str, Any], step: int) -> dict[str, list[tuple[int, float]]]:
    """ "SITE/KIND/METRIC" -> its one value."""
    return {
        f"{site}/{kind}/{metric}": [(step, score)]
        for site, kinds in checkpoints.items()
        for kind, checkpoint in kinds.items()
        for metric, score in checkpoint["scores"].items()
        if score is not None
    }


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A study's settings, each with its whole key."""
    found: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)[:LONGEST]
    return found


def _tables(folder: Path, target: Target) -> dict[str, bytes]:
    """The tables of a comparison, or of a run's scores."""
    if not (folder / "suite.json").is_file():
        return _of_run(folder, target)
    results = load(folder)
    if target == "csv":
        made = [
            table for table in (tables.main(results), tables.per_site(results), tables.differences(results)) if table
        ]
        found = significance.tests_csv(results, significance.compared(results))
        return {
            "scores.csv": as_csv(SCORE_COLUMNS, ((*row[:-1], repr(row[-1])) for row in tables.every_score(results))),
            "tables.csv": as_csv(tables.CSV_COLUMNS, (line for table in made for line in table.csv_rows())),
            "tests.csv": as_csv(significance.TESTS_COLUMNS, found),
        }
    grids = dict(_grids(results))
    return {f"{name}.tex": latex(grid, caption, name).encode() for name, (grid, caption) in grids.items()}


def _grids(results: Results) -> Iterator[tuple[str, tuple[Grid, str]]]:
    of = f"{results.metric} on {tables.split_of(results)} rows, mean over {len(results.seeds)} seeds"
    yield "scores", (tables.main(results).grid, f"{results.record['title']}: {of} ± 95 % interval")
    yield "sites", (tables.per_site(results).grid, f"{results.record['title']}, site by site: {of}")
    if found := significance.compared(results):
        yield "tests", (significance.tests_grid(results, found), "Runs paired by seed; Holm over the rows")
    if (ranked := significance.ranks(results)) is not None:
        yield "ranks", (significance.ranks_grid(*ranked), significance.ranks_words(ranked[0]))


def _of_run(folder: Path, target: Target) -> dict[str, bytes]:
    _, seeds = _run_of(folder)
    rows = [
        (str(seed), site, kind, checkpoint["split"], metric, score)
        for seed in seeds
        for site, kinds in run_folder.read(run_folder.seed_folder(folder, seed) / run_folder.RESULT)[
            "checkpoints"
        ].items()
        for kind, checkpoint in kinds.items()
        for metric, score in checkpoint["scores"].items()
        if score is not None
    ]
    columns = ("seed", "site", "checkpoint", "split", "metric", "value")
    if target == "csv":
        return {"scores.csv": as_csv(columns, ((*row[:-1], repr(row[-1])) for row in rows))}
    grid = Grid(columns, tuple((*row[:-1], f"{row[-1]:.4f}") for row in rows), 5)
    return {"scores.tex": latex(grid, "Scores of each seed and site", "scores").encode()}


def _to_mlflow(runs: Sequence[Exported], out: Path) -> list[Path]:
    os.environ.update(NO_TELEMETRY)  # before the import, which would otherwise report its use
    try:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise NeedsPerson(
            "an export to MLflow needs mlflow, which is not installed", hint="`pip install 'wardround[mlflow]'`"
        ) from None
    path = (out / "mlflow.db").absolute()
    if path.exists():
        raise CannotWrite(f"{path} exists already; MLflow would have every run twice", hint="another --out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what MLflow uses of SQLAlchemy
        client = MlflowClient(tracking_uri=f"sqlite:///{path}")
        experiments: dict[str, str] = {}
        for run in runs:
            if run.group not in experiments:
                held = client.get_experiment_by_name(run.group)
                experiments[run.group] = (
                    client.create_experiment(run.group, artifact_location=(out / "artifacts").absolute().as_uri())
                    if held is None
                    else held.experiment_id
                )
            made = client.create_run(experiments[run.group], run_name=run.name, tags={"seed": str(run.seed)})
            now = int(time.time() * 1000)
            metrics = [
                Metric(name, value, now, step) for name, values in run.series.items() for step, value in values
            ]  # fmt: skip
            client.log_batch(made.info.run_id, params=[Param(*pair) for pair in run.settings.items()])
            for start in range(0, len(metrics), BATCH):
                client.log_batch(made.info.run_id, metrics=metrics[start : start + BATCH])
            client.set_terminated(made.info.run_id)
    return [path]


def _to_tensorboard(runs: Sequence[Exported], out: Path) -> list[Path]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise NeedsPerson(
            "an export to TensorBoard needs tensorboard, which is not installed",
            hint="`pip install 'wardround[tensorboard]'`",
        ) from None
    made = []
    for run in runs:
        path = out / run.group / f"seed-{run.seed}"
        with SummaryWriter(str(path)) as writer:
            for name, values in run.series.items():
                for step, value in values:
                    writer.add_scalar(name, value, step)
            writer.add_text("settings", "\n\n".join(f"{key} = {value}" for key, value in run.settings.items()))
        made.append(path)
    return made
