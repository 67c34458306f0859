"""FedRep: its card and settings. No torch: ``client`` has what a site does."""

from typing import Literal, Self

from pydantic import Field

from fl_algorithms.methods.settings import Amount, FineTuning, HeadSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD


class FedRepSettings(HeadSettings):
    train_head: Amount = Field(default_factory=lambda: Amount(epochs=10))
    train_body: Amount | None = None  # None: as long as [training] says
    judged: Literal["downloaded", "trained"] = "trained"  # as downloaded, the head is one of the body before

    def filled(self, rounds: int) -> Self:
        """With the last local round: the head, as long as in each round, on the last body."""
        filled = super().filled(rounds)
        if filled.fine_tuning is not None:
            return filled
        head = FineTuning(steps=self.train_head.steps, epochs=self.train_head.epochs, train=self.head)
        return filled.model_copy(update={"fine_tuning": head})


ROWS = (
    MethodRow(
        name="fedrep",
        title="FedRep",
        paper="Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078",
        upload="the body",
        private="records, the head, the model with the head of the last local round, optimizer state",
        client="fl_algorithms.methods.fedrep.client:fedrep",
        settings=FedRepSettings,
        needs=frozenset({BODY_AND_HEAD}),
        differs="the optimizers: as [training] says, where the authors' code makes new ones in each round; the last "
        "local round: on a copy",
    ),
)
