"""The schema of an image study: classes, the size that a network sees, and how images are brought there."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fl_algorithms.settings.targets import ClassTarget
from wardround.records.schema import Strict

Side = Annotated[int, Field(ge=4, le=1024)]
Millimeters = Annotated[float, Field(ge=0.01, le=100)]
Percent = Annotated[float, Field(ge=0, le=100)]


class Augmentation(Strict):
    """How training images are changed at random, each time they are seen. Every amount is drawn evenly.

    What moves an image moves its mask alike. All but the flips are for two dimensions.

    Attributes:
        flip_horizontal, flip_vertical: of every second image.
        quarter_turns: by 0, 90, 180 or 270 degrees.
    """

    flip_horizontal: bool = False
    flip_vertical: bool = False
    quarter_turns: bool = False
    rotate_degrees: float = Field(default=0.0, ge=0, le=180)  # either way
    shift: float = Field(default=0.0, ge=0, le=0.5)  # share of a side, either way
    zoom: float = Field(default=0.0, ge=0, le=0.5)  # factor 1 - zoom to 1 + zoom
    brightness: float = Field(default=0.0, ge=0, le=1)  # added, of the range 0 to 1
    contrast: float = Field(default=0.0, ge=0, le=1)  # factor 1 - contrast to 1 + contrast, around the image's mean

    @property
    def bends(self) -> bool:
        """Whether pixels are interpolated."""
        return bool(self.rotate_degrees or self.shift or self.zoom)


class Window(Strict):
    """The part of an image's range that is brought to 0 to 1; what lies outside becomes 0 or 1.

    Attributes:
        center, width: in the unit of the file's numbers (Hounsfield units of a CT).
        percentiles: in their place, the lower and the upper of each image's own.
    """

    center: float | None = None
    width: float | None = Field(default=None, gt=0)
    percentiles: tuple[Percent, Percent] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        numbers = self.center is not None and self.width is not None
        if (self.center is None) != (self.width is None) or numbers == (self.percentiles is not None):
            raise ValueError("a window has a `center` and a `width`, or two `percentiles`")
        if self.percentiles is not None and not self.percentiles[0] < self.percentiles[1]:
            raise ValueError("of two `percentiles`, the lower comes first")
        return self


class PixelSettings(Strict):
    """What image studies of every kind have in common.

    Whole numbers without a sign are divided by the largest of their type (255, 65535), so that 8 and 16 bit mean the
    same range; other numbers, which may have a unit, stay. ``window``, ``mean`` and ``std`` are on that scale, the last
    two one per channel and after the window.

    Attributes:
        size: as the network sees images: (height, width), or (depth, height, width).
        channels: 1 of gray, 3 of color.
        fit: of an image of another size: squeeze it; cut the middle of that shape, then resize; refuse it; keep it, and
            look at pieces of that size.
        window: the part of the range that is looked at.
        normalize: (x - mean) / std with, per channel, the mean and deviation of "site": the study's ``mean`` and
            ``std``, or without them each site's own images'; "image": each image's own; "foreground": each image's own
            pixels that are not 0, which stays 0.
        mean, std: for all sites, one number a channel, after the window; without them each site's own.
        augment: how training images are changed at random.
    """

    size: tuple[Side, ...] = Field(min_length=2, max_length=3)
    channels: int = Field(default=3, ge=1, le=16)
    fit: Literal["resize", "crop", "exact", "patches"] = "resize"
    spacing: tuple[Millimeters, ...] = ()  # of a volume's voxels, in the order of `size`; (): as the files have them
    window: Window | None = None
    normalize: Literal["site", "image", "foreground"] = "site"
    mean: tuple[float, ...] = ()
    std: tuple[Annotated[float, Field(gt=0)], ...] = ()
    augment: Augmentation = Field(default_factory=Augmentation)
    image: str = Field(default="image", min_length=1)  # the column of the file's name, in a table beside a folder
    patient: str = ""  # the column, or the array, that says who it is; "": one image a patient
    max_pixels: int = Field(default=50_000_000, ge=1, le=2**31)  # of one file, refused before it is decoded
    cache_mib: int = Field(default=2048, ge=1, le=2**20)  # kept decoded; folders with more are read again in each epoch

    @model_validator(mode="after")
    def _together(self) -> Self:
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels):
            raise ValueError(
                f"`mean` and `std` have {len(self.mean)} and {len(self.std)} numbers, the images {self.channels} "
                "channels; leave both out to take each site's own"
            )
        if self.mean and self.normalize != "site":
            raise ValueError(f"`normalize` is {self.normalize}: each image's own, so leave `mean` and `std` out")
        if self.spacing and not len(self.spacing) == len(self.size) == 3:
            raise ValueError(
                "`spacing` is for volumes: three numbers in mm in the order of `size`, (depth, height, width)"
            )
        if len(self.size) == 3:
            if self.fit == "resize":
                raise ValueError(
                    'volumes are not resized: `fit = "crop"` cuts or fills up, "exact" refuses, "patches" sees pieces'
                )
            if self.augment.bends or self.augment.quarter_turns:
                raise ValueError("of [task.augment], only flips, `brightness` and `contrast` are for volumes")
        elif self.augment.quarter_turns and self.size[0] != self.size[1]:
            raise ValueError("`quarter_turns` need images as high as wide")
        return self

    @property
    def unscaled(self) -> tuple[str, ...]:
        """What a scale for all sites lacks."""
        return () if self.mean or self.normalize != "site" else ("channels",)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one image as a network is fed it: (channels, *size)."""
        return (self.channels, *self.size)


class ImageSettings(PixelSettings, ClassTarget):
    """[task] of a study whose task is ``images``: each image has one class.

    Attributes:
        label: the class's column, or array, where a site calls it nothing else.
    """

    label: str = Field(default="label", min_length=1)

    @model_validator(mode="after")
    def _three_columns(self) -> Self:
        if self.fit == "patches":
            raise ValueError('`fit = "patches"` is for masks: the class of an image is not that of its pieces')
        if len({self.image, self.label, self.patient}) < 3:
            raise ValueError("`image`, `label` and `patient` are not three different columns")
        return self
