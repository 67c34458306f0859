"""A study run with one or more seeds: in this process or side by side, kept in a folder or not. No torch by itself."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import run_folder
from fl_algorithms.lab.executors import (
    CARDS,
    NO_CARDS,
    ExecutorName,
    Placement,
    card_share,
    cores,
    on_ray,
    placement,
    processes,
)
from fl_algorithms.lab.participation import EVERYONE, Participation
from fl_algorithms.lab.seeds import Progress, Request, SeedResult, data_digests, run_seed, run_together
from fl_algorithms.study import ResolvedStudy
from wardround.errors import TryAgain, UsageProblem, WardroundError
from wardround.local import durable
from wardround.local.state_lock import StateLock

EngineName = Literal["plain", "batched"]
Make = Callable[[Request, Progress | None], SeedResult]
Digests = Callable[[ResolvedStudy, Path], dict[str, str]]
Told = Callable[[SeedResult, int], None]  # (a run that is whole, how many of them)
RoundsTold = Callable[[int, float, str], None]  # (seeds done, rounds of the next one done, its title)


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        study: resolved.
        folder: one folder for each site.
        seeds: how many, from the study's own on.
        out: where it is kept; None: nowhere.
        jobs: runs side by side; 1: in this process.
        where: the cards that they have, on this machine.
        card: share of a card that each has, on Ray.
        command: what repeats it, for the record.
        engine: "batched" trains all sites and seeds as one batch of models, in this process; its bits are others.
        private_weights: each site's own tensors start from these.
        make: makes one run; in this process, where it is no function of a module.
        digests: of each site's data.
    """

    study: ResolvedStudy
    folder: Path
    seeds: int = 1
    out: Path | None = None
    hardware: Hardware = field(default_factory=Hardware)
    weights: Path | None = None
    participation: Participation = EVERYONE
    jobs: int = 1
    executor: ExecutorName = "processes"
    where: Placement = NO_CARDS
    card: float = 0.0
    command: str = ""
    engine: EngineName = "plain"
    make: Make = run_seed
    digests: Digests = data_digests
    private_weights: Path | None = None

    @property
    def numbers(self) -> range:
        first = self.study.study.seed
        return range(first, first + self.seeds)

    def request(self, seed: int, like: Mapping[str, Any]) -> Request:
        study = self.study.changed(study={"seed": seed})
        keep = None if self.out is None else run_folder.seed_folder(self.out, seed)
        return Request(
            study, self.folder, self.hardware, self.weights, self.participation, keep, like, self.private_weights
        )


def _nothing(*_: object) -> None:
    return None


def side_by_side(plan: Plan, jobs: int | None, per_card: int) -> Plan:
    """The plan with ``jobs`` runs at once and their cards; None: one, or on Ray one a processor.

    Raises:
        UsageProblem: more than the cards of this machine take.
    """
    if plan.executor == "ray":
        return replace(plan, jobs=jobs or cores(), card=card_share(plan.hardware, per_card))
    if (jobs or 1) == 1:
        return plan  # in this process, on the card that torch takes first
    where = placement(plan.hardware, per_card, os.environ.get(CARDS))
    return replace(plan, jobs=where.jobs(jobs, 1), where=where)


def run_study(plan: Plan, told: Told = _nothing, rounds_told: RoundsTold = _nothing) -> list[SeedResult]:
    """The run of each seed, in their order. What ``plan.out`` has already is read, and what it began goes on.

    Raises:
        WardroundError: the first that a run gave; the others were made, and kept, before.
        TryAgain: another process writes there.
    """
    if plan.engine == "batched":
        _refuse_batched(plan)
    plan.participation.refuse_unfit(plan.study)
    with _begun(plan):
        done = dict(_there(plan))
        for number, seed in enumerate(sorted(done), start=1):
            told(done[seed], number)
        missing = [seed for seed in plan.numbers if seed not in done]
        if done and not missing:
            like = {"data": _like(done)["data"]}
            run_folder.refuse_other(like, {"data": plan.digests(plan.study, plan.folder)}, plan.out or plan.folder)
        failed: list[WardroundError] = []
        for seed, made in _made(plan, missing, _like(done), rounds_told):
            if isinstance(made, WardroundError):
                failed.append(_of_seed(seed, made) if plan.seeds > 1 else made)
                continue
            if like := _like(done):
                run_folder.refuse_other(like, _like({seed: made}), plan.out or plan.folder)
            done[seed] = made
            told(made, len(done))
        if failed:
            raise failed[0]
        return [done[seed] for seed in plan.numbers]


