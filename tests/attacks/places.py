"""A coordinator in the test's own process for the attacks on it, and what its attackers have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.coordinator.conftest import Place


@contextmanager
def placed(folder: Path) -> Iterator[Place]:
    """A coordinator on loopback with nobody in it yet."""
    place = Place(folder)
    try:
        yield place
    finally:
        place.close()
