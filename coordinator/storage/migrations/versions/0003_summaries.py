"""Summary requests, and what the sites told for them."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "summary_requests",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("open", sa.Boolean, nullable=False),
    )
    op.create_table(
        "site_summaries",
        sa.Column("request", sa.String(64), sa.ForeignKey("summary_requests.name"), primary_key=True),
        sa.Column("site", sa.String(64), primary_key=True),
        sa.Column("figures", sa.Text, nullable=False),
        sa.Column("said_s", sa.BigInteger, nullable=False),
    )
