"""The coordinator's tables, one class each, as SQLAlchemy maps them.

The migration beside this file makes them; a test compares the two. What several programs read, documents and lists, is
kept as JSON text and decoded where it is used, so that one damaged row is the failure of what it belongs to alone.
"""

import datetime
import json

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SENT_NUMBER = Integer().with_variant(BigInteger(), "postgresql")  # as a site may send it: 32 bits without a sign


def utc_text(seconds: float) -> str:
    """A stored Unix time as it is shown: 2026-01-01T00:00:00Z."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Base(DeclarativeBase):
    """What all tables have in common: the metadata that the migration must equal."""


class Invitation(Base):
    """A one-use permission to enrol. The bootstrap key is nowhere here, only the fingerprint of its certificate."""

    __tablename__ = "invitations"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    site: Mapped[str] = mapped_column(String(64), index=True)
    created_s: Mapped[int] = mapped_column(BigInteger)
    expires_s: Mapped[int] = mapped_column(BigInteger)
    fingerprint: Mapped[str] = mapped_column(String(64))
    withdrawn: Mapped[bool] = mapped_column(default=False)
    used_s: Mapped[int | None] = mapped_column(BigInteger)
    used_from: Mapped[str | None] = mapped_column(String(200))
    request_sha256: Mapped[str | None] = mapped_column(String(64))
    certificate: Mapped[str | None] = mapped_column(Text)


class Site(Base):
    """A site that has enrolled."""

    __tablename__ = "sites"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    enrolled_s: Mapped[int] = mapped_column(BigInteger)
    revoked_s: Mapped[int | None] = mapped_column(BigInteger)
    ledger_key: Mapped[str] = mapped_column(String(64))
    ledger_id: Mapped[str] = mapped_column(String(64), default="")  # of the ledger that we witness; "" before the first
    last_receipt: Mapped[str] = mapped_column(String(64))  # SHA-256 of its payload
    last_seen_s: Mapped[int | None] = mapped_column(BigInteger)
    agent_version: Mapped[str] = mapped_column(String(40), default="")
    certificate_fork_s: Mapped[int | None] = mapped_column(BigInteger)  # since when two renewal chains are in use


class Certificate(Base):
    """A site's certificate, from its issue until it can no longer be renewed or is replaced."""

    __tablename__ = "certificates"

    serial: Mapped[str] = mapped_column(String(64), primary_key=True)
    site: Mapped[str] = mapped_column(String(64), ForeignKey("sites.name"), index=True)
    issued_s: Mapped[int] = mapped_column(BigInteger)
    not_after_s: Mapped[int] = mapped_column(BigInteger)
    made_with: Mapped[str] = mapped_column(String(64), default="")  # serial of the one it was renewed with
    used_s: Mapped[int | None] = mapped_column(BigInteger)  # the first call with it
    root: Mapped[str] = mapped_column(String(64), default="")  # fingerprint of the root that stands behind it


class Model(Base):
    """A model whose file is kept, with its manifest as JSON."""

    __tablename__ = "models"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    manifest: Mapped[str] = mapped_column(Text)
    made_s: Mapped[int] = mapped_column(BigInteger)


class Study(Base):
    """One revision of a study: its document, its models, and its state with the clocks when it was written."""

    __tablename__ = "studies"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    document: Mapped[str] = mapped_column(Text)
    initial: Mapped[str] = mapped_column(String(64), ForeignKey("models.digest"))
    newest: Mapped[str] = mapped_column(String(64), ForeignKey("models.digest"))
    best: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    created_s: Mapped[int] = mapped_column(BigInteger)
    archived_s: Mapped[int | None] = mapped_column(BigInteger)  # since when no site and no list is told of it


class Restore(Base):
    """A restore from a backup: what happened between the two moments was forgotten here."""

    __tablename__ = "restores"

    restored_s: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    backup_s: Mapped[int] = mapped_column(BigInteger)


