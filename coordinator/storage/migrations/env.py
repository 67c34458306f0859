"""Alembic's way in: the caller hands over the connection, and its transaction."""

from alembic import context

from coordinator.storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
context.run_migrations()
