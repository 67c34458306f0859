"""What every type of entry in a site's ledger is made of: its word on disk, and the people whom it names."""

from dataclasses import dataclass
from typing import ClassVar

from wardround.records.ledger.form import Record, Unjudged


@dataclass(frozen=True, kw_only=True)
class UserAccount(Record):
    """A user account of the site's machine."""

    name: str
    uid: int


@dataclass(frozen=True, kw_only=True)
class Person(Record):
    """Who decided something: by which word that is known (``source``), and the account that the command ran as."""

    name: str
    uid: int
    source: Unjudged | None = None
    account: UserAccount | None = None

    def words(self) -> str:
        """As people read it: "dpo", or "dpo (sudo), as wardround" where the account is another."""
        account = self.account.name if self.account is not None else self.name
        alone = account == self.name and self.source != "page"
        return self.name if alone else f"{self.name} ({self.source or 'by its own word'}), as {account}"


@dataclass(frozen=True, kw_only=True)
class BaseEntry(Record):
    """What a line says. ``type`` is its word on disk."""

    type: ClassVar[str] = ""

    @property
    def place(self) -> tuple[str | None, int | None]:
        """The study and the round that it is about; None where it names none."""
        return getattr(self, "study", None), getattr(self, "round", None)
