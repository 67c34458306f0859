"""What the coordinator needs for a method that distils here: torch beside it, and its own copy of the common set."""

import hashlib
from pathlib import Path

from coordinator.storage.blobs import Blobs
from fl_algorithms import catalog
from fl_algorithms.server.feddf import require_torch
from wardround.errors import BadData
from wardround.local import durable
from wardround.records.study import StudyFile

SUFFIXES = (".csv", ".npz")


def prepare(study: StudyFile, blobs: Blobs, common: Path | None) -> None:
    """Keep a copy of the study's common set, if its method distils at the coordinator.

    Raises:
        BadData: torch or the set is missing, or ``common`` is not the study's or not a file that can be kept; or the
            study has no use for one.
    """
    name = study.algorithm.name
    if not distils(study):
        if common is not None:
            raise BadData(f"algorithm `{name}` does not distil at the coordinator, so it takes no common set here")
        return
    assert study.common is not None
    require_torch(name)
    if copy_of(study, blobs) is not None:
        return
    again = f"`coordinator study create STUDY.toml --common PATH` with the set of study `{study.study.name}`"
    if common is None:
        raise BadData(f"algorithm `{name}` distils at the coordinator, which has no copy of the common set", hint=again)
    if common.suffix.lower() not in SUFFIXES:
        raise BadData(f"{common}: the coordinator keeps a common set that is one .csv or .npz file", hint=again)
    try:
        data = common.read_bytes()
    except OSError as error:
        raise BadData(f"{common}: {error.strerror}", hint=again) from None
    found, wanted = hashlib.sha256(data).hexdigest(), study.common.digest
    if found != wanted:
        raise BadData(
            f"{common} is not the common set of study `{study.study.name}`: its digest is {found[:12]}…, the study's "
            f"is {wanted[:12]}…",
            hint=again,
        )
    durable.make_folder(blobs.common)
    durable.write_file(blobs.common / f"{wanted}{common.suffix.lower()}", data)


def copy_of(study: StudyFile, blobs: Blobs) -> Path | None:
    """The copy that ``prepare`` kept; None where the study needs none, or has none."""
    if not distils(study) or study.common is None:
        return None
    paths = [blobs.common / f"{study.common.digest}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if path.exists()), None)


def distils(study: StudyFile) -> bool:
    """Whether the study's method distils at the coordinator."""
    return catalog.method(study).common == catalog.COORDINATOR
