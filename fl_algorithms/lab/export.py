"""`fl-lab export`: what `fl-lab run --out` or `fl-lab compare` left in a folder, for other tools.

    csv, latex     the tables of a comparison; the scores of a run
    mlflow         OUT/mlflow.db, one MLflow run for each of ours: settings, learning curves, scores
    tensorboard    OUT/ROW/SEED, an event file for each of ours: learning curves and scores

All of it is written into a folder. No server is asked and nothing is sent.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fl_algorithms.lab import run_folder, significance, tables
from fl_algorithms.lab.latex import latex
from fl_algorithms.lab.report import SCORE_COLUMNS, as_csv
from fl_algorithms.lab.results import Results, load
from fl_algorithms.tracking import Exported, flat, to_mlflow, to_tensorboard
from wardround.errors import BadData
from wardround.local import durable
from wardround.pages.blocks import Grid

Target = Literal["csv", "latex", "mlflow", "tensorboard"]


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
    return to_mlflow(runs, out) if target == "mlflow" else to_tensorboard(runs, out)


def exported(folder: Path) -> Iterator[Exported]:
    """The whole runs of a folder. Raises BadData: there is none."""
    if (folder / "suite.json").is_file():
        for row in load(folder).reported:
            for seed, run in row.runs.items():
                yield Exported(row.name, seed, flat(run["study"]), _scores(run["checkpoints"], run["best_round"] or 0))
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
            study["algorithm"]["name"], seed, flat(study), series | _scores(result["checkpoints"], last)
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
