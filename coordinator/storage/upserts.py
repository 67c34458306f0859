"""Rows that are inserted, or changed where they are: SQL that both databases have, and SQLAlchemy makes for each alone.

A statement is made at its first use, so that a coordinator on a file does not hold what speaks to a server.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage.database import changed

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

    Insert = sqlite.Insert | postgresql.Insert


class Upsert:
    """A statement for whichever database a session is of.

    Args:
        table: whose rows are meant.
        make: completes an ``INSERT`` into it.
    """

    def __init__(self, table: type[object], make: "Callable[[Insert], sa.Insert]") -> None:
        self._table = table
        self._make = make

    def run(self, session: Session, **values: object) -> None:
        """Run it with ``values`` for its parameters."""
        changed(session, self._sqlite if session.get_bind().dialect.name == "sqlite" else self._postgresql, **values)

    @cached_property
    def _sqlite(self) -> sa.Insert:
        from sqlalchemy.dialects.sqlite import insert

        return self._make(insert(self._table))

    @cached_property
    def _postgresql(self) -> sa.Insert:
        from sqlalchemy.dialects.postgresql import insert

        return self._make(insert(self._table))