class Round(Base):
    """One attempt at a round."""

    __tablename__ = "rounds"

    study: Mapped[str] = mapped_column(String(64), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    closing: Mapped[bool]
    asked: Mapped[str] = mapped_column(Text)
    base: Mapped[str] = mapped_column(String(64))
    opened_s: Mapped[float] = mapped_column(Float)
    closed_s: Mapped[float | None] = mapped_column(Float)
    outcome: Mapped[str | None] = mapped_column(String(20))
    answers: Mapped[str | None] = mapped_column(Text)
    model: Mapped[str | None] = mapped_column(String(64))
    account: Mapped[str | None] = mapped_column(Text)  # what became of each accepted update


class SecureAttempt(Base):
    """What the sites told in an attempt with secure aggregation, as long as it goes on or its sum may be checked. There
    is no secret in it that they have not opened.
    """

    __tablename__ = "secure_attempts"

    study: Mapped[str] = mapped_column(String(64), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    document: Mapped[str] = mapped_column(Text)


class Upload(Base):
    """An update from its header on: how much of it is here, and what was decided about it."""

    __tablename__ = "uploads"
    __table_args__ = (
        Index("uploads_of_round", "study", "revision", "round"),
        Index("uploads_decided", "site", "decision", "decided_s"),  # by which a site's refused uploads are counted
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    site: Mapped[str] = mapped_column(String(64), index=True)
    study: Mapped[str] = mapped_column(String(64))
    revision: Mapped[int] = mapped_column(SENT_NUMBER)
    round: Mapped[int] = mapped_column(SENT_NUMBER)
    attempt: Mapped[int] = mapped_column(SENT_NUMBER)
    content: Mapped[str] = mapped_column(String(64))  # digest of the header without id and ledger
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    payload_bytes: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[str] = mapped_column(Text)
    num_examples: Mapped[int] = mapped_column(BigInteger)
    num_validation: Mapped[int] = mapped_column(BigInteger)
    received: Mapped[int] = mapped_column(BigInteger, default=0)  # bytes of the payload that are durable in the spool
    decision: Mapped[str] = mapped_column(String(20), default="")  # "", accepted, refused
    code: Mapped[str] = mapped_column(String(40), default="")
    tensor: Mapped[str] = mapped_column(String(260), default="")
    opened_s: Mapped[float] = mapped_column(Float)
    decided_s: Mapped[float | None] = mapped_column(Float)
    receipt: Mapped[str | None] = mapped_column(Text)  # the envelope, so that it can be sent again byte for byte

    @property
    def reported_metrics(self) -> tuple[tuple[str, str], ...]:
        """Name and decimal string of each metric that the site reported."""
        return tuple((name, value) for name, value in json.loads(self.metrics))


class Fit(Base):
    """What a site last said of its data before anybody approved: whether it fits, and how many rows it has."""

    __tablename__ = "fits"

    study: Mapped[str] = mapped_column(String(64), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    site: Mapped[str] = mapped_column(String(64), primary_key=True)
    fits: Mapped[bool]
    rows: Mapped[int] = mapped_column(BigInteger)
    said_s: Mapped[int] = mapped_column(BigInteger)


class SummaryRequest(Base):
    """What an operator asks the sites of their tables' columns."""

    __tablename__ = "summary_requests"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    document: Mapped[str] = mapped_column(Text)
    created_s: Mapped[int] = mapped_column(BigInteger)
    open: Mapped[bool]


class SiteSummary(Base):
    """The newest figures of a site for a summary request, as JSON."""

    __tablename__ = "site_summaries"

    request: Mapped[str] = mapped_column(String(64), ForeignKey("summary_requests.name"), primary_key=True)
    site: Mapped[str] = mapped_column(String(64), primary_key=True)
    figures: Mapped[str] = mapped_column(Text)
    said_s: Mapped[int] = mapped_column(BigInteger)


class LedgerHead(Base):
    """A head of a site's ledger. Of those that no receipt names only the newest is kept."""

    __tablename__ = "ledger_heads"

    site: Mapped[str] = mapped_column(String(64), primary_key=True)
    ledger_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    lines: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    head: Mapped[str] = mapped_column(String(64))
    in_receipt: Mapped[bool]


class JournalLine(Base):
    """A line of the operator's journal as canonical JSON, and the head of the chain with it. Never changed."""

    __tablename__ = "journal"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    line: Mapped[str] = mapped_column(Text)
    head: Mapped[str] = mapped_column(String(64))


class Leadership(Base):
    """Which coordinator may write, where several stand on one database. One row; see ``coordinator.storage.lease``.

    ``expires_s`` is by the database's clock. ``receipt_key`` and ``root`` are fingerprints of the leader's keys.
    """

    __tablename__ = "leadership"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    token: Mapped[int] = mapped_column(BigInteger)
    writes: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str] = mapped_column(String(400))
    expires_s: Mapped[float] = mapped_column(Float)
    receipt_key: Mapped[str] = mapped_column(String(64))
    root: Mapped[str] = mapped_column(String(64))
