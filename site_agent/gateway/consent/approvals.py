"""What a person approved, and whether this is it. Judges only: no file, no network.

A consent is for one digest: the study's settings and the exact tensors and numbers of an update. If either changes, it
is no consent, and ``changes`` says in words what changed.
"""

import re
from collections.abc import Mapping, Sequence

from site_agent.gateway.consent.account import SHORT, Account
from site_agent.gateway.consent.changes import differences, since_shown, tensor_differences
from site_agent.gateway.policy.decisions import StudyRequest
from site_agent.state.consent import APPROVED, WITHDRAWN, Consent, Shown, TrainedData
from site_agent.state.directory import now_text
from site_agent.state.offer import Offer
from site_agent.state.person import Person
from site_agent.state.tensors import specs_from
from wardround.errors import BadData, NeedsPerson, NotPermitted, UsageProblem, WardroundError
from wardround.records.assignment import ATTEMPTS_APPROVED, VALIDATE, Assignment
from wardround.records.codes import DECLINE_CODES
from wardround.records.study import ReportedSection
from wardround.records.trainer import Checked, Described
from wardround.tensors.manifests import TensorSpec

ATTEMPTS = ATTEMPTS_APPROVED  # at one round


def refuse_other_tensors(offer: Offer, described: Described) -> None:
    """Check that the coordinator's list of tensors is the one that this site's own trainer says would be uploaded.

    Args:
        described: what the trainer says of the installed model.

    Raises:
        NeedsPerson: the two lists differ, or something that is no float32 tensor would leave.
        BadData: the trainer names a tensor of an impossible form.
    """
    own = specs_from(described.upload)
    if _by_name(own) != _by_name(offer.upload):
        changed = "; ".join(tensor_differences(own, offer.upload))
        raise NeedsPerson(
            f"study `{offer.study}`: the coordinator's list of tensors is not what the model installed here shares: "
            f"{changed}",
            hint="the two programs hold different models; nothing was approved",
            code="DECLINED_MODEL_MISMATCH",
        )
    if own != offer.upload:
        raise NeedsPerson(
            f"study `{offer.study}`: the coordinator's list of tensors is in another order than that of the model "
            "installed here",
            hint="the coordinator's operator makes the initial model with `fl-lab init`; nothing was approved",
            code="DECLINED_MODEL_MISMATCH",
        )
    other = next((spec for spec in offer.initial_model.specs if spec.dtype != "F32"), None)
    if other is not None:
        raise NeedsPerson(
            f"study `{offer.study}` would share `{other.name}` as {other.dtype}; only F32 may leave",
            hint="nothing was approved",
            code="DECLINED_MODEL_MISMATCH",
        )


def grant(
    offer: Offer, described: Described, data: TrainedData, checked: Checked, person: Person, shown: Shown
) -> Consent:
    """A consent to ``offer``, whose tensors ``refuse_other_tensors`` has let pass.

    Args:
        described: what the trainer says of the installed model.
        data: what ``trained_data`` gives.
        checked: what the trainer says of the data.
        person: who approves.
        shown: the account that this person was shown.
    """
    return Consent(
        study=offer.study, revision=offer.revision, study_digest=offer.digest, upload=offer.upload,
        metrics=offer.metrics, counts=offer.reported.counts, private=tuple(described.private), data=data,
        rows=checked.rows, validation_rows=checked.validation_rows, approved_by=person, approved_at=now_text(),
        state=APPROVED, download=specs_from(described.download), exposure=described.exposure,
        personalized=described.personalized, document=offer.document, attempts=ATTEMPTS, account=shown,
        files=checked.status, averages=described.averages,
    )  # fmt: skip


def trained_data(name: str, described: Described, checked: Checked) -> TrainedData:
    """The data of a consent, from what the trainer says of the model and of the data called ``name``."""
    weights = "" if checked.weights is None else checked.weights.digest
    return TrainedData(name, checked.digest, described.network, checked.common, weights)


def study_request(
    offer: Offer, coordinator: str, records: int | None, exposure: str | None, personalized: str = ""
) -> StudyRequest:
    """What ``offer`` would have leave, for the policy.

    Args:
        records: rows that its metrics are taken over, if known.
        exposure, personalized: who would have what of this site's own, from the trainer; None where it was not asked.
    """
    return StudyRequest(
        offer.study, coordinator, offer.upload, offer.metrics, offer.reported.digits, offer.reported.counts, records,
        offer.rounds, exposure, personalized, offer.plugins, offer.is_secure,
    )  # fmt: skip


