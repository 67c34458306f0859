"""The lines of the operator's journal, and what the coordinator answers the commands about it. As ``answers``."""

from collections.abc import Mapping
from typing import Literal

from coordinator.answers import Answer
from coordinator.requests import AskingPerson
from wardround.records.schema import Strict

Known = str | int | bool
Event = Literal["begun", "done", "refused", "proposed", "taken_back"]


class JournalEntry(Strict):
    """One line.

    Attributes:
        at: when it was written (UTC).
        act: the command's name on the control socket, or init, restore or upgrade.
        event: begun, before the command acts; done or refused, after it. proposed, where it does nothing before another
            person gives it too, which then has lines of its own; taken_back, where it never will.
        of: the number of the line that began it, or that is taken back; None of one that has a line alone.
        about: what it is about, or what came of it.
    """

    number: int
    at: str
    by: AskingPerson
    act: str
    event: Event
    about: Mapping[str, Known]
    of: int | None = None


class JournalCopied(Answer):
    """How many lines were copied, the head after the last, and that head signed with the key of the receipts.

    ``receipt_key``: in hex.
    """

    lines: int
    head: str
    signed: dict[str, str]
    receipt_key: str


class JournalText(Answer):
    """A line of the journal, byte for byte."""

    line: str


class Proposed(Answer):
    """A command that does nothing yet: it waits for a second person, who gives it too.

    Attributes:
        proposal: the number of its line in the journal.
        what: the command, and what it is about, in words.
        by: who gave it. until: after which it counts no more (UTC).
        beside: what else was proposed of the same study or site, or has lapsed, in words; "" for nothing.
    """

    proposal: int
    what: str
    by: str
    until: str
    beside: str = ""


class WaitingRow(Proposed):
    """A proposal that waits. ``at``: since when (UTC). ``about``: all that the second person agrees to."""

    at: str
    about: Mapping[str, Known]


class WaitingList(Answer):
    """The proposals that wait for a second person, the oldest first.

    Attributes:
        needed_for: the commands that need one, as they are typed.
        config: those that the configuration names. They may be fewer: two people put them in force.
        lapse_s: after so long a proposal counts no more.
    """

    waiting: tuple[WaitingRow, ...]
    needed_for: tuple[str, ...]
    config: tuple[str, ...]
    lapse_s: int


class SecondPersonApplied(Answer):
    """The commands that need a second person from now on, as they are typed."""

    needed_for: tuple[str, ...]
    lapse_s: int
