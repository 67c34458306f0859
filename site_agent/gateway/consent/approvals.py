"""What a person approved, and whether this is it. Judges only: no file, no network.

A consent is for one digest: the study's settings and the exact tensors and numbers that leave. If either changes, it
is no consent, and ``differences`` says in words what changed.
"""

import re
from dataclasses import asdict
from typing import Any

from site_agent.gateway.connection.messages import VALIDATE, Assignment
from site_agent.gateway.consent.account import SHORT, Account, Line, setting_changes
from site_agent.gateway.exit.policy import Asked
from site_agent.state.directory import APPROVED, WITHDRAWN, Consent, Offer, Shown, exposed, now_text
from wardround.errors import BadData, NeedsPerson, NotPermitted, UsageProblem, WardroundError
from wardround.records.study import ReportedSection, StudyFile
from wardround.tensors.manifests import TensorSpec
from wardround.v1.federation_pb2 import RefusalCode

ATTEMPTS = 8  # at one round: each may send an update again, and the coordinator's operator may start a study anew
SAID_APART = ("reported.metrics ", "reported.counts ")  # in sentences of their own
DECLINED = frozenset(name for name, _ in RefusalCode.items() if name.startswith("DECLINED_"))
LEAF_FIELDS = ("bundle", "name", "dtype", "shape", "bytes")


def specs(leaves: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    """Leaves as tensor specs, in order."""
    return tuple(TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), row["bundle"]) for row in leaves)


def refuse_other_tensors(offer: Offer, described: dict[str, Any]) -> None:
    """Check that the coordinator's list of tensors is the one that this site's own trainer says would leave.

    Args:
        described: what the installed model shares (``leaves``), from the trainer.

    Raises:
        NeedsPerson: the two lists differ, or something that is no float32 tensor would leave.
    """
    own = [{key: row[key] for key in LEAF_FIELDS} for row in described["leaves"]]
    if _by_name(own) != _by_name(offer.leaves):
        changed = "; ".join(_tensor_differences(own, offer.leaves))
        raise NeedsPerson(
            f"study `{offer.study}`: the coordinator's list of tensors is not what the model installed here shares: "
            f"{changed}",
            hint="the two programs hold different models; nothing was approved",
            code="DECLINED_MODEL_MISMATCH",
        )
    if own != offer.leaves:
        raise NeedsPerson(
            f"study `{offer.study}`: the coordinator's list of tensors is in another order than that of the model "
            "installed here",
            hint="the coordinator's operator makes the initial model with `fl-lab init`; nothing was approved",
            code="DECLINED_MODEL_MISMATCH",
        )
    odd = next((row for row in offer.leaves if row["dtype"] != "F32"), None)
    if odd is not None:
        raise NeedsPerson(
            f"study `{offer.study}` would share `{odd['name']}` as {odd['dtype']}; only F32 may leave",
            hint="nothing was approved",
            code="DECLINED_MODEL_MISMATCH",
        )


def grant(
    offer: Offer,
    described: dict[str, Any],
    data: dict[str, str],
    checked: dict[str, Any],
    person: dict[str, Any],
    shown: Shown,
) -> Consent:
    """A consent to ``offer``, whose tensors ``refuse_other_tensors`` has let pass.

    Args:
        described: what the installed model begins a round with (``comes``) and keeps (``stays``), and who has this
            site's own model (``exposure``), from the trainer.
        data: what ``trained_on`` gives.
        checked: how many ``rows`` the table has, and ``validation_rows`` of them, from the trainer.
        person: name and uid of who approves.
        shown: the account that this person was shown.
    """
    return Consent(
        study=offer.study, revision=offer.revision, study_digest=offer.digest, leaves=offer.leaves,
        metrics=offer.metrics, counts=offer.document["reported"]["counts"], stays=described["stays"], data=data,
        rows=checked["rows"], validation_rows=checked["validation_rows"], approved_by=person, approved_at=now_text(),
        state=APPROVED, comes=[{key: row[key] for key in LEAF_FIELDS} for row in described["comes"]],
        exposure=described["exposure"], apart=described["apart"], document=offer.document, attempts=ATTEMPTS,
        account=asdict(shown),
        seen=checked.get("seen", {}),
    )  # fmt: skip


