"""The lab for notebooks: ``run`` a study, ``compare`` runs, ``load`` what was kept. ``docs/lab-api.md`` shows each.

Frames need pandas; the rest does not. Nothing here changes torch's own settings, or draws from its generators.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_algorithms.engine.hardware import DeviceName, Hardware
from fl_algorithms.lab import frames, run_folder, suite
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.executors import ExecutorName
from fl_algorithms.lab.participation import EVERYONE, Participation
from fl_algorithms.lab.progress import rounds_shown
from fl_algorithms.lab.seeds import SeedResult
from fl_algorithms.lab.study_run import Plan, run_study, side_by_side
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData, UsageProblem
from wardround.records import study as study_file
from wardround.records.schema import toml_value
from wardround.records.study import Named, StudyFile

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from fl_algorithms.engine.selection import Model

PathLike = str | Path
LATEST = "latest"


def run(
    study: "PathLike | ResolvedStudy",
    data: PathLike,
    *,
    variant: str = "",
    settings: Mapping[str, Any] | None = None,
    alone: bool = False,
    seeds: int = 1,
    out: PathLike | None = None,
    participation: Participation = EVERYONE,
    weights: PathLike | None = None,
    private_weights: PathLike | None = None,
    jobs: int | None = None,
    executor: ExecutorName = "processes",
    per_card: int = 1,
    device: DeviceName = "cpu",
    workers: int = 0,
) -> "Result":
    """Run a study file, as `fl-lab run` does: the same bits.

    Args:
        data: one folder for each site.
        settings: as ``{"training.learning_rate": 0.01}``.
        alone: share nothing: each site trains the same network alone.
        seeds: runs, with the study's seed and those after it.
        out: keep curves and models there; a call that was stopped goes on.
        participation: who is in a round.
        weights: start from the shared tensors of this safetensors file.
        private_weights: start each site's own tensors from this one, which may be the same.
        jobs: runs side by side, each in a process; None: one after the other, in this one.
        per_card: runs that share a CUDA card.

    Raises:
        WardroundError: as the command says it.
    """
    plan = Plan(
        study if isinstance(study, ResolvedStudy) else _resolved(Path(study), variant, settings or {}, alone=alone),
        Path(data),
        seeds,
        None if out is None else Path(out),
        Hardware(device, workers),
        None if weights is None else Path(weights),
        participation,
        executor=executor,
        private_weights=None if private_weights is None else Path(private_weights),
    )
    plan = side_by_side(plan, jobs, per_card)
    with rounds_shown(seeds, plan.study.study.rounds) as rounds_told:
        made = run_study(plan, rounds_told=rounds_told)
    return Result(plan.study, tuple(made), plan.out)


def load(path: PathLike) -> "Result | Comparison":
    """What `fl-lab run --out` or `fl-lab compare --out` kept in a folder, of the runs that are whole.

    Raises:
        BadData: it is no such folder.
    """
    folder = Path(path)
    if (folder / "suite.json").is_file():
        return Comparison(_suite_records(folder), _headline(folder))
    if not (folder / run_folder.RUN).is_file():
        raise BadData(
            f"{folder} has neither {run_folder.RUN} nor suite.json",
            hint="the folder that `--out` named in `fl-lab run` or `fl-lab compare`",
        )
    record = run_folder.read(folder / run_folder.RUN)
    study = ResolvedStudy(StudyFile.from_document(record["study"], str(folder / run_folder.RUN)))
    places = [run_folder.seed_folder(folder, seed) for seed in run_folder.seeds_of(folder)]
    if not places:
        raise BadData(f"{folder} has no run that is whole yet", hint="`fl-lab run` goes on where it was stopped")
    return Result(study, tuple(SeedResult(run_folder.read(place / run_folder.RESULT)) for place in places), folder)


def compare(
    what: "PathLike | Mapping[str, Result]",
    data: PathLike | None = None,
    out: PathLike | None = None,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    device: DeviceName = "cpu",
) -> "Comparison":
    """Runs side by side: those of a suite file, which are made and kept in ``out``, or results that are there.

    Args:
        what: SUITE.toml, with ``data`` and ``out``; or {name: result}.
        seeds: of each row, in place of the suite's.
        jobs: runs side by side; None: one a core.

    Raises:
        BadData: a run of the suite failed; the others are kept.
        UsageProblem: a suite without ``data`` or ``out``.
    """
    if isinstance(what, Mapping):
        results = dict(what)
        if not results:
            raise UsageProblem("there is nothing to compare", hint="`compare({'fedavg': run(...), 'fenda': run(...)})`")
        records = [(name, made.record) for name, result in results.items() for made in result.runs]
        return Comparison(tuple(records), next(iter(results.values())).headline)
    if data is None or out is None:
        raise UsageProblem("a suite needs `data` and `out`", hint="`compare('suite.toml', data='DIR', out='RUNS')`")
    from fl_algorithms.lab import comparison
    from fl_algorithms.lab.executors import cores

    resolved = suite.load(Path(what))
    tally = comparison.compare(
        resolved, Path(data), Path(out), seeds=seeds or resolved.seeds, jobs=jobs or cores(),
        command=f"compare({str(what)!r})", hardware=Hardware(device),
    )  # fmt: skip
    if tally.interrupted:
        raise KeyboardInterrupt
    if tally.failed:
        raise BadData(f"{len(tally.failed)} of {tally.wanted} runs failed: {tally.failed[0]}")
    found = load(out)
    assert isinstance(found, Comparison)
    return found


@dataclass(frozen=True, repr=False)
class Result:
    """A study's runs, one for each seed.

    Attributes:
        study: as it was resolved.
        runs: by seed.
        folder: where they are kept; None: in memory alone.
    """

    study: ResolvedStudy
    runs: tuple[SeedResult, ...]
    folder: Path | None = None

    def __repr__(self) -> str:
        return f"<Result: {self.study.method.name}, seeds {', '.join(map(str, self.seeds))}>"

    @property
    def seeds(self) -> list[int]:
        return [made.record["seed"] for made in self.runs]

    @property
    def digests(self) -> list[str | None]:
        """Of each seed's shared model; None where nothing is shared."""
        return [made.record["model_digest"] for made in self.runs]

    @property
    def warnings(self) -> list[str]:
        """What should be known of the data, and whom the study's limits touched."""
        said = [text for made in self.runs for text in (*made.record["warnings"], *made.record["limits"])]
        return list(dict.fromkeys(said))

    @property
    def headline(self) -> str:
        """The metric that a checkpoint's score is."""
        return _headline_of(self.runs[0].record)

    @cached_property
    def scores(self) -> "pd.DataFrame":
        """seed, site, checkpoint, metric, split, value."""
        return frames.scores(("", made.record) for made in self.runs).drop(columns="row")

    @cached_property
    def curves(self) -> "pd.DataFrame":
        """seed, round, site, and a column for each of val_loss, train_loss, bytes_sent and the metrics."""
        return frames.curves(self._curves)

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """seed, round, site, phase, step, loss."""
        return frames.steps(self._curves)

    def state_dict(self, site: str, checkpoint: str = LATEST, seed: int | None = None) -> "dict[str, Tensor]":
        """A checkpoint's tensors by name, private ones too.

        Args:
            checkpoint: "latest", "best_local", "best_global" or "fine_tuned".
            seed: None: the first.

        Raises:
            UsageProblem: there is none of that name.
        """
        made = self._run(seed)
        known = made.record["checkpoints"]
        if site not in known or checkpoint not in known[site]:
            there = ", ".join(f"{name} ({', '.join(kinds)})" for name, kinds in known.items())
            raise UsageProblem(f"there is no checkpoint `{checkpoint}` of site `{site}`", hint=f"there are: {there}")
        return self._tensors(made, made.models.get(site, {}).get(checkpoint), f"{site}/{checkpoint}.safetensors")

    def shared(self, seed: int | None = None) -> "dict[str, Tensor]":
        """What the coordinator keeps at the end, by name; {} where nothing is shared."""
        made = self._run(seed)
        if made.record["model_digest"] is None:
            return {}
        return self._tensors(made, made.shared or None, run_folder.SHARED)

    def model(self, site: str, checkpoint: str = LATEST, seed: int | None = None) -> "Model":
        """A checkpoint to be asked: ``.logits(x)``, ``.probabilities(x)``, and its ``.networks``."""
        from fl_algorithms.engine.partition import task_at, task_of
        from fl_algorithms.engine.selection import restored

        own = task_at(self.study, task_of(self.study), site)
        return restored(self.study.at(site), own, self.state_dict(site, checkpoint, seed))

    @cached_property
    def _curves(self) -> dict[int, Curves]:
        if self.folder is None:
            return {made.record["seed"]: made.curves for made in self.runs}
        return {seed: run_folder.curves_of(run_folder.seed_folder(self.folder, seed)) for seed in self.seeds}

    def _run(self, seed: int | None) -> SeedResult:
        for made in self.runs:
            if seed is None or made.record["seed"] == seed:
                return made
        raise UsageProblem(f"there is no run of seed {seed}", hint=f"there are: {', '.join(map(str, self.seeds))}")

    def _tensors(self, made: SeedResult, content: bytes | None, file: str) -> "dict[str, Tensor]":
        import safetensors.torch

        if content is not None:
            return safetensors.torch.load(content)
        assert self.folder is not None
        folder = run_folder.seed_folder(self.folder, made.record["seed"])
        return safetensors.torch.load_file(folder / run_folder.MODELS / file)


