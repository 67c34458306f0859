"""An index by which a site's refused uploads are counted at each of its openings."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_index("uploads_decided", "uploads", ["site", "decision", "decided_s"])
