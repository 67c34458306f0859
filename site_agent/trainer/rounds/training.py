"""A study's rounds: trained or validated, asked again after a crash, and finished.

What is trained and how lives in ``fl_algorithms``; this module brings it the data and the kept state, and puts away
what comes of it. A round ends in this order, so that it can be asked again after a crash at any instant:

    update file in staging ──> checkpoints ──> private state, pending ──> the answer ──> commit or discard
"""

import datetime
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from fl_algorithms.engine.device import device_for
from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.engine.selection import SELECTED, Kept, selected
from fl_algorithms.engine.session import Checkpoint, RoundResult
from fl_algorithms.engine.training import Progress
from fl_algorithms.rows import VAL_LOSS
from fl_algorithms.tasks.base import SiteData
from site_agent.handoff import staged
from site_agent.trainer.rounds import describing, examining, predictions, programs
from site_agent.trainer.rounds.installing import Installed, Studies
from site_agent.trainer.rounds.sessions import RoundContext, Sessions, encoded
from site_agent.trainer.rounds.tensorfiles import (
    NONE,
    Hashed,
    crc32,
    from_bytes,
    manifest_of,
    payload,
    read_download,
    require_specs,
    specs_of,
    update_name,
    write_update,
)
from site_agent.trainer.vault.cards import Card
from site_agent.trainer.vault.index import Origin, Pending
from site_agent.trainer.vault.states import Vault
from wardround import __version__
from wardround.errors import CannotWrite, NotPermitted
from wardround.records import trainer as records

RESERVED_BYTES = 16 * 1024 * 1024  # for the ledger and the logs, beside four times the update


