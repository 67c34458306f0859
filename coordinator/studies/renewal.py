"""A new revision of a study that goes on from a model that is here, where its rounds cannot go on by themselves.

After a restore the coordinator is behind its sites: their private parts and receipts are of rounds that it does not
know. A new revision is the same study to everybody. It begins with the newest model that is whole here, and each
hospital approves it once.
"""

import os
from dataclasses import dataclass

from coordinator.storage.blobs import Blobs, DamagedModel
from coordinator.studies.study import Study
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile, ViewFile
from wardround.tensors.manifests import Manifest


@dataclass(frozen=True)
class Renewed:
    """The study of a new revision, its initial model, which is durable, and the round of the old one that made it."""

    file: ResolvedStudy
    manifest: Manifest
    model: int


def renewed(study: Study, blobs: Blobs, file: ResolvedStudy | None = None, *, all_rounds: bool = False) -> Renewed:
    """What a new revision of ``study`` is.

    Its rounds are those that were left, where the study's other settings allow it; else as many as at first.

    Args:
        file: the study with other settings, that shares the same tensors; None for the study as it is.
        all_rounds: as many rounds as ``file`` says.

    Raises:
        DamagedModel: not even its first model is whole.
    """
    number, keys, digest = _newest_whole(study, blobs)
    with (
        TensorFile(blobs.whole_model(digest)) as kept,
        blobs.new_model(study.shared, f"renewed-{study.name}-{os.getpid()}") as new,
    ):
        for _, data in ViewFile(kept, keys).chunks():
            new.write(data)
        manifest = new.keep()
    new_file = file or study.resolved
    left = max(1, new_file.study.rounds - number)
    return Renewed(new_file if all_rounds else _with_rounds(new_file, left), manifest, number)


def _newest_whole(study: Study, blobs: Blobs) -> tuple[int, tuple[str, ...], str]:
    """The number of the newest whole model, the keys of the tensors in it that the sites share, and its digest."""
    shared = tuple(spec.key for spec in study.shared)
    candidates = [(0, study.initial)]
    if _keeps_one_model(study):
        best = [(study.best.round, study.best_digest)] if study.best.round is not None else []
        candidates = [(study.state.models, study.newest), *best, *candidates]
    for number, digest in candidates:
        try:
            blobs.whole_model(digest, again=True)
        except DamagedModel:
            if digest == study.initial:
                raise
            continue
        return number, shared, digest
    raise AssertionError("the first model is a candidate")


def _keeps_one_model(study: Study) -> bool:
    """Whether what is kept has each shared tensor as all sites share it."""
    kept = {item.spec.key: item for item in study.aggregator.keeps}
    return all(
        spec.key in kept and kept[spec.key].spec == spec and kept[spec.key].source == spec.key for spec in study.shared
    )


def _with_rounds(file: ResolvedStudy, rounds: int) -> ResolvedStudy:
    document = file.document()
    document["study"]["rounds"] = rounds
    try:
        return resolve(StudyFile.from_document(document), source=file.study.name)
    except BadData:
        return file
