"""What the coordinator answers its commands about the authority, receipts and ledgers. As ``coordinator.answers``."""

from coordinator.answers import Answer


class RootRow(Answer):
    """A root that is trusted: its fingerprint, and when it ends (UTC)."""

    fingerprint: str
    expires: str


class AuthorityStatus(Answer):
    """What signs the sites' certificates.

    Attributes:
        signs: what does, in words; until when (UTC).
        roots: those that are trusted, the newest first.
        sites: site -> fingerprint of the root behind the newest certificate that it used.
        behind: the sites that have not renewed since the newest root came.
    """

    signs: str
    expires: str
    roots: tuple[RootRow, ...]
    sites: dict[str, str]
    behind: tuple[str, ...]


class IntermediateRequested(Answer):
    """A request for an intermediate's certificate, PEM."""

    request: str


class ReceiptsCopied(Answer):
    """How many receipts of a site were copied."""

    site: str
    receipts: int


class Noted(Answer):
    """The command is in the journal."""

    federation: str


class RolledOver(Answer):
    """The ledger that a site keeps from now on, and the id of the one before ("" if there was none)."""

    site: str
    ledger: str
    before: str
