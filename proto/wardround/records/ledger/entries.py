"""One class for each type of entry in a site's ledger: what it says, and which of it must be there.

What must be there has no default; what may be missing is None then. docs/auditors.md says the same in words. Every
class also takes ``more``: fields of a later version, which nobody here reads.
"""

from dataclasses import dataclass
from functools import cached_property

from wardround.errors import BadData
from wardround.records.ledger.base import BaseEntry, Person
from wardround.records.ledger.decided import (
    EndorsedEntry,
    HeldEntry,
    PolicyEntry,
    ProposalEntry,
    RejectedEntry,
    ReleasedEntry,
)
from wardround.records.ledger.form import Digest, Record, Unjudged, encoded
from wardround.records.ledger.secure import (
    AgreedEntry,
    KeysEntry,
    MaskedUpload,
    OpenedEntry,
    PeerEntry,
    SumCheckedEntry,
)
from wardround.records.ledger.summary import SummaryEntry
from wardround.records.receipts import LedgerHead, Receipt, RecordedUpload
from wardround.signing import canonical
from wardround.signing.dsse import Envelope

LEFT = (
    "study", "revision", "study_digest", "kind", "round", "attempt", "destination", "manifest_sha256", "metrics",
    "num_examples", "num_validation",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorRow(Record):
    """One tensor that left. The norm and the largest magnitude are decimal texts."""

    bundle: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str
    bytes: int
    sha256: Digest
    l2: Unjudged | None = None
    max_abs: Unjudged | None = None
    nonfinite: int | None = None


@dataclass(frozen=True, kw_only=True)
class Metric(Record):
    """A number that was reported, as decimal text."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class MethodBytes(Record):
    """How often one method of the contract was called, how many messages that were, and their bytes."""

    method: str
    count: int
    bytes: int
    messages: int | None = None


@dataclass(frozen=True, kw_only=True)
class SignedText(Record):
    """A signed envelope as its text stands in a line; nothing in it was looked at."""

    payload_type: str
    payload: str
    keyid: str
    signature: str

    @classmethod
    def of(cls, envelope: Envelope) -> "SignedText":
        """Raises BadData: its payload is no text."""
        return cls.from_document(envelope.document())

    def envelope(self) -> Envelope:
        """Raises BadData: its signature is not base64 as it is written."""
        return Envelope.from_document(self.document())


@dataclass(frozen=True, kw_only=True)
class CitedHead(Record):
    """The end of the ledger that this one continues."""

    ledger_id: str
    lines: int
    head: Digest

    @classmethod
    def of(cls, head: LedgerHead) -> "CitedHead":
        return cls(ledger_id=head.ledger_id, lines=head.lines, head=head.head)

    def ledger_head(self) -> LedgerHead:
        return LedgerHead(self.ledger_id, self.lines, self.head)


@dataclass(frozen=True, kw_only=True)
class LimitedEntry(BaseEntry):
    """One of a type that a coordinator can cause without end: ``left_out`` before it have no line."""

    left_out: int | None = None


@dataclass(frozen=True, kw_only=True)
class GenesisEntry(BaseEntry):
    """The first line: who keeps this ledger, by its key, and which ledger it continues."""

    type = "genesis"
    ledger_id: str
    ledger_key: Digest | None = None
    software: str | None = None
    continues: CitedHead | None = None


@dataclass(frozen=True, kw_only=True)
class IdentityEntry(BaseEntry):
    """A certificate that this site has from here on, and the key of the coordinator's receipts."""

    type = "identity"
    receipt_key: Digest
    event: str | None = None  # issued, renewed, reopened
    site: str | None = None
    federation: str | None = None
    serial: Unjudged | None = None
    not_after: str | None = None
    certificate_sha256: Unjudged | None = None
    authority_sha256: Unjudged | None = None


@dataclass(frozen=True, kw_only=True)
class SessionEntry(LimitedEntry):
    """A connection began or ended; at its end, how many bytes of payload were given to it."""

    type = "session"
    event: str  # opened, closed
    peer: str | None = None
    bytes_up: int | None = None


@dataclass(frozen=True, kw_only=True)
class PluginRow(Record):
    """A plug-in whose code a person let run here: a distribution, and the digest of its files."""

    name: str
    version: str
    sha256: Unjudged | None = None


@dataclass(frozen=True, kw_only=True)
class ConsentEntry(BaseEntry):
    """A study was approved, or the approval withdrawn.

    Where the policy wants several people, those before the last one have endorsed it: nothing is in force by that.
    ``also_by``: who did, of an approval, or of endorsements that ``by`` took back.
    """

    type = "consent"
    event: str  # approved, withdrawn, endorsed, taken back
    study: str
    revision: int | None = None
    study_digest: Unjudged | None = None
    data_digest: Unjudged | None = None
    exposure: Unjudged | None = None
    consent_sha256: Unjudged | None = None
    network: Unjudged | None = None
    common_digest: Unjudged | None = None
    weights_digest: Unjudged | None = None
    plugins: tuple[PluginRow, ...] | None = None
    by: Person | None = None
    also_by: tuple[Person, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DeclareEntry(LimitedEntry):
    """What was declared to the coordinator: where this site stands in a study.

    ``num_examples`` (rows) and ``by`` are of the word that its data fits, which a person sent; ``estimate_s`` of how
    long a round's training will take.
    """

    type = "declare"
    study: str
    standing: str
    revision: int | None = None
    round: int | None = None
    attempt: int | None = None
    code: str | None = None
    num_examples: int | None = None
    by: Person | None = None
    estimate_s: int | None = None


@dataclass(frozen=True, kw_only=True)
class ControlEntry(BaseEntry):
    """All messages since the last such line, by method, without the payloads of uploads."""

    type = "control"
    bytes: int
    methods: tuple[MethodBytes, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class UploadEntry(BaseEntry):
    """An update that may leave from here on, once. ``masked``: its tensors are integers with masks."""

    type = "upload"
    upload_id: str
    study: str
    revision: int
    round: int
    attempt: int
    manifest_sha256: Digest
    payload_bytes: int
    tensors: tuple[TensorRow, ...]
    metrics: tuple[Metric, ...]
    study_digest: Unjudged | None = None
    kind: str | None = None  # train, validate
    destination: str | None = None
    num_examples: int | None = None
    num_validation: int | None = None
    update: Digest | None = None
    masked: MaskedUpload | None = None

    def manifest(self) -> list[dict[str, object]]:
        """What ``manifest_sha256`` is the digest of."""
        return [
            {
                "bundle": row.bundle, "name": row.name, "dtype": row.dtype, "shape": list(row.shape),
                "encoding": row.encoding, "bytes": row.bytes, "sha256": row.sha256,
            }
            for row in self.tensors
        ]  # fmt: skip

    def left(self) -> dict[str, object]:
        """Everything that left: what ``update`` is the digest of.

        Raises:
            BadData: the line does not say all of it.
        """
        document = encoded(self, LEFT)
        for name in LEFT:
            if name not in document:
                raise BadData(f"it does not have the form of a `{self.type}` record: no {name}")
        return document

    def recorded(self, seq: int) -> RecordedUpload:
        """What a receipt for it must repeat."""
        names = {name for row in self.tensors for name in (row.name, f"{row.bundle}/{row.name}")}
        return RecordedUpload(
            seq, self.upload_id, self.study, self.revision, self.round, self.attempt, self.manifest_sha256,
            self.payload_bytes, frozenset(names),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResendEntry(BaseEntry):
    """An upload may leave once more. ``sent``: payload bytes of the try before it; None where nobody knows."""

    type = "resend"
    upload_id: str
    study: str
    revision: int
    round: int
    attempt: int
    try_: int
    payload_bytes: int
    sent: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReceiptEntry(BaseEntry):
    """The coordinator's signed answer to an upload, verbatim."""

    type = "receipt"
    upload_id: str
    envelope: SignedText

    @cached_property
    def receipt(self) -> Receipt:
        """What the envelope says, by its own word: the signature is not looked at.

        Raises:
            BadData: it holds no receipt.
        """
        return Receipt.from_document(canonical.loads(self.envelope.payload.encode()))

    def refuse_no_receipt(self) -> None:
        """Raises BadData: the envelope holds no receipt."""
        _ = self.receipt


@dataclass(frozen=True, kw_only=True)
class BlockedEntry(LimitedEntry):
    """Nothing more of a round leaves, and why."""

    type = "blocked"
    study: str
    revision: int | None = None
    round: int | None = None
    attempt: int | None = None
    what: Unjudged | None = None
    rule: str | None = None


@dataclass(frozen=True, kw_only=True)
class LeftEntry(BaseEntry):
    """The membership ended."""

    type = "left"
    by: Person | None = None


@dataclass(frozen=True, kw_only=True)
class RecoveredEntry(BaseEntry):
    """A crash tore the last line; its bytes are kept in ``torn/``."""

    type = "recovered"
    torn_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class UnknownEntry(BaseEntry):
    """An entry of a type that a later version writes; all its fields are in ``more``."""

    unknown_type: str


Entry = (
    GenesisEntry | IdentityEntry | SessionEntry | PolicyEntry | ProposalEntry | ConsentEntry | DeclareEntry
    | SummaryEntry | ControlEntry | UploadEntry | ResendEntry | ReceiptEntry | BlockedEntry | HeldEntry | EndorsedEntry
    | ReleasedEntry | RejectedEntry | LeftEntry | RecoveredEntry | PeerEntry | KeysEntry | AgreedEntry | OpenedEntry
    | SumCheckedEntry | UnknownEntry
)  # fmt: skip
Limited = SessionEntry | DeclareEntry | BlockedEntry  # each LimitedEntry
