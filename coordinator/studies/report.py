"""What an operator hears about a study: its status, and the full report.

A study that finished without some of its sites in some rounds says which.
"""

import datetime
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from coordinator.metric_answers import VAL_LOSS
from coordinator.storage import tables
from coordinator.studies import fits
from coordinator.studies.course import course_of
from coordinator.studies.history import is_always_late, rounds_of, uploads_of
from coordinator.studies.participation import (
    absences,
    attempts_left,
    attempts_spent,
    reasons,
    slow_sites,
    usual_seconds,
)
from coordinator.studies.state import Answer, Kind, Outcome, Phase, site_states
from coordinator.studies.study import Study
from coordinator.study_answers import (
    Absence,
    AcceptedUpdate,
    AttemptReport,
    BestRound,
    RefusedUpload,
    SiteAnswer,
    SiteReport,
    SiteStatus,
    StudyReport,
    StudyStatus,
    TensorRow,
)
from fl_algorithms.server.best import mean_loss
from fl_algorithms.server.limits import Account


@dataclass(frozen=True)
class Sites:
    """What is known of sites beside the store.

    Attributes:
        busy: whose update is here and not yet decided.
        held: whose update waits for a person there.
        connected: who is connected now.
    """

    busy: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    connected: frozenset[str] = frozenset()


def status(study: Study, session: Session, now: Sites) -> StudyStatus:
    """How a study stands."""
    state = study.state
    course = course_of(session, study)
    current = state.open_round
    expected = {site: at for site, at in current.expected.items() if site in current.unanswered} if current else {}
    said = fits.of(session, study).sites
    seconds, spent = usual_seconds(state.took), attempts_spent(state)
    slow = slow_sites(seconds)
    shown = state.round or state.last
    present = state.round.number if state.round else max(state.models, state.last.number if state.last else 0)
    codes = {site: answer.code for site, answer in shown.answers.items() if answer.code} if shown else {}
    states = site_states(state, study.rules, now.busy, now.held)
    return StudyStatus(
        id=study.name,
        title=study.resolved.study.title,
        state=state.phase.value,
        why=state.why,
        round=min(present, study.rules.rounds),
        rounds=study.rules.rounds,
        attempt=shown.attempt if shown else 0,
        closing=bool(shown and shown.closing),
        revision=study.revision,
        study_digest=study.digest,
        model_digest=study.newest,
        best=_best(study),
        sites={
            site: SiteStatus(
                state=states[site],
                code=codes.get(site, ""),
                ready=site in state.ready,
                evaluates=site in study.rules.evaluators,
                rounds_contributed=tuple(course.contributed[site]),
                rounds_evaluated=tuple(course.evaluated[site]),
                rounds_left_out=tuple(course.left_out[site]),
                rounds_capped=tuple(course.capped[site]),
                rounds_late=tuple(number for number, missed in course.late.get(site, {}).items() if missed),
                always_late=is_always_late(course.late.get(site, {})),
                expected=_wall_clock(study, expected.get(site)),
                expects_to_be_late=expected.get(site, 0.0) > (current.deadline if current else 0.0),
                connected=site in now.connected,
                fit=said[site],
                seconds=round(seconds[site], 1) if site in seconds else None,
                slow=site in slow,
                absences=reasons(course.absent.get(site, [])),
                attempts_spent=site in spent,
            )
            for site in study.rules.sites
        },
        incomplete=incomplete(study, course.contributed),
        deadline=_wall_clock(study, current.deadline if current else None),
        attempts_left=attempts_left(state),
        step=state.round.step.value if state.round and study.rules.threshold else "",
        awaited=state.round.awaited if state.round and study.rules.threshold else (),
    )


def _wall_clock(study: Study, monotonic: float | None) -> str | None:
    """A time of the engine's clock as people read it."""
    if monotonic is None:
        return None
    return tables.utc_text(study.saved.wall_clock + monotonic - study.saved.monotonic)


def full(study: Study, session: Session, federation: str, now: Sites) -> StudyReport:
    """All that is known of a study: its status, and every attempt at every round."""
    uploads = {upload.id: upload for upload in uploads_of(session, study.name, study.revision)}
    rounds = rounds_of(session, study)
    opened = {(row.number, row.attempt): row.opened_s for row in rounds}
    attempts = tuple(_attempt(row, study, uploads, opened) for row in rounds)
    absent = _with_tensors(absences(rounds), uploads.values())
    present = status(study, session, now)
    return StudyReport(
        **{name: getattr(present, name) for name in StudyStatus.model_fields if name != "sites"},
        sites={site: _site(row, site, uploads.values(), absent.get(site, ())) for site, row in present.sites.items()},
        federation=federation,
        created=tables.utc_text(study.created_s),
        told_at=tables.utc_text(datetime.datetime.now(datetime.UTC).timestamp()),
        algorithm=study.resolved.file.algorithm.name,
        model=study.resolved.file.model.name,
        quorum=study.rules.needed,
        limits=tuple(study.resolved.file.bounds()),
        best_rule=best_rule(study),
        initial_digest=study.initial,
        bytes_per_update=study.bytes_per_update,
        tensors=tuple(TensorRow(name=spec.key, dtype=spec.dtype, shape=tuple(spec.shape)) for spec in study.shared),
        rounds_closed=tuple(row for row in attempts if row.outcome == Outcome.CLOSED and not row.closing),
        attempts=attempts,
        study=study.resolved.document(),
    )


