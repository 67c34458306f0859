"""What the image tasks share: rows of images, their scale, and who is in which split."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.settings.images import Augmentation, PixelSettings
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import Made, PublicData, SiteData, Source, Split, numbered
from fl_algorithms.tasks.images.augment import augmented
from fl_algorithms.tasks.images.labels import PackedMasks, ReadLabels, classes_among
from fl_algorithms.tasks.images.pixels import ByPlace
from fl_algorithms.tasks.images.pool import pooled
from fl_algorithms.tasks.images.reading import Origin
from fl_algorithms.tasks.images.sets import ImageSet, digest_of, read_plain, read_set
from fl_algorithms.tasks.images.volumes.patches import PatchRows
from wardround.errors import BadData

STATISTICS_NUMBERS = 1 << 22  # pixels' numbers at a time, for a site's mean and deviation
SMALLEST_DEVIATION = 1e-6  # below it a channel counts as constant and is only centred
Scale = tuple[Tensor, Tensor]  # mean and deviation of each channel, (channels,), float32


class ImageRows:
    """``fl_algorithms.tasks.base.Rows`` of images: (x - mean) / std, per channel."""

    def __init__(
        self,
        pixels: ByPlace,
        places: Tensor,
        settings: PixelSettings,
        mean: Tensor,
        std: Tensor,
        origins: Sequence[Origin] = (),
    ) -> None:
        """
        Args:
            places: of the rows among ``pixels``, int64 (n,).
            mean, std: (channels,), float32.
            origins: of each image before it was brought to the study's size; () where nobody will ask.
        """
        self.origins = origins
        self._pixels, self._places, self._settings = pixels, places, settings
        column = (-1, *(1 for _ in settings.size))
        self._mean, self._std = mean.reshape(column), std.reshape(column)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._settings.input_shape

    def __len__(self) -> int:
        return len(self._places)

    def take(self, places: Tensor) -> Tensor:
        return self._standardized(self._unit(places))

    def augmented(self, places: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        x, y = augmented(self._unit(places), y, places, seed, self._settings.augment)
        return self._standardized(x), y

    def for_worker(self) -> "FileRows | None":
        """See ``fl_algorithms.tasks.base.FromFiles``."""
        if self._pixels.is_kept:
            return None
        scale = (self._mean.flatten().numpy(), self._std.flatten().numpy())
        return FileRows(self._pixels.for_worker(), self._places.numpy(), self._settings, *scale)

    def _unit(self, places: Tensor) -> Tensor:
        return torch.from_numpy(self._pixels.take(self._places[places].numpy()))

    def _standardized(self, x: Tensor) -> Tensor:
        return x.sub_(self._mean).div_(self._std)


@dataclass(frozen=True)
class FileRows:
    """``ImageRows.augmented`` for a worker process; the fields are its arguments, without a tensor."""

    pixels: ByPlace
    places: NDArray[np.int64]
    settings: PixelSettings
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def __call__(self, places: NDArray[np.int64], y: NDArray[Any], seed: int) -> Made:
        own, mean, std = (torch.from_numpy(array) for array in (self.places, self.mean, self.std))
        rows = ImageRows(self.pixels, own, self.settings, mean, std)
        x, labels = rows.augmented(torch.from_numpy(places), torch.from_numpy(y), seed)
        return x.numpy(), labels.numpy()


def load_images(
    source: Source,
    settings: PixelSettings,
    read_y: ReadLabels,
    *,
    masks: bool,
    site: str,
    seed: int,
    validation_fraction: float,
) -> SiteData:
    """A site's images read, checked and split.

    The split is a permutation of the patients, in the order of their first image, from the stream (seed, site, 0,
    "split"); validation is its end, floor(fraction * patients). Without patients each image is one.

    Raises:
        BadData: see ``imagesets``; a patient is in training and test; or too few for a validation part.
    """
    whole, test = _both(source, settings, read_y, masks)
    digest = digest_of({**whole.digests, **({} if test is None else test.digests)}, source)
    return _site_data(whole, test, settings, digest, site, seed, validation_fraction)[0]


def load_pooled_images(
    sources: Mapping[str, Source],
    settings: PixelSettings,
    read_y: ReadLabels,
    *,
    masks: bool,
    site: str,
    seed: int,
    validation_fraction: float,
) -> tuple[SiteData, dict[str, Split]]:
    """See ``fl_algorithms.tasks.base.Pooling``: images in the order of ``sources``, split and scaled as one site's.

    Raises:
        BadData: as ``load_images``.
    """
    both = {name: _both(source, settings, read_y, masks) for name, source in sources.items()}
    whole = pooled({name: images for name, (images, _) in both.items()}, settings)
    tests = {name: test for name, (_, test) in both.items() if test is not None}
    test = pooled(tests, settings) if tests else None
    digest = digest_of({**whole.digests, **({} if test is None else test.digests)}, Source({}))
    data, scale = _site_data(whole, test, settings, digest, site, seed, validation_fraction)
    return data, {name: _part(images, torch.arange(len(images)), settings, scale) for name, images in tests.items()}


def _both(source: Source, settings: PixelSettings, read_y: ReadLabels, masks: bool) -> tuple[ImageSet, ImageSet | None]:
    """The training images and those to test."""
    whole = read_set(source, settings, read_y, test=False, masks=masks)
    test = read_set(source, settings, read_y, test=True, masks=masks)
    assert whole is not None
    if test is not None and (both := sorted(set(whole.patients) & set(test.patients))):
        raise BadData(
            f"{test.path}: {len(both)} of its {len(set(test.patients))} patients are also in {whole.path}",
            hint="a patient's images are all for training or all for testing",
        )
    return whole, test


def _site_data(
    whole: ImageSet,
    test: ImageSet | None,
    settings: PixelSettings,
    digest: str,
    site: str,
    seed: int,
    validation_fraction: float,
) -> tuple[SiteData, Scale]:
    train_places, validation_places = split_places(whole, site, seed, validation_fraction)
    scale = statistics(whole.pixels, settings)
    data = SiteData(
        train=_part(whole, train_places, settings, scale, pieces=True),
        validation=_part(whole, validation_places, settings, scale),
        test=None if test is None else _part(test, torch.arange(len(test)), settings, scale),
        digest=digest,
        warnings=(
            *_about_cache(whole, settings),
            *_about_twins(whole, test),
        ),
        preprocessing=scale_document(*scale, settings),
    )
    return data, scale


def _part(images: ImageSet, places: Tensor, settings: PixelSettings, scale: Scale, *, pieces: bool = False) -> Split:
    """``pieces``: to train on, where the study looks at pieces."""
    who = numbered([images.patients[place] for place in places.tolist()] if images.patients else ())
    if isinstance(images.y, PackedMasks):
        assert isinstance(settings, SegmentationSettings)
        each = settings.patches.per_image if pieces else 1
        rows = PatchRows(images.pixels, images.y, places, settings, scale, each)
        return Split(rows, torch.zeros(len(rows), dtype=torch.int64), who if each == 1 else None)
    assert images.y is not None
    return Split(ImageRows(images.pixels, places, settings, *scale), torch.from_numpy(images.y[places.numpy()]), who)


def split_places(images: ImageSet, site: str, seed: int, validation_fraction: float) -> tuple[Tensor, Tensor]:
    """The places of the training and of the validation part.

    Raises:
        BadData: there are too few patients, or images, for both.
    """
    who = images.patients or images.names
    of = {patient: number for number, patient in enumerate(dict.fromkeys(who))}
    held_out = math.floor(validation_fraction * len(of))
    if held_out == 0:
        raise BadData(
            f"{images.path}: {len(of)} {'patient' if images.patients else 'image'}{'s' if len(of) > 1 else ''}; "
            f"a validation part of {validation_fraction:g} needs at least {math.ceil(1 / validation_fraction)}"
        )
    order = torch.randperm(len(of), generator=torch.Generator().manual_seed(stream_seed(seed, site, 0, "split")))
    by_patient: list[list[int]] = [[] for _ in of]
    for place, patient in enumerate(who):
        by_patient[of[patient]].append(place)

    def places(patients: Tensor) -> Tensor:
        return torch.tensor([place for patient in patients.tolist() for place in by_patient[patient]])

    return places(order[:-held_out]), places(order[-held_out:])


def statistics(pixels: ByPlace, settings: PixelSettings) -> Scale:
    """Mean and deviation of each channel: the study's, or over all of the site's pixels; 0 and 1 where each image has
    its own. (channels,), float32.
    """
    if settings.mean:
        return torch.tensor(settings.mean), torch.tensor(settings.std)
    if settings.normalize != "site":
        return torch.zeros(settings.channels), torch.ones(settings.channels)
    sums: list[list[float]] = [[] for _ in range(settings.channels)]
    squares: list[list[float]] = [[] for _ in range(settings.channels)]
    count = 0
    for part in _batches(pixels, settings):
        x = torch.from_numpy(part).double().transpose(0, 1).flatten(1)
        count += x.shape[1]
        for channel, (total, square) in enumerate(zip(x.sum(1).tolist(), (x * x).sum(1).tolist(), strict=True)):
            sums[channel].append(total)
            squares[channel].append(square)
    mean = [math.fsum(parts) / count for parts in sums]
    variance = [math.fsum(parts) / count - center * center for parts, center in zip(squares, mean, strict=True)]
    std = [math.sqrt(max(value, 0.0)) for value in variance]
    return torch.tensor(mean), torch.tensor([value if value > SMALLEST_DEVIATION else 1.0 for value in std])


def _batches(pixels: ByPlace, settings: PixelSettings) -> Iterator[NDArray[np.float32]]:
    """All images in their order, (k, channels, *sides), some at a time."""
    if settings.fit == "patches":
        yield from (pixels.image(place)[None] for place in range(len(pixels)))
        return
    size = max(1, STATISTICS_NUMBERS // math.prod(settings.input_shape))
    for places in torch.split(torch.arange(len(pixels)), size):
        yield pixels.take(places.numpy())


def scale_document(mean: Tensor, std: Tensor, settings: PixelSettings) -> dict[str, Any]:
    """What ``read_new`` needs, as plain JSON: numbers as the shortest text that gives the same float32 back."""
    return {
        "shape": list(settings.input_shape),
        "mean": [repr(value) for value in mean.tolist()],
        "std": [repr(value) for value in std.tolist()],
    }


def new_images(
    path: Path, fitted: Mapping[str, Any], settings: PixelSettings
) -> tuple[ImageRows | PatchRows, list[str]]:
    """Images to be predicted, on the scale of ``fitted``, and their names; of arrays, their places from 0.

    Raises:
        BadData: as ``imagesets``; or ``fitted`` is of another study.
    """
    hint = "use the file that lies beside the checkpoint"
    if fitted.get("shape") != list(settings.input_shape):
        raise BadData("the preprocessing was fitted for images of another shape than the study's", hint=hint)
    try:
        mean, std = (torch.tensor([float(text) for text in fitted[key]]) for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError):
        raise BadData("the preprocessing has no mean and deviation", hint=hint) from None
    if not len(mean) == len(std) == settings.channels or not torch.isfinite(mean).all() or not (std > 0).all():
        raise BadData("the preprocessing's mean and deviation are not one number for each channel", hint=hint)
    plain = settings.model_copy(update={"augment": Augmentation()})
    images = read_plain(path, settings)
    places = torch.arange(len(images))
    rows: ImageRows | PatchRows = ImageRows(images.pixels, places, plain, mean, std, images.origins)
    if settings.fit == "patches":
        rows = PatchRows(images.pixels, None, places, plain, (mean, std), 1, images.origins)
    return rows, list(images.names)


def public_images(path: Path, settings: PixelSettings, classes: Sequence[str]) -> PublicData:
    """A study's public data set, on the study's scale and never augmented; with the class of each where ``classes``
    are.

    Raises:
        BadData: as ``imagesets``; or classes are wanted of a folder.
    """
    if not classes:
        images: ImageSet | None = read_plain(path, settings)
    elif path.is_dir():
        raise BadData(
            f"{path}: a folder has no classes",
            hint="a public data set with classes is one .npz file, as a site's arrays",
        )
    else:
        plain = Source({"arrays": path}, patient="")
        own = settings.model_copy(update={"patient": ""})
        images = read_set(plain, own, lambda labels: classes_among(labels, classes), test=False, masks=False)
    assert images is not None
    mean, std = statistics(images.pixels, settings)
    still = settings.model_copy(update={"augment": Augmentation()})
    rows = ImageRows(images.pixels, torch.arange(len(images)), still, mean, std)
    return PublicData(rows, torch.from_numpy(images.y) if isinstance(images.y, np.ndarray) else None)


def about_classes(part: str, y: Tensor, classes: Sequence[str]) -> list[str]:
    """A warning where one class only occurs."""
    present = torch.unique(y).tolist()
    if len(present) > 1:
        return []
    return [
        f"The {part} ({len(y)} images) has one class only, `{classes[present[0]]}`: AUC is undefined there and left "
        "out of means"
    ]


def _about_cache(images: ImageSet, settings: PixelSettings) -> list[str]:
    if images.pixels.is_kept:
        return []
    return [
        f"{images.path.name}: {len(images)} images take more than the study's {settings.cache_mib} MiB, so they are "
        "read and decoded again in each epoch"
    ]


def _about_twins(images: ImageSet, test: ImageSet | None) -> list[str]:
    """Warnings of images that are there more than once."""
    hashes = images.pixels.hashes()
    said, seen = [], set(hashes)
    if twins := len(hashes) - len(seen):
        said.append(f"{images.path.name}: {twins} of {len(hashes)} images are there more than once")
    if test is not None and (known := len([one for one in test.pixels.hashes() if one in seen])):
        said.append(f"{known} of the {len(test)} test images are also training images, so scores will be too good")
    return said