class Rounds:
    """Trains, validates and predicts for one site."""

    def __init__(self, state: Path, hardware: Hardware) -> None:
        """Raises UsageProblem: the device is not there, or cannot be used."""
        self._state = state
        self._device = device_for(hardware)
        self._studies = Studies()
        self._sessions = Sessions(state, self._device)

    def warm_up(self) -> None:
        """Take one step with an optimizer: torch imports its compiler's front (a second) with the first one."""
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.sum().backward()  # type: ignore[no-untyped-call]
        torch.optim.AdamW([weight], fused=True).step()

    def device(self) -> records.Device:
        """Where rounds are trained. Predictions are made on the CPU, so that they are the same from every command."""
        return records.Device(device=self._device.name)

    def describe(self, request: records.Describe) -> records.Described:
        """As ``describing.described``."""
        return describing.described(self._state, self._studies, request)

    def check(self, request: records.Check) -> records.Checked:
        """As ``describing.checked``."""
        return describing.checked(self._state, self._studies, request)

    def examine(self, request: records.Examine) -> records.Examined:
        """As ``examining.examined``."""
        return examining.examined(self._state, self._studies, request)

    def draft_mapping(self, request: records.DraftMapping) -> records.Drafted:
        """As ``examining.drafted``."""
        return examining.drafted(self._state, self._studies, request)

    def predict(self, request: records.Predict, tell: Callable[[int, int], object]) -> records.Predicted:
        """As ``predictions.predict``."""
        return predictions.predict(self._state, request, tell)

    def write_program(self, request: records.WriteProgram) -> records.Exported:
        """As ``programs.write_program``."""
        return programs.write_program(self._state, request)

    def train(self, request: records.Train, progress: Progress) -> records.Trained:
        """One training round. Asked again before it is decided, it gives the same update, trained anew only if need be.

        Raises:
            NotPermitted: this site only evaluates.
            BadData: DECLINED_DATA_CHANGED, DECLINED_DATA_INVALID or DECLINED_MODEL_MISMATCH.
            CannotWrite: there is no room for the update; DECLINED_RESOURCES.
            NeedsPerson: the private state is damaged; DECLINED_TRAINING_FAILED.
        """
        study = self._approved_study(request)
        if study.evaluates:
            raise NotPermitted(
                f"in study `{study.name}` this site only evaluates: nothing is trained here",
                code="DECLINED_BEYOND_CONSENT",
            )
        answer = self._round(study, request, progress)
        assert isinstance(answer, records.Trained)  # a pending round's answer is of its own command
        return answer

    def validate(self, request: records.Validate) -> records.Validated:
        """The closing round: judge the last model, keep it as a checkpoint, report its metrics. Raises as ``train``."""
        return self._round(self._approved_study(request), request, None)

    def finish(self, request: records.Finish) -> None:
        """The study has ended: keep the best global model and what this site will use, and write into the cards who
        contributed.
        """
        study = self._approved_study(request)
        vault = Vault(self._state, study.name, request.revision)
        selects = study.file.checkpoints.selection != "none" and bool(vault.checkpoints())
        if request.best is not None or selects:
            vault.open(request.study_digest, request.study)
            start = vault.start_of(study.file.study.rounds + 2)
            context = RoundContext(study, request.study_digest, request.data, vault, start)
            data = self._sessions.data(context)
        if request.best is not None:
            best = read_download(staged(self._state, request.best.file))
            require_specs(best.specs, study.partition.download, "the best global model")
            session = self._sessions.resume(context, data)  # and not kept: it holds the best model now, not the last
            self._keep_all(context, session.finish(request.best.round, best.tensors), data, best.hashed)
        if selects:
            models: dict[str, Kept] = {
                file.card.kind: Kept(file.card.round, from_bytes(file.model.read_bytes()))
                for file in vault.checkpoints()
                if file.card.kind != SELECTED
            }
            self._keep_all(context, [selected(study.own, study.task.at(data), data, models)], data)
        if request.contributors:
            vault.name_contributors(request.contributors, request.capped, request.left_out)

    def _round(
        self, study: Installed, request: records.Train | records.Validate, progress: Progress | None
    ) -> records.Validated:
        # 1. The state that the round starts from.
        number = request.round
        vault = Vault(self._state, study.name, request.revision)
        vault.open(request.study_digest, request.study)
        context = RoundContext(study, request.study_digest, request.data, vault, vault.start_of(number))

        # 2. The data that was approved.
        data = self._sessions.data(context)

        # 3. The model that was announced, with the tensors that the installed method begins with and no others.
        base = read_download(staged(self._state, request.base), request.base_digest)
        require_specs(base.specs, study.partition.download, "the downloaded model")

        # 4. What an earlier request of the same has given already.
        origin = Origin(
            command=request.command, base_digest=request.base_digest, data_digest=data.digest,
            start="" if context.start is None else context.start.file, network=study.network,
            weights=request.data.weights,
        )  # fmt: skip
        pending = vault.pending(number, origin)
        if pending is not None and self._is_whole(pending):
            return pending.answer

        # 5. The round.
        session = self._sessions.resume(context, data)
        if progress is None:
            result, update_crc32 = session.validate(number, base.tensors), ""
            answer = _reported(study, result)
        else:
            uploaded = study.partition.upload
            self._require_room(sum(spec.bytes for spec in uploaded))
            result = session.train(number, base.tensors, progress)
            update = update_name(study.name, vault.revision, number)
            update_crc32 = write_update(staged(self._state, update), result.uplink, uploaded)
            result.uplink.clear()  # it is as large as the model, and lies in its file now
            answer = records.Trained(update=update, **dict(_reported(study, result)))

        # 6. What is kept here.
        self._keep_all(context, result.checkpoints, data, base.hashed)
        del result  # its tensors are in files now
        state = encoded(session.export_state(copies=False), study.network)
        after = vault.keep_pending(number, state, origin, answer, update_crc32)
        self._sessions.remember(context, data, after, session)
        return answer

    def _approved_study(self, request: records.Train | records.Validate | records.Finish) -> Installed:
        """The study of a request, with the network that a person approved."""
        return self._studies.at(request.study, request.site, request.data.network)

    def _keep_all(
        self, context: RoundContext, checkpoints: Iterable[Checkpoint], data: SiteData, hashed: Hashed = NONE
    ) -> None:
        """``hashed``: of the downloaded tensors, which a checkpoint may hold as they came."""
        digests: dict[int, str] = {}  # of tensors that several checkpoints share: hashed once
        kept = list(checkpoints)
        for checkpoint in kept:
            shared = id(checkpoint.tensors)
            if shared not in digests:
                digests[shared] = manifest_of(checkpoint.tensors, specs_of(checkpoint.tensors), hashed).digest()
            self._keep(context, checkpoint, data, digests[shared])

    def _keep(self, context: RoundContext, checkpoint: Checkpoint, data: SiteData, digest: str) -> None:
        """``digest``: of its tensors' manifest."""
        specs = specs_of(checkpoint.tensors)
        fitted = {"inputs": context.study.task.fitted(data), "outputs": checkpoint.fit}
        preprocessing = json.dumps(fitted, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False).encode()
        card = Card.model_validate({
            "study": context.study.name, "revision": context.vault.revision, "study_digest": context.study_digest,
            "site": context.study.site, "network": context.study.network, "kind": checkpoint.kind,
            "round": checkpoint.round, "score": _finite(checkpoint.score), "metric": checkpoint.metric,
            "split": checkpoint.split,
            "scores": {name: _finite(score) for name, score in checkpoint.scores.items()},
            "val_loss": _finite(checkpoint.val_loss), "why": checkpoint.why,
            "model_digest": digest, "data_digest": data.digest,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "wardround": __version__, "torch": str(torch.__version__), "device": self._device.name,
            "threads": torch.get_num_threads(), "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "preprocessing_sha256": hashlib.sha256(preprocessing).hexdigest(),
        })  # fmt: skip
        context.vault.keep_checkpoint(card, specs, payload(checkpoint.tensors, specs), preprocessing)

    def _is_whole(self, pending: Pending) -> bool:
        """Whether the update of a pending round still lies in staging, bit for bit."""
        if not isinstance(pending.answer, records.Trained):
            return True
        # gone, cut short or overwritten: the round is trained again, to the same bits
        return crc32(staged(self._state, pending.answer.update)) == pending.update_crc32

    def _require_room(self, update_bytes: int) -> None:
        """Fail before the training and not after it.

        Raises:
            CannotWrite: the disk has no room for what the round will write.
        """
        needed = 4 * update_bytes + RESERVED_BYTES
        for folder in (self._state / "staging", self._state / "studies"):
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise CannotWrite(
                    f"{folder} has {free >> 20} MiB free, a round needs {needed >> 20} MiB",
                    hint="make room on that disk",
                    code="DECLINED_RESOURCES",
                )


def _reported(study: Installed, result: RoundResult) -> records.Validated:
    """The numbers of a round, in the form that the study says. A site that evaluates has trained on no row."""
    form, trained = study.file.reported, 0 if study.evaluates else result.num_examples
    return records.Validated(
        num_examples=form.count(trained), num_validation=form.count(result.num_validation),
        metrics={name: form.metric(name, result.metrics.get(name)) for name in form.metrics},
        own_loss="" if (loss := result.metrics[VAL_LOSS]) is None else repr(loss),
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