def refuse_unshown(digest: str, account: Account, last: Shown | None, again: str) -> None:
    """Refuse to approve an account under a digest that is not its own.

    Args:
        digest: what the person or script says was shown; its first 16 hex digits are enough.
        last: the account that was shown last, if it is kept.
        again: the command that shows it.

    Raises:
        UsageProblem: that is no digest. NeedsPerson: another account was shown; it says what changed, line by line.
    """
    hint = f"`{again}` shows what is offered now; nothing was approved"
    if not re.fullmatch(rf"[0-9a-f]{{{SHORT},64}}", digest):
        raise UsageProblem(f"{digest[:80]!r} is not a digest of {SHORT} to 64 of 0-9 and a-f", hint=hint)
    if account.digest.startswith(digest):
        return
    if account.study_digest.startswith(digest):
        raise UsageProblem(
            f"{digest} is the digest of study `{account.study}`; to approve takes that of the whole account", hint=hint
        )
    if last is None or not last.digest.startswith(digest):
        raise NeedsPerson(f"study `{account.study}`: what is offered now was not shown under {digest}", hint=hint)
    raise NeedsPerson(
        f"study `{account.study}` is not what was shown at {last.at}: {'; '.join(since_shown(last, account))}",
        hint=hint,
    )


def refuse_overtaken(consent: Consent, offer: Offer, *, overtaken: bool) -> None:
    """Refuse a consent that was made of what is no longer so: reading the data for it takes minutes.

    Args:
        offer: as it is now.
        overtaken: whether somebody approved or withdrew the study meanwhile.

    Raises:
        NeedsPerson: it says what changed.
    """
    changed = differences(consent, offer) if offer.digest != consent.study_digest else []
    changed += ["somebody approved or withdrew it meanwhile"] if overtaken else []
    if changed:
        raise NeedsPerson(
            f"study `{consent.study}` changed while it was approved: {'; '.join(changed)}",
            hint=f"`site-agent preview {consent.study} --data {consent.data.name}`; nothing was approved",
        )


def require(consent: Consent | None, study: str, digest: str) -> Consent:
    """The consent under which a study of this digest may be worked on.

    Raises:
        NeedsPerson: there is none, it was withdrawn, or it is for another digest; the code may be reported.
    """
    hint = f"`site-agent preview {study}`, then `site-agent approve {study} --data NAME`"
    if consent is None:
        raise NeedsPerson(f"study `{study}` is not approved here", hint=hint, code="DECLINED_NOT_APPROVED")
    if consent.state == WITHDRAWN:
        raise NeedsPerson(f"study `{study}` was withdrawn here", hint=hint, code="DECLINED_WITHDRAWN")
    if consent.study_digest != digest:
        raise NeedsPerson(
            f"study `{study}` changed since it was approved: digest {digest[:12]}…, "
            f"approved {consent.study_digest[:12]}…",
            hint=hint,
            code="DECLINED_NOT_APPROVED",
        )
    return consent


def require_offered(consent: Consent, offer: Offer, assignment: Assignment) -> None:
    """Check that what is offered is what was approved, and that the model which the study begins with is the one in its
    digest.

    Raises:
        NeedsPerson: something else is offered by now; the code may be reported.
        NotPermitted: the coordinator sends another model as the one of round 0.
    """
    require(consent, assignment.study, offer.digest)
    base, initial = assignment.base, offer.initial_model
    if base is None or base.round != 0 or initial.specs != consent.download:
        return  # of what a site gets beside the shared tensors, the consent has no digest
    if base.digest != initial.digest():
        raise NotPermitted(
            f"study `{consent.study}` begins with model {initial.digest()[:12]}…, and the coordinator sends "
            f"{base.digest[:12]}… as that",
            hint="show this to the coordinator's operator; nothing was computed",
            code="DECLINED_MODEL_MISMATCH",
        )


