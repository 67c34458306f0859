"""[training] of a study: the local steps at each site."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict

WEIGHT_DECAY = {"sgd": 0.0, "adam": 0.0, "adamw": 0.01}  # torch's own defaults


class Schedule(Strict):
    """How the learning rate goes over the run's rounds; a function of the round and the step, so nothing is kept.

    Attributes:
        kind: "cosine" goes from the learning rate to ``floor`` times it at the end of the last round; "step" multiplies
            it by ``factor`` after each ``every`` rounds.
        warmup_rounds: over which it rises from 0, linearly; parts of a round count.
    """

    kind: Literal["constant", "cosine", "step"] = "constant"
    warmup_rounds: float = Field(default=0.0, ge=0, le=100_000)
    floor: float = Field(default=0.0, ge=0, le=1)  # cosine only
    every: int = Field(default=10, ge=1, le=100_000)  # step only
    factor: float = Field(default=0.1, gt=0, le=1)  # step only

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate is the same in every step."""
        return self.kind == "constant" and not self.warmup_rounds


class EarlyStopping(Strict):
    """A site ends a round's steps early, by its own validation rows, and goes back to the step of their smallest loss.

    Attributes:
        every: how many steps lie between two looks at the loss.
        patience: after how many looks without a smaller loss the steps end.
    """

    every: int = Field(ge=1, le=1_000_000)
    patience: int = Field(default=1, ge=1, le=10_000)


class TrainingSection(Strict):
    """The local steps of each site in a round.

    Attributes:
        optimizer: of the local steps.
        learning_rate: where its schedule begins.
        batch_size: rows of a step.
        local_steps, local_epochs: how long each round trains: steps, or passes over the training rows. One of the two.
        optimizer_lifetime: whether the optimizer's moments live for the whole run, or for a round.
        iterator: whether the order of rows goes on over rounds, or begins anew in each.
        drop_last: whether a pass leaves out a last batch that is not full.
        weight_decay: where a study says none, torch's own for the optimizer: 0.01 of adamw, else 0.
        clip_norm: the largest norm of a step's gradient; a larger one is scaled down to it.
        sampling: "balanced" draws the rows of a pass with replacement, each class (or rows with an event, and without)
            equally often, by the site's own training counts.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0, le=100)
    schedule: Schedule = Field(default_factory=Schedule)
    weight_decay: float = Field(default=0.01, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)  # sgd only
    betas: tuple[float, float] = (0.9, 0.999)  # adam and adamw
    clip_norm: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=32, ge=1, le=65536)
    local_steps: int | None = Field(default=None, ge=0, le=1_000_000)
    local_epochs: int | None = Field(default=None, ge=0, le=10_000)
    early_stopping: EarlyStopping | None = None
    optimizer_lifetime: Literal["run", "round"] = "run"
    iterator: Literal["run", "round"] = "round"
    drop_last: bool = False
    sampling: Literal["shuffled", "balanced"] = "shuffled"
    init_private: Literal["site", "common"] | None = None  # None: "common" where the method needs it, else "site"

    @model_validator(mode="before")
    @classmethod
    def _weight_decay(cls, tables: Any) -> Any:
        if not isinstance(tables, dict) or tables.get("weight_decay") is not None:
            return tables
        default = WEIGHT_DECAY.get(str(tables.get("optimizer", "adamw")))
        return tables if default is None else {**tables, "weight_decay": default}

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError("give either `local_steps` or `local_epochs`")
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} are not both at least 0 and below 1")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"`momentum` belongs to sgd, the optimizer is {self.optimizer}")
        return self
