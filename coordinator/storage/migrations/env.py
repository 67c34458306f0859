"""Alembic's way in: the caller hands over the connection, and its transaction."""

from alembic import context

from coordinator.storage.database import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
