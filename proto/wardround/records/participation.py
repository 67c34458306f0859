"""[study] of a study file: who takes part and as what, how many rounds, and until when each waits."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from wardround.records.schema import Strict
from wardround.terminal import is_plain

SITE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
STUDY_NAME = SITE_NAME
Role = Literal["train", "evaluate"]  # of a site in a study
TRAINS: Role = "train"


class StudySection(Strict):
    """Who takes part, how many rounds, and until when each waits.

    Attributes:
        name: of the study, in commands and in every ledger: 1 to 64 of a-z, 0-9 and -.
        title: one line for people.
        sites: the sites' names, as they were invited.
        rounds: after which the study has finished.
        quorum: how many accepted updates close a round at its deadline; without it, those of all sites that train.
        roles: site -> "evaluate": it downloads each round's model, judges it on all of its rows and reports the
            metrics; nothing is trained there and no tensor leaves. Without a role a site trains.
        round_deadline_s: seconds that a round waits for its sites.
        deadlines: fixed; or measured, where a round waits no longer than four times its slowest site's last three
            rounds, at least a minute and at most round_deadline_s.
        late_updates: of an update that is on its way at the deadline: refuse it; or finish it, for at most as long
            again as round_deadline_s.
        start_deadline_s: seconds that the study waits, once started, for enough sites to be ready.
        seed: of everything that is drawn: initial weights, validation rows, the order of batches.
        threads: of each training process; another number may change the last bits.
        max_update_norm: the largest L2 norm over all of an update's tensors; without it, [limits] learns one.
    """

    name: str
    title: str = Field(default="", max_length=200)
    sites: tuple[str, ...] = Field(min_length=1, max_length=256)
    rounds: int = Field(ge=1, le=100_000)
    quorum: int | None = Field(default=None, ge=1)
    roles: dict[str, Role] = Field(default_factory=dict)
    round_deadline_s: int = Field(default=3600, ge=1, le=30 * 86400)
    deadlines: Literal["fixed", "measured"] = "fixed"
    late_updates: Literal["refuse", "finish"] = "refuse"
    start_deadline_s: int = Field(default=7 * 86400, ge=1, le=365 * 86400)
    seed: int = Field(default=1, ge=0, le=2**53 - 1)
    threads: int = Field(default=1, ge=1, le=256)
    max_update_norm: float | None = Field(default=None, gt=0)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not STUDY_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of 1 to 64 of a-z, 0-9 and - (not at either end)")
        return name

    @field_validator("title")
    @classmethod
    def _title(cls, title: str) -> str:
        if not is_plain(title):
            raise ValueError("the title is one line without control characters")
        return title

    @field_validator("sites")
    @classmethod
    def _sites(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if not SITE_NAME.fullmatch(site):
                raise ValueError(f"site {site!r} is not a name of 1 to 64 of a-z, 0-9 and - (not at either end)")
        if len(set(sites)) != len(sites):
            raise ValueError(f"site {next(s for s in sites if sites.count(s) > 1)!r} stands twice")
        return tuple(sorted(sites))

    @field_validator("roles")
    @classmethod
    def _roles(cls, roles: dict[str, Role]) -> dict[str, Role]:
        """Those that are not the default, in the sites' order."""
        return {site: role for site, role in sorted(roles.items()) if role != TRAINS}

    @model_validator(mode="after")
    def _of_its_sites(self) -> Self:
        for site in self.roles:
            if site not in self.sites:
                raise ValueError(f"`roles` names site {site[:60]!r}, which the study does not have")
        if not self.trainers:
            raise ValueError("every site of the study only evaluates: at least one trains")
        if self.quorum is not None and self.quorum > len(self.trainers):
            there = f"the study has {len(self.trainers)} sites" + (" that train" if self.roles else "")
            raise ValueError(f"quorum is {self.quorum}, but {there}")
        return self

    @property
    def evaluators(self) -> tuple[str, ...]:
        """The sites that only evaluate."""
        return tuple(site for site in self.sites if self.roles.get(site, TRAINS) != TRAINS)

    @property
    def trainers(self) -> tuple[str, ...]:
        """The sites that train."""
        return tuple(site for site in self.sites if self.roles.get(site, TRAINS) == TRAINS)

    @property
    def needed(self) -> int:
        """How many accepted updates close a round at its deadline."""
        return self.quorum if self.quorum is not None else len(self.trainers)
