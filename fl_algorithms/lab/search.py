"""`fl-lab tune`: settings of one study, searched on validation loss alone. No test table is opened.

    grid      every combination
    random    draws that depend on the seed and the trial's number alone
    optuna    Optuna's tree-structured Parzen estimator; each proposal depends on the seed and the trials before it

A trial is one point with every tuning seed; its loss is the mean of theirs, as ``tuning`` chooses it for a suite. The
result is one file with every trial, written whole after each, so that the same command goes on where it was stopped.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import runs, space
from fl_algorithms.lab.executors import Pool, cores, processes
from fl_algorithms.lab.grouping import grouped
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.runs import Failed
from fl_algorithms.lab.space import Settings, Space
from fl_algorithms.lab.suite import TUNING_OFFSET, Job, shown
from fl_algorithms.lab.tuning import Run, chosen_kind, run_mean, site_mean
from fl_algorithms.resolving import resolve
from wardround.cli import say
from wardround.errors import BadData
from wardround.local import durable
from wardround.records import study as study_file
from wardround.records.schema import toml_value
from wardround.signing import canonical

FORMAT = 1
AHEAD = 4  # trials that wait in line for a worker, of those that need no other's loss
Method = Literal["grid", "random", "optuna"]
Propose = Callable[[int, "Sequence[Trial]"], Settings]


@dataclass(frozen=True)
class Asked:
    """A search, as a person asks for it.

    Attributes:
        settings: those of ``--set``, which hold in every trial.
        trials: how many; of a grid 0 for all.
        seed: of the search's own draws. The runs have the study's seed + 1000 and on.
        seeds: runs of each trial.
    """

    study: Path
    settings: tuple[str, ...]
    variant: str
    space: Space
    method: Method
    trials: int
    seed: int
    seeds: int

    def job(self, number: int, settings: Settings, run: int) -> Job:
        """Run ``run`` of a trial.

        Raises:
            BadData: the settings make no study.
        """
        more = [f"{key}={toml_value(value)}" for key, value in settings.items()]
        study = resolve(
            study_file.load(self.study, [*self.settings, *more], self.variant), lab=True, source=self.study.name
        )
        study = study.changed(study={"seed": study.study.seed + TUNING_OFFSET + run})
        kind: Literal["federated", "silo"] = "silo" if study.method.name == "silo" else "federated"
        return Job("tune", kind, "matched", True, number, settings, study, Protocol(), "")

    def document(self) -> dict[str, Any]:
        """All that decides what a trial gives, but for data and versions."""
        base = resolve(study_file.load(self.study, [*self.settings], self.variant), lab=True, source=self.study.name)
        return {
            "study": base.document(),
            "space": space.document(self.space),
            "search": self.method,
            "seed": self.seed,
            "seeds": self.seeds,
        }


@dataclass(frozen=True)
class Trial:
    """One point, and what its runs gave.

    Attributes:
        val_loss: the mean of the runs' losses; None where one is not finite or failed.
        kind: the checkpoint whose loss it is; "" where every run failed.
        same_as: an earlier trial with the same settings, whose runs these are.
    """

    number: int
    settings: Settings
    val_loss: float | None
    kind: str
    runs: list[dict[str, Any]]
    seconds: float
    same_as: int | None = None


@dataclass(frozen=True)
class Found:
    """Every trial so far, by number, and whether all are there."""

    trials: list[Trial]
    interrupted: bool = False

    @property
    def best(self) -> Trial | None:
        """The trial of lowest loss; of equals the first. None where no loss is finite."""
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[Trial]:
        """Those with a finite loss, the lowest first."""
        finite = [trial for trial in self.trials if trial.val_loss is not None]
        return sorted(finite, key=lambda trial: (trial.val_loss or 0.0, trial.number))


def search(
    asked: Asked,
    folder: Path,
    out: Path,
    *,
    jobs: int,
    hardware: Hardware = Hardware(),
    pool: Pool = processes,
) -> Found:
    """Do the trials that ``out`` lacks, and say how it goes.

    Raises:
        BadData: a point makes no study, a site's data cannot be read, or ``out`` holds another search.
        UsageProblem: a grid over a range.
        NeedsPerson: Optuna is not installed.
        TryAgain: a worker was ended from outside.
        CannotWrite: the disk does not take it.
    """
    propose, wanted = _proposer(asked)
    asked.job(0, propose(0, ()), 0)  # a key that no study has is said before any run
    trials: list[Trial] = []
    try:
        with pool(jobs) as executor:
            record = _record(asked, folder, executor, hardware, out)
            trials += [Trial(**trial) for trial in record["trials"]]
            for trial in _done(asked, propose, wanted, trials, executor, folder, hardware):
                trials.append(trial)
                durable.write_file(out, _file(record, Found(trials)))
                loss = "no finite loss" if trial.val_loss is None else f"validation loss {trial.val_loss:.6g}"
                say(f"trial {trial.number + 1} of {wanted}: {shown(trial.settings)}: {loss}")
    except KeyboardInterrupt:
        return Found(trials, interrupted=True)
    return Found(trials)


def _proposer(asked: Asked) -> tuple[Propose, int]:
    """What proposes a trial's settings, and how many there are."""
    if asked.method == "grid":
        points = space.grid(asked.space)
        return lambda number, before: points[number], min(len(points), asked.trials or len(points))
    if asked.method == "random":
        return lambda number, before: space.drawn(asked.space, asked.seed, number), asked.trials
    from fl_algorithms.lab import optuna_search

    optuna_search.require()
    return (
        lambda number, before: optuna_search.proposed(
            asked.space, asked.seed, number, [(trial.settings, trial.val_loss) for trial in before]
        ),
        asked.trials,
    )


