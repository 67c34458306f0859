"""Each certificate has the root that stands behind it; "" where that was not recorded."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("certificates") as certificates:
        certificates.add_column(sa.Column("root", sa.String(64), nullable=False, server_default=""))
