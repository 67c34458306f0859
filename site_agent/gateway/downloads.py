"""Download a model into a folder of the gateway's own, check it there, and only then hand it to the trainer."""

import logging
import os
from pathlib import Path

from site_agent.gateway.connection.backoff import TRIES_IN_TROUBLE, backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.exit.staging import Staging, is_model, model_name
from site_agent.state.directory import Consent, SiteState
from wardround import refusals
from wardround.errors import BadData, CannotWrite, TryAgain, Unavailable
from wardround.local import durable, traces
from wardround.records.assignment import Assignment, ModelRef
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import Manifest, PayloadHasher

log = logging.getLogger(__name__)


class Downloads:
    """Downloads models for one site."""

    def __init__(self, state: SiteState, session: Session, staging: Staging) -> None:
        self._state = state
        self._session = session
        self._staging = staging

    @traces.step("download")
    def fetch(
        self, assignment: Assignment, model: ModelRef, consent: Consent, kind: str, interrupt: Interrupt,
        keep: Path | None = None,
    ) -> str:  # fmt: skip
        """Put a model, whole and as announced, into staging. Goes on where a broken connection, or a crash, left it.

        It is hashed as it comes; one that goes on is read and hashed as a whole. It is not fsynced: what a loss of
        power leaves is told by its digest, and the trainer looks at that again.

        Args:
            kind: base or best.
            keep: a further name for it that only the gateway's user reaches.

        Returns:
            Its name in staging.

        Raises:
            BadData: other tensors than approved, or another digest than announced.
            CannotWrite: there is no room for it.
        """
        specs = consent.download
        header = file_header(specs)
        name = model_name(kind, assignment.study, model.round)
        path = self._state.incoming / name
        self._remove_models(assignment.study, name)
        leaving = sum(spec.bytes for spec in consent.upload)
        coming = sum(spec.bytes for spec in specs)
        self._refuse_full_disk(coming + 2 * leaving)  # the trainer's file, and our copy
        for tries, wait_s in enumerate(backoff(), 1):
            interrupt.check()
            times_connected = self._session.times_connected
            try:
                with durable.SpoolFile(path, lasting=False, size=len(header) + coming) as file:
                    if file.size() <= len(header):
                        file.truncate(0)
                        file.write_at(0, header)
                    begun = file.size() - len(header)
                    hasher = PayloadHasher(specs)
                    self._fill(file, len(header), assignment, model, consent, interrupt, hasher)
                digest = _digest_or_none(path) if begun else hasher.manifest().digest()
                if digest == model.digest:
                    if keep is not None:
                        durable.link(path, keep)
                    self._staging.give(path, name)
                    return name
                durable.remove(path)
                if begun == 0:
                    raise BadData(
                        f"model {model.round} of `{assignment.study}` is not the announced one: digest "
                        f"{(digest or 'none')[:12]}…, announced {model.digest[:12]}…",
                        code="DECLINED_MODEL_MISMATCH",
                    )
            except (Unavailable, TryAgain) as error:
                interrupt.check()
                if error.code == refusals.TROUBLE and tries >= TRIES_IN_TROUBLE:
                    raise
                log.warning("%s; trying again in %.1f s, or as soon as the coordinator is back", error.message, wait_s)
                self._session.pause(wait_s, times_connected, interrupt)
        raise AssertionError("backoff never ends")

    def forget(self, study: str) -> None:
        """Remove a study's models, whole or begun."""
        self._remove_models(study, "")

    def _remove_models(self, study: str, keep: str) -> None:
        """Remove all but the one called ``keep``, so that no coordinator fills the disk with numbers of models."""
        for path in self._state.incoming.iterdir() if self._state.incoming.is_dir() else []:
            if is_model(path.name, study) and path.name != keep:
                durable.remove(path)
        self._staging.remove_models(study)

    def _fill(
        self,
        file: durable.SpoolFile,
        start: int,
        assignment: Assignment,
        model: ModelRef,
        consent: Consent,
        interrupt: Interrupt,
        hasher: PayloadHasher,
    ) -> None:
        """Write what is missing. ``hasher`` takes what comes; it counts where the file was empty before."""
        size = start + sum(spec.bytes for spec in consent.download)
        if file.size() >= size:
            file.truncate(start)  # begun before, and wrong: from the beginning
        offset = file.size() - start
        with self._session.use() as connection:
            for part in connection.download(assignment.study, assignment.revision, model, offset, interrupt):
                if isinstance(part, Manifest):
                    what = f"model {model.round} of `{assignment.study}`"
                    consents.check_tensors(part.specs, consent.download, consent.study, what)
                    continue
                position, data = part
                if position != file.size() - start or start + position + len(data) > size:
                    raise BadData("the coordinator sends bytes that were not asked for", code="DECLINED_MODEL_MISMATCH")
                file.write_at(start + position, data)
                hasher.update(data)
        if file.size() != size:
            raise Unavailable(f"downloading model {model.round} of `{assignment.study}`: it ended early")

    def _refuse_full_disk(self, needed: int) -> None:
        room = os.statvfs(self._state.incoming)
        free = room.f_bavail * room.f_frsize
        if free < needed:
            raise CannotWrite(
                f"{self._state.root} has {free >> 20} MiB free, a round needs {needed >> 20} MiB",
                hint="free some space",
                code="DECLINED_RESOURCES",
            )


def _digest_or_none(path: Path) -> str | None:
    try:
        with TensorFile(path) as file:
            return file.manifest().digest()
    except BadData:
        return None