@dataclass(frozen=True)
class Comparison:
    """Runs of several rows.

    Attributes:
        records: (row, a run's record).
        headline: the metric of ``table`` where none is named.
    """

    records: tuple[tuple[str, Mapping[str, Any]], ...] = field(repr=False)
    headline: str

    @cached_property
    def scores(self) -> "pd.DataFrame":
        """row, seed, site, checkpoint, metric, split, value."""
        return frames.scores(self.records)

    def table(self, metric: str = "", checkpoint: str = LATEST, reference: str = "") -> "pd.DataFrame":
        """For each row the mean over its runs, the 95 % interval, and how much it exceeds ``reference``, by seed.

        Args:
            metric: "": the headline.
        """
        return frames.table(self.scores, metric or self.headline, checkpoint, reference)


def _resolved(path: Path, variant: str, settings: Mapping[str, Any], *, alone: bool) -> ResolvedStudy:
    given = [f"{key}={toml_value(value)}" for key, value in settings.items()]
    study = study_file.load(path, given, variant)
    if alone:
        study = study.model_copy(update={"algorithm": Named(name="silo")})
    return resolve(study, lab=True, source=path.name)


def _suite_records(folder: Path) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """The runs that tables are made of, in the suite's order of rows."""
    from fl_algorithms.lab import comparison

    order = list(comparison.read(folder / "suite.json")["labels"])
    found = [comparison.read(path) for path in (folder / "runs").glob("*/*.json") if "." not in path.stem]
    reported = [record for record in found if not record["tuning"] and record["row"] in order]
    reported.sort(key=lambda record: (order.index(record["row"]), record["seed"]))
    return tuple((record["row"], record) for record in reported)


def _headline(folder: Path) -> str:
    from fl_algorithms.lab import comparison

    named: str = comparison.read(folder / "suite.json")["metric"]
    records = _suite_records(folder)
    if not records:
        raise BadData(f"{folder} has no run yet", hint="`fl-lab compare` goes on where it was stopped")
    return named or _headline_of(records[0][1])


def _headline_of(record: Mapping[str, Any]) -> str:
    metric: str = next(iter(next(iter(record["checkpoints"].values())).values()))["metric"]
    return metric
