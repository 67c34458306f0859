"""What was promised against what was measured: each promise of a study's approvals and policies, held against every
line of the ledger. Nothing here reads a file.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from site_agent.gateway.consent.facts import number, size
from site_agent.gateway.policy.policy import Policy
from site_agent.state.consent import APPROVED, Consent
from wardround.records.ledger.decided import PolicyEntry, ReleasedEntry
from wardround.records.ledger.entries import (
    ConsentEntry,
    ReceiptEntry,
    ResendEntry,
    TensorRow,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.study import DECIMAL
from wardround.tensors.manifests import MODEL
from wardround.terminal import many

State = Literal["kept", "broken", "not shown"]
SHOWN = 6  # names, before "and more"


@dataclass(frozen=True)
class Promise:
    """One promise. ``state``: what the ledger shows of it."""

    name: str
    promised: str
    measured: str
    state: State


@dataclass(frozen=True)
class Measured:
    """An upload as it left, with what was in force at its line."""

    upload: UploadEntry
    withdrawn: bool  # nothing was approved then
    policy: str  # its digest; "" where the ledger names none before


@dataclass
class _Study:
    uploads: list[Measured] = field(default_factory=list)
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))  # (revision, round) -> bytes
    answered: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    policies: list[str] = field(default_factory=list)


def measured(lines: Iterable[Line], study: str) -> _Study:
    """What the ledger says of a study, oldest line first."""
    found, policy, approved = _Study(), "", False
    for line in lines:
        match line.entry:
            case PolicyEntry(sha256=sha256):
                policy = sha256 or ""
                found.policies.append(policy)
            case ConsentEntry() as consent if consent.study == study:
                approved = consent.event == APPROVED
            case UploadEntry() as upload if upload.study == study:
                found.uploads.append(Measured(upload, not approved, policy))
                found.sent[upload.revision, upload.round] += upload.payload_bytes
            case ResendEntry() as resend if resend.study == study:
                found.sent[resend.revision, resend.round] += resend.payload_bytes
            case ReceiptEntry() as answer:
                found.answered.add(answer.upload_id)
            case ReleasedEntry() as released if released.study == study:
                found.released.add(released.update or "")
    return found


def promises(
    lines: Iterable[Line], study: str, consents: Sequence[Consent], policies: Mapping[str, Policy]
) -> list[Promise]:
    """Each promise, with what the ledger shows of it.

    Args:
        consents: the study's approvals and withdrawals that the site keeps, oldest first.
        policies: by digest, as far as the site keeps their texts.
    """
    found = measured(lines, study)
    approved = {consent.study_digest: consent for consent in consents if consent.state == APPROVED}
    return [*_by_consent(found, approved), *_by_policy(found, policies)]


def _by_consent(found: _Study, approved: Mapping[str, Consent]) -> Iterator[Promise]:
    uploads = [one.upload for one in found.uploads]
    others = sorted({upload.study_digest or "none" for upload in uploads} - approved.keys())
    yield Promise(
        "One exact study, approved by a person",
        f"{len(approved)} approved: {_names(digest[:12] for digest in sorted(approved))}",
        f"{many(len(uploads), 'update')} of {_names(sorted({(u.study_digest or 'none')[:12] for u in uploads}))}",
        "broken" if others else "kept",
    )
    late = [one.upload for one in found.uploads if one.withdrawn]
    yield Promise(
        "Nothing leaves without an approval in force",
        "no update before an approval, or after its withdrawal",
        f"{many(len(late), 'update')} so",
        "broken" if late else "kept",
    )
    known = [(upload, approved[digest]) for upload in uploads if (digest := upload.study_digest or "") in approved]
    names = {spec.key for consent in approved.values() for spec in consent.upload}
    strange = sorted({
        _key(row) for upload, consent in known for row in upload.tensors
        if (row.bundle, row.name, row.dtype, row.shape)
        not in {(spec.bundle, spec.name, spec.dtype, tuple(spec.shape)) for spec in consent.upload}
    })  # fmt: skip
    left = {_key(row) for upload in uploads for row in upload.tensors}
    yield Promise(
        "These tensors and no others",
        f"{len(names)}: {_names(sorted(names))}",
        f"{len(left)} left" + (f"; not approved: {_names(strange)}" if strange else "; none other"),
        "broken" if strange else "kept",
    )
    kept = {row.name for consent in approved.values() for row in consent.private}
    gone = sorted(kept & left)
    yield Promise(
        "These stay at the site",
        f"{many(len(kept), 'tensor')}: {_names(sorted(kept))}; every row of the table, and the keys",
        f"{len(gone)} of them left" + (f": {_names(gone)}" if gone else ""),
        "broken" if gone else "kept",
    )
    wanted = sorted({name for consent in approved.values() for name in consent.metrics})
    told = sorted({metric.name for upload in uploads for metric in upload.metrics})
    unasked = sorted({m.name for upload, consent in known for m in upload.metrics if m.name not in consent.metrics})
    yield Promise(
        "These metrics and no others", _names(wanted), _names(told), "broken" if unasked else "kept"
    )  # fmt: skip
    forms = sorted({consent.counts for consent in approved.values()})
    odd = [u for u, consent in known for n in (u.num_examples, u.num_validation) if not _has_form(n, consent.counts)]
    yield Promise(
        "Numbers of rows in this form", _names(forms), f"{many(len(odd), 'number')} otherwise",
        "broken" if odd else "kept",
    )  # fmt: skip
    rounds = sorted({upload.round for upload in uploads if upload.kind != "validate"})
    validated = sum(upload.kind == "validate" for upload in uploads)
    beyond = [u for u, consent in known if u.round > consent.rounds + (u.kind == "validate")]
    most = max((consent.rounds for consent in approved.values()), default=0)
    yield Promise(
        "So many rounds, and one that only validates", str(most),
        f"{many(len(rounds), 'round')} trained, and {many(validated, 'validation')}"
        + (f"; {many(len(beyond), 'update')} beyond" if beyond else ""),
        "broken" if beyond else "kept",
    )  # fmt: skip
    yield _attempts(known)
    open_ = [upload for upload in uploads if upload.upload_id not in found.answered]
    yield Promise(
        "Each update has the coordinator's signed receipt", "a receipt for each, or it counts as having left",
        f"{len(uploads) - len(open_)} of {len(uploads)}", "not shown" if open_ else "kept",
    )  # fmt: skip


def _attempts(known: Sequence[tuple[UploadEntry, Consent]]) -> Promise:
    counted = Counter((upload.revision, upload.round) for upload, _ in known)
    allowed = max((consent.attempts for _, consent in known), default=0)
    most = max(counted.values(), default=0)
    return Promise(
        "So many updates of one round at most", str(allowed) if known else "none approved", str(most),
        "broken" if most > allowed else "kept",
    )  # fmt: skip


def _by_policy(found: _Study, policies: Mapping[str, Policy]) -> Iterator[Promise]:
    """What the site's own policy bounds. An update whose policy's text is not kept shows nothing of it."""
    judged = [(one.upload, policies[one.policy]) for one in found.uploads if one.policy in policies]
    missing = len(found.uploads) - len(judged)
    unknown = f"; of {many(missing, 'update')} the policy's text is not kept" if missing else ""
    held: State = "not shown" if missing else "kept"
    elsewhere = sorted({u.destination or "none" for u, policy in judged if u.destination != policy.study.coordinator})
    names = sorted({policy.study.coordinator for _, policy in judged})
    yield Promise(
        "To this coordinator alone",
        _names(names),
        (f"also to {_names(elsewhere)}" if elsewhere else "to no other") + unknown,
        "broken" if elsewhere else held,
    )
    over = [u for u, policy in judged if found.sent[u.revision, u.round] > policy.quotas.bytes_per_round]
    bounds = sorted({policy.quotas.bytes_per_round for _, policy in judged})
    most = max(found.sent.values(), default=0)
    yield Promise(
        "At most so many bytes in a round",
        _names(f"{number(bound)} ({size(bound)})" for bound in bounds),
        f"{number(most)} in the largest, sent again counted too{unknown}",
        "broken" if over else held,
    )
    precise = [
        f"{metric.name} {metric.value}"
        for upload, policy in judged
        for metric in upload.metrics
        if not _allowed(metric.name, metric.value, policy)
    ]
    yield Promise(
        "Metrics with so many digits at most",
        _names(sorted({f"{rule.name} {rule.digits}" for _, policy in judged for rule in policy.metrics.allow})),
        (f"otherwise: {_names(precise)}" if precise else "none with more") + unknown,
        "broken" if precise else held,
    )
    first = {u.upload_id for u, policy in judged if policy.release.updates == "every"}
    unreleased = [u for u, _ in judged if u.upload_id in first and (u.update or "") not in found.released]
    asked = sorted({policy.release.updates for _, policy in judged})
    yield Promise(
        "Updates that a person releases",
        _names(asked),
        f"{len(found.released)} released by a person"
        + (f"; {many(len(unreleased), 'update')} without" if unreleased else "")
        + unknown,
        "broken" if unreleased else held,
    )


def _allowed(name: str, value: str, policy: Policy) -> bool:
    digits = {rule.name: rule.digits for rule in policy.metrics.allow}
    if name not in digits:
        return False
    if not DECIMAL.fullmatch(value):
        return value == "null"
    return float(f"{float(value):.{digits[name]}g}") == float(value)


def _has_form(count: int | None, form: str) -> bool:
    if count is None or form == "exact":
        return True
    return count == 1 if form == "uniform" else count <= 0 or count & (count - 1) == 0


def _key(row: TensorRow) -> str:
    return row.name if row.bundle == MODEL else f"{row.bundle}/{row.name}"


def _names(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}" if found else "none"
