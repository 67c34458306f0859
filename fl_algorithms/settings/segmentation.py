"""The schema of a segmentation study: what a mask's numbers mean, and the loss."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.settings.targets import Level, Weights, check_levels, check_weights
from wardround.records.schema import Strict


class Patches(Strict):
    """How images are looked at with ``fit = "patches"``: in pieces of the study's ``size``.

    A piece to train on lies around a pixel of the foreground, or anywhere, each place as likely as any other. To judge
    an image, or to predict its mask, pieces are laid over all of it, and their logits averaged.

    Attributes:
        per_image: pieces to train on, in each epoch.
        foreground: the share of them that lies around a pixel of the foreground.
        overlap: of a piece with the next, as a share of its side.
        weight: of a piece's pixels: by a Gaussian of an eighth of the side about its middle, or all alike.
    """

    per_image: int = Field(default=4, ge=1, le=1000)
    foreground: float = Field(default=0.5, ge=0, le=1)
    overlap: float = Field(default=0.25, ge=0, le=0.9)
    weight: Literal["gaussian", "constant"] = "gaussian"


class SegmentationSettings(PixelSettings):
    """[task] of a study whose task is ``segmentation``: each image has a mask of its own size.

    Attributes:
        classes: what a pixel can be; the background first.
        values: a mask's number for each class; without them 0, 1, 2, ...
        loss: "dice_ce" is that of Dice plus the mean cross entropy of the pixels.
        class_weights: of that cross entropy: "balanced" is n / (classes x n of the class) among the pixels of a site's
            training masks; or one number for each class.
        patches: how images are looked at in pieces.
        hausdorff: also the 95th percentile of the distance between the masks' surfaces; takes a while.
        headline: what a checkpoint's score is.
    """

    classes: tuple[Level, ...] = Field(default=("background", "foreground"), min_length=2, max_length=255)
    values: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()
    loss: Literal["dice", "dice_ce"] = "dice_ce"
    class_weights: Weights = "none"
    patches: Patches = Field(default_factory=Patches)
    hausdorff: bool = False
    headline: Literal["dice"] = "dice"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        check_levels(self.classes, "`classes`")
        check_weights(self.class_weights, self.classes)
        if self.loss == "dice" and self.class_weights != "none":
            raise ValueError('`class_weights` weigh the cross entropy, which `loss = "dice"` has not')
        if self.fit != "patches" and self.patches != Patches():
            raise ValueError('[task.patches] needs `fit = "patches"`')
        if self.values and (len(self.values) != len(self.classes) or len(set(self.values)) != len(self.values)):
            raise ValueError(
                f"`values` has {len(set(self.values))} different numbers, there are {len(self.classes)} classes"
            )
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """All that it has; those of single classes have no range, so a study does not report them."""
        each = tuple(f"dice_{name}" for name in self.classes[1:]) if len(self.classes) > 2 else ()
        return ("dice", *each, *(("hausdorff95",) if self.hausdorff else ()))

    @property
    def mask_values(self) -> tuple[int, ...]:
        """A mask's number for each class, background first."""
        return self.values or tuple(range(len(self.classes)))
