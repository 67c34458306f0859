"""A federation of data sets and a network that are Python objects, as a notebook has them.

The same methods, rounds and arithmetic as of a study file. Nothing is registered: the study itself brings its task and
its network, so that two federations in one process know nothing of each other.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import nn
from torch.utils.data import Dataset

from fl_algorithms.engine.hardware import DeviceName, Hardware
from fl_algorithms.engine.training import seeded
from fl_algorithms.lab.api import Result
from fl_algorithms.lab.participation import EVERYONE, Participation
from fl_algorithms.lab.progress import rounds_shown
from fl_algorithms.lab.seeds import Progress, Request, SeedResult, run_read
from fl_algorithms.lab.study_run import Plan, run_study
from fl_algorithms.resolving import resolve
from fl_algorithms.rows import COLUMNS, IMAGES, ModelRow, TaskRow, dataset_row
from fl_algorithms.settings.dataset import ClassDatasetSettings, DatasetSettings
from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS, TWO_EXTRACTORS, NetworkSettings
from fl_algorithms.study import Choice, ResolvedStudy, SiteStudy
from fl_algorithms.tasks.base import SiteData, in_parts
from fl_algorithms.tasks.dataset import CheckedRows, DatasetTask, checked_rows
from wardround.errors import BadData, UsageProblem
from wardround.records.schema import Strict, check
from wardround.records.study import StudyFile

Datasets = Mapping[str, Dataset[Any]]  # site -> rows
Make = Callable[[], nn.Module]
SOURCE = "Federation.from_datasets"
HERE = "fl_algorithms.lab.own"
DIGEST_ROWS = 256  # hashed at once
PARTS = {
    BODY_AND_HEAD: {"body", "head"}, TWO_EXTRACTORS: {"shared_extractor", "private_extractor", "head"},
}  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)


class OwnTask(DatasetTask):
    """The rows were read by who made the federation."""


class OwnNetwork(NetworkSettings):
    """A network that a notebook has: what the study's digest knows of it is its class and its tensors."""

    architecture: str
    _make: Make = PrivateAttr()
    _offers: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def offers(self) -> frozenset[str]:
        return self._offers

    @classmethod
    def of(cls, model: nn.Module | Make) -> "OwnNetwork":
        """Of a module, which is copied, or of what makes one.

        Raises:
            BadData: it makes no module.
        """
        make: Make = partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model
        with seeded(0):
            found = make() if callable(make) else None
        if not isinstance(found, nn.Module):
            raise BadData(
                f"{SOURCE}: `model` gives a {type(found).__name__} and not an nn.Module",
                hint="a network, or a function without arguments that makes one: `lambda: Net(30)`",
            )
        children = {name for name, _ in found.named_children()}
        offers = {what for what, parts in PARTS.items() if parts <= children}
        if any(isinstance(module, NORMS) for module in found.modules()):
            offers.add(NORM_LAYERS)
        own = cls(architecture=type(found).__name__)
        own._make, own._offers = make, frozenset(offers)
        return own

    def network(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """A new one. Raises BadData: it does not take such rows, or does not give so many outputs."""
        made = self._make()
        training = made.training
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = tuple(made.eval()(torch.zeros(2, *shape)).shape)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise BadData(
                f"model `{self.architecture}` does not take rows of {list(shape)}: {type(error).__name__}",
                hint=f"`model(torch.zeros(2, {', '.join(map(str, shape))}))` shows the error",
            ) from None
        made.train(training)
        if found != (2, outputs):
            raise BadData(
                f"model `{self.architecture}` gives {list(found)} for 2 rows, the task needs [2, {outputs}]",
                hint="of two classes one logit, the last class's; of more classes one each; for a number one",
            )
        return made


def own_network(settings: OwnNetwork, inputs: int | tuple[int, ...], outputs: int) -> nn.Module:
    return settings.network((inputs,) if isinstance(inputs, int) else inputs, outputs)


@dataclass(frozen=True)
class Brought:
    """What a study brings, in place of what is installed."""

    task: Choice[TaskRow, Strict]
    model: Choice[ModelRow, NetworkSettings]

    def study(self, file: StudyFile, source: str) -> "OwnStudy":
        return OwnStudy(file, source, self)


@dataclass(frozen=True)
class OwnStudy(ResolvedStudy):
    """A study whose task and network are those that were brought."""

    brought: Brought | None = field(default=None, compare=False)

    @cached_property
    def task(self) -> Choice[TaskRow, Strict]:
        assert self.brought is not None
        return self.brought.task

    @cached_property
    def model(self) -> Choice[ModelRow, NetworkSettings]:
        assert self.brought is not None
        return self.brought.model

    def at(self, site: str, chosen: str = "") -> SiteStudy:
        return OwnSiteStudy(self.file, self.source, self.brought)


@dataclass(frozen=True)
class OwnSiteStudy(OwnStudy, SiteStudy):
    """The same as one site trains it."""


@dataclass(frozen=True)
class Federation:
    """Sites with data sets, a network and a method. ``from_datasets`` makes one; ``run`` can be called again.

    Attributes:
        rows: site -> its rows, read once.
        tests: site -> its test rows, of the sites that have some.
    """

    study: OwnStudy
    rows: Mapping[str, CheckedRows] = field(repr=False)
    tests: Mapping[str, CheckedRows] = field(repr=False)

    @classmethod
    def from_datasets(
        cls,
        datasets: Datasets,
        model: nn.Module | Make,
        method: str | Mapping[str, Any] = "fedavg",
        *,
        tests: Datasets | None = None,
        classes: Sequence[str] = (),
        task: DatasetSettings | None = None,
        rounds: int = 10,
        seed: int = 1,
        training: Mapping[str, Any] | None = None,
        **tables: Mapping[str, Any],
    ) -> "Federation":
        """Read every row once, and put a study together.

        Args:
            datasets: site -> rows (x, y), x of one shape everywhere; y an index of a class, unless ``task`` says
                otherwise. The same row is the same numbers each time.
            model: a network, whose weights are where every seed begins; or what makes one, drawn from the seed's
                stream. It gives (n, outputs): one logit for two classes, else one each.
            method: its name, or the keys of [algorithm] with it: ``{"name": "fedprox", "mu": 0.1}``.
            tests: site -> its test rows; without them a checkpoint is scored on the site's validation rows.
            classes: their names by index; without them they are counted in the data.
            task: of ``fl_algorithms.settings.dataset``, for what is no class: a number, labels, survival.
            training: keys of [training]; one pass over the rows in each round if it says nothing of the amount.
            tables: keys of other tables: ``study={"quorum": 2}``, ``checkpoints={"validation_fraction": 0.3}``.

        Raises:
            BadData: a row, the network or a setting is not what it must be; the message says which.
            UsageProblem: the method needs a public data set.
        """
        if not datasets:
            raise UsageProblem(f"{SOURCE}: there is no site", hint='`{"ashford": dataset, "birchwood": dataset}`')
        if unknown := sorted((tests or {}).keys() - datasets.keys()):
            raise UsageProblem(f"{SOURCE}: `tests` has site `{unknown[0]}`, which `datasets` does not have")
        settings = task or _class_settings(datasets, classes)
        rows = {site: checked_rows(data, settings, f"site {site}") for site, data in sorted(datasets.items())}
        tested = {
            site: checked_rows(data, settings, f"tests of {site}") for site, data in sorted((tests or {}).items())
        }
        gives = COLUMNS if len(settings.input_shape) == 1 else IMAGES
        network = OwnNetwork.of(model)
        brought = Brought(
            Choice(dataset_row("dataset", f"{HERE}:OwnTask", type(settings), gives=gives), settings),
            Choice(ModelRow("module", OwnNetwork, f"{HERE}:own_network", gives), network),
        )
        named = {"name": method} if isinstance(method, str) else dict(method)
        amount = dict(training or {})
        amount |= {} if {"local_steps", "local_epochs"} & amount.keys() else {"local_epochs": 1}
        study = {"name": "notebook", "sites": sorted(datasets), "rounds": rounds, "seed": seed}
        written = {
            **tables,
            "study": study | dict(tables.get("study", {})),
            "task": brought.task.named().model_dump(),
            "model": brought.model.named().model_dump(),
            "algorithm": named,
            "training": amount,
        }
        file = check(StudyFile, written, SOURCE)
        if OwnStudy(file, SOURCE, brought).method.row.public_data:
            raise UsageProblem(
                f"{SOURCE} has no public data set, which algorithm `{file.algorithm.name}` needs",
                hint="a study file with [public_data], and `run(study, data)`",
            )
        resolved = resolve(file, lab=True, source=SOURCE, form=brought.study)
        assert isinstance(resolved, OwnStudy)
        network.network(settings.input_shape, OwnTask(settings).outputs)
        return cls(resolved, rows, tested)

    def run(
        self,
        *,
        seeds: int = 1,
        out: str | Path | None = None,
        participation: Participation = EVERYONE,
        device: DeviceName = "cpu",
    ) -> Result:
        """Run it with the study's seed and those after it, in this process.

        Args:
            out: keep curves and models there; a call that was stopped goes on.

        Raises:
            WardroundError: as ``fl_algorithms.lab.run``.
        """
        kept = None if out is None else Path(out)
        plan = Plan(
            self.study,
            Path(),
            seeds,
            kept,
            Hardware(device),
            participation=participation,
            make=self._run_seed,
            digests=lambda *_: self._digests,
        )
        with rounds_shown(seeds, self.study.study.rounds) as rounds_told:
            made = run_study(plan, rounds_told=rounds_told)
        return Result(self.study, tuple(made), kept)

    def _run_seed(self, request: Request, progress: Progress | None) -> SeedResult:
        settings = self.study.task.settings
        assert isinstance(settings, DatasetSettings)
        task, fraction = OwnTask(settings), self.study.checkpoints.validation_fraction
        data: dict[str, SiteData] = {
            site: task.site_data(
                rows,
                self.tests.get(site),
                Path(f"site {site}"),
                self._digests[site],
                site=site,
                seed=request.seed,
                validation_fraction=fraction,
            )
            for site, rows in self.rows.items()
        }
        return run_read(request, task, data, progress)

    @cached_property
    def _digests(self) -> dict[str, str]:
        """SHA-256 (hex) of each site's rows."""
        return {
            site: _digest([rows, *([self.tests[site]] if site in self.tests else [])])
            for site, rows in self.rows.items()
        }


def _class_settings(datasets: Datasets, classes: Sequence[str]) -> DatasetSettings:
    """The shape of the first row, and the classes that occur where nobody names them."""
    shape: tuple[int, ...] | None = None
    most = 1
    for site, data in sorted(datasets.items()):
        try:
            for place in range(len(data)) if shape is None or not classes else ():  # type: ignore[arg-type]
                x, y = data[place]
                shape = shape or tuple(torch.as_tensor(x).shape)
                if classes:
                    break
                most = max(most, int(y))
        except Exception as error:  # of code that is not ours; its text may hold a patient's value
            raise BadData(
                f"{SOURCE}: a row of site `{site}` cannot be read as (x, class): {type(error).__name__}",
                hint="`__getitem__` gives x and the index of a class, `__len__` how many; `task=` for what is no class",
            ) from None
    if shape is None:
        raise BadData(f"{SOURCE}: the datasets have no rows")
    names = tuple(classes) or tuple(map(str, range(most + 1)))
    return check(ClassDatasetSettings, {"shape": shape, "classes": names}, SOURCE)


def _digest(parts: Sequence[CheckedRows]) -> str:
    hasher = hashlib.sha256()
    for rows in parts:
        for x in in_parts(rows.split.x, DIGEST_ROWS):
            hasher.update(x.contiguous().numpy().tobytes())
        hasher.update(rows.split.y.contiguous().numpy().tobytes())
        hasher.update("\0".join(rows.groups).encode())
    return hasher.hexdigest()
