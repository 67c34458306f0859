"""The tables of version 0.1."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "invitations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("site", sa.String(64), nullable=False, index=True),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("withdrawn", sa.Boolean, nullable=False),
        sa.Column("used_s", sa.BigInteger),
        sa.Column("used_from", sa.String(200)),
        sa.Column("request_sha256", sa.String(64)),
        sa.Column("certificate", sa.Text),
    )
    op.create_table(
        "sites",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("enrolled_s", sa.BigInteger, nullable=False),
        sa.Column("revoked_s", sa.BigInteger),
        sa.Column("ledger_key", sa.String(64), nullable=False),
        sa.Column("ledger_id", sa.String(64), nullable=False),
        sa.Column("last_receipt", sa.String(64), nullable=False),
        sa.Column("last_seen_s", sa.BigInteger),
        sa.Column("agent_version", sa.String(40), nullable=False),
        sa.Column("certificate_fork_s", sa.BigInteger),
    )
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String(64), primary_key=True),
        sa.Column("site", sa.String(64), sa.ForeignKey("sites.name"), nullable=False, index=True),
        sa.Column("issued_s", sa.BigInteger, nullable=False),
        sa.Column("not_after_s", sa.BigInteger, nullable=False),
        sa.Column("made_with", sa.String(64), nullable=False),
        sa.Column("used_s", sa.BigInteger),
    )
    op.create_table(
        "models",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("made_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "studies",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("revision", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("initial", sa.String(64), sa.ForeignKey("models.digest"), nullable=False),
        sa.Column("newest", sa.String(64), sa.ForeignKey("models.digest"), nullable=False),
        sa.Column("best", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "rounds",
        sa.Column("study", sa.String(64), primary_key=True),
        sa.Column("revision", sa.Integer, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("closing", sa.Boolean, nullable=False),
        sa.Column("asked", sa.Text, nullable=False),
        sa.Column("base", sa.String(64), nullable=False),
        sa.Column("opened_s", sa.Float, nullable=False),
        sa.Column("closed_s", sa.Float),
        sa.Column("outcome", sa.String(20)),
        sa.Column("answers", sa.Text),
        sa.Column("model", sa.String(64)),
        sa.Column("account", sa.Text),
    )
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("site", sa.String(64), nullable=False, index=True),
        sa.Column("study", sa.String(64), nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("content", sa.String(64), nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("num_examples", sa.BigInteger, nullable=False),
        sa.Column("num_validation", sa.BigInteger, nullable=False),
        sa.Column("received", sa.BigInteger, nullable=False),
        sa.Column("decision", sa.String(20), nullable=False),
        sa.Column("code", sa.String(40), nullable=False),
        sa.Column("tensor", sa.String(260), nullable=False),
        sa.Column("opened_s", sa.Float, nullable=False),
        sa.Column("decided_s", sa.Float),
        sa.Column("receipt", sa.Text),
    )
    op.create_index("uploads_of_round", "uploads", ["study", "revision", "round"])
    op.create_index("uploads_decided", "uploads", ["site", "decision", "decided_s"])
    op.create_table(
        "fits",
        sa.Column("study", sa.String(64), primary_key=True),
        sa.Column("revision", sa.Integer, primary_key=True),
        sa.Column("site", sa.String(64), primary_key=True),
        sa.Column("fits", sa.Boolean, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("said_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "ledger_heads",
        sa.Column("site", sa.String(64), primary_key=True),
        sa.Column("ledger_id", sa.String(64), primary_key=True),
        sa.Column("lines", sa.BigInteger, primary_key=True),
        sa.Column("head", sa.String(64), nullable=False),
        sa.Column("in_receipt", sa.Boolean, nullable=False),
    )
