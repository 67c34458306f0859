"""[protocol] of a suite: what is measured of each run beside the scores of its checkpoints. No torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict


class Protocol(Strict):
    """All off by default; ``fl_algorithms.lab.protocol`` says what each measures."""

    matrix: bool = False
    leave_one_out: bool = False
    personalisation: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = ()  # amounts of fine-tuning
    personalisation_unit: Literal["steps", "epochs"] = "steps"
    tent: bool = False
    tent_learning_rate: float = Field(default=1e-3, ge=0, le=100)
    tent_batch: int = Field(default=16, ge=2, le=65536)  # one row has no variance
    episodic: bool = False  # Tent starts anew at each batch
    sharpness: bool = False
    sharpness_batches: int = Field(default=0, ge=0, le=1_000_000)  # of each site's training rows, the first; 0: all
    bootstrap: int = Field(default=0, ge=0, le=10_000)  # samples of the scored rows' patients, for intervals
    bootstrap_metrics: tuple[str, ...] = ()  # (): the task's headline

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if list(self.personalisation) != sorted(set(self.personalisation)):
            raise ValueError(f"`personalisation` {list(self.personalisation)} does not rise")
        return self

    @property
    def asks(self) -> bool:
        """Whether anything is to be measured."""
        return any((self.matrix, self.leave_one_out, self.personalisation, self.tent, self.sharpness, self.bootstrap))
