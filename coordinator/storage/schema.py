"""The schema of a database: which one it has, the newest one, and the way to it by the migrations beside this file.

Alembic is imported where a schema is changed, and by nothing else: a service that serves does without it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from wardround.errors import NeedsPerson

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).parent / "migrations"


def schemas() -> list[str]:
    """Those that this program knows, oldest first. A migration's file begins with the one that it leads to."""
    return sorted(path.stem.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def newest_schema() -> str:
    """The schema that this program works with."""
    return schemas()[-1]


def schema_of(connection: sa.Connection) -> str | None:
    """The schema of a database, as Alembic keeps it; None of one that has none."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars()
    return " and ".join(sorted(found)) or None


def migrate(connection: sa.Connection, to: str = "head") -> None:
    """Bring a database to a schema, in the transaction of ``connection``."""
    from alembic import command

    configuration = alembic_config()
    configuration.attributes["connection"] = connection
    command.upgrade(configuration, to)


def refuse_newer(name: object, present: str) -> None:
    """Raises NeedsPerson: a newer program wrote the database ``name``."""
    if present not in schemas():
        raise NeedsPerson(
            f"{name} has schema {present}, which this program does not know: a newer one wrote it",
            hint="install the newer version again, or put the copy back that its `coordinator upgrade` kept beside it",
        )


def alembic_config() -> "Config":
    from alembic.config import Config

    configuration = Config()
    configuration.set_main_option("script_location", str(MIGRATIONS))
    configuration.set_main_option("path_separator", "os")
    return configuration
