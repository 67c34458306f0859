"""The lines of the operator's journal, and what the coordinator answers the commands about it. As ``answers``."""

from collections.abc import Mapping
from typing import Literal

from coordinator.answers import Answer
from coordinator.requests import AskingPerson
from wardround.records.schema import Strict

Known = str | int | bool


class JournalEntry(Strict):
    """One line.

    Attributes:
        at: when it was written (UTC).
        act: the command's name on the control socket, or init, restore or upgrade.
        event: begun, before the command acts; done or refused, after it.
        of: the number of the line that began it; None of one that has a line alone.
        about: what it is about, or what came of it.
    """

    number: int
    at: str
    by: AskingPerson
    act: str
    event: Literal["begun", "done", "refused"]
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
