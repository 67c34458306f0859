"""FedDF, and pFedDF with a student for each site: cards and settings. No torch: what a site does is FedAvg.

``server`` has what the coordinator does.
"""

import math

from pydantic import Field

from fl_algorithms.methods.settings import MethodSettings, Rate
from fl_algorithms.rows import COORDINATOR, MethodRow
from wardround.records.schema import Strict


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
    distil_batch_size: int = Field(default=128, ge=2, le=65536)  # rows of the public data set in a step
    distil_learning_rate: Rate = 1e-3  # Adam's
    early_stopping: EarlyStopping | None = None  # None: all steps, for which no classes are needed

    @property
    def compares_classes(self) -> bool:
        return True

    @property
    def labeled(self) -> bool:
        return self.early_stopping is not None

    def public_data_misfit(self, rows: int) -> tuple[str, str]:
        if self.early_stopping is None or 0 < (held_out := self.early_stopping.held_out(rows)) < rows - 1:
            return "", ""
        return (
            f"`early_stopping` in [algorithm] holds out {held_out} of the public data set's {rows} rows, and needs 1 "
            "of them at least and 2 to learn from",
            "another `fraction`, or a larger public data set",
        )


ROWS = (
    MethodRow(
        name="feddf",
        title="FedDF",
        paper="Lin et al., NeurIPS 2020, https://arxiv.org/abs/2006.07242",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedDfSettings,
        server="fl_algorithms.methods.feddf.server:feddf",
        single_updates="the coordinator distills what each site's network says of the public data",
        one_global_model=True,
        heterogeneous=True,
        public_data=COORDINATOR,
        differs="the end of the distillation: after a fixed number of steps, unless `early_stopping` says otherwise",
    ),
    MethodRow(
        name="pfeddf",
        title="pFedDF",
        paper="FedDF with a student for each site: an interpretation of a baseline of KT-pFL, https://arxiv.org/abs/2111.02625",
        upload="the whole network, kept apart",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedDfSettings,
        server="fl_algorithms.methods.feddf.server:pfeddf",
        single_updates="the coordinator distills each site's network into a student of each",
        heterogeneous=True,
        public_data=COORDINATOR,
        exposure="coordinator",
        personalized="the site's own network, after it has learned from the others'",
        differs="all: no paper defines it",
    ),
)
