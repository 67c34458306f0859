"""Where a site's data lies. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wardround.errors import BadData


@dataclass(frozen=True)
class Source:
    """A site's files and folders by role; the task that reads them decides which roles it needs.

    A table: ``table`` and perhaps ``test``. Arrays (.npz): ``arrays`` and perhaps ``test``. Folders of images:
    ``images`` with ``labels`` (CSV) or ``masks``, and perhaps ``test_images`` with theirs, ``test_labels`` or
    ``test_masks``.

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
