"""The names under which files are only being written, each beside its place: whoever finds one knows what it is."""

import os
import re
import threading
from pathlib import Path

Names = re.Pattern[str]
ANY: Names = re.compile(".+")
_TEMPORARY = re.compile(r"\.(.+)\.\d+\.\d+\.tmp")  # of ``beside``


def beside(path: Path) -> Path:
    """Where this thread writes what will be ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def is_half_written(path: Path) -> bool:
    """Whether a file is only being written under this name, or was when its process was killed."""
    return becomes(path) is not None


def becomes(path: Path) -> str | None:
    """The name that a half-written file would have had in the end; None: it is not half written."""
    found = _TEMPORARY.fullmatch(path.name)
    return found[1] if found is not None else None
