"""The settings of the methods, beside the local steps that all share under [training]."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict

Rate = Annotated[float, Field(gt=0, le=100)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Patterns = Annotated[tuple[str, ...], Field(min_length=1)]  # of tensor names, as in a shell


class Amount(Strict):
    """How long: steps, or passes over the training rows."""

    steps: int | None = Field(default=None, ge=0, le=1_000_000)
    epochs: int | None = Field(default=None, ge=0, le=10_000)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either `steps` or `epochs`")
        return self


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

    momentum: m <- beta1 m + Delta. The others: ``fl_algorithms.server.fedopt``.
    """

    optimizer: Literal["momentum", "adam", "yogi", "adagrad"]
    learning_rate: Rate = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.99  # adam and yogi
    tau: float = Field(default=1e-9, gt=0)  # all but momentum


class Momentum(ServerOptimizer):
    optimizer: Literal["momentum"] = "momentum"
    learning_rate: Rate = 1.0


class Adam(ServerOptimizer):
    optimizer: Literal["adam"] = "adam"


class Yogi(ServerOptimizer):
    optimizer: Literal["yogi"] = "yogi"


class Adagrad(ServerOptimizer):
    optimizer: Literal["adagrad"] = "adagrad"
    beta1: Beta = 0.0


class MethodSettings(Strict):
    """A method without settings of its own."""

    fine_tuning: FineTuning | None = None

    @property
    def exposes(self) -> bool:
        """Whether it shows a site's own model as far as its row says, or, as it is set, to nobody."""
        return True

    @property
    def labeled(self) -> bool:
        """Whether the classes of the public data set's rows are needed too."""
        return False

    def filled(self, rounds: int) -> Self:
        """These settings with every default that depends on the study's number of rounds put in."""
        return self


class ServerSettings(MethodSettings):
    """A method whose server aggregator is the mean: a server optimizer may follow it."""

    server: ServerOptimizer | None = None


class MeanSettings(ServerSettings):
    """One that predicts with what it shares: a soup may follow the local steps."""

    soup: Soup | None = None

    def filled(self, rounds: int) -> Self:
        return self if self.soup is None else self.model_copy(update={"soup": self.soup.filled(rounds)})


class FedAvgMSettings(MeanSettings):
    server: Momentum = Momentum()


class FedAdamSettings(MeanSettings):
    server: Adam = Adam()


class FedYogiSettings(MeanSettings):
    server: Yogi = Yogi()


class FedAdagradSettings(MeanSettings):
    server: Adagrad = Adagrad()


class FedSoupSettings(MeanSettings):
    soup: Soup = Soup()


class FedProxSettings(MeanSettings):
    mu: float = Field(default=0.01, ge=0)


class ScaffoldSettings(MethodSettings):
    server_learning_rate: Rate = 1.0


class HeadSettings(MeanSettings):
    """A method that divides the network: ``head`` names the tensors of its top."""

    head: Patterns = ("head.*",)


class FedBabuSettings(HeadSettings):
    fine_tuning: FineTuning = FineTuning(epochs=5)  # of the whole network; 0 epochs: the one model for all


class FedRepSettings(HeadSettings):
    train_head: Amount = Amount(epochs=10)
    train_body: Amount | None = None  # None: as long as [training] says


class ApflSettings(MeanSettings):
    alpha: float = Field(default=0.5, ge=0, le=1)
    alpha_learning_rate: float = Field(default=0.1, ge=0)
    mixing: Literal["outputs", "weights"] = "outputs"


class DittoSettings(ServerSettings):
    lam: float = Field(default=1.0, ge=0)  # lambda, the pull to the global model


class MoonSettings(MeanSettings):
    mu: float = Field(default=1.0, ge=0)
    temperature: float = Field(default=0.5, gt=0)


class FedFomoSettings(MethodSettings):
    peers: int = Field(default=5, ge=1)  # M: other sites' models that a site downloads
    explore: float = Field(default=0.3, ge=0, le=1)  # epsilon: chance that a peer is drawn at random, where M < N - 1
    explore_decay: float = Field(default=0.05, ge=0, le=1)  # subtracted each round
    norm_guard: float = Field(default=1e-5, gt=0)


class FedSmSettings(MethodSettings):
    lam: float = Field(default=0.7, ge=0, le=1)  # lambda of SoftPull
    gamma: float = Field(default=0.9, ge=0)  # a choice of the selector counts above this probability
    answer: Literal["super", "personal"] = "super"  # what predicts: the super model, or the site's personal network
    selector_hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = (16,)
    selector_learning_rate: Rate = 1e-3
    selector_epochs: int = Field(default=1, ge=0, le=1000)


