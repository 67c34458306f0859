"""How a study comes to be here: checked, its initial model durable, and offered to its sites in one transaction."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.answers import StudyCreated
from coordinator.context import Context
from coordinator.models import public_data as public_data_sets
from coordinator.models.aggregation import begin
from coordinator.models.kept import add_model
from coordinator.secure_roster import with_roster
from coordinator.storage import tables
from coordinator.studies.plugins import admit_allowed
from coordinator.studies.state import Phase
from coordinator.studies.study import Study, last_revision, new_study
from coordinator.updates.admission import Refusal, judged_values
from fl_algorithms.study import ResolvedStudy
from wardround import rpc
from wardround.errors import BadData, NeedsPerson
from wardround.records.messages import manifest_most_bytes
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest

MAX_MANIFEST = rpc.MAX_STRUCTURED - 128 * 1024  # an upload's opening has a ledger's lines and metrics beside it
RUNS = (Phase.WAITING, Phase.RUNNING, Phase.PAUSED)


def create(
    context: Context, file: ResolvedStudy, initial: Path, public_data: Path | None, agreed: str = ""
) -> StudyCreated:
    """Offer a resolved study to its sites. With exactly the content that is known here, nothing changes.

    Args:
        initial: the initial shared tensors, a safetensors file.
        public_data: the public data set, where the coordinator distills on it.
        agreed: the digest of the initial tensors to which two people agreed; "" where nobody had to.

    Raises:
        NeedsPerson: a study of that name goes on, or with secure aggregation a site has not enrolled.
        NotPermitted: a plug-in would run here that the configuration does not allow.
        BadData: the tensors are not finite float32, or not the agreed ones; what distilling needs is missing, or a
            plug-in that would run here is not installed.
        TryAgain: another command created a study of that name at the same time.
    """
    refuse_unready(context, file, public_data)
    with TensorFile(initial) as tensors:
        _refuse_unusable(tensors)
        file = with_roster(context.store, file, tensors.specs)
        digest = file.digest(tensors.manifest().digest())
        present = context.engine.find(file.study.name)
        if present and present.digest == digest:
            return _created(context, present, new=False)
        if present and present.state.phase in RUNS:
            raise NeedsPerson(
                f"study `{present.name}` is {present.state.phase}, and this is another revision of it",
                hint=f"`coordinator study edit {present.name} FILE` makes it in one step; the sites must approve it",
            )
        manifest = context.blobs.keep_model(tensors, _label("initial", file))
    _refuse_others(manifest, agreed, initial)
    return _created(context, add(context, file, manifest), new=True)


def refuse_unready(context: Context, file: ResolvedStudy, public_data: Path | None) -> None:
    """Check that this coordinator may run a study and has what it needs. Raises as ``create``."""
    admit_allowed(file, context.config.plugins)
    public_data_sets.prepare(file, context.blobs, public_data)


def keep_initial(context: Context, file: ResolvedStudy, initial: Path, agreed: str = "") -> Manifest:
    """Make the initial tensors of a new revision durable. ``agreed``, and what it raises: as of ``create``."""
    refuse_unready(context, file, None)
    with TensorFile(initial) as tensors:
        _refuse_unusable(tensors)
        manifest = context.blobs.keep_model(tensors, _label("initial", file))
    _refuse_others(manifest, agreed, initial)
    return manifest


def add(context: Context, file: ResolvedStudy, manifest: Manifest) -> Study:
    """Offer a study whose initial model is durable, as the next revision of its name.

    Raises:
        TryAgain: another command added one of that name at the same time.
    """
    now = int(context.wall_clock())
    file = with_roster(context.store, file, manifest.specs)
    with context.store.read() as session:
        revision = last_revision(session, file.study.name) + 1
    study = new_study(file, manifest, revision, now, context.config.plugins)
    kept = begin(context.blobs, study.aggregator, manifest, _label("kept", file))
    study = replace(study, newest=kept.digest())

    def write(session: Session) -> None:
        for model in (manifest, kept):
            add_model(session, model, now)

    context.engine.add(study, write)
    return study


def _label(what: str, file: ResolvedStudy) -> str:
    """Of a model while it is written; two commands at once do not write the same file."""
    return f"{what}-{file.study.name}-{os.getpid()}-{threading.get_ident()}"


def _created(context: Context, study: Study, *, new: bool) -> StudyCreated:
    with context.store.read() as session:
        known = set(session.scalars(sa.select(tables.Site.name).where(tables.Site.revoked_s.is_(None))))
    return StudyCreated(
        id=study.name, revision=study.revision, study_digest=study.digest, initial_digest=study.initial,
        bytes_per_round=study.bytes_per_update, new=new,
        not_enrolled=tuple(site for site in study.rules.sites if site not in known),
    )  # fmt: skip


def _refuse_others(kept: Manifest, agreed: str, initial: Path) -> None:
    """Raises BadData: what was read of a file is not what two people agreed to."""
    if agreed and kept.digest() != agreed:
        raise BadData(
            f"{initial} was changed while it was read: its tensors have digest {kept.digest()[:12]}…, and two people "
            f"agreed to {agreed[:12]}…",
            hint="nothing was made; both give the command again",
        )


def _refuse_unusable(tensors: TensorFile) -> None:
    """Raises BadData: these tensors cannot be a study's initial model."""
    if not tensors.specs:
        raise BadData(f"{tensors.path} holds no tensors: nothing would be shared")
    for spec in tensors.specs:
        if spec.dtype != "F32":
            raise BadData(f"{tensors.path}: `{spec.key}` is {spec.dtype}, shared tensors are F32")
    if manifest_most_bytes(tensors.specs) > MAX_MANIFEST:
        raise BadData(
            f"{tensors.path}: the names and shapes of {len(tensors.specs)} tensors do not fit into a message",
            hint=f"a study shares tensors whose manifest has at most {MAX_MANIFEST} bytes: shorter names, or fewer",
        )
    if isinstance(refusal := judged_values(tensors, None), Refusal):
        raise BadData(f"{tensors.path}: `{refusal.tensor}` is not finite")
