"""A data set of one's own, as a plug-in brings it: a folder of rows, written as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_algorithms.settings.dataset import ClassDatasetSettings
from fl_algorithms.tasks.dataset import DatasetTask

SHAPE = (2, 3)


class Own(Dataset[Any]):
    """``PATH/rows.txt``: the patient, the class and six numbers of each row."""

    def __init__(self, path: Path) -> None:
        self.lines = [line.split() for line in (path / "rows.txt").read_text().splitlines()]
        self.groups = [line[0] for line in self.lines]
        self.names = [f"{line[0]}-{place}" for place, line in enumerate(self.lines)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        _, label, *numbers = self.lines[row]
        return torch.tensor([float(text) for text in numbers]).reshape(2, -1), int(label)


class OwnTask(DatasetTask):
    dataset = Own


def settings(**changes: Any) -> ClassDatasetSettings:
    return ClassDatasetSettings.model_validate({"shape": SHAPE, "classes": ["no", "yes"], **changes})


def write_rows(folder: Path, rows: int, patients: int = 0, seed: int = 0) -> Path:
    """A folder of ``rows`` rows, of ``patients`` in turn."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in range(rows):
        numbers: Sequence[float] = torch.randn(6, generator=generator).tolist()
        who = row % patients if patients else row
        lines.append(f"p{seed}.{who} {int(numbers[0] > 0)} " + " ".join(f"{number:.6f}" for number in numbers))
    (folder / "rows.txt").write_text("\n".join(lines) + "\n")
    return folder