def trained_on(name: str, described: dict[str, Any], checked: dict[str, Any]) -> dict[str, str]:
    """The data of a consent: its name and digest; and where there are any, ``network``, the label of the one that
    trains on it, ``common``, the digest of the common set, and ``weights``, that of what private tensors begin with.
    """
    weights = checked.get("weights")
    more = {
        "network": described.get("network", ""),
        "common": checked.get("common", ""),
        "weights": "" if weights is None else weights["digest"],
    }
    return {"name": name, "digest": checked["digest"], **{key: text for key, text in more.items() if text}}


def pinned(consent: Consent) -> dict[str, str]:
    """What a consent pins beside the data, as the ledger's line has it."""
    names = {"network": "network", "common": "common_digest", "weights": "weights_digest"}
    return {field: consent.data[key] for key, field in names.items() if key in consent.data}


def data_differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What a site would train on otherwise than approved, one sentence each."""
    found = []
    if (before["name"], before["digest"]) != (now["name"], now["digest"]):
        found.append(f"the data is `{now['name']}`, {now['digest'][:12]}…")
    if "network" in before and before["network"] != now.get("network"):
        found.append(f"this site trains network `{now.get('network', 'default')}`, approved was `{before['network']}`")
    if before.get("weights") != now.get("weights"):
        found.append(f"its own tensors begin with {_weights(now)}, approved was: {_weights(before)}")
    return found


def asked(offer: Offer, coordinator: str, records: int | None, exposure: str, apart: str = "") -> Asked:
    """What ``offer`` would have leave, for the policy.

    Args:
        records: rows that its metrics are taken over, if known.
        exposure, apart: who would have what of this site's own, from the trainer.
    """
    told = told_of(offer)
    leaving = specs(offer.leaves)
    return Asked(
        offer.study, coordinator, leaving, offer.metrics, told.digits, told.counts, records, offer.rounds, exposure,
        apart,
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


def since_shown(last: Shown, account: Account) -> list[str]:
    """What changed between an account that was shown and another one, line by line; never nothing if anything did."""
    now = account.lines
    found = [f"revision {last.revision} -> {account.revision}"] if last.revision != account.revision else []
    found += [
        Line(name, now[name], last.lines.get(name, "")).sentence() for name in now if last.lines.get(name) != now[name]
    ]
    found += [f"{name} {value} is gone" for name, value in last.lines.items() if name not in now]
    return found or [f"the initial model, of digest {last.study_digest[:12]}… -> {account.study_digest[:12]}…"]


def require(consent: Consent | None, study: str, digest: str) -> Consent:
    """The consent under which a study of this digest may be worked on.

    Raises:
        NeedsPerson: there is none, it was withdrawn, or it is for another digest; the code may be told.
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


def refuse_beyond(consent: Consent, assignment: Assignment, last: tuple[int, int], base: str) -> None:
    """Refuse an assignment that lies outside what was approved: another revision, a round that the study has not or
    that is over, one attempt too many, numbers of a round that is not the closing one, another model in a round that
    was begun.

    Args:
        last: round and attempt that this site last began or sent of this revision; (0, 0) before the first.
        base: the digest of the model with which round ``last`` was begun; "" if that is not known any more.

    Raises:
        NotPermitted: the message says what was asked and what was approved; its code may be told.
    """
    closing = consent.rounds + 1
    asked, attempt, (before, tried) = assignment.round, assignment.attempt, last
    if assignment.revision != consent.revision:
        what = f"revision {assignment.revision}: revision {consent.revision} was approved"
    elif assignment.kind == VALIDATE and asked != closing:
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


def check_tensors(found: tuple[TensorSpec, ...], approved: list[dict[str, Any]], study: str, what: str) -> None:
    """Refuse anything but exactly the approved tensors (``leaves`` or ``comes`` of a consent), in the approved order.

    Raises:
        BadData: naming the first tensor that is extra, missing, or of another shape.
    """
    if found == specs(approved):
        return
    have = [dict(zip(LEAF_FIELDS, (s.bundle, s.name, s.dtype, list(s.shape), s.bytes), strict=True)) for s in found]
    changed = _tensor_differences(approved, have) or ["the same tensors in another order"]
    raise BadData(
        f"{what} does not hold the tensors that were approved for `{study}`: {changed[0]}",
        code="DECLINED_MODEL_MISMATCH",
    )


