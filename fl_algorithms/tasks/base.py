"""What a task is: everything about a study that depends on the kind of data, and nothing that depends on the method.

A task reads a hospital's files into ``SiteData`` and says how logits are judged. Networks and methods see tensors
alone. Add one by a row at the entry point ``wardround.tasks``; ``tabular`` is the example.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Rows used for one purpose: ``x`` float32 (n, features), standardised; ``y`` int64 (n,), class indices."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])


@dataclass(frozen=True)
class SiteData:
    """One site's data, read, checked and split. It stays in the process that read it.

    ``digest`` pins what was read: SHA-256 (hex) of the canonical JSON {table, test, label} with the files' own SHA-256.
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


class Task(Protocol):
    """One kind of data and how a model of it is judged. Holds settings only: the same object serves many sites."""

    @property
    def inputs(self) -> int:
        """The number of features a network is fed."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names in the order of their indices; of two, the last is the positive one."""

    @property
    def headline(self) -> str:
        """The metric that a checkpoint's score is."""

    def load(
        self, table: Path, test: Path | None, label: str, *, site: str, seed: int, validation_fraction: float
    ) -> SiteData:
        """Read and check a site's files.

        Args:
            label: the column that holds the class in this site's files.
            site, seed: key the split's random stream; a study's own.
            validation_fraction: of the table's usable rows, in (0, 1), rounded down.

        Raises:
            BadData: a file is not what the study needs. The message has file, line and column and never a value.
        """

    def fitted(self, data: SiteData) -> dict[str, Any]:
        """The preprocessing of ``data`` as plain JSON, to be kept with each checkpoint."""

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
        """Rows to predict, encoded as ``fitted`` says: float32 (n, features), and the line in the file of each.

        Raises:
            BadData: as ``load``; or ``fitted`` is not of this task's schema.
        """

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample: (n,), carries gradient."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``, a scalar: what training takes the gradient of."""

    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float | None]:
        """Scores over all samples given; None where a score is undefined."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability of each class: (n, classes), rows sum to 1."""


@runtime_checkable
class Pooling(Protocol):
    """What a task may also offer, for the lab alone: several sites' files as if they were one site's."""

    def load_pooled(
        self,
        tables: Mapping[str, tuple[Path, Path]],
        label: str,
        *,
        site: str,
        seed: int,
        validation_fraction: float,
    ) -> tuple[SiteData, dict[str, Split]]:
        """The raw rows of all training tables encoded, split and described as ``Task.load`` does one site's, with all
        test rows as ``test``; and each site's own test rows, on that same scale.

        Args:
            tables: site -> (table, test table).
            site: names the pool's random streams.

        Raises:
            BadData: as ``Task.load``.
        """
