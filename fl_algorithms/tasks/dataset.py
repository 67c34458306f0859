"""Rows of a ``torch.utils.data.Dataset`` of one's own, as a task.

    class Waveforms(Dataset):
        def __init__(self, path: Path) -> None: ...       # the file or folder that a hospital named
        def __len__(self) -> int: ...
        def __getitem__(self, row: int): return x, y      # x a float tensor, y as the study's settings say

    class WaveformTask(DatasetTask):
        dataset = Waveforms

and, in a module that imports no torch, ``TASK = dataset_row("waveforms", "waveforms.data:WaveformTask")`` at the entry
point ``wardround.tasks``. A dataset may also have ``groups``, who each row is (a patient's rows are then all for
training or all for validation), and ``names``, what a prediction's row is called. The same row must be the same numbers
each time it is asked for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fl_algorithms.settings.dataset import DatasetSettings
from fl_algorithms.settings.targets import ClassTarget, LabelsTarget, NumberTarget, OrdinalTarget
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import Inputs, Made, PublicData, SiteData, Source, Split, numbered
from fl_algorithms.tasks.objectives import objective_of
from fl_algorithms.tasks.objectives.base import Judged
from fl_algorithms.tasks.objectives.classes import ClassObjective
from fl_algorithms.tasks.selection import chosen
from fl_algorithms.tasks.source import FILES, TEST_FILES, files_digest
from fl_algorithms.tasks.tables.splits import split_rows
from wardround.errors import BadData

MIB = 1 << 20
FLOAT_BYTES = 4


class DatasetTask(Judged):
    """See ``fl_algorithms.tasks.base.Task``. Derive from it, and say what the rows are.

    Attributes:
        dataset: called with the path that a site named, or that new rows lie at.
    """

    dataset: ClassVar[Callable[[Path], Dataset[Any]]]

    def __init__(self, settings: DatasetSettings) -> None:
        self.settings = settings
        self.input_shape: tuple[int, ...] = settings.shape
        self.objective = objective_of(settings)
        if isinstance(self.objective, ClassObjective):  # see ``fl_algorithms.tasks.base.Classifies``
            self.classes: tuple[str, ...] = self.objective.classes
            self.probabilities: Callable[[Tensor], Tensor] = self.objective.probabilities

    def open(self, path: Path) -> Dataset[Any]:
        """The rows at ``path``. To be replaced where they depend on ``self.settings``."""
        return type(self).dataset(path)

    def load(self, source: Source, *, site: str, seed: int, validation_fraction: float) -> SiteData:
        """Read a site's rows, check each once, and split them by row, or by group where the dataset has ``groups``.

        The split is a permutation from the stream (seed, site, 0, "split"); validation is its end, floor(fraction * n)
        rows, or groups. The digest is of all files at the site's paths.

        Raises:
            BadData: a row is not what the study says; the message has which, and no value. Or a group is in both parts.
        """
        path, test = source.path(FILES), source.paths.get(TEST_FILES)
        train = self._read(path)
        tested = None if test is None else self._read(test)
        return self.site_data(
            train, tested, path, files_digest(source), site=site, seed=seed, validation_fraction=validation_fraction
        )

    def site_data(
        self,
        rows: "CheckedRows",
        test: "CheckedRows | None",
        path: Path,
        digest: str,
        *,
        site: str,
        seed: int,
        validation_fraction: float,
    ) -> SiteData:
        """``load``, of rows that were read. ``path`` is for messages."""
        if test is not None and (both := set(rows.groups) & set(test.groups)):
            raise BadData(
                f"{path}: {len(both)} of its {len(set(rows.groups))} groups are in the test rows too",
                hint="a patient's rows are all for training or all for testing",
            )
        generator = torch.Generator().manual_seed(stream_seed(seed, site, 0, "split"))
        places = split_rows(len(rows.split), validation_fraction, generator, path, patients=rows.groups)
        train, validation = (chosen(rows.split, part) for part in places)
        parts = {"training part": train, "validation part": validation, "test set": test.split if test else None}
        return SiteData(
            train=train,
            validation=validation,
            test=parts["test set"],
            digest=digest,
            warnings=tuple(
                warning
                for part, split in parts.items()
                if split is not None
                for warning in self.objective.about(part, split.y)
            ),
            preprocessing={"shape": list(self.settings.shape)},
        )

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[Inputs, list[int] | list[str]]:
        """Rows to predict, whose y is not looked at, and their names; places from 0 where the dataset has none."""
        dataset = self._open(rows)
        inputs = DatasetRows(dataset, self.settings.shape, str(rows))
        names = getattr(dataset, "names", None)
        return inputs, list(range(len(inputs))) if names is None else [str(name) for name in names]

    def read_public_data(self, path: Path, *, labeled: bool) -> PublicData:
        """See ``fl_algorithms.tasks.base.ReadsPublicData``."""
        split = self._read(path).split
        return PublicData(split.x, split.y if labeled else None)

    def _read(self, path: Path) -> "CheckedRows":
        return checked_rows(self._open(path), self.settings, str(path))

    def _open(self, path: Path) -> Dataset[Any]:
        try:
            return self.open(path)
        except BadData:
            raise
        except Exception as error:  # of code that is not ours; its text may hold a patient's value
            raise BadData(
                f"{path}: cannot be opened: {type(error).__name__} in {type(self).__name__}",
                hint="open it in Python with the plug-in's own class, which shows the error",
            ) from None


@dataclass(frozen=True)
class CheckedRows:
    """A dataset whose rows were each read and checked. ``groups``: of each row; () where each is one."""

    split: Split
    groups: tuple[str, ...] = ()


def checked_rows(dataset: Dataset[Any], settings: DatasetSettings, name: str) -> CheckedRows:
    """All rows of ``dataset``, read once and checked; kept in memory where they fit into the study's ``cache_mib``.

    Args:
        name: of the dataset, for messages.

    Raises:
        BadData: it has no rows, or one is not what the study says; the message has its number, from 0, and no value.
    """
    rows = DatasetRows(dataset, settings.shape, name)
    if len(rows) == 0:
        raise BadData(f"{name}: the dataset has no rows")
    keep = len(rows) * math.prod(settings.shape) * FLOAT_BYTES <= settings.cache_mib * MIB
    xs, ys = [], []
    for place in range(len(rows)):
        x, y = rows.pair(place)
        ys.append(_checked_y(y, settings, f"{name}: row {place}"))
        if place == 0 and not torch.equal(x, rows.pair(0)[0]):
            raise BadData(
                f"{name}: row 0 is not the same when it is read again",
                hint="a dataset draws nothing at random: every run, and every site's audit, must see the same rows",
            )
        if keep:
            xs.append(x)
    y_all = torch.stack(ys)
    groups = getattr(dataset, "groups", None)
    if groups is not None and len(groups) != len(rows):
        raise BadData(f"{name}: the dataset has {len(rows)} rows, and `groups` of {len(groups)}")
    who = () if groups is None else tuple(str(group) for group in groups)
    return CheckedRows(Split(torch.stack(xs) if keep else rows, y_all, numbered(who)), who)


class DatasetRows:
    """``fl_algorithms.tasks.base.Rows`` of a dataset, read when they are asked for."""

    def __init__(self, dataset: Dataset[Any], shape: tuple[int, ...], name: str) -> None:
        """Raises BadData: the dataset has no length."""
        self.shape = shape
        self._dataset, self._name = dataset, name
        try:
            self._length = len(dataset)  # type: ignore[arg-type]
        except Exception as error:
            raise BadData(
                f"{name}: the dataset has no length: {type(error).__name__}",
                hint="it needs `__len__` beside `__getitem__`; an iterable dataset cannot be split",
            ) from None

    def __len__(self) -> int:
        return self._length

    def take(self, places: Tensor) -> Tensor:
        """Raises BadData: a row cannot be read, or is of another shape than before."""
        return torch.stack([self.pair(place)[0] for place in places.tolist()])

    def augmented(self, places: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """As they are: a dataset draws nothing at random."""
        return self.take(places), y

    def for_worker(self) -> "Callable[[NDArray[np.int64], NDArray[Any], int], Made] | None":
        """See ``fl_algorithms.tasks.base.FromFiles``; None where the dataset cannot be handed to another process."""
        try:
            ForkingPickler.dumps(self._dataset)  # as it is handed to the worker
        except Exception:  # whatever its own code raises: the rows are then read in this process
            return None
        return WorkerRows(self._dataset, self.shape, self._name)

    def pair(self, place: int) -> tuple[Tensor, Any]:
        """x, float32, checked, and y as it came; None where the row is x alone.

        Raises:
            BadData: the row cannot be read, or its x is not finite numbers of the study's shape.
        """
        row = f"{self._name}: row {place}"
        try:
            item = self._dataset[place]
        except BadData:
            raise
        except Exception as error:  # of code that is not ours; its text may hold a patient's value
            raise BadData(
                f"{row} cannot be read: {type(error).__name__}",
                hint=f"`dataset[{place}]` in Python shows the error",
            ) from None
        x, y = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
        try:
            found = torch.as_tensor(x).to(torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise BadData(
                f"{row} is {type(item).__name__}, and not a pair (x, y) of a tensor and what is to be learned",
                hint="`return x, y` in `__getitem__`",
            ) from None
        if tuple(found.shape) != self.shape:
            raise BadData(
                f"{row}: x is {list(found.shape)}, `shape` in [task] is {list(self.shape)}",
                hint="every row has one shape: cut, fill up or resize in `__getitem__`",
            )
        if not torch.isfinite(found).all():
            raise BadData(f"{row}: x holds nan or infinity", hint="fill gaps in `__getitem__`, or leave the row out")
        return found, y


@dataclass(frozen=True)
class WorkerRows:
    """``DatasetRows.augmented`` for a worker process."""

    dataset: Dataset[Any]
    shape: tuple[int, ...]
    name: str

    def __call__(self, places: NDArray[np.int64], y: NDArray[Any], seed: int) -> Made:
        rows = DatasetRows(self.dataset, self.shape, self.name)
        return rows.take(torch.from_numpy(places)).numpy(), y


def _checked_y(y: Any, settings: DatasetSettings, row: str) -> Tensor:
    """What is to be learned of a row: int64 (), float32 (), (labels,) or (2,)."""
    try:
        found = torch.as_tensor(y)
        numbers: Sequence[float] = found.double().flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        raise BadData(f"{row}: y is {type(y).__name__}, which is no number", hint=_wanted(settings)) from None
    finite = all(math.isfinite(number) for number in numbers)
    if isinstance(settings, ClassTarget | OrdinalTarget):
        fits = found.dim() == 0 and finite and numbers[0] in range(len(settings.classes))
    elif isinstance(settings, NumberTarget):
        fits = found.dim() == 0 and finite
    elif isinstance(settings, LabelsTarget):
        fits = found.shape == (len(settings.labels),) and all(number in (0, 1) for number in numbers)
    else:
        fits = found.shape == (2,) and finite and numbers[0] > 0 and numbers[1] in (0, 1)
    if not fits:
        raise BadData(f"{row}: y, {list(found.shape)}, is not what the study predicts", hint=_wanted(settings))
    return found.to(torch.int64 if isinstance(settings, ClassTarget | OrdinalTarget) else torch.float32)


def _wanted(settings: DatasetSettings) -> str:
    if isinstance(settings, ClassTarget | OrdinalTarget):
        return f"the index of a class, 0 to {len(settings.classes) - 1}"
    if isinstance(settings, NumberTarget):
        return "one finite number"
    if isinstance(settings, LabelsTarget):
        return f"0 or 1 for each of {len(settings.labels)} labels"
    return "a time above 0 and, 1 or 0, whether the event happened then"
