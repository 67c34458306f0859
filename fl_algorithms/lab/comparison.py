"""Run a suite: every row with every seed, side by side, one result file for each run.

    OUT/suite.json              the suite resolved, its digest, versions, data and seeds
    OUT/runs/ROW/SEED.json      a run that the tables are made of
    OUT/runs/ROW/SEED-tuning-POINT.json
    OUT/runs/ROW/....failed.json    why a run gave none

Only this process writes, each file whole or not at all; so whatever stops it, the next call does what is missing.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import runs, tuning
from fl_algorithms.lab.executors import Pool, processes
from fl_algorithms.lab.grouping import grouped
from fl_algorithms.lab.run_folder import difference
from fl_algorithms.lab.runs import Failed, Survey
from fl_algorithms.lab.suite import Job, Row, Suite
from wardround.cli import say
from wardround.errors import BadData, TryAgain, WardroundError
from wardround.local import durable
from wardround.local.state_lock import StateLock


@dataclass
class Tally:
    """How far a comparison is."""

    wanted: int
    done: int = 0
    failed: list[str] = field(default_factory=list)  # a sentence each
    waiting: list[str] = field(default_factory=list)  # rows whose tuning is not complete, so they have no runs
    interrupted: bool = False


def compare(
    suite: Suite,
    folder: Path,
    out: Path,
    *,
    seeds: int,
    jobs: int,
    command: str,
    only: Sequence[str] = (),
    hardware: Hardware = Hardware(),
    pool: Pool = processes,
) -> Tally:
    """Do the runs of ``suite`` that ``out`` lacks, and say how it goes.

    Args:
        folder: one folder for each site.
        seeds: of each row, from the study's own on.
        jobs: worker processes.
        command: what repeats it, for the record.
        only: names of rows; none for all.

    Raises:
        UsageProblem: ``only`` names no row; or the device is not there.
        BadData: ``out`` holds another suite's runs, or a site's data cannot be read.
        TryAgain: another process writes there, or there is nowhere to run.
        CannotWrite: the disk does not take it.
    """
    rows = [suite.row(name) for name in dict.fromkeys(only)] or list(suite.rows)
    durable.make_folder(out)
    with _owned(out):
        _refuse_other_suite(suite, out)  # before the seconds that starting a worker takes
        work = _Work(suite, rows, folder, out, seeds, hardware)
        try:
            with pool(min(jobs, max(work.tally.wanted, 1))) as executor:
                survey = _survey(executor, suite.rows[0], folder, hardware)
                _settle(suite, folder, out, survey, seeds, command)
                work.do(executor, survey)
        except KeyboardInterrupt:
            work.tally.interrupted = True
    return work.tally


def read(path: Path) -> dict[str, Any]:
    """A JSON file that ``compare`` wrote.

    Raises:
        BadData: it is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadData(f"{path}: not JSON: {error}", hint="remove that file, then run `fl-lab compare` again") from None
    if not isinstance(content, dict) or content.get("format") != runs.FORMAT:
        raise BadData(f"{path}: not a file of this version of `fl-lab compare`", hint="use another --out")
    return content


class _Work:
    """The runs still to do. A tuned row's reported runs join when its last tuning run is in."""

    def __init__(
        self, suite: Suite, rows: Sequence[Row], folder: Path, out: Path, seeds: int, hardware: Hardware
    ) -> None:
        self._hardware = hardware
        self._suite, self._rows, self._folder, self._out, self._seeds = suite, rows, folder, out, seeds
        self._running: dict[Future[bytes | Failed], Job] = {}
        wanted = [job for row in rows for job in (*suite.tuning_jobs(row), *suite.reported_jobs(row, 0, seeds))]
        self.tally = Tally(len(self._missing(wanted)))

    def do(self, executor: Executor, survey: Survey) -> None:
        self._survey = survey
        tuning_jobs = [job for row in self._rows for job in self._suite.tuning_jobs(row)]
        reported = [self._reported(row) for row in self._rows if not self._missing(self._suite.tuning_jobs(row))]
        self._submit(executor, tuning_jobs)
        self._submit(executor, [job for jobs in zip(*filter(None, reported), strict=True) for job in jobs])
        with _progress(self.tally.wanted) as advance:
            while self._running:
                for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                    job = self._running.pop(future)
                    self._keep(job, _answer(future))
                    advance(job)
                    if job.tuning and not self._tuning_runs(job.row):
                        self._submit(executor, self._tuned(self._suite.row(job.row)))

    def _tuned(self, row: Row) -> list[Job]:
        """The reported runs of a row whose last tuning run has just ended."""
        if self._missing(self._suite.tuning_jobs(row)):
            self.tally.waiting.append(row.name)
            return []
        return self._reported(row)

    def _reported(self, row: Row) -> list[Job]:
        try:
            point = choice(self._suite, row, self._out).point if row.tuned else 0
        except WardroundError as error:
            self.tally.failed.append(error.message)
            return []
        return self._suite.reported_jobs(row, point, self._seeds)

    def _tuning_runs(self, row: str) -> bool:
        return any(job.tuning and job.row == row for job in self._running.values())

    def _missing(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if not (self._out / job.file).is_file()]

    def _submit(self, executor: Executor, jobs: Sequence[Job]) -> None:
        for row in {job.row for job in jobs}:
            durable.make_folder(self._out / "runs" / row)
        for job in self._missing(jobs):
            self._running[executor.submit(runs.attempt, job, self._folder, self._hardware)] = job

    def _keep(self, job: Job, result: bytes | Failed) -> None:
        if isinstance(result, bytes) and (other := _other_versions(result, self._survey)):
            result = Failed(f"it was made with other versions: {other}", "nodes of one cluster must be alike")
        if isinstance(result, Failed):
            self.tally.failed.append(f"{job}: {result.message}" + (f" (hint: {result.hint})" if result.hint else ""))
            failure = {"format": runs.FORMAT, "run": str(job), **asdict(result)}
            durable.write_file(self._out / job.failure_file, json.dumps(failure, indent=1).encode())
            return
        durable.write_file(self._out / job.file, result)
        durable.remove(self._out / job.failure_file)
        self.tally.done += 1


