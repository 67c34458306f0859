"""The schema of a database: which one it has, the newest one, and the way to it by the migrations beside this file."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from wardround.errors import NeedsPerson


def newest_schema() -> str:
    """The schema that this program works with."""
    return str(ScriptDirectory.from_config(alembic_config()).get_current_head())


def schema_of(connection: sa.Connection) -> str | None:
    """The schema of a database; None of one that has none."""
    return MigrationContext.configure(connection).get_current_revision()


def migrate(connection: sa.Connection, to: str = "head") -> None:
    """Bring a database to a schema, in the transaction of ``connection``."""
    configuration = alembic_config()
    configuration.attributes["connection"] = connection
    command.upgrade(configuration, to)


def refuse_newer(name: object, present: str) -> None:
    """Raises NeedsPerson: a newer program wrote the database ``name``."""
    if present not in {row.revision for row in ScriptDirectory.from_config(alembic_config()).walk_revisions()}:
        raise NeedsPerson(
            f"{name} has schema {present}, which this program does not know: a newer one wrote it",
            hint="install the newer version again, or put the copy back that its `coordinator upgrade` kept beside it",
        )


def alembic_config() -> Config:
    configuration = Config()
    configuration.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    configuration.set_main_option("path_separator", "os")
    return configuration
