"""What an operator is told about a study: the status, and the full report, which ``page`` shows.

Participation is told truthfully: a study that finished without some of its sites in some rounds says which.
"""

import datetime
import json
from typing import Any

from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.history import accounts, contributed_rounds, rounds_naming, rounds_of, uploads_of
from coordinator.studies.state import Outcome, Phase, site_states
from coordinator.studies.study import VAL_LOSS, Study
from fl_algorithms.server.best import mean_loss
from fl_algorithms.server.limits import Account


def status(study: Study, session: Session, busy: frozenset[str], held: frozenset[str] = frozenset()) -> dict[str, Any]:
    """How a study stands, in plain JSON.

    ``busy``: the sites whose update is here and not yet decided; ``held``: where it waits for a person.
    """
    state = study.state
    contributed = contributed_rounds(session, study)
    made = accounts(session, study)
    left_out = rounds_naming(study.rules.sites, [(number, account.left_out) for number, account in made])
    capped = rounds_naming(study.rules.sites, [(number, account.capped) for number, account in made])
    shown = state.round or state.last
    present = state.round.number if state.round else max(state.models, state.last.number if state.last else 0)
    codes = {site: answer.code for site, answer in shown.answers.items() if answer.code} if shown else {}
    states = site_states(state, study.rules, busy, held)
    return {
        "id": study.name,
        "title": study.file.study.title,
        "state": state.phase.value,
        "why": state.why,
        "round": min(present, study.rules.rounds),
        "rounds": study.rules.rounds,
        "attempt": shown.attempt if shown else 0,
        "closing": bool(shown and shown.closing),
        "revision": study.revision,
        "study_digest": study.digest,
        "model_digest": study.newest,
        "best": _best(study),
        "sites": {
            site: {
                "state": states[site],
                "code": codes.get(site, ""),
                "ready": site in state.ready,
                "rounds_contributed": contributed[site],
                "rounds_left_out": left_out[site],
                "rounds_capped": capped[site],
            }
            for site in study.rules.sites
        },
        "incomplete": incomplete(study, contributed),
    }


def full(
    study: Study, session: Session, busy: frozenset[str], federation: str, held: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """All that is known of a study, in plain JSON: the status and every attempt at every round."""
    uploads = {upload.id: upload for upload in uploads_of(session, study.name, study.revision)}
    rows = rounds_of(session, study)
    attempts = [_attempt(row, uploads, study.file.limits.max_weight) for row in rows]
    said = status(study, session, busy, held)
    for site, row in said["sites"].items():
        own = [upload for upload in uploads.values() if upload.site == site]
        row["bytes_received"] = sum(
            upload.received if upload.decision != "accepted" else upload.payload_bytes for upload in own
        )
        row["refused"] = [
            {"round": upload.round, "attempt": upload.attempt, "code": upload.code, "tensor": upload.tensor}
            for upload in own
            if upload.decision == "refused"
        ]
    return said | {
        "federation": federation,
        "created": _utc(study.created_s),
        "told_at": _utc(datetime.datetime.now(datetime.UTC).timestamp()),
        "algorithm": study.file.algorithm.name,
        "model": study.file.model.name,
        "quorum": study.rules.needed,
        "limits": list(study.file.bounds()),
        "initial_digest": study.initial,
        "bytes_per_update": study.bytes_per_update,
        "tensors": [{"name": spec.key, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in study.shared],
        "rounds_closed": [row for row in attempts if row["outcome"] == Outcome.CLOSED and not row["closing"]],
        "attempts": attempts,
        "study": study.file.document(),
    }


def incomplete(study: Study, contributed: dict[str, list[int]]) -> list[str]:
    """The sites of a finished study that are not in every one of its rounds."""
    if study.state.phase != Phase.FINISHED:
        return []
    return [site for site, rounds in contributed.items() if len(rounds) < study.rules.rounds]


def _best(study: Study) -> dict[str, Any] | None:
    if study.best.round is None:
        return None
    return {"round": study.best.round, "val_loss": study.best.loss, "digest": study.best_digest}


def _attempt(row: tables.Round, uploads: dict[str, tables.Upload], max_weight: float) -> dict[str, Any]:
    account = Account.from_document(json.loads(row.account)) if row.account else Account()
    answers = {}
    for site, (kind, code, upload_id) in json.loads(row.answers or "{}").items():
        upload = uploads.get(upload_id)
        answers[site] = {"answer": kind, "code": code, "tensor": upload.tensor if upload else ""}
        if upload and kind == "accepted":
            answers[site] |= {
                "attempt": upload.attempt, "num_examples": upload.num_examples,
                "num_validation": upload.num_validation, "metrics": dict(upload.reported_metrics),
                "update_digest": upload.manifest_sha256,
            }  # fmt: skip
    asked = json.loads(row.asked)
    closed = row.closed_s
    return {
        "round": row.number,
        "attempt": row.attempt,
        "closing": row.closing,
        "outcome": row.outcome or "open",
        "opened": _utc(row.opened_s),
        "closed": _utc(closed) if closed is not None else None,
        "seconds": round(closed - row.opened_s, 4) if closed is not None else None,
        "asked": asked,
        "contributors": [site for site, answer in answers.items() if answer["answer"] == "accepted"],
        "unanswered": [site for site in asked if site not in answers] if closed is not None else [],
        "answers": answers,
        "base_digest": row.base,
        "model_digest": row.model,
        "val_loss": _mean_loss(answers, max_weight),
        **account.document(),
    }


def _mean_loss(answers: dict[str, Any], max_weight: float) -> float | None:
    """The sites' told validation losses of the base model, weighted as the best global model's are."""
    told = [answer for answer in answers.values() if VAL_LOSS in answer.get("metrics", {})]
    return mean_loss([(answer["metrics"][VAL_LOSS], answer["num_validation"]) for answer in told], max_weight)


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
