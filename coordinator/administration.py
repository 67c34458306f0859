"""What the operator's commands do, in the running service, or in the command itself when none runs.

``Administration`` takes a record of ``coordinator.requests`` and gives one of ``coordinator.answers``.
"""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator import authority_commands, backups, creation, reading, requests
from coordinator.answers import (
    Answer,
    Changed,
    InvitationMade,
    Revoked,
    SiteList,
    SiteRow,
    StudyCreated,
    StudyFits,
    StudyList,
    StudyRenewed,
    StudyReport,
    StudyRow,
    StudyStatus,
)
from coordinator.context import Context
from coordinator.member_answers import ReceiptsCopied, RolledOver
from coordinator.requests import Request, request_from
from coordinator.storage import tables
from coordinator.studies import fits, report
from coordinator.studies.lifecycle import Start, Stop
from coordinator.studies.renewal import renewed
from coordinator.studies.state import ENDED, Phase
from coordinator.studies.study import Study, archived_studies
from coordinator.summaries.commands import Summaries
from coordinator.updates.ledgers import newest_head
from coordinator.updates.receipts import copy_of
from fl_algorithms.study import ResolvedStudy
from wardround import rpc
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.records.study import StudyFile
from wardround.signing.dsse import Envelope, fingerprint

LEDGER_ID = re.compile(r"[0-9a-f]{32}")
MAX_MANIFEST = rpc.MAX_STRUCTURED - 128 * 1024  # an upload's opening has a ledger's lines and metrics beside it
REST = 20  # times as long as one status took, a follower waits for the next: following costs a twentieth at most
MAX_REST_S = 1.0
RUNS = (Phase.WAITING, Phase.RUNNING, Phase.PAUSED)
Progress = Callable[[Envelope | StudyStatus | Changed], None]


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
        self._summaries = Summaries(context.store, context.wall_clock)
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
            case requests.RenewStudy():
                return self.renew(request.study)
            case requests.ArchiveStudy():
                return self.archive(request.study)
            case requests.ListStudies():
                return self.list_studies(archived=request.archived)
            case requests.MakeSnapshot():
                return backups.snapshot(self._context)
            case requests.ShowStatus():
                return self.status(request.study)
            case requests.ShowFits():
                return self.fits(request.study)
            case requests.CreateSummary():
                return self._summaries.create(request.document)
            case requests.ListSummaries():
                return self._summaries.list()
            case requests.ShowSummary():
                return self._summaries.show(request.name)
            case requests.CloseSummary():
                return self._summaries.close(request.name)
            case requests.ShowReport():
                return self.report(request.study)
            case requests.FollowStudy():
                return self.follow(request.study, progress)
            case requests.WatchAll():
                return reading.watch(self._engine, progress)
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
                    copied_since=_utc_or_none(self._context.instances.copied_since(site)),
                    ledger_key=fingerprint(bytes.fromhex(row.ledger_key)),
                )
            )  # fmt: skip
        key = fingerprint(self._context.receipt_key.public_key().public_bytes_raw())
        return SiteList(sites=tuple(sorted(rows, key=lambda row: row.site)), receipt_key=key)

    def revoke(self, site: str) -> Revoked:
        """Refuse a site from its next call on, end its calls under way, and let its studies go on without it."""
        was_enrolled = self._context.enrolment.revoke(site)
        for study in self._engine.studies():
            self._engine.gone(site, study.name, "SITE_REVOKED")
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
        """Offer a resolved study to its sites. See ``creation.create``."""
        file = ResolvedStudy(StudyFile.from_document(document))
        self._known(file.study.name)
        return creation.create(self._context, file, Path(initial), None if public_data is None else Path(public_data))

    def start(self, study: str) -> StudyStatus:
        """Start a study, or continue a paused one.

        Raises:
            NeedsPerson: it has ended.
            DamagedModel: its newest model is damaged.
        """
        present = self._study(study)
        phase = present.state.phase
        if phase in ENDED:
            raise NeedsPerson(
                f"study `{study}` is {phase}: it cannot be started again",
                hint="change the study file (a new title is enough) and create it as a new revision",
            )
        if phase in (Phase.CREATED, Phase.PAUSED):
            self._context.blobs.whole_model(present.newest, again=True)
            self._engine.happened(study, Start())
        return self.status(study)

    def stop(self, study: str) -> StudyStatus:
        """Stop a study for good. One that has ended stays as it is."""
        if self._study(study).state.phase not in ENDED:
            self._engine.happened(study, Stop())
        return self.status(study)

    def renew(self, study: str) -> StudyRenewed:
        """Begin a new revision of a study from its newest model that is whole here; the one before is stopped.

        Raises:
            NeedsPerson: it is finished.
            DamagedModel: none of its models is whole.
        """
        present = self._study(study)
        if present.state.phase == Phase.FINISHED:
            raise NeedsPerson(f"study `{study}` is finished: there is nothing to go on with")
        new = renewed(present, self._context.blobs)
        self.stop(study)
        added = creation.add(self._context, new.file, new.manifest)
        return StudyRenewed(
            id=study, revision=added.revision, study_digest=added.digest, model=new.model, rounds=added.rules.rounds
        )

    def archive(self, study: str) -> StudyStatus:
        """Tell nobody of an ended study any more: no site, and no list. Its models, receipts and report stay.

        Raises:
            NeedsPerson: it has not ended.
        """
        present = self._study(study)
        if present.state.phase not in ENDED:
            raise NeedsPerson(
                f"study `{study}` is {present.state.phase}: only one that has ended can be archived",
                hint=f"`coordinator study stop {study}` ends it for good",
            )
        status = self.status(study)
        if self._engine.find(study) is not None:
            self._engine.archive(study)
        return status

    def list_studies(self, *, archived: bool) -> StudyList:
        """The studies here, with the archived ones if they are asked for."""
        rows = [(study, False) for study in self._engine.studies()]
        if archived:
            with self._store.read() as session:
                rows += [(study, True) for study in archived_studies(session, self._context.config.plugins)]
        return StudyList(
            studies=tuple(
                StudyRow(
                    id=study.name, revision=study.revision, state=study.state.phase.value, round=study.state.models,
                    rounds=study.rules.rounds, archived=is_archived,
                )
                for study, is_archived in sorted(rows, key=lambda row: row[0].name)
            )
        )  # fmt: skip

    def status(self, study: str) -> StudyStatus:
        """How a study stands now."""
        present = self._study(study)
        held = self._engine.holding(present)
        with self._store.read() as session:
            return report.status(present, session, self._busy(study), held)

    def fits(self, name: str) -> StudyFits:
        """Whose data fits a study. Raises as ``status``."""
        study = self._study(name)
        with self._store.read() as session:
            return fits.of(session, study)

    def report(self, study: str) -> StudyReport:
        """All that is known of a study."""
        present = self._study(study)
        held = self._engine.holding(present)
        with self._store.read() as session:
            return report.full(present, session, self._busy(study), self._context.config.federation, held)

    def follow(self, study: str, progress: Progress) -> StudyStatus:
        """Give the status now and after changes to ``progress``, until the study has ended or paused.

        Raises:
            Unavailable: the service goes down before.
        """
        self._study(study)
        changes = self._engine.follow(study)
        try:
            while True:
                began = time.monotonic()
                status = self.status(study)
                progress(status)
                if status.state in (*ENDED, Phase.PAUSED):
                    return status
                if not changes.wait(min(MAX_REST_S, REST * (time.monotonic() - began))):
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
            with self._store.read() as session:
                study = next(iter(archived_studies(session, self._context.config.plugins, name)), None)
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


def _utc_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else tables.utc_text(seconds)
