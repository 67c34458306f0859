"""A suite: one TOML file that says which variants of a study are compared, with which seeds, and what is measured.

    [suite]      the study, how many seeds, what the others are compared with
    [protocol]   what is measured of each run beside its checkpoints' scores
    [[row]]      a variant of the study, alone or pooled; [row.tune] has settings to choose from on validation loss,
                 [row.attack] what bad sites do

A suite is resolved into ``Row``s of resolved studies, and these into ``Job``s: one run each, with one result file.
Importing this needs no torch.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fl_algorithms.lab import space
from fl_algorithms.lab.attacks import Attack
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.space import Among, Settings
from fl_algorithms.resolving import need_hint, resolve
from fl_algorithms.rows import MASKS
from fl_algorithms.settings.models import NORM_LAYERS, NetworkSettings
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData, UsageProblem, WardroundError
from wardround.records import study as study_file
from wardround.records.schema import Strict, check, read_toml, toml_value
from wardround.records.study import STUDY_NAME, Named
from wardround.signing import canonical

TUNING_OFFSET = 1000  # tuning seeds start that far above the reported ones, of which there are at most as many

Kind = Literal["federated", "silo", "central"]


class SuiteSection(Strict):
    name: str
    title: str = ""
    study: str  # relative to the suite's file
    metric: str = ""  # "": the task's headline
    seeds: int = Field(default=5, ge=1, le=TUNING_OFFSET)
    tuning_seeds: int = Field(default=5, ge=1, le=TUNING_OFFSET)
    reference: str = ""  # row with which every other is compared, run by run

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _named(name)


class RowSection(Strict):
    name: str
    label: str = ""
    variant: str = ""
    set: tuple[str, ...] = ()
    kind: Kind = "federated"
    normalisation: Literal["matched", "site"] = "matched"  # central only
    tune: dict[str, Among] = {}  # noqa: RUF012 - pydantic copies it
    trials: int = Field(default=0, ge=0, le=10_000)  # points drawn at random of `tune`; 0: every combination
    attack: Attack | None = None  # what bad sites do

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _named(name)

    @field_validator("tune", mode="before")
    @classmethod
    def _flat(cls, tables: Any) -> Any:
        """``training.learning_rate = [...]`` means the same without quotes."""
        return dict(_flattened(tables)) if isinstance(tables, dict) else tables

    @field_validator("tune")
    @classmethod
    def _space(cls, tune: dict[str, Among]) -> dict[str, Among]:
        space.refuse_unfit(tune)
        return tune

    @model_validator(mode="after")
    def _countable(self) -> "RowSection":
        ranges = [key for key, among in self.tune.items() if isinstance(among, space.Range)]
        if ranges and not self.trials:
            raise ValueError(f"`tune` has a range for {ranges[0]!r}: say with `trials` how many points are drawn")
        if self.trials and not self.tune:
            raise ValueError("`trials` draws points of `tune`, which is empty")
        return self

    @model_validator(mode="after")
    def _central(self) -> "RowSection":
        if self.normalisation != "matched" and self.kind != "central":
            raise ValueError(f'`normalisation` belongs to kind = "central", the kind is "{self.kind}"')
        if self.attack is not None and self.kind != "federated":
            raise ValueError(f'`attack` belongs to kind = "federated", the kind is "{self.kind}"')
        return self


class SuiteFile(Strict):
    suite: SuiteSection
    protocol: Protocol = Protocol()
    row: tuple[RowSection, ...] = Field(min_length=1, max_length=256)


@dataclass(frozen=True)
class Point:
    """One of a row's grid, or the row itself where it has none."""

    settings: Settings
    study: ResolvedStudy  # resolved


@dataclass(frozen=True)
class Job:
    """One run: what a worker process is given. ``file`` is its result's place below the output folder."""

    row: str
    kind: Kind
    normalisation: Literal["matched", "site"]
    tuning: bool
    point: int
    settings: Settings
    study: ResolvedStudy  # with the run's seed
    protocol: Protocol
    file: str
    attack: Attack | None = None

    @property
    def seed(self) -> int:
        return self.study.study.seed

    @property
    def failure_file(self) -> str:
        return self.file.removesuffix(".json") + ".failed.json"

    def __str__(self) -> str:
        return f"{self.row}: seed {self.seed}" + (f", tuning {shown(self.settings)}" if self.tuning else "")


