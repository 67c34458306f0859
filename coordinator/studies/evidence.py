"""What a member of a study checks a sum with, from the round's end until the next one's: read from the store."""

import json
from dataclasses import dataclass

from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.state import Round
from coordinator.studies.study import Study
from wardround.errors import BadData
from wardround.records.secure_messages import AttemptRef, SumEvidence
from wardround.secure import coordinator
from wardround.secure.coordinator import Attempt
from wardround.secure.documents import attempt_from_document


@dataclass(frozen=True)
class Summed:
    """A round whose sum may be checked: its attempt, and site -> the id of its vector."""

    attempt: Attempt
    uploads: dict[str, str]


def summed(session: Session, study: Study, round_number: int) -> Summed:
    """Raises BadData: no sum of that round may be checked, or not any more (ROUND_CLOSED)."""
    ended = next((one for one in study.state.summed if one.number == round_number), None)
    row = session.get(tables.SecureAttempt, _key(study, ended)) if ended is not None else None
    if ended is None or row is None:
        raise BadData(f"there is no sum of round {round_number} of `{study.name}` to check now", code="ROUND_CLOSED")
    attempt = attempt_from_document(json.loads(row.document))
    return Summed(attempt, {site: ended.answers[site].upload for site in attempt.chosen})


def evidence_of(study: Study, found: Summed, model: str) -> SumEvidence:
    """What is shown of it. ``model``: digest of what was made of the sum; "" for the closing validation."""
    attempt = found.attempt
    opened, _ = coordinator.unmasking(attempt)
    context = attempt.context
    return SumEvidence(
        AttemptRef(study.name, study.revision, study.digest, context.round, context.attempt),
        tuple(attempt.keys[site] for site in attempt.group), attempt.shown_set(), attempt.shown_agreements(),
        opened.self_masks, opened.mask_keys, context.base, model,
    )  # fmt: skip


def _key(study: Study, ended: Round) -> tuple[str, int, int, int]:
    return study.name, study.revision, ended.number, ended.attempt
