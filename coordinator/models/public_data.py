"""What a method needs that distills at the coordinator: torch beside it, and a copy of the study's public data set."""

import hashlib
from pathlib import Path

from coordinator.storage.blobs import Blobs
from fl_algorithms.methods.feddf.server import require_torch
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.local import durable

SUFFIXES = (".csv", ".npz")


def prepare(study: ResolvedStudy, blobs: Blobs, path: Path | None) -> None:
    """Keep a copy of the study's public data set, if its method distills at the coordinator.

    Raises:
        BadData: torch or the set is missing, or ``path`` is not the study's or not a file that can be kept; or the
            study has no use for one.
    """
    name = study.file.algorithm.name
    if not study.distills:
        if path is not None:
            raise BadData(
                f"algorithm `{name}` does not distill at the coordinator, so it takes no public data set here"
            )
        return
    assert study.public_data is not None
    require_torch(name)
    if (kept := _kept(study, blobs)) is not None and _digest(kept) == study.public_data.digest:
        return
    again = f"`coordinator study create STUDY.toml --public-data PATH` with the set of study `{study.study.name}`"
    if path is None:
        message = f"algorithm `{name}` distills at the coordinator, which has no copy of the public data set"
        raise BadData(message, hint=again)
    if path.suffix.lower() not in SUFFIXES:
        raise BadData(f"{path}: the coordinator keeps a public data set that is one .csv or .npz file", hint=again)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint=again) from None
    digest, wanted = hashlib.sha256(data).hexdigest(), study.public_data.digest
    if digest != wanted:
        raise BadData(
            f"{path} is not the public data set of study `{study.study.name}`: "
            f"its digest is {digest[:12]}…, the study's is {wanted[:12]}…",
            hint=again,
        )
    durable.make_folder(blobs.public_data)
    copy = blobs.public_data / f"{wanted}{path.suffix.lower()}"
    durable.write_file(copy, data)
    blobs.share(copy)


def copy_of(study: ResolvedStudy, blobs: Blobs) -> Path | None:
    """The copy that ``prepare`` kept, hashed again; None where the study needs none, or has none.

    Raises:
        BadData: it is damaged.
    """
    path = _kept(study, blobs)
    if path is not None and study.public_data is not None and _digest(path) != study.public_data.digest:
        raise BadData(
            f"{path} no longer has the digest of its name",
            hint="check the disk; `coordinator study create STUDY.toml --public-data PATH` with the same study keeps "
            "it anew, then `coordinator study start`",
        )
    return path


def _kept(study: ResolvedStudy, blobs: Blobs) -> Path | None:
    if not study.distills or study.public_data is None:
        return None
    paths = [blobs.public_data / f"{study.public_data.digest}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if blobs.bring(path)), None)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
