"""The sizes of the installed networks."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict

TWO_EXTRACTORS = "a shared and a private extractor"
BODY_AND_HEAD = "a body and a head"
NORM_LAYERS = "norm layers"
DEPTHS = "depths of a U"

Width = Annotated[int, Field(ge=1, le=65536)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class NetworkSettings(Strict):
    """A network's sizes."""

    @property
    def offers(self) -> frozenset[str]:
        """What of the above it has, so that methods may ask for it."""
        return frozenset()

    def misfit(self, shape: tuple[int, ...]) -> str:
        """What it needs that images of ``shape``, (channels, *size), do not have, as in "takes images of ..."; "" if
        nothing.
        """
        return ""

    def built_for(self, shape: tuple[int, ...]) -> Self:
        """The same with all said that the network takes from ``shape``, so that ``misfit`` is that of other images."""
        return self


class MlpSettings(NetworkSettings):
    """Linear layers with ReLU between them.

    Attributes:
        hidden: the width of each hidden layer; ``[]`` is logistic regression.
    """

    hidden: tuple[Width, ...] = ()
    dropout: Dropout = 0.0  # on each hidden layer
    norm: Literal["none", "batch", "layer"] = "none"  # of each hidden layer, before its ReLU

    @property
    def offers(self) -> frozenset[str]:
        if not self.hidden:
            return frozenset()
        return frozenset({BODY_AND_HEAD} if self.norm == "none" else {BODY_AND_HEAD, NORM_LAYERS})


class FendaSettings(NetworkSettings):
    """A shared and a private extractor of hidden layers; a linear head on both.

    Attributes:
        shared_hidden, private_hidden: the width of each hidden layer.
    """

    shared_hidden: tuple[Width, ...] = Field(default=(5,), min_length=1)
    private_hidden: tuple[Width, ...] = Field(default=(5,), min_length=1)
    dropout: Dropout = 0.3  # on the concatenated features

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({TWO_EXTRACTORS})


class BallastSettings(NetworkSettings):
    """Logistic regression that carries tensors which no sample ever touches, to measure what a payload costs.

    Attributes:
        layout: of those tensors: so many of one size, or as ResNet-18 has them.
    """

    layout: Literal["flat", "resnet18"] = "flat"
    tensors: int = Field(default=1, ge=0, le=10_000)  # flat only
    bytes: int = Field(default=0, ge=0, le=2**36)  # flat only: all of them together, float32

    @model_validator(mode="after")
    def _whole_tensors(self) -> Self:
        if self.layout == "flat" and self.bytes:
            if self.tensors == 0:
                raise ValueError(f"`bytes` is {self.bytes}, but `tensors` is 0")
            if self.bytes % (4 * self.tensors):
                raise ValueError(f"`bytes` is {self.bytes}, not a multiple of 4 for each of {self.tensors} tensors")
        return self
