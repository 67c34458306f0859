"""A study's common set: whether this file is it, and reading it. The digest needs no torch.

The digest of a file is its SHA-256, as ``sha256sum`` prints it; of a folder, that of the canonical JSON of every file's
name and SHA-256.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from fl_algorithms import catalog
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.signing import canonical

if TYPE_CHECKING:
    from fl_algorithms.tasks.base import Common, Task


def common_digest(path: Path) -> str:
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
    from fl_algorithms.tasks.images.sets import files_in

    return canonical.digest([[name, common_digest(file)] for name, file in files_in(path).items()])


def require_common(study: StudyFile, path: Path, hint: str) -> None:
    """Refuse a set other than the study's.

    Args:
        hint: what whoever holds ``path`` can do.

    Raises:
        BadData: it cannot be read, or its digest is not the study's.
    """
    assert study.common is not None
    found = common_digest(path)
    if found != study.common.digest:
        raise BadData(
            f"{path} is not the common set of study `{study.study.name}`: its digest is {found[:12]}…, the study's is "
            f"{study.common.digest[:12]}…",
            hint=hint,
        )


def read_common(study: StudyFile, task: "Task", path: Path) -> "Common":
    """The set as the study's task reads it, with classes if the method needs them. Whether it is the study's, is
    ``require_common``'s question.

    Raises:
        BadData: it is not what the task needs, or has another number of rows than [common] says.
    """
    from fl_algorithms.tasks.base import ReadsCommon

    if not isinstance(task, ReadsCommon):
        raise BadData(f"task `{study.task.name}` reads no common set")
    _, _, settings = catalog.settings_of(study)
    common = task.read_common(path, labelled=settings.labelled)
    if study.common is not None and len(common.x) != study.common.rows:
        raise BadData(
            f"{path}: {len(common.x)} rows, [common] of study `{study.study.name}` says {study.common.rows}",
            hint="`fl-lab common STUDY.toml PATH` prints what belongs there",
        )
    return common
