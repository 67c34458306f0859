"""All rows of one database in another: to a SQLite file (a backup, whatever the store), and from one into a server."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from coordinator.storage import sqlite
from wardround.local.durable import remove

OWN = ("alembic_version", "leadership")  # of each database, never of another
ROWS = 500  # in memory at a time


def copy_to_file(source: sa.Connection, path: Path, schema: str) -> None:
    """Write the rows of ``source``, whose tables are those of ``schema``, to a new SQLite file: whole, and durable."""
    partial = path.with_name(f".{path.name}.rows")
    try:
        _clear(partial)
        sqlite.migrate(partial, schema)
        engine = sa.create_engine(f"sqlite:///{partial}")
        with engine.begin() as target:
            _copy(source, target, _tables(target))
        engine.dispose()
        made = sqlite3.connect(partial)
        try:
            sqlite.copy_database(made, path)
        finally:
            made.close()
    finally:
        _clear(partial)


def copy_from_file(path: Path, target: sa.Connection) -> None:
    """Put the rows of a SQLite file into the empty tables of ``target``, which has the same schema."""
    engine = sa.create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    try:
        with engine.connect() as source:
            _copy(source, target, _tables(source))
    finally:
        engine.dispose()


def _tables(connection: sa.Connection) -> Iterator[sa.Table]:
    """The tables of a SQLite file, each after those that it refers to."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return (table for table in metadata.sorted_tables if table.name not in OWN)


def _copy(source: sa.Connection, target: sa.Connection, tables: Iterator[sa.Table]) -> None:
    for table in tables:
        rows = source.execution_options(yield_per=ROWS).execute(sa.select(table))
        for page in rows.mappings().partitions():
            target.execute(table.insert(), [dict(row) for row in page])


def _clear(partial: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        remove(partial.with_name(partial.name + suffix))
