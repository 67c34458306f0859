"""The schema of a segmentation study: what a mask's numbers mean, and the loss."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.settings.targets import Level, check_levels


class SegmentationSettings(PixelSettings):
    """[task] of a study whose task is ``segmentation``: each image has a mask of its own size."""

    classes: tuple[Level, ...] = Field(default=("background", "foreground"), min_length=2, max_length=255)
    values: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()  # a mask's number for each class; none: 0, 1, 2, ...
    loss: Literal["dice", "dice_ce"] = "dice_ce"  # dice_ce: plus the mean cross entropy of the pixels
    headline: Literal["dice"] = "dice"  # what a checkpoint's score is

    @model_validator(mode="after")
    def _whole(self) -> Self:
        check_levels(self.classes, "`classes`")
        if self.values and (len(self.values) != len(self.classes) or len(set(self.values)) != len(self.values)):
            raise ValueError(
                f"`values` has {len(set(self.values))} different numbers, there are {len(self.classes)} classes"
            )
        return self

    @property
    def mask_values(self) -> tuple[int, ...]:
        """A mask's number for each class, background first."""
        return self.values or tuple(range(len(self.classes)))