def incomplete(study: Study, contributed: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """The sites of a finished study that train and are not in every one of its rounds."""
    if study.state.phase != Phase.FINISHED:
        return ()
    evaluators = study.rules.evaluators
    return tuple(
        site for site, rounds in contributed.items() if len(rounds) < study.rules.rounds and site not in evaluators
    )


def best_rule(study: Study) -> str:
    """Which model is the best global one, in words; "" for a method that has no one global model."""
    if not study.one_global_model:
        return ""
    most = study.resolved.limits.max_weight
    capped = f"; of three or more sites none weighs more than {most:g} of all" if most < 1 else ""
    return (
        "the one whose validation losses at the sites have the smallest mean, "
        f"where each site's loss is weighted by its validation rows as reported{capped}"
    )


def _best(study: Study) -> BestRound | None:
    if study.best.round is None or study.best.loss is None:
        return None
    return BestRound(round=study.best.round, val_loss=study.best.loss, digest=study.best_digest)


def _with_tensors(
    absent: Mapping[str, Sequence[Absence]], uploads: Collection[tables.Upload]
) -> dict[str, tuple[Absence, ...]]:
    """The same, each with the tensor that was to blame."""
    tensors = {(upload.site, upload.round, upload.attempt): upload.tensor for upload in uploads if upload.tensor}
    return {
        site: tuple(row.model_copy(update={"tensor": tensors.get((site, row.round, row.attempt), "")}) for row in rows)
        for site, rows in absent.items()
    }


def _site(
    present: SiteStatus, site: str, uploads: Collection[tables.Upload], absent: tuple[Absence, ...]
) -> SiteReport:
    own = [upload for upload in uploads if upload.site == site]
    return SiteReport(
        **{name: getattr(present, name) for name in SiteStatus.model_fields},
        bytes_received=sum(
            upload.received if upload.decision != "accepted" else upload.payload_bytes for upload in own
        ),
        refused=tuple(
            RefusedUpload(round=upload.round, attempt=upload.attempt, code=upload.code, tensor=upload.tensor)
            for upload in own
            if upload.decision == "refused"
        ),
        absent=absent,
    )


def _attempt(
    row: tables.Round, study: Study, uploads: Mapping[str, tables.Upload], opened: Mapping[tuple[int, int], float]
) -> AttemptReport:
    """``opened``: round and attempt -> when it was opened."""
    account = Account.from_document(json.loads(row.account)) if row.account else Account()
    answers = {
        site: _answer(answer, uploads.get(answer.upload), opened) for site, answer in _answers(row, study).items()
    }
    asked = json.loads(row.asked)
    closed = row.closed_s
    return AttemptReport(
        round=row.number,
        attempt=row.attempt,
        closing=row.closing,
        outcome=row.outcome or "open",
        opened=tables.utc_text(row.opened_s),
        closed=tables.utc_text(closed) if closed is not None else None,
        seconds=round(closed - row.opened_s, 4) if closed is not None else None,
        asked=tuple(asked),
        contributors=tuple(site for site, answer in answers.items() if answer.answer == Kind.ACCEPTED),
        unanswered=tuple(site for site in asked if site not in answers) if closed is not None else (),
        answers=answers,
        base_digest=row.base,
        model_digest=row.model,
        val_loss=account.metrics.get(VAL_LOSS, _mean_loss(answers, study.resolved.limits.max_weight)),
        norms=account.norms,
        limits=account.limits,
        shares=account.shares,
        capped=account.capped,
        left_out=account.left_out,
        metrics=account.metrics,
    )


def _answers(row: tables.Round, study: Study) -> Mapping[str, Answer]:
    """What the sites did in an attempt; of the one under way, so far."""
    present = study.state.round
    if row.answers is None and present is not None and (present.number, present.attempt) == (row.number, row.attempt):
        return dict(sorted(present.answers.items()))
    kept = json.loads(row.answers or "{}")
    return {site: Answer(Kind(kind), code, upload) for site, (kind, code, upload) in kept.items()}


def _answer(answer: Answer, upload: tables.Upload | None, opened: Mapping[tuple[int, int], float]) -> SiteAnswer:
    kind, tensor = answer.kind, upload.tensor if upload else ""
    if upload is None or kind not in (Kind.ACCEPTED, Kind.EVALUATED):
        return SiteAnswer(answer=kind, code=answer.code, tensor=tensor)
    began = opened.get((upload.round, upload.attempt))
    return AcceptedUpdate(
        answer=kind, code=answer.code, tensor=tensor, attempt=upload.attempt, num_examples=upload.num_examples,
        num_validation=upload.num_validation, metrics=dict(upload.reported_metrics),
        update_digest=upload.manifest_sha256,
        seconds=None if began is None or upload.decided_s is None else round(max(0.0, upload.decided_s - began), 3),
    )  # fmt: skip


def _mean_loss(answers: Mapping[str, SiteAnswer], max_weight: float) -> float | None:
    """The mean of the sites' validation losses of the model that they downloaded, by the rule of ``best_rule``."""
    reported = [
        (answer.metrics[VAL_LOSS], answer.num_validation)
        for answer in answers.values()
        if isinstance(answer, AcceptedUpdate) and answer.answer == Kind.ACCEPTED and VAL_LOSS in answer.metrics
    ]
    return mean_loss(reported, max_weight)
