"""Where a site's data lies, and the draft of what makes it a study's. No torch."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wardround.errors import BadData
from wardround.signing import canonical

FILES, TEST_FILES = "files", "test_files"


@dataclass(frozen=True)
class Source:
    """A site's files and folders by role; the task that reads them decides which roles it needs.

    A table: ``table`` and perhaps ``test``. Arrays (.npz): ``arrays`` and perhaps ``test``. Folders of images:
    ``images`` with ``labels`` (CSV) or ``masks``, and perhaps ``test_images`` with theirs, ``test_labels`` or
    ``test_masks``. Of a data set of one's own: ``files``, a file or a folder, and perhaps ``test_files``.

    Attributes:
        label: the column of the class in this site's files; "" for the study's own.
        patient: the column of the patient; "" for the study's own, or one row a patient.
        image: the column of a file's name, in a table beside a folder; "" for the study's own.
    """

    paths: Mapping[str, Path]
    label: str = ""
    patient: str = ""
    image: str = ""

    def path(self, role: str) -> Path:
        """What lies under ``role``.

        Raises:
            BadData: nothing was named.
        """
        if role not in self.paths:
            given = ", ".join(sorted(self.paths)) or "nothing"
            raise BadData(f"the study needs `{role}` of this site's data, found {given}")
        return self.paths[role]


@dataclass(frozen=True)
class Draft:
    """A mapping file to be edited.

    Attributes:
        columns: how many columns the study reads.
        as_they_are: how many of them need no mapping.
        open: how many a person must fill in.
    """

    text: str
    columns: int
    as_they_are: int
    open: int


def files_digest(source: Source) -> str:
    """What a site's approval pins (hex), from every file of ``source`` as it is now, whoever can read them.

    Raises:
        BadData: one cannot be read.
    """
    digests = {role: _digests(path) for role, path in sorted(source.paths.items())}
    return canonical.digest({"files": digests, "label": source.label, "patient": source.patient, "image": source.image})


def _digests(path: Path) -> list[list[str]]:
    """[name, SHA-256] of a file, or of each below a folder, by name."""
    try:
        if not path.is_dir():
            return [["", _sha256(path)]]
        below = sorted(Path(at, name) for at, _, names in os.walk(path, onerror=_raise) for name in names)
        return [[file.relative_to(path).as_posix(), _sha256(file)] for file in below]
    except OSError as error:
        raise BadData(f"{error.filename}: {error.strerror}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _raise(error: OSError) -> None:
    raise error
