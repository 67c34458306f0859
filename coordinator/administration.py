"""What the operator's commands do, in the running service, or in the command itself when none runs.

``Administration`` takes a record of ``coordinator.requests`` and gives one of ``coordinator.answers``.
"""

import re
from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator import authority_commands, backups, journal, reading, requests
from coordinator.acts import about, bound, came_to
from coordinator.answers import Answer, Changed, InvitationMade, Revoked, SiteList, SiteRow, StudyRenewed
from coordinator.context import Context
from coordinator.journal import Journal, Waits, waiting_row
from coordinator.journal_records import JournalCopied, JournalText, SecondPersonApplied, WaitingList, WaitingRow
from coordinator.member_answers import Noted, ReceiptsCopied, RolledOver
from coordinator.requests import Request, request_from
from coordinator.second_person import Terms, refuse_nobody
from coordinator.storage import tables
from coordinator.studies.state import ENDED
from coordinator.study_answers import StudyStatus
from coordinator.study_commands import StudyCommands
from coordinator.summaries.commands import Summaries
from coordinator.updates.ledgers import newest_head
from coordinator.updates.receipts import copy_of
from wardround.errors import BadData
from wardround.local import control
from wardround.local.person import Person, behind, who
from wardround.signing.dsse import Envelope, fingerprint

LEDGER_ID = re.compile(r"[0-9a-f]{32}")
Progress = Callable[[Envelope | StudyStatus | JournalText | Changed], None]


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
        self._journal = Journal(context.store, context.wall_clock)
        self._wanted = Terms.of(context.config.second_person)
        self._after_revoke = after_revoke
        self.studies = StudyCommands(context, undecided)

    def run(self, document: Mapping[str, object], progress: Callable[[object], None]) -> object:
        """Do the command of a control connection; its request, progress and answer as plain JSON.

        Raises:
            UsageProblem: the command is not known here, or a field is not valid.
            WardroundError: what the command itself raises.
        """
        request = request_from(document)
        by = request.by or who()
        if (peer := control.peer()) is not None:
            by = behind(by, *peer)
        return self.answer(request, lambda item: progress(item.document()), by).document()

    def answer(self, request: Request, progress: Progress, by: Person) -> Answer:
        """Do one command that ``by`` gave. One that changes something is in the operator's journal, before it acts.

        Where it needs a second person, the first one's answer is ``Proposed``, and nothing is done.

        Raises:
            NotPermitted: it needs a second person, and nobody can tell which person ``by`` is.
            UsageProblem: it needs a second person, and ``by`` is the first.
            WardroundError: what the command itself raises.
        """
        if (told := about(request)) is None:
            return self._do(request, progress)
        terms = self._journal.keep_terms(by, self._wanted)
        if isinstance(request, requests.TakeBack):
            return self._taken_back(request.number, by, terms)
        second = terms if terms.need(request.command) else None
        if second is not None:
            refuse_nobody(by, request.command, self._context.state.root.stat().st_uid)
            told |= bound(request, self._context, lambda study: self.studies.status(study).revision)
        begun = self._journal.begin(by, request.command, told, second)
        if second is not None:
            self._engine.tell_watchers()
        if isinstance(begun, Waits):
            return begun.answer
        with self._journal.under_way(by, request.command, begun) as act:
            answer = self._do(request, progress, str(told.get("initial_digest", "")))
            act.result = came_to(answer)
        return answer

    def renew_restored(self, study: str, by: Person) -> StudyRenewed:
        """Renew a study of a backup, as a part of its restore: what that needed, it has had."""
        request = requests.RenewStudy(study=study)
        begun = self._journal.begin(by, request.command, {"study": study})
        assert isinstance(begun, int), "it needs no second person"
        with self._journal.under_way(by, request.command, begun) as act:
            renewed = self.studies.renew(study)
            act.result = came_to(renewed)
        return renewed

    def _taken_back(self, number: int, by: Person, terms: Terms) -> WaitingRow:
        row = waiting_row(self._journal.take_back(by, number, terms.lapse_s))
        self._engine.tell_watchers()
        return row

    def waiting(self) -> WaitingList:
        """What waits for a second person, and which commands need one."""
        terms = self._journal.terms(self._wanted)
        return WaitingList(
            waiting=tuple(map(waiting_row, self._journal.waiting(terms.lapse_s))), lapse_s=terms.lapse_s,
            needed_for=tuple(sorted(terms.commands)), config=tuple(sorted(self._wanted.commands)),
        )  # fmt: skip

    def _do(self, request: Request, progress: Progress, initial: str = "") -> Answer:
        """``initial``: the digest of the initial tensors to which two people agreed; "" where nobody had to."""
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
                return self.studies.create(request.document, request.initial, request.public_data, initial)
            case requests.StartStudy():
                return self.studies.start(request.study)
            case requests.StopStudy():
                return self.studies.stop(request.study)
            case requests.RenewStudy():
                return self.studies.renew(request.study)
            case requests.EditStudy():
                return self.studies.edit(request, initial)
            case requests.ArchiveStudy():
                return self.studies.archive(request.study)
            case requests.ListStudies():
                return self.studies.listed(archived=request.archived)
            case requests.CopyJournal():
                return self._copy_journal(progress)
            case requests.MakeSnapshot():
                return backups.snapshot(self._context)
            case requests.NoteModelExport():
                self.studies.status(request.study)
                return Noted(federation=self._context.config.federation)
            case requests.ListWaiting():
                return self.waiting()
            case requests.ApplySecondPerson():
                return SecondPersonApplied(
                    needed_for=tuple(sorted(self._wanted.commands)), lapse_s=self._wanted.lapse_s
                )
            case requests.NoteExport() | requests.NoteRootExport():
                return Noted(federation=self._context.config.federation)
            case requests.ShowStatus():
                return self.studies.status(request.study)
            case requests.ShowFits():
                return self.studies.fits(request.study)
            case requests.CreateSummary():
                return self._summaries.create(request.document)
            case requests.ListSummaries():
                return self._summaries.list()
            case requests.ShowSummary():
                return self._summaries.show(request.name)
            case requests.CloseSummary():
                return self._summaries.close(request.name)
            case requests.ShowReport():
                return self.studies.report(request.study)
            case requests.FollowStudy():
                return self.studies.follow(request.study, progress)
            case requests.WatchAll():
                return reading.watch(self._engine, progress)
        raise TypeError(f"a request of kind {type(request).__name__}")

    def _copy_journal(self, progress: Progress) -> JournalCopied:
        """Give every line to ``progress``.

        Raises:
            BadData: the journal was changed in the database.
        """
        context, lines = self._context, list(self._journal.lines())
        found, head = journal.entries(lines)
        for line in lines:
            progress(JournalText(line=line))
        time = tables.utc_text(context.wall_clock())
        signed = journal.signed_head(len(found), head, context.config.federation, time, context.receipt_key)
        key = context.receipt_key.public_key().public_bytes_raw().hex()
        return JournalCopied(lines=len(found), head=head, signed=signed.document(), receipt_key=key)

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


def _utc_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else tables.utc_text(seconds)
