"""Whose failure an error is: one study's, or the machine's."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DatabaseError

from wardround.errors import CannotWrite, TryAgain, WardroundError


class StudyFailed(Exception):
    """A step of one study failed in what is that study's alone."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@contextmanager
def blamed() -> Iterator[None]:
    """What fails inside is the study's. Database and disk are not: ``Store`` says what becomes of their errors.

    Raises:
        StudyFailed: with the error that it was.
        CannotWrite, TryAgain, DatabaseError: as they come.
    """
    try:
        yield
    except (CannotWrite, TryAgain, DatabaseError):
        raise
    except Exception as error:
        raise StudyFailed(error) from error


def reason_of(error: Exception) -> str:
    """An error in words that may stand in a study's status."""
    return error.message if isinstance(error, WardroundError) else f"{type(error).__name__}; its log says more"