def _answer(future: "Future[bytes | Failed]") -> bytes | Failed:
    """What a run gave. One whose workers ended again and again has failed; the others go on."""
    try:
        return future.result()
    except TryAgain as error:
        return Failed(error.message, error.hint)


def _other_versions(result: bytes, survey: Survey) -> str:
    """What a run was made with that the others were not; "" where all is alike."""
    made = json.loads(result).get("versions")
    if made is None:
        return ""  # it gave nothing to compare
    made.pop("threads")
    return difference(survey.versions, made) if made != survey.versions else ""


def choice(suite: Suite, row: Row, out: Path) -> tuning.Choice:
    """What the row's tuning runs chose. Raises BadData: one is missing, or none has a finite loss."""
    return tuning.choose(row.name, [read(out / job.file) for job in suite.tuning_jobs(row)])


def _survey(executor: Executor, row: Row, folder: Path, hardware: Hardware) -> Survey:
    survey: Survey = executor.submit(runs.survey, row.points[0].study, folder, hardware).result()
    return survey


def _owned(out: Path) -> StateLock:
    try:
        return StateLock(out, "fl-lab compare")
    except TryAgain as error:
        raise TryAgain(error.message, hint="let it end, or use another --out") from None


def _refuse_other_suite(suite: Suite, out: Path) -> None:
    if not (out / "suite.json").is_file():
        return
    held = read(out / "suite.json")
    if held["digest"] != suite.digest():
        raise BadData(
            f"{out} holds runs of another suite: {difference(held['suite'], suite.document())}",
            hint="use another --out, or the suite as it was",
        )


def _settle(suite: Suite, folder: Path, out: Path, survey: Survey, seeds: int, command: str) -> None:
    """Refuse to mix with runs of other data or versions; then write what the runs have in common.

    Raises:
        BadData: the folder's runs were made otherwise; the message says what differs.
    """
    path = out / "suite.json"
    if path.is_file():
        held = read(path)
        versions = {"device": "cpu"} | held["versions"]  # that of a folder from before there was a choice
        for what, old, new in (("versions", versions, survey.versions), ("data", held["data"], survey.data)):
            if old != new:
                raise BadData(
                    f"{out} holds runs with other {what}: {difference(old, new)}",
                    hint="use another --out: runs are compared only where all else is equal",
                )
    for warning in grouped(survey.warnings):
        say(f"warning: {warning}")
    record = {
        "format": runs.FORMAT,
        "digest": suite.digest(),
        "suite": suite.document(),
        "name": suite.name,
        "title": suite.title,
        "metric": suite.metric,
        "reference": suite.reference,
        "labels": {row.name: row.label for row in suite.rows},
        "seeds": seeds,
        "sites": list(suite.sites),
        "versions": survey.versions,
        "data": survey.data,
        "data_folder": str(folder),
        "command": command,
    }
    durable.write_file(path, json.dumps(record, indent=1, ensure_ascii=False).encode())


@contextmanager
def _progress(wanted: int) -> Iterator[Callable[[Job], None]]:
    """A bar on a terminal, else a line for each run."""
    if not sys.stderr.isatty():
        count = itertools.count(1)
        yield lambda job: say(f"{job} ({next(count)} of {wanted} runs)")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("runs", total=wanted)
        yield lambda job: bar.update(task, advance=1, description=str(job))
