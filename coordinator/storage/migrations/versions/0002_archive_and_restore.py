"""Studies may be archived; restores from a backup are remembered."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("studies") as studies:
        studies.add_column(sa.Column("archived_s", sa.BigInteger))
    op.create_table(
        "restores",
        sa.Column("restored_s", sa.BigInteger, primary_key=True),
        sa.Column("backup_s", sa.BigInteger, nullable=False),
    )