@dataclass(frozen=True)
class Row:
    """A line of the tables: what is run, at each point of its grid."""

    name: str
    label: str
    kind: Kind
    normalisation: Literal["matched", "site"]
    points: tuple[Point, ...]
    attack: Attack | None = None

    @property
    def tuned(self) -> bool:
        return len(self.points) > 1


@dataclass(frozen=True)
class Suite:
    """A suite with every study resolved."""

    name: str
    title: str
    metric: str
    seeds: int
    tuning_seeds: int
    reference: str
    protocol: Protocol
    rows: tuple[Row, ...]
    first_seed: int
    sites: tuple[str, ...]
    source: str = field(compare=False)

    def document(self) -> dict[str, Any]:
        """All that decides what a run gives, as plain JSON without floats: no titles, and not how many seeds."""
        rows = {
            row.name: {
                "kind": row.kind,
                "normalisation": row.normalisation,
                "points": [{"settings": point.settings, "study": point.study.document()} for point in row.points],
                **({} if row.attack is None else {"attack": row.attack.model_dump(mode="json")}),
            }
            for row in self.rows
        }
        document = {
            "first_seed": self.first_seed,
            "protocol": self.protocol.model_dump(mode="json"),
            "rows": rows,
            "tuning_seeds": self.tuning_seeds,
        }
        plain: dict[str, Any] = canonical.with_text_floats(document)
        return plain

    def digest(self) -> str:
        return canonical.digest(self.document())

    def row(self, name: str) -> Row:
        """Raises UsageProblem: there is none of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise UsageProblem(f"{self.source} has no row `{name}`", hint=_nearest(name, [row.name for row in self.rows]))

    def tuning_jobs(self, row: Row) -> list[Job]:
        """Every point of the row's grid with every tuning seed; none where there is nothing to choose."""
        first = self.first_seed + TUNING_OFFSET
        seeds = range(first, first + self.tuning_seeds) if row.tuned else ()
        return [self._job(row, point, seed, tuning=True) for seed in seeds for point in range(len(row.points))]

    def reported_jobs(self, row: Row, point: int, seeds: int) -> list[Job]:
        """The runs that the tables are made of, at the chosen point."""
        return [self._job(row, point, seed, tuning=False) for seed in range(self.first_seed, self.first_seed + seeds)]

    def _job(self, row: Row, point: int, seed: int, *, tuning: bool) -> Job:
        chosen = row.points[point]
        study = chosen.study.changed(study={"seed": seed})
        protocol = Protocol() if tuning else self.protocol
        file = f"runs/{row.name}/{seed}-tuning-{point}.json" if tuning else f"runs/{row.name}/{seed}.json"
        return Job(
            row.name, row.kind, row.normalisation, tuning, point, chosen.settings, study, protocol, file, row.attack
        )  # fmt: skip


def load(path: Path) -> Suite:
    """Read a suite and resolve every study of it.

    Raises:
        BadData: the file is not a suite, or a row makes no study; the message names file, row and key.
        UsageProblem: a row's variant does not exist, or one of its settings is not TABLE.KEY=VALUE.
    """
    tables = read_toml(path)
    written = tables.get("row", [])
    for number, row in enumerate(written if isinstance(written, list) else [], start=1):
        called = row.get("name", f"number {number}") if isinstance(row, dict) else f"number {number}"
        check(RowSection, row, f"{path.name}: row `{called}`")  # with its name, which the whole file's check lacks
    parsed = check(SuiteFile, tables, path.name)
    names = [row.name for row in parsed.row]
    for name in names:
        if names.count(name) > 1:
            raise BadData(f"{path.name}: row `{name}` stands twice", hint="tables and files call rows by their name")
    reference = parsed.suite.reference
    if reference and reference not in names:
        raise BadData(
            f"{path.name}: `reference` names row `{reference}`, which is not there", hint=_nearest(reference, names)
        )
    study_path = path.parent / parsed.suite.study
    rows = tuple(_resolved(row, study_path, path.name) for row in parsed.row)
    first = rows[0].points[0].study
    for row in rows:
        _refuse_unlike(row, first, path.name)
        if parsed.protocol.tent and row.kind != "central":
            _refuse_no_norms(row, path.name)
    metric = parsed.suite.metric
    known = getattr(first.task.settings, "metrics", first.task.row.metrics)
    if metric and metric not in known:
        raise BadData(
            f"{path.name}: `metric` in [suite] names `{metric}`, which the task does not have",
            hint=_nearest(metric, known),
        )
    section = parsed.suite
    return Suite(
        section.name, section.title or section.name, metric, section.seeds, section.tuning_seeds, reference,
        parsed.protocol, rows, first.study.seed, first.study.sites, path.name,
    )  # fmt: skip


