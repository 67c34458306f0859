"""The settings of the methods, beside the local steps that all share under [training]."""

from typing import Self

from pydantic import Field

from wardround.schema import Strict


class MethodSettings(Strict):
    """A method without settings of its own."""

    def filled(self, rounds: int) -> Self:
        """These settings with every default that depends on the study's number of rounds put in."""
        return self


class FedSoupSettings(MethodSettings):
    """When souping starts."""

    start_after: int | None = Field(default=None, ge=0)  # E: round r is a soup round when r > E; None: floor(0.75 R)

    def filled(self, rounds: int) -> Self:
        if self.start_after is not None:
            return self
        return self.model_copy(update={"start_after": 3 * rounds // 4})