def pool_of(plan: Plan) -> AbstractContextManager[Executor]:
    """Where the plan's runs are made, if not in this process."""
    if plan.executor == "ray":
        return on_ray(plan.jobs, threads=plan.study.study.threads, card=plan.card)
    return processes(plan.jobs, plan.where)


@contextmanager
def _begun(plan: Plan) -> Iterator[None]:
    """The folder made and owned, and what was asked for written into it."""
    if plan.out is None:
        yield
        return
    durable.make_folder(plan.out)
    with _owned(plan.out):
        asked = {"study": plan.study.document(), "participation": plan.participation.document()}
        path = plan.out / run_folder.RUN
        if path.is_file():
            held = run_folder.read(path)
            run_folder.refuse_other({key: held[key] for key in asked}, asked, plan.out)
        record = {"format": run_folder.FORMAT, **asked, "data_folder": str(plan.folder), "command": plan.command}
        durable.write_file(path, run_folder.as_json(record))
        yield


def _owned(out: Path) -> AbstractContextManager[object]:
    try:
        return StateLock(out, "fl-lab run")
    except TryAgain as error:
        raise TryAgain(error.message, hint="let it end, or use another --out") from None


def _there(plan: Plan) -> Iterator[tuple[int, SeedResult]]:
    for seed in plan.numbers if plan.out is not None else ():
        assert plan.out is not None
        record = run_folder.result_of(run_folder.seed_folder(plan.out, seed))
        if record is not None:
            yield seed, SeedResult(record)


def _like(done: Mapping[int, SeedResult]) -> dict[str, Any]:
    """Versions and data of the runs so far."""
    return {} if not done else {key: next(iter(done.values())).record[key] for key in ("versions", "data")}


def _made(
    plan: Plan, seeds: list[int], like: Mapping[str, Any], rounds_told: RoundsTold
) -> Iterator[tuple[int, SeedResult | WardroundError]]:
    """Each run as it ends. In this process the first error is the last run."""
    if plan.engine == "batched":
        requests, title = [plan.request(seed, like) for seed in seeds], f"{plan.study.method.name}: {len(seeds)} seeds"
        made = run_together(requests, lambda done, _: rounds_told(0, done * len(seeds), title)) if seeds else []
        yield from zip(seeds, made, strict=True)
        return
    if plan.jobs == 1 and plan.executor == "processes":
        for number, seed in enumerate(seeds, start=plan.seeds - len(seeds)):
            title = f"{plan.study.method.name}: seed {seed}"
            yield seed, plan.make(plan.request(seed, like), lambda done, _, n=number, t=title: rounds_told(n, done, t))  # type: ignore[misc]
        return
    if not seeds:
        return
    with pool_of(replace(plan, jobs=min(plan.jobs, len(seeds)))) as executor:
        running = {executor.submit(plan.make, plan.request(seed, like), None): seed for seed in seeds}
        for future in as_completed(running):
            try:
                yield running[future], future.result()
            except WardroundError as error:
                yield running[future], error


def _refuse_batched(plan: Plan) -> None:
    """Raises UsageProblem: an option that the batched engine does not follow."""
    for there, option in (
        (plan.participation != EVERYONE, "--sample, --dropout, --delay-s and --attack"),
        (plan.jobs > 1 or plan.executor != "processes", "--jobs and --executor"),
        (plan.hardware != Hardware(), "--device and --workers"),
        (plan.private_weights is not None, "--private-weights"),
        (bool(plan.study.study.evaluators), "sites that only evaluate (`roles` in [study])"),
    ):
        if there:
            raise UsageProblem(
                f"the batched engine trains every site and seed at once on the CPU, without {option}",
                hint="leave these out, or `--engine batched`",
            )


def _of_seed(seed: int, error: WardroundError) -> WardroundError:
    return type(error)(f"seed {seed}: {error.message}", hint=error.hint, code=error.code)
