"""The sizes of the installed networks."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from wardround.schema import Strict

Width = Annotated[int, Field(ge=1, le=65536)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class MlpSettings(Strict):
    """Linear layers with ReLU between them; ``hidden = []`` is logistic regression."""

    hidden: tuple[Width, ...] = ()
    dropout: Dropout = 0.0  # on each hidden layer


class FendaSettings(Strict):
    """A shared and a private extractor of hidden layers; a linear head on both."""

    shared_hidden: tuple[Width, ...] = Field(default=(5,), min_length=1)
    private_hidden: tuple[Width, ...] = Field(default=(5,), min_length=1)
    dropout: Dropout = 0.3  # on the concatenated features


class BallastSettings(Strict):
    """Logistic regression that carries tensors which no sample ever touches, to measure what a payload costs."""

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
