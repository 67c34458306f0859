"""What the operator's commands do, in the running service, or in the command itself when none runs.

``Administration`` takes a record of ``coordinator.requests`` and gives one of ``coordinator.answers``.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator import authority_commands, requests
from coordinator.answers import (
    Answer,
    InvitationMade,
    ReceiptsCopied,
    Revoked,
    RolledOver,
    SiteList,
    SiteRow,
    StudyCreated,
    StudyFits,
    StudyReport,
    StudyStatus,
)
from coordinator.context import Context
from coordinator.models import public_data as public_data_sets
from coordinator.models.aggregation import begin
from coordinator.models.kept import add_model
from coordinator.requests import Request, request_from
from coordinator.storage import tables
from coordinator.studies import fits, report
from coordinator.studies.lifecycle import Start, Stop
from coordinator.studies.plugins import admit_allowed
from coordinator.studies.state import ENDED, Phase
from coordinator.studies.study import Study, new_study
from coordinator.updates.admission import values_refusal
from coordinator.updates.ledgers import newest_head
from coordinator.updates.receipts import copy_of
from fl_algorithms.study import ResolvedStudy
from wardround import rpc
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.records.messages import manifest_most_bytes
from wardround.records.study import StudyFile
from wardround.signing.dsse import Envelope, fingerprint
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest

LEDGER_ID = re.compile(r"[0-9a-f]{32}")
MAX_MANIFEST = rpc.MAX_STRUCTURED - 128 * 1024  # an upload's opening has a ledger's lines and metrics beside it
RUNS = (Phase.WAITING, Phase.RUNNING, Phase.PAUSED)
Progress = Callable[[Envelope | StudyStatus], None]


class Administration:
    """The commands of one coordinator.

    Args:
        after_revoke: ends the calls that a revoked site has under way; without a service there are none.
        undecided: (study, site) of the updates that are here and not yet decided.
    """

    def __init__(
        self,
        context: Context,
        *,
        after_revoke: Callable[[str], None] = lambda site: None,
        undecided: Callable[[], frozenset[tuple[str, str]]] = frozenset,
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._store = context.store
        self._after_revoke = after_revoke
        self._undecided = undecided

    def run(self, document: Mapping[str, object], progress: Callable[[object], None]) -> object:
        """Do the command of a control connection; its request, progress and answer as plain JSON.

        Raises:
            UsageProblem: the command is not known here, or a field is not valid.
            WardroundError: what the command itself raises.
        """
        request = request_from(document)
        return self.answer(request, lambda item: progress(item.document())).document()

    def answer(self, request: Request, progress: Progress) -> Answer:
        """Do one command."""
        match request:
            case requests.Invite():
                return self.invite(request.site, request.expires_s)
            case requests.ListSites():
                return self.sites()
            case requests.Revoke():
                return self.revoke(request.site)
            case (
                requests.ShowAuthority()
                | requests.LeaveRoot()
                | requests.RequestIntermediate()
                | requests.InstallIntermediate()
                | requests.RetireRoot()
            ):
                return authority_commands.answer(self._context, request)
            case requests.CopyReceipts():
                return self.receipts(request.site, progress)
            case requests.RollOver():
                return self.rollover(request.site, request.ledger)
            case requests.CreateStudy():
                return self.create(request.document, request.initial, request.public_data)
            case requests.StartStudy():
                return self.start(request.study)
            case requests.StopStudy():
                return self.stop(request.study)
            case requests.ShowStatus():
                return self.status(request.study)
            case requests.ShowFits():
                return self.fits(request.study)
            case requests.ShowReport():
                return self.report(request.study)
            case requests.FollowStudy():
                return self.follow(request.study, progress)
        raise TypeError(f"a request of kind {type(request).__name__}")

    # Members.

    def invite(self, site: str, expires_s: int) -> InvitationMade:
        """Make an invitation. See ``Enrolment.invite``."""
        with self._store.read() as session:
            present = session.get(tables.Site, site)
        invitation = self._context.enrolment.invite(site, expires_s)
        replaces = present is not None and present.revoked_s is None
        return InvitationMade(
            invitation=invitation.encode(), expires=tables.utc_text(invitation.expires_s), replaces=replaces
        )

    def sites(self) -> SiteList:
        """Every site that is invited or has enrolled, and the fingerprints of the keys that an auditor compares."""
        connected = self._engine.connected()
        going_on = [study.state for study in self._engine.studies() if study.state.phase not in ENDED]
        ready = frozenset[str]().union(*(state.ready for state in going_on))
        with self._store.read() as session:
            enrolled = {row.name: row for row in session.scalars(sa.select(tables.Site))}
            ends: dict[str, int] = {}
            for certificate in session.scalars(sa.select(tables.Certificate)):
                ends[certificate.site] = max(ends.get(certificate.site, 0), certificate.not_after_s)
            unused = sa.and_(tables.Invitation.withdrawn.is_(False), tables.Invitation.used_s.is_(None))
            invited = set(session.scalars(sa.select(tables.Invitation.site).where(unused))) - enrolled.keys()
        rows = [SiteRow(site=site, state="invited") for site in invited]
        for site, row in enrolled.items():
            state = "enrolled"
            if row.revoked_s is not None:
                state = "revoked"
            elif site in connected:
                state = "ready" if site in ready else "connected"
            rows.append(
                SiteRow(
                    site=site, state=state, certificate_expires=_utc_or_none(ends.get(site)),
                    last_seen=_utc_or_none(row.last_seen_s),
                    certificate_fork_since=_utc_or_none(row.certificate_fork_s),
                    ledger_key=fingerprint(bytes.fromhex(row.ledger_key)),
                )
            )  # fmt: skip
        key = fingerprint(self._context.receipt_key.public_key().public_bytes_raw())
        return SiteList(sites=tuple(sorted(rows, key=lambda row: row.site)), receipt_key=key)

    def revoke(self, site: str) -> Revoked:
        """Refuse a site from its next call on, end its calls under way, and let its studies go on without it."""
        was_enrolled = self._context.enrolment.revoke(site)
        self._engine.revoked(site)
        self._after_revoke(site)
        return Revoked(site=site, was_enrolled=was_enrolled)

    def receipts(self, site: str, progress: Progress) -> ReceiptsCopied:
        """Give every receipt of a site's present enrolment to ``progress``, and last the signed statement about them.

        Raises:
            BadData: no such site has ever enrolled.
        """
        with self._store.read() as session:
            self._enrolled(session, site)
        context, count = self._context, 0
        for envelope in copy_of(
            self._store, site, context.config.federation, context.receipt_key, context.wall_clock()
        ):
            progress(envelope)
            count += 1
        return ReceiptsCopied(site=site, receipts=count - 1)

    def rollover(self, site: str, ledger: str) -> RolledOver:
        """Accept a site's new ledger in the place of the one before, as its people and the operator agreed.

        From now on the site's uploads must come with ledger ``ledger``; with the old one they are refused LEDGER_FORK.

        Raises:
            BadData: no such site, no id of a ledger, or one that was seen before: there is no way back to it.
        """
        if not LEDGER_ID.fullmatch(ledger):
            raise BadData(
                f"{ledger[:64]!r} is not a ledger's id: 32 hex digits", hint="`site-agent audit rollover` prints it"
            )
        with self._store.write() as session:
            row = self._enrolled(session, site)
            if newest_head(session, site, ledger) is not None:
                raise BadData(
                    f"ledger {ledger[:12]}… of site `{site}` was seen before: a site cannot go back to it",
                    hint="the site makes a new one: `site-agent audit rollover`",
                )
            before, row.ledger_id = row.ledger_id, ledger
        return RolledOver(site=site, ledger=ledger, before=before)

    def _enrolled(self, session: Session, site: str) -> tables.Site:
        row = session.get(tables.Site, site)
        if row is None:
            known = ", ".join(sorted(session.scalars(sa.select(tables.Site.name)))) or "none yet"
            raise BadData(f"no site `{site[:64]}` has enrolled here", hint=f"sites here: {known}")
        return row

    # Studies.

    def create(self, document: Mapping[str, object], initial: str, public_data: str | None = None) -> StudyCreated:
        """Offer a resolved study to its sites. With exactly the content that is known here, nothing changes.

        Args:
            initial: path of the initial shared tensors, a safetensors file.
            public_data: path of the public data set, where the coordinator distills on it.

        Raises:
            NeedsPerson: a study of that name goes on.
            NotPermitted: a plug-in would run here that the configuration does not allow.
            BadData: the document is no study, the tensors are not finite float32, what distilling needs is missing, or
                a plug-in that would run here is not installed.
        """
        file = ResolvedStudy(StudyFile.from_document(document))
        admit_allowed(file, self._context.config.plugins)
        public_data_sets.prepare(file, self._context.blobs, None if public_data is None else Path(public_data))
        with TensorFile(Path(initial)) as tensors:
            _refuse_unusable(tensors)
            digest = file.digest(tensors.manifest().digest())
            present = self._known(file.study.name)
            if present and present.digest == digest:
                return self._created(present, new=False)
            if present and present.state.phase in RUNS:
                raise NeedsPerson(
                    f"study `{present.name}` is {present.state.phase}, and this is another revision of it",
                    hint=f"`coordinator study stop {present.name}` first; the sites must approve the new revision",
                )
            manifest = self._context.blobs.keep_model(tensors, f"initial-{file.study.name}-{os.getpid()}")
        revision = present.revision + 1 if present else 1
        return self._created(self._add(file, manifest, revision), new=True)

    def _add(self, file: ResolvedStudy, manifest: Manifest, revision: int) -> Study:
        now = int(self._context.wall_clock())
        study = new_study(file, manifest, revision, now, self._context.config.plugins)
        kept = begin(self._context.blobs, study.aggregator, manifest, f"kept-{study.name}-{os.getpid()}")
        study = replace(study, newest=kept.digest())

        def write(session: Session) -> None:
            for model in (manifest, kept):
                add_model(session, model, now)

        self._engine.add(study, write)
        return study

    def _created(self, study: Study, *, new: bool) -> StudyCreated:
        with self._store.read() as session:
            known = set(session.scalars(sa.select(tables.Site.name).where(tables.Site.revoked_s.is_(None))))
        return StudyCreated(
            id=study.name, revision=study.revision, study_digest=study.digest, initial_digest=study.initial,
            bytes_per_round=study.bytes_per_update, new=new,
            not_enrolled=tuple(site for site in study.rules.sites if site not in known),
        )  # fmt: skip

    def start(self, study: str) -> StudyStatus:
        """Start a study, or continue a paused one.

        Raises:
            NeedsPerson: it has ended.
        """
        phase = self._study(study).state.phase
        if phase in ENDED:
            raise NeedsPerson(
                f"study `{study}` is {phase}: it cannot be started again",
                hint="change the study file (a new title is enough) and create it as a new revision",
            )
        if phase in (Phase.CREATED, Phase.PAUSED):
            self._engine.happened(study, Start())
        return self.status(study)

    def stop(self, study: str) -> StudyStatus:
        """Stop a study for good. One that has ended stays as it is."""
        if self._study(study).state.phase not in ENDED:
            self._engine.happened(study, Stop())
        return self.status(study)

    def status(self, study: str) -> StudyStatus:
        """How a study stands now."""
        present, held = self._study(study), self._engine.holding(study)
        with self._store.read() as session:
            return report.status(present, session, self._busy(study), held)

    def fits(self, name: str) -> StudyFits:
        """Whose data fits a study. Raises as ``status``."""
        study = self._study(name)
        with self._store.read() as session:
            return fits.of(session, study)

    def report(self, study: str) -> StudyReport:
        """All that is known of a study."""
        present, held = self._study(study), self._engine.holding(study)
        with self._store.read() as session:
            return report.full(present, session, self._busy(study), self._context.config.federation, held)

    def follow(self, study: str, progress: Progress) -> StudyStatus:
        """Give the status now and after each change to ``progress``, until the study has ended or paused.

        Raises:
            Unavailable: the service goes down before.
        """
        self._study(study)
        changes = self._engine.follow(study)
        try:
            while True:
                status = self.status(study)
                progress(status)
                if status.state in (*ENDED, Phase.PAUSED):
                    return status
                if not changes.get():
                    raise Unavailable(
                        "the service is shutting down; the study goes on when it runs again",
                        hint=f"then: `coordinator study status {study} --follow`",
                    )
        finally:
            self._engine.unfollow(changes)

    def _study(self, name: str) -> Study:
        """Raises BadData: there is no such study. NeedsPerson: its record is damaged."""
        study = self._known(name)
        if study is None:
            known = ", ".join(study.name for study in self._engine.studies()) or "none yet"
            raise BadData(f"there is no study `{name[:64]}` here", hint=f"studies here: {known}")
        return study

    def _known(self, name: str) -> Study | None:
        """Raises NeedsPerson: the study's record is damaged."""
        study = self._engine.find(name)
        if study is None and (why := self._engine.unreadable().get(name)) is not None:
            raise NeedsPerson(
                f"the record of study `{name}` is damaged here: {why}",
                hint="the other studies go on; restore the state directory from a backup, or give the new study "
                "another name",
            )
        return study

    def _busy(self, study: str) -> frozenset[str]:
        return frozenset(site for name, site in self._undecided() if name == study)


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
    if refusal := values_refusal(tensors, None):
        raise BadData(f"{tensors.path}: `{refusal.tensor}` is not finite")


def _utc_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else tables.utc_text(seconds)
