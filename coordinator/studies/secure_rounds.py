"""The attempts of rounds with secure aggregation: what sites told, what each is shown, and where it is kept.

``wardround.secure.coordinator`` judges the messages, ``secure_steps`` the time. Here both are brought together: a
message becomes the next state of an attempt and an event for ``lifecycle``; a step that is over closes a part of the
attempt. No secret is in an attempt that its sites have not opened; what is in it are public keys, sealed shares and
signed statements, so it may stand in every backup.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.models.downloads import Downloads
from coordinator.storage import tables
from coordinator.studies import events
from coordinator.studies.state import Outcome, Phase, Round, Step
from coordinator.studies.study import Change, Study
from fl_algorithms.server.secure_sums import layout_of
from wardround.errors import BadData, TryAgain
from wardround.records import secure_round
from wardround.records.secure_messages import AttemptRef, SecureShown, SecureTold, Shown, Told
from wardround.records.update import UploadHeader
from wardround.secure import coordinator
from wardround.secure.coordinator import Attempt
from wardround.secure.documents import attempt_document
from wardround.secure.layout import Layout

STEPS = {
    Told.KEYS: Step.KEYS, Told.SHARES: Step.SHARES, Told.AGREEMENT: Step.AGREEMENT, Told.OPENING: Step.OPENING,
}  # fmt: skip


class SecureRounds:
    """The attempts of one coordinator's studies."""

    def __init__(self, downloads: Downloads, federation: str) -> None:
        self._downloads, self._federation = downloads, federation

    def taken(self, study: Study, site: str, told: SecureTold) -> tuple[Attempt, events.Told] | None:
        """The attempt with what a site tells, and what that means for its round; None where it is known.

        Raises:
            TryAgain: it is of no attempt that is under way, or too late for it (ROUND_CLOSED).
            BadData: it is not the site's, of another attempt, or another than the first time (MESSAGE_MALFORMED).
            NotPermitted: the site was given another model.
        """
        current = _under_way(study, site, told.attempt)
        before = self._attempt(study, current)
        try:
            attempt = with_told(before, site, told)
        except BadData as error:
            raise BadData(error.message, hint=error.hint, code=error.code or "MESSAGE_MALFORMED") from None
        if attempt == before:
            return None
        opened = told.kind == Told.OPENING and not current.is_open and _is_open(attempt)
        return attempt, events.Told(site, STEPS[told.kind], opened)

    def _attempt(self, study: Study, current: Round) -> Attempt:
        """Of the round under way; before its first message a new one, which follows from the study."""
        if study.attempt is not None and is_of(study.attempt, current):
            return study.attempt
        file, site = study.resolved.file, study.rules.sites[0]
        base = self._downloads.digest(study.aggregator, site, study.state.models, study.newest)
        layout = layout_for(study, closing=current.closing)
        context = secure_round.context_of(
            file, self._federation, study.digest, current.number, current.attempt, base, layout
        )
        return Attempt(context, secure_round.roster_of(file), secure_round.rules_of(file))


def with_attempt(attempt: Attempt | None) -> Change:
    """A study's change to another state of its attempt; None: as it was."""
    return lambda study: study if attempt is None else replace(study, attempt=attempt)


def layout_for(study: Study, *, closing: bool) -> Layout:
    """The form of the vectors of a round."""
    return layout_of(study.resolved, study.aggregator, () if closing else None)


def is_of(attempt: Attempt, current: Round) -> bool:
    return (attempt.context.round, attempt.context.attempt) == (current.number, current.attempt)


def submitted(study: Study, site: str, header: UploadHeader) -> Attempt | None:
    """The study's attempt with the vector of an upload that is accepted now; None without secure aggregation.

    Raises:
        BadData: the submission is not the site's, or of another attempt or group.
    """
    if not study.rules.threshold:
        return None
    if study.attempt is None or header.submission is None:
        raise BadData(f"site `{site}` sends a vector without a submission of this attempt")
    return coordinator.submission(study.attempt, site, header.submission)