def shown(settings: Settings | dict[str, Any]) -> str:
    """Settings as a person writes them: "training.learning_rate=0.1"."""
    return ", ".join(f"{key}={toml_value(value)}" for key, value in settings.items())


def _resolved(row: RowSection, path: Path, source: str) -> Row:
    try:
        points = tuple(Point(settings, _study(row, settings, path)) for settings in _settings(row))
        if row.attack is not None:
            for point in points:
                row.attack.refuse_unfit(point.study)
    except WardroundError as error:
        raise type(error)(f"{source}: row `{row.name}`: {error.message}", hint=error.hint) from None
    return Row(row.name, row.label or row.name, row.kind, row.normalisation, points, row.attack)


def _study(row: RowSection, settings: Settings, path: Path) -> ResolvedStudy:
    more = [f"{key}={toml_value(value)}" for key, value in settings.items()]
    study = study_file.load(path, [*row.set, *more], row.variant)
    if row.kind != "federated" and study.algorithm.name != "silo":
        study = study.model_copy(update={"algorithm": Named(name="silo")})
    return resolve(study, lab=True, source=path.name)


def _settings(row: RowSection) -> list[Settings]:
    """The points of a row: every combination, or so many drawn at random, each once. The draws are the same whatever
    seed the study has.
    """
    if not row.trials:
        return space.grid(row.tune)
    points: list[Settings] = []
    for number in range(row.trials):
        if (point := space.drawn(row.tune, 0, number)) not in points:
            points.append(point)
    return points


def _refuse_unlike(row: Row, first: ResolvedStudy, source: str) -> None:
    """Rows are compared run by run and site by site."""
    for point in row.points:
        mine = point.study.study
        if mine.sites != first.study.sites:
            raise BadData(
                f"{source}: row `{row.name}` has the sites {', '.join(mine.sites)}; the first row has "
                f"{', '.join(first.study.sites)}",
                hint="rows of one suite are compared site by site",
            )
        if mine.seed != first.study.seed:
            raise BadData(
                f"{source}: row `{row.name}` starts at seed {mine.seed}, the first row at {first.study.seed}",
                hint="rows of one suite are compared seed by seed",
            )


def _refuse_no_norms(row: Row, source: str) -> None:
    """Tent lowers the entropy of classes by norm layers; better said now than by every run."""
    for point in row.points:
        task = point.study.task.row
        if not (task.classes or task.gives == MASKS):
            raise BadData(
                f"{source}: `tent` in [protocol] adapts to the classes of rows, task `{task.name}` of row `{row.name}` "
                "has none",
                hint="leave `tent` out of [protocol]",
            )
        for site in point.study.study.sites:
            network = point.study.at(site).model.settings
            if isinstance(network, NetworkSettings) and NORM_LAYERS not in network.offers:
                raise BadData(
                    f"{source}: `tent` in [protocol] needs networks with {NORM_LAYERS}, row `{row.name}` has none",
                    hint=need_hint(NORM_LAYERS, point.study.task.row.gives),
                )


def _flattened(tables: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, dict) and not value.keys() & {"low", "high"}:  # a range is no table of keys
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _named(name: str) -> str:
    if not STUDY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of 1 to 64 of a-z, 0-9 and - (not at either end)")
    return name


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(known)}"
