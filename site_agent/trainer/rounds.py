"""The trainer's work itself: a study's rounds on this hospital's data, its checkpoints, and predictions.

What is trained and how lives in ``fl_algorithms``; this module brings it the data and the kept state, and puts away
what comes of it. A round ends in this order, so that it can be asked again after a crash at any instant:

    update file in staging ──> checkpoints ──> private state, pending ──> the answer ──> commit or discard
"""

import datetime
import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_algorithms import catalog, registry
from fl_algorithms.client.partition import Partition, describe, task_of
from fl_algorithms.client.session import Checkpoint, Restored, RoundResult, SessionState, SiteSession
from fl_algorithms.client.weights import OwnWeights, own_weights
from fl_algorithms.device import device_for, make_deterministic
from fl_algorithms.hardware import Hardware
from fl_algorithms.resolving import resolve
from fl_algorithms.tasks.base import SiteData, Task
from fl_algorithms.tasks.public_data import read_public_data
from fl_algorithms.training import Progress
from site_agent.handoff import staged
from site_agent.trainer import predictions
from site_agent.trainer import vault as vaults
from site_agent.trainer.data import changes
from site_agent.trainer.data import sources as tables
from site_agent.trainer.tensorfiles import (
    from_bytes,
    manifest_of,
    payload,
    read_downlink,
    require_specs,
    specs_of,
    to_bytes,
    write_update,
)
from site_agent.trainer.vault import Kept, Vault
from wardround import __version__
from wardround.errors import BadData, CannotWrite
from wardround.records.study import StudyFile
from wardround.signing import canonical
from wardround.tensors.manifests import TensorFile, TensorSpec

log = logging.getLogger(__name__)
REMEMBERED_STUDIES = 16
RESERVED_BYTES = 16 * 1024 * 1024  # for the ledger and the logs, beside four times the update


@dataclass(frozen=True)
class _Installed:
    """A study as the programs installed here understand it, at one site that trains one of its networks."""

    file: StudyFile
    own: StudyFile  # the same with that network alone
    network: str  # its label; "" where the study has one network
    digest: str  # of the document alone
    site: str
    task: Task
    partition: Partition


@dataclass(frozen=True)
class _Asked:
    """One round as the gateway asks for it, with what the trainer itself found to go with it."""

    study: _Installed
    study_digest: str
    data_name: str
    vault: Vault
    start: Kept | None
    weights: str  # the approved digest of what the private tensors begin with; "" for as they are drawn


