"""Which coordinator leads, where several may stand on one database; and wider numbers of what sites send."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    leadership = op.create_table(
        "leadership",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("writes", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.String(400), nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
        sa.Column("receipt_key", sa.String(64), nullable=False),
        sa.Column("root", sa.String(64), nullable=False),
    )
    op.bulk_insert(
        leadership,
        [{"id": 1, "token": 0, "writes": 0, "holder": "", "expires_s": 0.0, "receipt_key": "", "root": ""}],
    )
    if op.get_bind().dialect.name == "postgresql":  # whose INTEGER has 32 bits with a sign
        for column in ("revision", "round", "attempt"):
            op.alter_column("uploads", column, type_=sa.BigInteger)