def check_numbers(
    metrics: dict[str, str], num_examples: int, num_validation: int, consent: Consent, told: ReportedSection
) -> None:
    """Refuse any number that was not approved, is told more exactly than approved, or is outside its range; and any
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
        if not told.has_form(value):
            raise BadData(
                f"metric `{name}` is not a decimal of at most {told.digits} digits, as approved for `{consent.study}`",
                code="DECLINED_POLICY",
            )
        if not told.is_in_range(name, value):
            raise BadData(
                f"metric `{name}` is outside its range, as approved for `{consent.study}`", code="DECLINED_POLICY"
            )
    known = {"num_examples": consent.train_rows, "num_validation": consent.validation_rows}
    for name, count in (("num_examples", num_examples), ("num_validation", num_validation)):
        if type(count) is not int or count != told.count(known[name]):
            raise BadData(
                f"the trainer's {name} is not that of the data approved for `{consent.study}`, told {told.counts}",
                hint="`site-agent approve` again, if the data changed",
                code="DECLINED_POLICY",
            )


def told_of(study: Offer | Consent) -> ReportedSection:
    return StudyFile.from_document(study.document, f"study `{study.study}`").reported


def differences(consent: Consent, offer: Offer, described: dict[str, Any] | None = None) -> list[str]:
    """What changed between the approved study and the offered one, one sentence each; empty if nothing did.

    Args:
        described: what the trainer says of the offered study, where it was asked; without it, who has this site's own
            model is not compared.
    """
    if (consent.study_digest, consent.revision) == (offer.digest, offer.revision):
        return []
    found = [f"revision {offer.revision}, approved was {consent.revision}"]
    if described is not None:
        now, was = exposed(described["exposure"], described["apart"]), exposed(consent.exposure, consent.apart)
        found += [f"now {now}; approved was: {was}"] if now != was else []
    found += _tensor_differences(consent.leaves, offer.leaves)
    found += [f"metric `{name}` would now leave" for name in offer.metrics if name not in consent.metrics]
    found += [f"metric `{name}` would no longer leave" for name in consent.metrics if name not in offer.metrics]
    counts = offer.document["reported"]["counts"]
    if counts != consent.counts:
        found.append(f"counts would be told {counts}, approved was {consent.counts}")
    settings = setting_changes(consent.document, offer.document) if consent.document else []
    found += [change for change in settings if not change.startswith(SAID_APART)]
    if len(found) == 1 and consent.study_digest != offer.digest:
        found.append("the same settings, tensors and numbers; its initial model is another")
    return found


def sayable(error: WardroundError) -> str:
    """The code under which a failure here may be told to the coordinator; nothing else of it may."""
    if error.code in DECLINED:
        return error.code
    return "DECLINED_RESOURCES" if error.exit_code == 73 else "DECLINED_TRAINING_FAILED"


def _weights(data: dict[str, str]) -> str:
    return f"the weights {data['weights'][:12]}…" if "weights" in data else "what the study's seed draws"


def _by_name(leaves: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return sorted(tuple(str(row[key]) for key in LEAF_FIELDS) for row in leaves)


def _tensor_differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    old = {(row["bundle"], row["name"]): row for row in before}
    new = {(row["bundle"], row["name"]): row for row in after}
    found = [f"`{key[1]}` is added ({_form(new[key])})" for key in new if key not in old]
    found += [f"`{key[1]}` is gone ({_form(old[key])})" for key in old if key not in new]
    found += [
        f"`{key[1]}` is {_form(new[key])}, was {_form(old[key])}"
        for key in new
        if key in old and _form(new[key]) != _form(old[key])
    ]
    return found


def _form(row: dict[str, Any]) -> str:
    return f"{row['dtype']} {list(row['shape'])}"
