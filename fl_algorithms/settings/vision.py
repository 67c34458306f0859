"""The sizes of the networks for images."""

from typing import Annotated, Literal

from pydantic import Field

from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS, Dropout, NetworkSettings

Channels = Annotated[int, Field(ge=1, le=4096)]


class VisionSettings(NetworkSettings):
    """A classifier: a ``body`` that ends in the mean over the image, and a linear ``head``."""

    width: float = Field(default=1.0, ge=0.05, le=4)  # factor on the published numbers of channels
    stem: Literal["auto", "small", "large"] = "auto"  # small: the first layers keep the size; auto: up to 64 pixels
    norm: Literal["batch", "group"] = "batch"
    dropout: Dropout = 0.0  # on the features, before the head

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({BODY_AND_HEAD, NORM_LAYERS})

    def small_stem(self, shape: tuple[int, ...]) -> bool:
        return self.stem == "small" or (self.stem == "auto" and max(shape[1:]) <= 64)

    def misfit(self, shape: tuple[int, ...]) -> str:
        return "" if len(shape) == 3 else "takes images, not volumes"


class DenseNetSettings(VisionSettings):
    blocks: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(6, 12, 24, 16), min_length=1, max_length=6)

    def misfit(self, shape: tuple[int, ...]) -> str:
        shrinks = 2 ** (len(self.blocks) - 1) * (1 if self.small_stem(shape) else 4)
        if len(shape) == 3 and min(shape[1:]) < shrinks:
            return f"with {len(self.blocks)} blocks needs images of {shrinks} x {shrinks} pixels or more"
        return super().misfit(shape)


class SqueezeNetSettings(VisionSettings):
    """SqueezeNet has no norm layers."""

    norm: Literal["none"] = "none"  # type: ignore[assignment]  # narrower: it can be nothing else

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({BODY_AND_HEAD})

    def misfit(self, shape: tuple[int, ...]) -> str:
        least = 8 if self.small_stem(shape) else 17
        return f"needs images of {least} x {least} pixels or more" if min(shape[1:]) < least else super().misfit(shape)


class VggSettings(VisionSettings):
    def misfit(self, shape: tuple[int, ...]) -> str:
        least = 16 if self.small_stem(shape) else 32
        return f"needs images of {least} x {least} pixels or more" if min(shape[1:]) < least else super().misfit(shape)


class UnetSettings(NetworkSettings):
    """A network for masks, of images or volumes: channels at each depth, the whole image's first."""

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
