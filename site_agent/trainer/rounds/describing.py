"""What a study would do at this site, before anybody approved it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from fl_algorithms.server.secure_study import averages
from fl_algorithms.tasks.base import Classifies, OwnSizes, Split, Task, samples
from site_agent.trainer.data import changes
from site_agent.trainer.data.sources import source as source_of
from site_agent.trainer.rounds.installing import Studies
from site_agent.trainer.rounds.reading import load, weights_of
from wardround.records.trainer import Check, Checked, Describe, Described, PrivateTensor, TensorRow
from wardround.tensors.manifests import TensorSpec


def described(state: Path, studies: Studies, request: Describe) -> Described:
    """The tensors that would be uploaded and downloaded, and those that are private; reads no patient.

    Raises:
        UsageProblem: there is no data of that name.
        BadData: the study is not for the programs installed here, or the weights are no file for its network.
    """
    source = source_of(state, request.data) if request.data else None
    study = studies.at(request.study, request.site, "" if source is None else source.network)
    partition = study.partition
    private = [
        PrivateTensor(name=kept.name, dtype=kept.dtype, shape=list(kept.shape), bytes=kept.bytes, why=kept.why)
        for kept in partition.private
    ]
    return Described.model_validate({
        "upload": [_row(spec) for spec in partition.upload], "download": [_row(spec) for spec in partition.download],
        "private": private, "exposure": partition.exposure, "personalized": partition.personalized,
        "network": study.network, "model": study.own.model.name, "parameters": partition.parameters,
        "weights": None if source is None else weights_of(study, source), "averages": averages(study.file),
    })  # fmt: skip


def checked(state: Path, studies: Studies, request: Check) -> Checked:
    """Read a hospital's data as a study would.

    Raises:
        BadData: it is not what the study needs; code DECLINED_DATA_INVALID. Or the public data set is not the study's,
            or the weights are no file for its network.
    """
    name = request.data
    source = source_of(state, name)
    status = changes.stat(source).status  # before it is read: what is changed meanwhile differs from then on
    study = studies.at(request.study, request.site, source.network)
    data = load(study, name, source)
    warnings = list(data.warnings)
    if data.digest != source.digest:
        warnings.append(f"the files of `{name}` have changed since `data add`; approving pins them as they are now")
    parts = (data.validation,) if study.evaluates else (data.train, data.validation)
    return Checked.model_validate({
        "digest": data.digest, "rows": sum(map(samples, parts)),
        "train_rows": 0 if study.evaluates else samples(data.train),
        "validation_rows": samples(data.validation), "test_rows": None if data.test is None else samples(data.test),
        "gives": study.file.task.row.gives,
        "classes": _counts(study.task, parts),
        "common": "" if data.public_data is None or (pinned := study.file.public_data) is None else pinned.digest,
        "weights": weights_of(study, source), "status": status, "warnings": warnings,
    })  # fmt: skip


def _row(spec: TensorSpec) -> TensorRow:
    return TensorRow(bundle=spec.bundle, name=spec.name, dtype=spec.dtype, shape=list(spec.shape), bytes=spec.bytes)


def _counts(task: Task, parts: Sequence[Split]) -> dict[str, int]:
    """How many rows, or images, are of each kind; of masks, how many have a pixel of it."""
    whole = [part.x for part in parts if isinstance(part.x, OwnSizes)]
    if not whole or not isinstance(task, Classifies):
        return task.counts(torch.cat([part.y for part in parts]))
    seen = (torch.cat([images.pixels_by_class for images in whole]) > 0).sum(0)
    return {name: int(count) for name, count in zip(task.classes, seen, strict=True)}