def _done(
    asked: Asked,
    propose: Propose,
    wanted: int,
    before: Sequence[Trial],
    executor: Executor,
    folder: Path,
    hardware: Hardware,
) -> Iterator[Trial]:
    """The trials after ``before``, in their order. ``before`` grows by each as the caller takes it."""
    ahead = 1 if asked.method == "optuna" else AHEAD * max(1, cores())
    line: deque[tuple[int, Settings, list[tuple[Job, Future[bytes | Failed]]], float]] = deque()
    following = iter(range(len(before), wanted))
    while True:
        while len(line) < ahead and (number := next(following, None)) is not None:
            settings = propose(number, before)
            known = [trial.settings for trial in before] + [waiting[1] for waiting in line]
            todo = [] if settings in known else [asked.job(number, settings, run) for run in range(asked.seeds)]
            running = [(job, executor.submit(runs.attempt, job, folder, hardware)) for job in todo]
            line.append((number, settings, running, time.perf_counter()))
        if not line:
            return
        number, settings, running, began = line.popleft()
        same = next((trial for trial in before if trial.settings == settings), None)
        if same is not None:
            yield Trial(number, settings, same.val_loss, same.kind, [], 0.0, same.number)
        else:
            yield _trial(number, settings, [(job, future.result()) for job, future in running], began)


def _trial(number: int, settings: Settings, results: Sequence[tuple[Job, bytes | Failed]], began: float) -> Trial:
    kind, found = "", list[dict[str, Any]]()
    for job, result in results:
        if isinstance(result, Failed):
            found.append({"seed": job.seed, "val_loss": None, "failed": result.message})
            continue
        made: Run = json.loads(result)
        kind = chosen_kind(made)
        sites = {site: kinds[kind]["val_loss"] for site, kinds in made["checkpoints"].items()}
        found.append({"seed": job.seed, "val_loss": site_mean(made, kind), "sites": sites})
    loss = run_mean([run["val_loss"] for run in found])
    return Trial(number, settings, loss, kind, found, time.perf_counter() - began)


def _record(asked: Asked, folder: Path, executor: Executor, hardware: Hardware, out: Path) -> dict[str, Any]:
    """What the search has from before, or its beginning.

    Raises:
        BadData: ``out`` is of another search, or of other data or versions.
    """
    survey: runs.Survey = executor.submit(
        runs.survey, asked.job(0, {}, 0).study, folder, hardware, False
    ).result()  # fmt: skip
    mine = {"format": FORMAT, **asked.document(), "data": survey.data, "versions": survey.versions}
    mine["digest"] = canonical.digest(canonical.with_text_floats(mine))
    if not out.is_file():
        for warning in grouped(survey.warnings):
            say(f"warning: {warning}")
        return {**mine, "trials": []}
    try:
        held = json.loads(out.read_bytes())
        known = isinstance(held, dict) and held.get("digest") == mine["digest"]
    except ValueError:
        known = False
    if not known:
        raise BadData(
            f"{out} is not a file of this search: another study, space, seed, data or version made it",
            hint="use another --out",
        )
    trials = [{**trial, "settings": _settings(trial["settings"])} for trial in held["trials"]]
    return {**mine, "trials": trials}


def _settings(read: dict[str, Any]) -> Settings:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in read.items()}


def _file(record: dict[str, Any], found: Found) -> bytes:
    best = found.best
    whole = {**record, "best": None if best is None else best.number, "trials": [asdict(one) for one in found.trials]}
    return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False).encode()