class Rounds:
    """Trains, validates and predicts for one site; keeps the last session and its data in memory between rounds."""

    def __init__(self, state: Path, hardware: Hardware) -> None:
        """Raises UsageProblem: the device is not there, or cannot be used."""
        self._state = state
        self._device = device_for(hardware)
        self._session: tuple[tuple[str, ...], SiteSession] | None = None  # what it continues, and the session
        self._data: tuple[tuple[str, ...], SiteData] | None = None
        self._studies: dict[tuple[str, str, str], _Installed] = {}  # by digest, site and chosen network

    def warm_up(self) -> None:
        """Take one step with an optimizer: torch imports its compiler's front (a second) with the first one."""
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.sum().backward()  # type: ignore[no-untyped-call]
        torch.optim.AdamW([weight], fused=True).step()

    def device(self) -> dict[str, Any]:
        """Where rounds are trained. Predictions are made on the CPU, so that they are the same from every command."""
        return {"device": self._device.name}

    def describe(self, document: Any, site: str, name: str = "") -> dict[str, Any]:
        """The tensors of a study that would leave, that come, and that stay and why; who has this site's own model.

        ``name``: of the data, which may choose the network and name weights; without it, what is assigned to the site.
        """
        source = tables.source(self._state, name) if name else None
        study = self._installed(document, site, "" if source is None else source.network)
        partition = study.partition
        stays = [
            {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "bytes": s.bytes, "why": s.why}
            for s in partition.private
        ]
        return {
            "leaves": _rows(partition.upload), "comes": _rows(partition.download), "stays": stays,
            "exposure": partition.exposure, "apart": partition.personalized, "network": study.network,
            "model": study.own.model.name, "parameters": partition.parameters,
            "weights": None if source is None else self._weights(study, source),
        }  # fmt: skip

    def check(self, document: Any, site: str, name: str) -> dict[str, Any]:
        """Read a hospital's data as a study would.

        Raises:
            BadData: it is not what the study needs; code DECLINED_DATA_INVALID. Or the public data set is not the
                study's, or the weights are no file for its network.
        """
        source = tables.source(self._state, name)
        seen = changes.at(source)  # before it is read: what is changed meanwhile is another from then on
        study = self._installed(document, site, source.network)
        data = self._load(study, name, source)
        warnings = list(data.warnings)
        if data.digest != source.digest:
            warnings.append(f"the files of `{name}` have changed since `data add`; approving pins them as they are now")
        labels = torch.cat([data.train.y, data.validation.y])
        classes = study.task.classes
        return {
            "digest": data.digest,
            "rows": len(labels),
            "train_rows": len(data.train),
            "validation_rows": len(data.validation),
            "test_rows": None if data.test is None else len(data.test),
            "gives": catalog.task(study.file).gives,
            "classes": dict(zip(classes, _counts(labels, len(classes)), strict=True)),
            "common": "" if data.public_data is None or (pinned := study.file.public_data) is None else pinned.digest,
            "weights": self._weights(study, source),
            "seen": {"data": seen["data"], "weights": seen["weights"]},
            "warnings": warnings,
        }

    def train(self, request: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """One training round. Asked again before it is decided, it gives the same update, trained anew only if need be.

        Raises:
            BadData: DECLINED_DATA_CHANGED, DECLINED_DATA_INVALID or DECLINED_MODEL_MISMATCH.
            CannotWrite: there is no room for the update; DECLINED_RESOURCES.
            NeedsPerson: the private state is damaged; DECLINED_TRAINING_FAILED.
        """
        return self._round(request, progress)

    def validate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The closing round: judge the last model, keep it as a checkpoint, tell the metrics. Raises as ``train``."""
        return self._round(request, None)

    def finish(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The study has ended: keep the best global model, and write into the cards who contributed."""
        study = self._approved_study(request)
        vault = Vault(self._state, study.file.study.name, request["revision"])
        if request["best"] is not None and request["best_round"] is not None:
            vault.open(request["study_digest"], request["study"])
            start = vault.start_of(study.file.study.rounds + 2)
            asked = _asked(study, request, vault, start)
            data = self._approved(asked, request["data"]["digest"])
            path = staged(self._state, request["best"])
            with TensorFile(path) as file:
                digest = request.get("best_digest") or file.manifest().digest()
            specs, downlink = read_downlink(path, digest)
            require_specs(specs, study.partition.download, "the best global model")
            session = self._resume(asked, data)  # and not kept: it holds the best model now, not the last
            for checkpoint in session.finish(request["best_round"], downlink):
                self._keep(asked, checkpoint, data)
        if request.get("contributors"):
            vault.name_contributors(request["contributors"], request.get("capped", {}), request.get("left_out", {}))
        return {"checkpoints": [checkpoint.row() for checkpoint in vault.checkpoints()]}

    def predict(
        self, name: str, kind: str, given: Mapping[str, Path], out: Path, *, force: bool = False
    ) -> dict[str, Any]:
        """Write what a checkpoint says of new rows or images: see ``predictions``.

        Args:
            given: one of ``kinds.PREDICTABLE`` and what lies there.
            force: replace what is at ``out``.

        Raises:
            UsageProblem: there is no such checkpoint, or ``out`` is no place for it.
            BadData: the checkpoint is damaged, or the rows or images are not what the study needs.
            CannotWrite: ``out`` does not take it. NotPermitted: it is, or lies in, what is never written over.
        """
        vault, found = vaults.checkpoint(self._state, name, kind)
        vaults.verify_model(found)
        study = catalog.network_of(installed(vault.document()), found.card["site"], found.card.get("network", ""))
        path = predictions.rows_for(study, given, out, force=force, keep=tables.protected(self._state))
        make_deterministic(study.study.threads)
        task = task_of(study)
        x, names = task.read_new(path, found.preprocessing())
        restored = Restored(study, task, from_bytes(found.model.read_bytes()))
        predictions.write(restored, task, x, names, path, out, force=force)
        return {"rows": len(names), "out": str(out)}

    def _round(self, request: Mapping[str, Any], progress: Progress | None) -> dict[str, Any]:
        # 1. The study as it is installed here, and the state that the round starts from.
        study, number = self._approved_study(request), request["round"]
        name = study.file.study.name
        vault = Vault(self._state, name, request["revision"])
        vault.open(request["study_digest"], request["study"])
        asked = _asked(study, request, vault, vault.start_of(number))

        # 2. The data that was approved.
        data = self._approved(asked, request["data"]["digest"])

        # 3. The model that was announced, with the tensors that the installed method begins with and no others.
        specs, base = read_downlink(staged(self._state, request["base"]), request["base_digest"])
        require_specs(specs, study.partition.download, "the downloaded model")

        # 4. What an earlier request of the same has given already.
        seed = {
            "command": request["command"],
            "base_digest": request["base_digest"],
            "data_digest": data.digest,
            "start": "" if asked.start is None else asked.start.folder,
            **({"network": study.network} if study.network else {}),
            **({"weights": asked.weights} if asked.weights else {}),
        }
        answer = vault.pending(number, seed)
        if answer is not None and self._is_whole(answer):
            return _told(answer)

        # 5. The round.
        session = self._resume(asked, data)
        if progress is None:
            result = session.validate(number, base)
            answer = _numbers(study.file, result)
        else:
            leaves = study.partition.upload
            self._require_room(sum(spec.bytes for spec in leaves))
            result = session.train(number, base, progress)
            update = f"update-{name}-{vault.revision}-{number}.safetensors"
            digest = write_update(staged(self._state, update), result.uplink, leaves)
            answer = {"update": update, "update_digest": digest, **_numbers(study.file, result)}

        # 6. What stays here.
        for checkpoint in result.checkpoints:
            self._keep(asked, checkpoint, data)
        exported = session.export_state()
        meta = {**exported.meta, "network": study.network} if study.network else exported.meta
        kept = vault.keep_pending(number, to_bytes(exported.tensors), meta, seed, answer)
        self._session = (_key(asked, data, kept), session)
        return _told(answer)

    def _approved_study(self, request: Mapping[str, Any]) -> _Installed:
        """The study of a request, with the network that a person approved."""
        return self._installed(request["study"], request["site"], request["data"].get("network", ""))

    def _installed(self, document: Any, site: str, chosen: str) -> _Installed:
        """The study at ``site``; building its networks to see what they share is done once."""
        digest = canonical.digest(document)
        key = (digest, site, chosen)
        if key not in self._studies:
            study = installed(document)
            if len(self._studies) >= REMEMBERED_STUDIES:
                self._studies.clear()
            own = catalog.network_of(study, site, chosen)
            label = _label(study, site, chosen)
            partition = describe(study, site, chosen)
            self._studies[key] = _Installed(study, own, label, digest, site, task_of(own), partition)
        return self._studies[key]

    def _approved(self, asked: _Asked, approved: str) -> SiteData:
        """The data, which must be what a person approved; read anew only when another study had its turn."""
        source = tables.source(self._state, asked.data_name)
        name = asked.study.file.study.name
        network = _label(asked.study.file, asked.study.site, source.network)
        tables.must_be_approved_network(name, asked.data_name, asked.study.network, network)
        tables.must_be_approved(name, asked.data_name, approved, tables.digest_now(source))
        if _needs_public_data(asked.study.file):
            tables.public_data_of(asked.study.file, asked.data_name, source)
        key = (asked.study.digest, asked.study.site, canonical.digest(source.model_dump()), approved)
        if self._data is None or self._data[0] != key:
            data = self._load(asked.study, asked.data_name, source)
            tables.must_be_approved(name, asked.data_name, approved, data.digest)
            self._data = (key, data)
        return self._data[1]

    def _load(self, study: _Installed, name: str, source: tables.DataSource) -> SiteData:
        path = tables.public_data_of(study.file, name, source) if _needs_public_data(study.file) else None
        try:
            data = study.task.load(
                source.files, site=study.site, seed=study.file.study.seed,
                validation_fraction=study.file.checkpoints.validation_fraction,
            )  # fmt: skip
            return data if path is None else replace(data, public_data=read_public_data(study.file, study.task, path))
        except BadData as error:
            raise BadData(error.message, hint=error.hint, code=tables.DATA_INVALID) from None

    def _resume(self, asked: _Asked, data: SiteData) -> SiteSession:
        """The session as it was after the state that the round starts from: the one in memory, or the vault's.

        It is taken out of memory, so that a round which fails halfway leaves nothing behind.
        """
        warm, self._session = self._session, None
        if warm is not None and warm[0] == _key(asked, data, asked.start):
            return warm[1]
        state = None
        if asked.start is not None:
            stored = asked.vault.load(asked.start)
            if stored.meta.get("network", "") == asked.study.network:
                state = SessionState(from_bytes(stored.tensors), stored.meta)
            else:
                log.warning(
                    "study `%s`: this site trains network `%s` from here on and begins anew; what it kept was of `%s`",
                    asked.study.file.study.name, asked.study.network, stored.meta.get("network", ""),
                )  # fmt: skip
        own = None if state is not None else self._begin(asked)
        return SiteSession(asked.study.own, asked.study.site, asked.study.task, data, state, own, self._device)

    def _begin(self, asked: _Asked) -> dict[str, torch.Tensor] | None:
        """The private tensors that a person approved to begin with; None for as they are drawn.

        Raises:
            BadData: the file is not what was approved, or not what the network needs.
        """
        source, name = tables.source(self._state, asked.data_name), asked.study.file.study.name
        must = partial(tables.must_be_approved_weights, name, asked.data_name, asked.weights)
        must(tables.weights_now(source))
        if source.weights is None:
            return None
        found = _own(asked.study, source.weights)
        must(found.digest)
        return found.tensors

    def _weights(self, study: _Installed, source: tables.DataSource) -> dict[str, Any] | None:
        """What the file of weights holds for the study's private tensors; None where the data names none."""
        if source.weights is None:
            return None
        found = _own(study, source.weights)
        return {
            "digest": found.digest, "used": len(found.tensors), "drawn": list(found.drawn),
            "unused": list(found.unused),
        }  # fmt: skip

    def _keep(self, asked: _Asked, checkpoint: Checkpoint, data: SiteData) -> None:
        specs = specs_of(checkpoint.tensors)
        card = {
            "study": asked.study.file.study.name,
            "revision": asked.vault.revision,
            "study_digest": asked.study_digest,
            "site": asked.study.site,
            **({"network": asked.study.network} if asked.study.network else {}),
            "kind": checkpoint.kind,
            "round": checkpoint.round,
            "score": _finite(checkpoint.score),
            "metric": checkpoint.metric,
            "split": checkpoint.split,
            "scores": {name: _finite(score) for name, score in checkpoint.scores.items()},
            "val_loss": _finite(checkpoint.val_loss),
            "model_digest": manifest_of(checkpoint.tensors, specs).digest(),
            "data_digest": data.digest,
            "contributors": None,  # known when the study has ended
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "wardround": __version__,
            "torch": torch.__version__,
            "device": self._device.name,
            "threads": torch.get_num_threads(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
        }
        fitted = asked.study.task.fitted(data)
        preprocessing = json.dumps(fitted, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False).encode()
        asked.vault.keep_checkpoint(card, specs, payload(checkpoint.tensors, specs), preprocessing)

    def _is_whole(self, answer: dict[str, Any]) -> bool:
        """Whether the update that ``answer`` names still lies in staging, bit for bit."""
        if "update" not in answer:
            return True
        path = staged(self._state, answer["update"])
        if not path.exists():
            return False
        try:
            with TensorFile(path) as file:
                return file.manifest().digest() == str(answer["update_digest"])
        except BadData:
            return False  # cut short or overwritten: the round is trained again, to the same bits

    def _require_room(self, update_bytes: int) -> None:
        """Fail before the training and not after it.

        Raises:
            CannotWrite: the disk has no room for what the round will write.
        """
        wanted = 4 * update_bytes + RESERVED_BYTES
        for folder in (self._state / "staging", self._state / "studies"):
            free = shutil.disk_usage(folder).free
            if free < wanted:
                raise CannotWrite(
                    f"{folder} has {free >> 20} MiB free, a round needs {wanted >> 20} MiB",
                    hint="make room on that disk",
                    code="DECLINED_RESOURCES",
                )


def installed(document: Any) -> StudyFile:
    """The study of a resolved document, as the programs installed here understand it.

    Raises:
        BadData: it names something that is not installed, or means something else here.
    """
    study = resolve(StudyFile.from_document(document))
    if study.document() != document:
        raise BadData(
            f"study `{study.study.name}` was written for another version of the installed task, network or method",
            hint="compare `site-agent --version` with the coordinator's",
            code="DECLINED_MODEL_MISMATCH",
        )
    return study


def _counts(y: torch.Tensor, classes: int) -> list[int]:
    """How many rows are of each class; of masks, how many have a pixel of it."""
    if y.ndim == 1:
        return [int(count) for count in torch.bincount(y, minlength=classes)]
    return [int((y == place).flatten(1).any(1).sum()) for place in range(classes)]


def _needs_public_data(study: StudyFile) -> bool:
    return catalog.method(study).public_data == registry.SITES


def _label(study: StudyFile, site: str, chosen: str) -> str:
    """What the site's network is called; "" where the study has one network. Raises BadData: not allowed."""
    return catalog.network_label(study, site, chosen) if study.networks or chosen else ""


def _own(study: _Installed, path: str) -> OwnWeights:
    """Raises BadData: they do not fit; DECLINED_DATA_INVALID."""
    try:
        return own_weights(study.own, study.site, Path(path))
    except BadData as error:
        raise BadData(error.message, hint=error.hint, code=tables.DATA_INVALID) from None


def _asked(study: _Installed, request: Mapping[str, Any], vault: Vault, start: Kept | None) -> _Asked:
    data = request["data"]
    return _Asked(study, request["study_digest"], data["name"], vault, start, data.get("weights", ""))


def _rows(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
    return [
        {"bundle": s.bundle, "name": s.name, "dtype": s.dtype, "shape": list(s.shape), "bytes": s.bytes} for s in specs
    ]


def _key(asked: _Asked, data: SiteData, state: Kept | None) -> tuple[str, ...]:
    """What a session continues. A state's folder is named by its content."""
    start = "" if state is None else state.folder
    return (str(asked.vault.folder), asked.study_digest, asked.study.site, asked.study.network, data.digest, start)


def _numbers(study: StudyFile, result: RoundResult) -> dict[str, Any]:
    """What may be told of a round beside the tensors, in the form that the study says."""
    told = study.reported
    return {
        "num_examples": told.count(result.num_examples),
        "num_validation": told.count(result.num_validation),
        "metrics": {name: told.metric(name, result.metrics.get(name)) for name in told.metrics},
    }


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "update_digest"}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
