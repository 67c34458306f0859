"""What a task is: everything about a study that depends on the kind of data, and nothing that depends on the method.

A task reads a hospital's files into ``SiteData`` and says how logits are judged. Networks and methods see tensors
alone. Add one by a row at the entry point ``wardround.tasks``; ``tabular`` is the example.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.tasks.source import Draft as Draft
from fl_algorithms.tasks.source import Source as Source


class Rows(Protocol):
    """A split's inputs that are made when they are asked for, as images are. ``places`` are int64 (k,), from 0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""

    def __len__(self) -> int: ...

    def take(self, places: Tensor) -> Tensor:
        """float32 (k, *shape), on the network's scale, in the order of ``places``."""

    def augmented(self, places: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """As ``take``, changed at random as the study says, with the rows' labels ``y`` (masks move with their image).

        A row's change is drawn from (seed, place) alone: neither its neighbors nor the number of workers matter.
        """


Made = tuple[NDArray[np.float32], NDArray[Any]]


@runtime_checkable
class FromFiles(Protocol):
    """What rows may also offer: to be made in worker processes, while the batch before them is trained on."""

    def for_worker(self) -> Callable[[NDArray[np.int64], NDArray[Any], int], Made] | None:
        """``augmented`` of arrays, to be pickled; None where the rows are in memory, so that workers would not help."""


@runtime_checkable
class OwnSizes(Protocol):
    """What rows may also offer: images of their own sizes, seen in pieces, with labels of their own.

    Each row has an image; the row itself, what a network is fed, is a piece of it, and ``augmented`` gives the piece's
    labels. The split's ``y`` says nothing then but how many rows there are.
    """

    @property
    def images(self) -> int:
        """How many there are; several rows may be of one."""

    @property
    def pixels_by_class(self) -> Tensor:
        """Of each image, (images, classes), int64."""

    def middle(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as ``take`` gives them, with their labels: the middle of each one's image."""

    def judged(self, place: int, infer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The logits (1, outputs, *sides) and the labels (1, *sides) of the whole image of row ``place``.

        Args:
            infer: logits of rows, (k, *shape); both on the CPU.
        """


Inputs = Tensor | Rows  # of a split: (n, features), or what makes (n, *shape)


def in_parts(x: Inputs, size: int) -> Iterator[Tensor]:
    """``x`` in its order as a network takes it, ``size`` rows at a time."""
    if isinstance(x, Tensor):
        yield from torch.split(x, size)
    else:
        for places in torch.split(torch.arange(len(x)), size):
            yield x.take(places)


@dataclass(frozen=True)
class Split:
    """Rows used for one purpose: ``x`` float32 (n, features), standardized, or ``Rows``; ``y`` what is to be learned.

    ``y`` is int64 (n,), class indices; uint8 (n, *size), those of each pixel; float32 (n,), numbers; float32 (n,
    labels), 0 or 1; or float32 (n, 2), a time and whether the event happened then (1) or the patient was seen no longer
    (0). Of rows that are ``OwnSizes`` it is zeros (n,). ``groups`` is int64 (n,), a number for each row's patient; None
    where the data do not say, and each row is one.
    """

    x: Inputs
    y: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return int(self.y.shape[0])


def numbered(names: Sequence[str]) -> Tensor | None:
    """For each row a number of its own for the patient of that name; None of no names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.int64) if numbers else None


def samples(split: Split) -> int:
    """How many there are to be counted: rows, or the images that rows are pieces of."""
    return split.x.images if isinstance(split.x, OwnSizes) else len(split)


@dataclass(frozen=True)
class PublicData:
    """A study's public data set as each party reads it: no patients, the same rows in the same order everywhere.

    ``y`` is int64 (n,), class indices, where the method asks for them.
    """

    x: Inputs
    y: Tensor | None = None


@dataclass(frozen=True)
class SiteData:
    """One site's data, read, checked and split. It stays in the process that read it.

    ``digest`` pins what was read: SHA-256 (hex) of canonical JSON with the files' own SHA-256 and the columns' names.
    ``warnings`` are sentences for the hospital's own terminal, with columns and counts; they never cross to the
    coordinator.
    ``preprocessing`` is what ``Task.read_new`` needs to encode further rows alike. It is plain JSON without floats
    (numbers as text), computed from patients and therefore kept at the site beside each checkpoint.
    """

    train: Split
    validation: Split
    test: Split | None
    digest: str
    warnings: tuple[str, ...] = ()
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    public_data: PublicData | None = None  # from a file of its own, which the study pins and ``digest`` does not


OutputsOf = Callable[[Split], Tensor]  # a model's outputs for a split's rows, (n, outputs), on the CPU
Scores = dict[str, float | None]


@dataclass(frozen=True)
class Predictions:
    """What a model says of new rows, as a table: ``rows`` has texts, and numbers to be shown with six digits, in the
    order of ``header``.

    ``notes`` are sentences about all of them: which threshold, and where it comes from.
    """

    header: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    notes: tuple[str, ...] = ()


class Task(Protocol):
    """One kind of data and how a model of it is judged. Holds settings only: the same object serves many sites."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample as a network is fed it: (features,), or (channels, *size)."""

    @property
    def outputs(self) -> int:
        """How many numbers (logits) a network gives for a sample; or for each pixel."""

    @property
    def headline(self) -> str:
        """The metric that a checkpoint's score is."""

    def load(self, source: Source, *, site: str, seed: int, validation_fraction: float) -> SiteData:
        """Read and check a site's files.

        Args:
            site, seed: key the split's random stream; a study's own.
            validation_fraction: of the usable rows, or of the patients where they are known, in (0, 1), rounded down.

        Raises:
            BadData: a file is not what the study needs. The message has file, line and column and never a value.
        """

    def at(self, data: SiteData) -> "Task":
        """The task as it judges at the site of ``data``: itself, unless its loss is weighed by the site's classes."""

    def fitted(self, data: SiteData) -> dict[str, Any]:
        """The preprocessing of ``data`` as plain JSON, to be kept with each checkpoint."""

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[Inputs, list[int] | list[str]]:
        """Rows to predict, encoded as ``fitted`` says, and the line in the file of each, or its name in the folder.

        Raises:
            BadData: as ``load``; or ``fitted`` is not of this task's schema.
        """

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample: (n,), carries gradient.

        Where samples are compared with one another, as in survival, a sample's part in the loss of all that are given:
        their mean is that loss, and of some of them alone it would be another. So training compares the samples of a
        batch, and validation those of the whole split.
        """

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``, a scalar: what training takes the gradient of."""

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """Scores over all samples given; None where a score is undefined.

        Args:
            fit: what ``fit_outputs`` gave for this model; without it, scores that rest on it are None.
        """

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        """What predictions of a model need beside its tensors, found out on this site's own rows: a threshold from the
        validation part, a baseline hazard from the training part. Plain JSON without floats (numbers as text); computed
        from patients, so it stays at the site, beside the checkpoint.
        """

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        """What a model says of rows to be predicted. ``fit`` is what ``fit_outputs`` gave for it."""

    def kinds(self, y: Tensor) -> Tensor | None:
        """What each sample is, for drawing each kind equally often: int64 (n,), its class, or whether it has the event;
        None where samples are of no kinds.
        """

    def counts(self, y: Tensor) -> dict[str, int]:
        """How many samples are of each kind, by name: of each class, with an event. For the site's own eyes."""


@runtime_checkable
class Classifies(Protocol):
    """What a task of classes also has: each sample, or each pixel, is of one of them."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names in the order of their indices; of two, the last is the positive one."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability of each class: (n, classes), rows sum to 1; (n, classes, *size) for masks."""


@runtime_checkable
class RowByRow(Protocol):
    """What a task may also offer: scores made of each row's own, so that a split's logits are never held at once."""

    def judgements(self, logits: Tensor, y: Tensor) -> Tensor:
        """What each row counts for: (n, k), float64; the first column is its loss."""

    def overall(self, judgements: Tensor) -> dict[str, float | None]:
        """``Task.metrics`` of all rows together, from their ``judgements`` in the split's order."""


@runtime_checkable
class Pooling(Protocol):
    """What a task may also offer, for the lab alone: several sites' files as if they were one site's."""

    def load_pooled(
        self, sources: Mapping[str, Source], *, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, dict[str, Split]]:
        """The raw rows of all sites' training files encoded, split and described as ``Task.load`` does one site's, with
        all test rows as ``test``; and each site's own test rows, where it has some, on that same scale.

        Args:
            sources: site -> its files; the pool has their order.
            site: names the pool's random streams.

        Raises:
            BadData: as ``Task.load``.
        """


@runtime_checkable
class ReadsPublicData(Protocol):
    """What a task may also offer: to read a study's public data set."""

    def read_public_data(self, path: Path, *, labeled: bool) -> PublicData:
        """The rows of ``path`` on the study's own scale, in the file's order; with classes if ``labeled``.

        Raises:
            BadData: as ``Task.load``; or a value is missing.
        """


@runtime_checkable
class TakesMapping(Protocol):
    """What a task may also offer: to read a site's files by its mapping, the role ``mapping``, and to draft one."""

    def draft_mapping(self, source: Source) -> Draft:
        """A mapping of the table of ``source``, for the hospital to edit. It has column names and codes of the site's.

        Raises:
            BadData: a file cannot be read as a table at all.
        """
