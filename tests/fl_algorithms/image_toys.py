"""Small studies of images, and made-up images for them."""

import csv
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fl_algorithms import registry, rows
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Source
from fl_algorithms.tasks.images.classification import ImageTask
from fl_algorithms.tasks.images.segmentation import SegmentationTask
from wardround.records.study import StudyFile

SIDE = 8
PUBLIC_ROWS = 9
CLASSES = ["round", "oval"]
IMAGES: dict[str, Any] = {"name": "images", "size": [SIDE, SIDE], "channels": 1, "classes": CLASSES, "label": "shape"}
MASKS: dict[str, Any] = {"name": "segmentation", "size": [SIDE, SIDE], "channels": 1}
RESNET: dict[str, Any] = {"name": "resnet10", "width": 0.0625}
UNET: dict[str, Any] = {"name": "unet", "widths": [4, 8]}


NONE = {"steps": 0}
BEGINNING: dict[str, dict[str, Any]] = {"fedmd": {"transfer": NONE, "initial": NONE}, "ktpfl": {"initial": NONE}}


def image_study(
    task: dict[str, Any] | None = None, model: dict[str, Any] | None = None, algorithm: str = "fedavg", **training: Any
) -> ResolvedStudy:
    """A resolved study of two sites and two rounds."""
    task = task or IMAGES
    public_data, distilling = {}, {}
    if registry.METHODS[algorithm].public_data == rows.COORDINATOR:
        distilling = {"distil_steps": 1, "distil_batch_size": 4}
    if algorithm in BEGINNING:
        distilling = BEGINNING[algorithm]
    if registry.METHODS[algorithm].public_data:
        task = {**task, "mean": [0.25], "std": [0.25]}
        public_data = {"public_data": {"digest": hashlib.sha256(public_bytes()).hexdigest(), "rows": PUBLIC_ROWS}}
    steps = {"optimizer": "sgd", "weight_decay": 0.0, "learning_rate": 0.1, "batch_size": 4, "local_steps": 3}
    tables = {
        "study": {"name": "toy", "sites": ["ash", "birch"], "rounds": 2, "seed": 5},
        "task": task,
        "model": model or (UNET if task["name"] == "segmentation" else RESNET),
        "algorithm": {"name": algorithm, **distilling},
        "training": {**steps, **training},
        **public_data,
    }
    return resolve(StudyFile.model_validate(tables), lab=True)


def public_bytes() -> bytes:
    """A public data set of images, an .npz file; the same bytes every time."""
    file = io.BytesIO()
    np.savez(file, images=pictures(PUBLIC_ROWS, seed=77)[0])
    return file.getvalue()


def settings_of(table: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**table, **changes}.items() if key != "name"}


def image_task(**changes: Any) -> ImageTask:
    return ImageTask(ImageSettings.model_validate(settings_of(IMAGES, **changes)))


def mask_task(**changes: Any) -> SegmentationTask:
    return SegmentationTask(SegmentationSettings.model_validate(settings_of(MASKS, **changes)))


def load(task: Any, source: Source, **changes: Any) -> SiteData:
    data: SiteData = task.load(source, **{"site": "ash", "seed": 1, "validation_fraction": 0.25, **changes})
    return data


def pictures(n: int, seed: int = 1, side: int = SIDE) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Gray images (n, side, side) with a bright block, and masks of it (0, 1); every other one is dim."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 60, (n, side, side)).astype(np.uint8)
    masks = np.zeros((n, side, side), dtype=np.uint8)
    for place in range(n):
        row, column = random.integers(0, side - 3, 2)
        masks[place, row : row + 3, column : column + 3] = 1
        images[place][masks[place] == 1] = 250 if place % 2 else 120
    return images, masks


def write_images(folder: Path, images: Sequence[NDArray[Any]], ending: str = "png") -> list[str]:
    """One file each; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{place:03}.{ending}" for place in range(len(images))]
    for name, image in zip(names, images, strict=True):
        Image.fromarray(image).save(folder / name)
    return names


def write_table(path: Path, columns: dict[str, Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def labeled(folder: Path, n: int = 12, seed: int = 1, **columns: Sequence[Any]) -> Source:
    """A folder of ``n`` images and its table of labels."""
    names = write_images(folder / "images", list(pictures(n, seed)[0]))
    labels = [CLASSES[place % 2] for place in range(n)]
    table = write_table(folder / "labels.csv", {"image": names, "shape": labels, **columns})
    return Source({"images": folder / "images", "labels": table})


def masked(folder: Path, n: int = 12) -> Source:
    images, masks = pictures(n)
    write_images(folder / "images", list(images))
    write_images(folder / "masks", list(masks))
    return Source({"images": folder / "images", "masks": folder / "masks"})


def packed(path: Path, n: int = 12, seed: int = 1, **arrays: Any) -> Path:
    """An .npz file of images with labels and masks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images, masks = pictures(n, seed)
    labels = np.array([CLASSES[place % 2] for place in range(n)])
    np.savez(path, **{"images": images, "shape": labels, "masks": masks, **arrays})
    return path
