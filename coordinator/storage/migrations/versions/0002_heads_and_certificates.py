"""Which ledger heads a receipt names, and which certificate each certificate was renewed with.

Of heads that were noted before it is not known, so all of them stay.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("ledger_heads", sa.Column("in_receipt", sa.Boolean, nullable=False, server_default=sa.true()))
    op.add_column("certificates", sa.Column("made_with", sa.String(64), nullable=False, server_default=""))
    op.add_column("certificates", sa.Column("used_s", sa.BigInteger))
    op.add_column("sites", sa.Column("two_lines_s", sa.BigInteger))