def followed(study: Study, action: events.Action) -> Study:
    """The study with its attempt as an action wants it: keys or shares closed, or the set chosen."""
    match action:
        case events.Entered(one):
            assert study.attempt is not None
            return replace(study, attempt=_closed(study.attempt, one))
        case events.Closed(one, outcome) if outcome != Outcome.CLOSED:
            return replace(study, attempt=None)
    return study


def write_down(session: Session, before: Study, study: Study, actions: Sequence[events.Action]) -> None:
    """Keep the study's attempt where it is another than before, and forget those that nobody needs any more."""
    table = tables.SecureAttempt
    for action in actions:
        if isinstance(action, events.Closed) and study.rules.threshold:
            going_on = [study.state.round] if study.state.round else []
            kept = [(one.number, one.attempt) for one in (*study.state.summed, *going_on)]
            own = sa.and_(table.study == study.name, table.revision == study.revision)
            session.execute(sa.delete(table).where(own, sa.tuple_(table.number, table.attempt).not_in(kept)))
    if study.attempt is not None and study.attempt is not before.attempt:
        context = study.attempt.context
        session.merge(
            table(
                study=study.name, revision=study.revision, number=context.round, attempt=context.attempt,
                document=json.dumps(attempt_document(study.attempt)),
            )
        )  # fmt: skip


def shown(study: Study, site: str) -> list[SecureShown]:
    """All that a site is shown of the attempt under way, in order."""
    current, attempt = study.state.round, study.attempt
    if study.state.phase != Phase.RUNNING or current is None or attempt is None or not is_of(attempt, current):
        return []
    ref = AttemptRef(study.name, study.revision, study.digest, current.number, current.attempt)
    found = []
    if site in attempt.peers:
        found.append(SecureShown(ref, Shown.KEYS, attempt.shown_keys()))
    if site in attempt.group:
        found.append(SecureShown(ref, Shown.SHARES, shares=attempt.shares_for(site)))
        if attempt.chosen:
            found.append(SecureShown(ref, Shown.SET, attempt.shown_set()))
        if current.step == Step.OPENING:
            found.append(SecureShown(ref, Shown.AGREEMENTS, attempt.shown_agreements()))
    return found


def _under_way(study: Study, site: str, ref: AttemptRef) -> Round:
    current, state = study.state.round, study.state
    if (ref.revision, ref.digest) != (study.revision, study.digest):
        raise BadData(f"study `{study.name}` is at revision {study.revision} now", code="REVISION_CHANGED")
    if state.phase != Phase.RUNNING or current is None or (ref.round, ref.attempt) != (current.number, current.attempt):
        raise TryAgain(f"attempt {ref.attempt} of round {ref.round} is not under way", code="ROUND_CLOSED")
    if not study.rules.threshold or site not in current.asked:
        raise BadData(f"site `{site}` was asked for nothing of this attempt", code="ROUND_NOT_ASKED")
    return current


def with_told(attempt: Attempt, site: str, told: SecureTold) -> Attempt:
    """An attempt with what a site tells. Raises as ``SecureRounds.taken``."""
    if told.shares is not None:
        return coordinator.shares(attempt, site, told.shares)
    assert told.statement is not None
    take = {Told.KEYS: coordinator.keys, Told.AGREEMENT: coordinator.agreement, Told.OPENING: coordinator.opening}
    return take[told.kind](attempt, site, told.statement)


def _closed(attempt: Attempt, entered: Round) -> Attempt:
    match entered.step:
        case Step.SHARES:
            return coordinator.close_keys(attempt)
        case Step.TRAINING:
            return coordinator.close_shares(attempt)
        case Step.AGREEMENT:
            return coordinator.choose(attempt)
    return attempt


def _is_open(attempt: Attempt) -> bool:
    try:
        coordinator.unmasking(attempt)
    except TryAgain:
        return False
    return True
