"""Commands that need a second person, where the configuration says so: which they can be, and which proposals wait.

The first person's command is a proposal: a line of the operator's journal. The same command by another person carries
it out. What the two must agree in is all that the journal says of a command: names, numbers, and digests of documents
and tensors. Judges only: no database, no clock but the one given.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from pydantic import Field, field_validator

from coordinator.journal_records import JournalEntry, Known
from wardround.errors import NotPermitted
from wardround.local.person import Person
from wardround.records.schema import Strict
from wardround.terminal import escaped

COMMANDS: Mapping[str, str] = {
    "invite": "invite", "revoke": "revoke", "rollover": "rollover", "study create": "create", "study edit": "edit",
    "study renew": "renew", "study start": "start", "study stop": "stop", "study archive": "archive",
    "models export": "model-export", "backup": "snapshot", "restore": "restore", "standby export": "standby-export",
    "authority export-root": "authority-export-root", "authority install": "authority-install",
    "authority retire": "authority-retire", "summary create": "summary_create", "summary close": "summary_close",
}  # fmt: skip
ACTS = {act: command for command, act in COMMANDS.items()}  # as the journal has it -> as a person types it
NOT_BY_DEFAULT = ("study start", "backup", "summary create", "summary close")
TERMS = "second-person"  # the act of saying which commands need one
SUBJECTS = ("study", "name", "site")
KNOWN_BY = ("loginuid", "sudo", "polkit")  # of a person; the account that the coordinator runs as is none
DAY_S = 86400


class SecondPerson(Strict):
    """[second_person] of the configuration.

    Attributes:
        acts: the commands that need a second person.
        lapse_s: after so long a proposal counts no more.
    """

    acts: tuple[str, ...] = tuple(command for command in COMMANDS if command not in NOT_BY_DEFAULT)
    lapse_s: int = Field(default=DAY_S, ge=60, le=30 * DAY_S)

    @field_validator("acts")
    @classmethod
    def _acts(cls, acts: tuple[str, ...]) -> tuple[str, ...]:
        for command in acts:
            if command not in COMMANDS:
                raise ValueError(f"`{command[:40]}` is none of {', '.join(COMMANDS)}")
        return acts


@dataclass(frozen=True)
class Terms:
    """Which commands need a second person, as they are typed, and after how many seconds a proposal lapses."""

    commands: frozenset[str] = frozenset()
    lapse_s: int = DAY_S

    @classmethod
    def of(cls, config: SecondPerson | None) -> "Terms":
        return cls() if config is None else cls(frozenset(config.acts), config.lapse_s)

    @classmethod
    def from_known(cls, about: Mapping[str, Known]) -> "Terms":
        """What ``known`` gave."""
        return cls(frozenset(filter(None, str(about["acts"]).split(", "))), int(about["lapse_s"]))

    def known(self) -> dict[str, Known]:
        """As the journal has them."""
        return {"acts": ", ".join(sorted(self.commands)), "lapse_s": self.lapse_s}

    def with_all_of(self, other: "Terms") -> "Terms":
        """The stricter of both in everything."""
        if not self.commands or not other.commands:
            return self if self.commands else other
        return Terms(self.commands | other.commands, min(self.lapse_s, other.lapse_s))

    def need(self, act: str) -> bool:
        """Whether an act, as the journal names it, needs a second person; other terms do wherever there are any."""
        return bool(self.commands) if act == TERMS else ACTS.get(act) in self.commands


@dataclass(frozen=True)
class Proposal:
    """A command that one person gave, and that does nothing yet. ``number``: of its line in the journal.

    ``until_s``: Unix time after which it counts no more.
    """

    number: int
    at_s: float
    until_s: float
    by: Person
    act: str
    about: Mapping[str, Known]

    def counts(self, now_s: float) -> bool:
        """Whether it has not lapsed, and a person made it who is known."""
        return now_s <= self.until_s and self.by.source in KNOWN_BY

    @property
    def text(self) -> str:
        """As people read it: "`coordinator revoke`, site charite"."""
        return in_words(self.act, self.about)


def in_words(act: str, about: Mapping[str, Known]) -> str:
    """A command and what it is about, on one line: nobody has looked at a name before the journal has it."""
    subject = "".join(f", {name} {escaped(str(about[name]))}" for name in SUBJECTS if name in about)
    return f"`coordinator {typed(act)}`{subject}"


def typed(act: str) -> str:
    """An act as a person types it."""
    return "second-person apply" if act == TERMS else ACTS.get(act, act)


def proposals(newest_first: Iterable[JournalEntry], lapse_s: int, since_s: float) -> Iterator[Proposal]:
    """The proposals since a Unix time that nobody carried out or took back, the newest first; also those that lapsed.

    Args:
        newest_first: the journal's lines. No more are read than are needed.
    """
    closed: set[object] = set()
    for entry in newest_first:
        at_s = datetime.fromisoformat(entry.at).timestamp()
        if at_s < since_s:
            return
        if entry.event == "taken_back":
            closed.add(entry.of)
        elif entry.event == "begun" and "proposal" in entry.about:
            closed.add(entry.about["proposal"])
        elif entry.event == "proposed" and entry.number not in closed:
            yield Proposal(entry.number, at_s, at_s + lapse_s, entry.by, entry.act, entry.about)


def same_subject(proposal: Proposal, act: str, about: Mapping[str, Known]) -> bool:
    """Whether it is the same act on the same study or site, whatever else it says."""
    names = [(proposal.about.get(name), about.get(name)) for name in SUBJECTS]
    return proposal.act == act and all(one == other for one, other in names)


def refuse_nobody(by: Person, act: str, service: int) -> None:
    """Refuse a command that needs two people where nobody can tell which person gives it.

    Args:
        service: the uid of the account that the coordinator runs as, which is nobody's own.

    Raises:
        NotPermitted: it was given by the account itself, or no login stands behind it.
    """
    if by.source not in KNOWN_BY or by.uid == service:
        account = by.account.name if by.account is not None else by.name
        raise NotPermitted(
            f"`coordinator {typed(act)}` needs two people here, and nobody can tell which person gives it: it comes "
            f"from the account `{account}`, behind which no other login stands",
            hint="log in with an account of your own, and give the command with sudo or pkexec",
        )
