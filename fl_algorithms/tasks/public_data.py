"""A study's public data set: whether this file is it, and reading it. The digest needs no torch.

The digest of a file is its SHA-256, as ``sha256sum`` prints it; of a folder, that of the canonical JSON of every file's
name and SHA-256.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.signing import canonical

if TYPE_CHECKING:
    from fl_algorithms.tasks.base import PublicData, Task


def public_data_digest(path: Path) -> str:
    """SHA-256 (hex) of the set as it lies there now.

    Raises:
        BadData: it cannot be read.
    """
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    from fl_algorithms.tasks.images.files import files_in

    return canonical.digest([[name, public_data_digest(file)] for name, file in files_in(path).items()])


def require_public_data(study: ResolvedStudy, path: Path, hint: str) -> None:
    """Refuse a set other than the study's.

    Args:
        hint: what whoever holds ``path`` can do.

    Raises:
        BadData: it cannot be read, or its digest is not the study's.
    """
    assert study.public_data is not None
    found = public_data_digest(path)
    if found != study.public_data.digest:
        raise BadData(
            f"{path} is not the public data set of study `{study.study.name}`: its digest is {found[:12]}…, the "
            f"study's is {study.public_data.digest[:12]}…",
            hint=hint,
        )


def read_public_data(study: ResolvedStudy, task: "Task", path: Path) -> "PublicData":
    """The set as the study's task reads it, with classes if the method needs them. Whether it is the study's, is
    ``require_public_data``'s question.

    Raises:
        BadData: it is not what the task needs, or has another number of rows than [public_data] says.
    """
    from fl_algorithms.tasks.base import ReadsPublicData

    if not isinstance(task, ReadsPublicData):
        raise BadData(f"task `{study.task.name}` reads no public data set")
    settings = study.method.settings
    try:
        public_data = task.read_public_data(path, labeled=settings.labeled)
    except BadData as error:
        if settings.labeled:
            name = study.method.name
            classes = f"algorithm `{name}` as it is set also needs the classes of these rows: `fl-lab methods {name}`"
            error.hint = f"{error.hint}; {classes}" if error.hint else classes
        raise
    if study.public_data is not None and len(public_data.x) != study.public_data.rows:
        raise BadData(
            f"{path}: {len(public_data.x)} rows, [public_data] of study `{study.study.name}` says "
            f"{study.public_data.rows}",
            hint="`fl-lab public-data STUDY.toml PATH` prints what belongs there",
        )
    return public_data