def refuse_beyond(consent: Consent, assignment: Assignment, last: tuple[int, int], base: str) -> None:
    """Refuse an assignment that lies outside what was approved: another revision, a round that the study has not or
    that is over, one attempt too many, numbers of a round that is not the closing one, training where a site only
    evaluates, another model in a round that was begun.

    Args:
        last: round and attempt that this site last began or sent of this revision; (0, 0) before the first.
        base: the digest of the model with which round ``last`` was begun; "" if that is not known any more.

    Raises:
        NotPermitted: the message says what was asked and what was approved; its code may be reported.
    """
    closing = consent.rounds + 1
    asked, attempt, (before, tried) = assignment.round, assignment.attempt, last
    if assignment.revision != consent.revision:
        what = f"revision {assignment.revision}: revision {consent.revision} was approved"
    elif consent.evaluates and assignment.kind != VALIDATE:
        what = f"training in round {asked}: this site was approved to evaluate alone"
    elif consent.evaluates and not 1 <= asked <= closing:
        what = f"numbers of round {asked}: rounds 1 to {closing} were approved"
    elif assignment.kind == VALIDATE and asked != closing and not consent.evaluates:
        what = f"numbers of round {asked}: without an update only round {closing}, the closing one, may ask for them"
    elif assignment.kind != VALIDATE and not 1 <= asked <= consent.rounds:
        what = f"round {asked}: rounds 1 to {consent.rounds} were approved"
    elif not 1 <= attempt <= consent.attempts:
        what = f"attempt {attempt} at round {asked}: attempts 1 to {consent.attempts} were approved"
    elif (asked, attempt) < last:
        what = f"attempt {attempt} at round {asked} after attempt {tried} at round {before}: rounds go forward only"
    elif asked == before and base and assignment.base is not None and assignment.base.digest != base:
        what = f"round {asked} with another model than it was begun with: one model a round"
    else:
        return
    raise NotPermitted(
        f"study `{consent.study}` asks for what nobody approved here: {what}",
        hint="ask the coordinator's operator; nothing of it was computed or sent",
        code="DECLINED_BEYOND_CONSENT",
    )


def check_tensors(specs: Sequence[TensorSpec], approved: Sequence[TensorSpec], study: str, what: str) -> None:
    """Refuse anything but exactly the approved tensors (``upload`` or ``download`` of a consent), in their order.

    Raises:
        BadData: naming the first tensor that is extra, missing, or of another shape.
    """
    if tuple(specs) == tuple(approved):
        return
    changed = tensor_differences(approved, specs) or ["the same tensors in another order"]
    raise BadData(
        f"{what} does not hold the tensors that were approved for `{study}`: {changed[0]}",
        code="DECLINED_MODEL_MISMATCH",
    )


def check_numbers(
    metrics: Mapping[str, str], num_examples: int, num_validation: int, consent: Consent, reported: ReportedSection
) -> None:
    """Refuse any number that was not approved, is reported more exactly than approved, or is outside its range; and any
    count but that of the approved data, which is known since it was approved: a trainer has nothing to say by it.

    Raises:
        BadData: naming the metric or count; never its value.
    """
    for name, value in metrics.items():
        if name not in consent.metrics:
            raise BadData(
                f"metric `{name[:40]}` was not approved for `{consent.study}`; approved: {', '.join(consent.metrics)}",
                code="DECLINED_POLICY",
            )
        if not reported.has_form(value):
            raise BadData(
                f"metric `{name}` is not a decimal of at most {reported.digits} digits, as approved for "
                f"`{consent.study}`",
                code="DECLINED_POLICY",
            )
        if not reported.is_in_range(name, value):
            raise BadData(
                f"metric `{name}` is outside its range, as approved for `{consent.study}`", code="DECLINED_POLICY"
            )
    known = {"num_examples": consent.train_rows, "num_validation": consent.validation_rows}
    for name, count in (("num_examples", num_examples), ("num_validation", num_validation)):
        if type(count) is not int or count != reported.count(known[name]):
            raise BadData(
                f"the trainer's {name} is not that of the data approved for `{consent.study}`, reported "
                f"{reported.counts}",
                hint="`site-agent approve` again, if the data changed",
                code="DECLINED_POLICY",
            )


def reportable_code(error: WardroundError) -> str:
    """The code under which a failure here may be reported to the coordinator; nothing else of it may."""
    if error.code in DECLINE_CODES:
        return error.code
    return "DECLINED_RESOURCES" if error.exit_code == 73 else "DECLINED_TRAINING_FAILED"


def _by_name(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return sorted(specs, key=lambda spec: (spec.bundle, spec.name, spec.dtype, spec.shape))
