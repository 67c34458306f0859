"""What methods that exchange predictions on a public data set share: settings here, hooks in ``client``. No torch."""

from pydantic import Field

from fl_algorithms.methods.settings import Amount, MethodSettings, Rate


class DistillationSettings(MethodSettings):
    """A method whose sites exchange predictions on the study's public data set, and learn from them ("distil")."""

    subset: int | None = Field(default=None, ge=2)  # rows drawn for each round; None: all of them
    distil: Amount = Field(default_factory=lambda: Amount(epochs=1))  # passes are over the round's rows
    distil_batch_size: int = Field(default=128, ge=2, le=65536)  # rows of the public data set in a step
    distil_learning_rate: Rate | None = None  # None: that of [training]

    @property
    def compares_classes(self) -> bool:
        return True

    def public_data_misfit(self, rows: int) -> tuple[str, str]:
        if (self.subset or 0) > rows:
            return f"`subset` in [algorithm] is {self.subset}, the public data set has {rows} rows", ""
        return "", ""