Widths = tuple[Annotated[int, Field(ge=1, le=4096)], ...]


class MhPflgbSettings(ServerSettings):
    """``own`` and ``other`` weigh the losses of the stage's own head and of the other one."""

    widths: Widths = Field(default=(), max_length=6)  # of the bypass; none: as its task asks, see models.bypass
    train_local: Amount = Amount(epochs=4)
    train_global: Amount = Amount(epochs=1)
    local_learning_rate: Rate = 1e-4
    global_learning_rate: Rate = 1e-5
    own: float = Field(default=0.9, ge=0)
    other: float = Field(default=0.1, ge=0)
    global_body: bool = True  # without: the bypass is a head on what the site's own body sees
    global_head: bool = True  # without: the bypass is a body, and the site's own head alone is asked
    feature_fusion: bool = True  # without: both sources count alike, whatever the channels hold

    @model_validator(mode="after")
    def _something_shared(self) -> Self:
        if not (self.global_body or self.global_head):
            raise ValueError("without `global_body` and `global_head` nothing is shared")
        return self


class LcFedSettings(MethodSettings):
    train_head: Amount = Amount(steps=10)
    train_body: Amount | None = None  # None: as long as [training] says
    train_calibration: Amount | None = None  # the same
    selection: bool = True  # channels of the body are chosen by the site's code
    calibration: bool = True  # the head is corrected where the sites' heads disagree, and so each is shown to all
    reduction: int = Field(default=16, ge=1, le=4096)  # of the selection's squeeze
    alpha: float = Field(default=0.0, ge=0)  # how strongly the selections of two sites are driven apart
    blur: int = Field(default=31, ge=1, le=255)  # pixels, of the kernel that softens what the calibration looks at
    blur_sigma: float = Field(default=4.0, gt=0)  # pixels

    @model_validator(mode="after")
    def _odd(self) -> Self:
        if self.blur % 2 == 0:
            raise ValueError(f"`blur` is {self.blur}; a kernel has a middle, so it is odd")
        if self.alpha and not self.selection:
            raise ValueError("`alpha` drives the selections of sites apart, and `selection` is off")
        return self

    @property
    def exposes(self) -> bool:
        return self.calibration


class DistillationSettings(MethodSettings):
    """A method whose sites exchange predictions on the study's public data set, and learn from them ("distil")."""

    subset: int | None = Field(default=None, ge=2)  # rows drawn for each round; None: all of them
    distil: Amount = Amount(epochs=1)  # passes are over the round's rows
    distil_batch_size: int = Field(default=128, ge=2, le=65536)
    distil_learning_rate: Rate | None = None  # None: that of [training]


class FedMdSettings(DistillationSettings):
    transfer: Amount | None = None  # train on the public data set's own classes before anything else

    @property
    def labeled(self) -> bool:
        return self.transfer is not None


class DsFlSettings(DistillationSettings):
    aggregation: Literal["era", "mean"] = "era"  # entropy reduction, or the mean as it is
    temperature: float = Field(default=0.1, gt=0)  # of era


class KtPflSettings(DistillationSettings):
    distil_batch_size: int = Field(default=256, ge=2, le=65536)
    temperature: float = Field(default=10.0, gt=0)  # of the predictions
    rho: float = Field(default=0.5, ge=0)  # pull of the coefficients towards 1/N
    compat: bool = False  # coefficients as in the released code: a step of fixed size, then softmax(5 c)


class EarlyStopping(Strict):
    """Steps end when they no longer lower the loss on rows of the public data set that are held out, with their
    classes. The network with the lowest loss is kept.
    """

    every: int = Field(default=100, ge=1, le=1_000_000)  # steps between two looks
    patience: int = Field(default=1000, ge=1, le=1_000_000)  # steps without gain
    fraction: float = Field(default=0.2, gt=0, le=0.9)  # of the public data set's rows, held out

    def held_out(self, rows: int) -> int:
        """How many of ``rows``."""
        return math.floor(self.fraction * rows)


class FedDfSettings(MethodSettings):
    """The coordinator's steps on the public data set, after each round."""

    distil_steps: int = Field(default=500, ge=0, le=1_000_000)  # at most, with early stopping
    distil_batch_size: int = Field(default=128, ge=2, le=65536)
    distil_learning_rate: Rate = 1e-3
    early_stopping: EarlyStopping | None = None  # None: all steps, for which no classes are needed

    @property
    def labeled(self) -> bool:
        return self.early_stopping is not None
