"""The sizes of the networks for images."""

from typing import Annotated, Literal, Self

from pydantic import Field

from fl_algorithms.settings.images import Side
from fl_algorithms.settings.models import BODY_AND_HEAD, DEPTHS, NORM_LAYERS, Dropout, NetworkSettings

Channels = Annotated[int, Field(ge=1, le=4096)]


Stem = Literal["auto", "small", "medium", "large"]


class SeesImages(NetworkSettings):
    """A network for images.

    Attributes:
        size: at which it sees them, where that is another than [task] says.
    """

    size: tuple[Side, ...] | None = Field(default=None, min_length=2, max_length=3)


class VisionSettings(SeesImages):
    """A classifier: a ``body`` that ends in the mean over the image, and a linear ``head``.

    Attributes:
        width: factor on the published numbers of channels.
        stem: what the first layers do to an image's sides: "small" keeps them, "medium" halves them, "large" is as
            published, for 224 pixels; "auto" is small up to 64 pixels, else large.
        norm: the normalization layers.
    """

    width: float = Field(default=1.0, ge=0.05, le=4)
    stem: Stem = "auto"
    norm: Literal["batch", "group"] = "batch"
    dropout: Dropout = 0.0  # on the features, before the head

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({BODY_AND_HEAD, NORM_LAYERS})

    def stem_for(self, shape: tuple[int, ...]) -> Stem:
        if self.stem != "auto":
            return self.stem
        return "small" if max(shape[1:]) <= 64 else "large"

    def built_for(self, shape: tuple[int, ...]) -> Self:
        return self.model_copy(update={"stem": self.stem_for(shape)})

    def at_least(self, shape: tuple[int, ...], sides: dict[Stem, int]) -> str:
        """What is said of an image smaller than ``sides`` has for its stem."""
        least = sides[self.stem_for(shape)]
        if len(shape) == 3 and min(shape[1:]) < least:
            return f"with its {self.stem_for(shape)} stem needs images of {least} x {least} pixels or more"
        return VisionSettings.misfit(self, shape)

    def misfit(self, shape: tuple[int, ...]) -> str:
        return "" if len(shape) == 3 else "takes images, not volumes"


class DenseNetSettings(VisionSettings):
    """DenseNet.

    Attributes:
        blocks: how many layers each dense block has.
    """

    blocks: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(6, 12, 24, 16), min_length=1, max_length=6)

    def misfit(self, shape: tuple[int, ...]) -> str:
        shrinks = 2 ** (len(self.blocks) - 1)
        return self.at_least(shape, {"small": shrinks, "medium": 2 * shrinks, "large": 4 * shrinks})


class SqueezeNetSettings(VisionSettings):
    """SqueezeNet.

    Attributes:
        norm: it has no such layers.
    """

    norm: Literal["none"] = "none"  # type: ignore[assignment]  # narrower: it can be nothing else

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({BODY_AND_HEAD})

    def misfit(self, shape: tuple[int, ...]) -> str:
        return self.at_least(shape, {"small": 8, "medium": 16, "large": 17})


class VggSettings(VisionSettings):
    def misfit(self, shape: tuple[int, ...]) -> str:
        return self.at_least(shape, {"small": 16, "medium": 32, "large": 32})


class UnetSettings(SeesImages):
    """A network for masks, of images or volumes.

    Attributes:
        widths: channels at each depth, the whole image's first.
        norm: the normalization layers.
    """

    widths: tuple[Channels, ...] = Field(default=(16, 32, 64, 128), min_length=2, max_length=7)
    norm: Literal["batch", "group", "none"] = "batch"
    dropout: Dropout = 0.0  # at the greatest depth

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({BODY_AND_HEAD} if self.norm == "none" else {BODY_AND_HEAD, NORM_LAYERS})

    def misfit(self, shape: tuple[int, ...]) -> str:
        shrinks = 2 ** (len(self.widths) - 1)
        if any(side % shrinks for side in shape[1:]):
            return f"with {len(self.widths)} `widths` needs sides that {shrinks} divides"
        return ""


class UShapeSettings(UnetSettings):
    """One that goes down and up again through its depths."""

    @property
    def offers(self) -> frozenset[str]:
        return super().offers | {DEPTHS}


class MonaiUnetSettings(UnetSettings):
    """MONAI's: a convolution of stride 2 to each depth, a transposed one back; dropout after each convolution."""

    norm: Literal["batch", "instance", "group", "none"] = "batch"  # type: ignore[assignment]  # wider
    residual_units: int = Field(default=2, ge=0, le=8)  # convolutions beside a shortcut, at each depth; 0: one, without

    @property
    def offers(self) -> frozenset[str]:
        tensors = self.norm in ("batch", "group")  # MONAI's instance norms hold none
        return frozenset({BODY_AND_HEAD, NORM_LAYERS} if tensors else {BODY_AND_HEAD})

    def misfit(self, shape: tuple[int, ...]) -> str:
        shrinks = 2 ** (len(self.widths) - 1)
        if self.norm == "instance" and all(side <= shrinks for side in shape[1:]):
            return f"with {len(self.widths)} `widths` and instance norms needs a side of more than {shrinks}"
        return super().misfit(shape)
