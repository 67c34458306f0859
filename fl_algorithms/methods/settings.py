"""What the settings of several methods share, beside the local steps that all share under [training]. No torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict

Rate = Annotated[float, Field(gt=0, le=100)]


Beta = Annotated[float, Field(ge=0, lt=1)]


Patterns = Annotated[tuple[str, ...], Field(min_length=1)]  # of tensor names, as in a shell


class Amount(Strict):
    """How long.

    Attributes:
        steps, epochs: steps, or passes over the training rows. One of the two.
    """

    steps: int | None = Field(default=None, ge=0, le=1_000_000)
    epochs: int | None = Field(default=None, ge=0, le=10_000)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either `steps` or `epochs`")
        return self

    @property
    def is_any(self) -> bool:
        """Whether it is more than nothing."""
        return bool(self.steps or self.epochs)


class FineTuning(Amount):
    """After the last round each site tunes a copy of what it has, with the task's plain loss and a fresh optimizer."""

    learning_rate: Rate | None = None  # None: that of [training]
    train: Patterns = ("*",)  # tensors that move, as "head.*"


class Soup(Strict):
    """FedSoup's patching of the shared parameters."""

    start_after: int | None = Field(default=None, ge=0)  # E: round r is a soup round when r > E; None: floor(0.75 R)
    compat: bool = False  # as the released code: a tie adds no model, souping starts one round earlier
    moments: Literal["keep", "reset"] = "keep"  # of the optimizer, after a patch
    statistics: Literal["keep", "estimate"] = "keep"  # of norm layers, after a patch: as trained, or anew on the site

    def filled(self, rounds: int) -> Self:
        if self.start_after is not None:
            return self
        return self.model_copy(update={"start_after": 3 * rounds // 4})


class ServerOptimizer(Strict):
    """What the coordinator makes of the mean Delta of the sites' deltas; theta moves by ``learning_rate`` times it.

    momentum: m <- beta1 m + Delta. The others: ``fl_algorithms.methods.fedopt.server``.

    Attributes:
        optimizer: what is made of the mean.
        learning_rate: of the coordinator's step.
        beta1: how much of the first moment is kept.
    """

    optimizer: Literal["momentum", "adam", "yogi", "adagrad"]
    learning_rate: Rate = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.99  # adam and yogi
    tau: float = Field(default=1e-9, gt=0)  # all but momentum
    v_0: float | None = Field(default=None, ge=0)  # where v begins; None: at tau^2, as the paper asks of it at least

    def filled(self) -> Self:
        if self.optimizer == "momentum" or self.v_0 is not None:
            return self
        return self.model_copy(update={"v_0": self.tau**2})


class MethodSettings(Strict):
    """A method without settings of its own."""

    fine_tuning: FineTuning | None = None
    judged: Literal["downloaded", "trained"] = "downloaded"  # which model of a round may become the site's best

    @property
    def exposes(self) -> bool:
        """Whether it shows a site's own model as far as its row says, or, as it is set, to nobody."""
        return True

    @property
    def compares_classes(self) -> bool:
        """Whether its mathematics, as it is set, is of classes' probabilities."""
        return False

    @property
    def without_classes(self) -> str:
        """What can be done where a task has no classes."""
        return "a method that averages weights, such as fedavg, fedprox, fenda or ditto"

    @property
    def labeled(self) -> bool:
        """Whether the classes of the public data set's rows are needed too."""
        return False

    @property
    def wrappers(self) -> "tuple[Wrapper, ...]":
        """What these settings put round the client of the method, the innermost first."""
        return (
            ()
            if self.judged == "downloaded"
            else (Wrapper("fl_algorithms.engine.pre_aggregation:judged_after_training", self),)
        )

    @property
    def server_wrapper(self) -> str:
        """What takes the place of the method's server aggregator, as "module:attribute"; "" for nothing."""
        return ""

    @property
    def head_patterns(self) -> tuple[str, ...]:
        """The tensors that are the head, where the method divides the network; () where it does not."""
        return ()

    def public_data_misfit(self, rows: int) -> tuple[str, str]:
        """What is wrong with a public data set of so many rows, and a hint; ("", "") for nothing."""
        return "", ""

    def filled(self, rounds: int) -> Self:
        """These settings with every default that depends on the study's number of rounds put in."""
        return self


@dataclass(frozen=True)
class Wrapper:
    """What a study puts round a method's client: ``implementation`` ("module:attribute") is called with the client and
    the settings, and gives a client.
    """

    implementation: str
    settings: Strict


class ServerSettings(MethodSettings):
    """A method whose server aggregator is the mean: a server optimizer may follow it."""

    server: ServerOptimizer | None = None

    @property
    def server_wrapper(self) -> str:
        return "fl_algorithms.methods.fedopt.server:fedopt" if self.server is not None else ""

    def filled(self, rounds: int) -> Self:
        filled = super().filled(rounds)
        return filled if filled.server is None else filled.model_copy(update={"server": filled.server.filled()})


class MeanSettings(ServerSettings):
    """One that predicts with what it shares: a soup may follow the local steps."""

    soup: Soup | None = None

    @property
    def wrappers(self) -> tuple[Wrapper, ...]:
        inner = super().wrappers
        if self.soup is None:
            return inner
        return (*inner, Wrapper("fl_algorithms.methods.fedsoup.client:with_soup", self.soup))

    def filled(self, rounds: int) -> Self:
        filled = super().filled(rounds)
        return filled if filled.soup is None else filled.model_copy(update={"soup": filled.soup.filled(rounds)})


class HeadSettings(MeanSettings):
    """A method that divides the network.

    Attributes:
        head: the names of the tensors of its top, as in a shell.
    """

    head: Patterns = ("head.*",)

    @property
    def head_patterns(self) -> tuple[str, ...]:
        return self.head
