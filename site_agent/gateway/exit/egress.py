"""The one exit. What leaves is checked against consent and policy, and in the ledger before its first byte is sent.

``record`` is the only maker of a ``PendingUpload`` and ``send`` the only caller of the upload; so nothing is sent that
the ledger does not hold. Both read the gateway's own copy of an update (``take``) and never the trainer's file, which
the trainer may change at any time. A line of the ledger lets an update out once: what is sent again has a line of its
own.
"""

import logging
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from site_agent.gateway.connection.backoff import TRIES_IN_TROUBLE, backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.connection.session import Session
from site_agent.gateway.connection.upload import UploadTry
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.exit import receipts
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.masked import Masking
from site_agent.gateway.exit.measure import NOTHING, Measured, measure
from site_agent.gateway.exit.staging import Staging
from site_agent.state.directory import Consent, Journal
from wardround import refusals
from wardround.errors import BadData, NotPermitted, TryAgain, Unavailable
from wardround.local import traces
from wardround.records.ledger.entries import ControlEntry, MethodBytes, Metric, ResendEntry, TensorRow, UploadEntry
from wardround.records.receipts import Receipt
from wardround.records.update import LedgerStatement, UploadHeader
from wardround.signing import canonical
from wardround.signing.dsse import Envelope
from wardround.tensors.files import MAX_HEADER
from wardround.tensors.manifests import Entry, Manifest, TensorSpec
from wardround.tensors.tags import Tag

MAX_TRIES = 100  # lines that one update may have, however short its tries are: the ledger is not a peer's to fill
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingUpload:
    """An update that the ledger holds without a receipt, and that may be sent.

    ``file`` is the gateway's own copy, None for a closing validation. ``update``: the digest that people release.
    ``line_spent``: what was sent under its last line is not known, so that it needs another. ``tag``: of the payload as
    it was measured, where this process measured it.
    """

    header: UploadHeader
    file: Path | None
    update: str
    line_spent: bool = False
    tag: Tag | None = None


@traces.step("take")
def take(staging: Staging, policy: PolicyEnforcement, journal: Journal, consent: Consent, copy: Path) -> Measured:
    """Copy what the trainer handed over to ``copy``, a place of the gateway's own, and measure the copy.

    Args:
        journal: names the file in staging as its ``update``.

    Raises:
        BadData: it is no plain file, larger than what was approved, or no safetensors file of the approved tensors.
        CannotWrite: there is no room for it.
    """
    staging.take(journal.update, copy, 8 + MAX_HEADER + sum(spec.bytes for spec in consent.upload))
    return _measured(policy, journal, consent, copy)


def _measured(policy: PolicyEnforcement, journal: Journal, consent: Consent, file: Path) -> Measured:
    """What the gateway's own copy holds. Raises BadData: not the approved tensors; the ledger says so."""
    try:
        return measure(file, consent)
    except BadData as error:
        policy.block(journal, "the update", f"consent: {error.message}")
        raise


def update_digest(journal: Journal, destination: str, manifest_sha256: str = "") -> str:
    """One digest over everything of an assignment that would leave: what a person releases is this and nothing else.

    Args:
        journal: names study, kind, round, attempt, metrics and counts.
        manifest_sha256: of the measured tensors; as the journal has it, if not given.
    """
    manifest_sha256 = manifest_sha256 or journal.update_digest or Manifest(()).digest()
    return canonical.digest(_entry(journal, destination, manifest_sha256).left())


@traces.step("check")
def record(
    ledger: Ledger,
    policy: PolicyEnforcement,
    meter: Meter,
    journal: Journal,
    consent: Consent,
    file: Path | None,
    measured: Measured | None = None,
    masking: Masking | None = None,
) -> PendingUpload | None:
    """Check an update against consent and policy and write it into the ledger, after what was sent beside updates.

    1. the numbers and tensors are those that were approved, and each value is finite
    2. the policy allows every one of them, and the quotas the bytes
    3. where the policy wants a person's release, it was given for exactly this
       with secure aggregation, the update is masked here: from now on what leaves is the masked one
    4. the ledger holds what else was sent until now
    5. the ledger holds this update

    Args:
        journal: names round, attempt, metrics and counts.
        file: the gateway's own copy of the deltas, None for a closing validation.
        measured: what ``take`` measured of ``file`` just now; without it the file is measured here.
        masking: with secure aggregation, how the update gets its masks.

    Returns:
        None: it waits for a person, and the ledger says so.

    Raises:
        BadData: it is not what was approved. NotPermitted: the policy denies it, or a person rejected it. Either way
            the ledger says so, and nothing may leave.
        CannotWrite: the ledger does not take it; nothing may leave.
    """
    reported = consent.reported
    try:
        consents.check_numbers(journal.metrics, journal.num_examples, journal.num_validation, consent, reported)  # 1
    except BadData as error:
        policy.block(journal, "the update", f"consent: {error.message}")
        raise
    if measured is None:
        measured = _measured(policy, journal, consent, file) if file is not None else NOTHING
    manifest, tensors, tag = measured.manifest, measured.rows, measured.tag
    _refuse_nonfinite(manifest, tensors, policy, journal)
    policy.refuse_denied(journal, consent, reported, manifest.specs, sorted(journal.metrics))  # 2
    entry = _entry(journal, policy.coordinator, manifest.digest())
    update = canonical.digest(entry.left())
    if policy.holds(journal, update):  # 3
        return None
    upload_id = uuid.uuid4().hex
    submission = None
    if masking is None:
        entry = replace(entry, upload_id=upload_id, update=update, payload_bytes=manifest.bytes, tensors=tensors)
    else:
        made = masking.make()
        entry = made.entry(entry, upload_id, masking.commit(upload_id, entry, tensors))
        file, submission, tag = made.file, made.submission, None
    with meter.taken() as methods:
        ledger.append_all([*_control(methods), entry])  # 4 and 5, in this order, with one fsync
    return PendingUpload(_header(entry, ledger.statement(), submission), file, update, tag=tag)


def record_control(ledger: Ledger, meter: Meter) -> None:
    """Write what was sent beside updates since the last time into the ledger, if anything was."""
    with meter.taken() as methods:
        ledger.append_all(_control(methods))


def recorded(
    ledger: Ledger, journal: Journal, destination: str, file: Path | None, masking: Masking | None = None
) -> PendingUpload | None:
    """The journal's upload that the ledger holds without a receipt, to be sent again; None if there is none.

    How much of it was sent is not known any more, so it is sent under a line of its own. One with masks is masked
    again: from the same update and the same secrets come the same bytes.

    Raises:
        BadData: they are others.
    """
    entry = ledger.unresolved.get(journal.upload_id)
    if entry is None:
        return None
    update = update_digest(journal, destination)
    submission = None
    if masking is not None:
        made = masking.make()
        if made.manifest.digest() != entry.manifest_sha256:
            raise BadData(
                f"what round {entry.round} of `{entry.study}` would send again is not what the ledger has",
                hint="the update or the secrets of its masks are others than before; the next round is another one",
                code="DECLINED_MODEL_MISMATCH",
            )
        file, submission = made.file, made.submission
    return PendingUpload(_header(entry, ledger.statement(), submission), file, update, line_spent=True)


@traces.step("upload")
def send(
    upload: PendingUpload,
    session: Session,
    ledger: Ledger,
    policy: PolicyEnforcement,
    consent: Consent,
    interrupt: Interrupt,
) -> Receipt:
    """Send it, as often as the connection breaks, until there is a receipt; the receipt is in the ledger when this
    returns.

    The `upload` line lets out the first try. A try that the coordinator answered spends a line; the next one writes a
    `resend` line before it sends anything. Each try after the first begins if the policy as it is by then lets out all
    of it: a coordinator may not answer for days.

    Raises:
        Interrupted: called off; what was sent stays unresolved until the coordinator is asked.
        NotPermitted: the policy denies by now what it let pass, or it was sent so often that a quota is spent; what was
            sent stays unresolved.
        CannotWrite: the ledger does not take another line; nothing more is sent.
        HostileReceipt: the receipt is not the coordinator's, or is for something else; it is kept as evidence.
        WardroundError: the coordinator refused the call itself.
    """
    header = upload.header
    sent = None if upload.line_spent else UploadTry()
    for tries, wait_s in enumerate(backoff(), 1):
        interrupt.check()
        times_connected = session.times_connected
        if sent is None or sent.answered:
            _record_resend(upload, sent, ledger, policy, consent)
        elif tries > 1:
            _refuse_again(upload, policy, consent, counted=True)
        sent = UploadTry()
        try:
            with session.use() as connection:
                ledger.catch_up(connection.show_ledger)
                now = replace(header, ledger=ledger.statement())
                envelope = connection.upload(now, upload.file, sent, interrupt, upload.tag)
                return receipts.take(header.upload_id, envelope, connection, ledger)
        except (Unavailable, TryAgain) as error:
            interrupt.check()
            if error.code == refusals.TROUBLE and tries >= TRIES_IN_TROUBLE:
                raise  # it stays unresolved, and is asked about with the next connection
            log.warning("%s; trying again in %.1f s, or as soon as the coordinator is back", error.message, wait_s)
            session.pause(wait_s, times_connected, interrupt)
    raise AssertionError("backoff never ends")


def _record_resend(
    upload: PendingUpload, sent: UploadTry | None, ledger: Ledger, policy: PolicyEnforcement, consent: Consent
) -> None:
    """Write the line under which an upload is sent once more, if the policy allows it and the quotas have room.

    Args:
        sent: what was sent under the line before; None if that is not known, and then it counts for all of it.
    """
    header = upload.header
    tries = ledger.tries(header.upload_id)
    if sent is not None:
        ledger.sent(header.upload_id, sent.payload_bytes)
    _refuse_again(upload, policy, consent, counted=False)
    if tries >= MAX_TRIES:
        policy.block(header, "the update", f"it was begun {tries} times")
        raise NotPermitted(
            f"round {header.round} of `{header.study}` was begun {tries} times and has no receipt; "
            "it is not sent again",
            hint="the connection to the coordinator breaks, or the coordinator breaks it; its operator may know why",
            code="DECLINED_POLICY",
        )
    ledger.append(ResendEntry(
        upload_id=header.upload_id, study=header.study, revision=header.revision, round=header.round,
        attempt=header.attempt, payload_bytes=header.manifest.bytes, try_=tries + 1,
        sent=sent.payload_bytes if sent is not None else None,
    ))  # fmt: skip
    log.info("round %d of `%s`: try %d", header.round, header.study, tries + 1)


def _refuse_again(upload: PendingUpload, policy: PolicyEnforcement, consent: Consent, *, counted: bool) -> None:
    """Raises NotPermitted: as ``PolicyEnforcement.refuse_again``, or people must release it by now, and did not."""
    header = upload.header
    metrics: Sequence[str] = [name for name, _ in header.metrics]
    specs = header.manifest.specs
    if header.submission is not None:  # the masks hide what the policy is asked about
        specs, metrics = consent.upload if len(specs) > 1 else (), consent.metrics
    policy.refuse_again(header, consent, consent.reported, specs, metrics, counted=counted)
    if policy.waits_for_people(header, upload.update):
        policy.block(header, "the update", "[release]: people did not let it out")
        raise NotPermitted(
            f"by now the policy wants people to release round {header.round} of `{header.study}`; it is not sent again",
            hint="the next round waits for them before it is sent",
            code="DECLINED_POLICY",
        )


def _refuse_nonfinite(
    manifest: Manifest, tensors: Sequence[TensorRow], policy: PolicyEnforcement, journal: Journal
) -> None:
    """Raises BadData: a tensor holds NaN or an infinity; the message and the ledger name the first."""
    bad = next(((spec.key, row) for spec, row in zip(manifest.specs, tensors, strict=True) if row.nonfinite), None)
    if bad is None:
        return
    key, row = bad
    what = f"{row.nonfinite} of {math.prod(row.shape)} values are not finite"
    policy.block(journal, key, what)
    raise BadData(
        f"tensor `{key}` of the update for `{journal.study}`: {what}; nothing was sent",
        hint="the training diverged: look at this site's data and the study's learning rate",
        code="DECLINED_TRAINING_FAILED",
    )


def _entry(journal: Journal, destination: str, manifest_sha256: str) -> UploadEntry:
    """The ledger's entry of what would leave, before it has an id: ``left`` of it is what a person releases."""
    return UploadEntry(
        upload_id="", study=journal.study, revision=journal.revision, study_digest=journal.study_digest,
        kind=journal.kind, round=journal.round, attempt=journal.attempt, destination=destination,
        manifest_sha256=manifest_sha256, payload_bytes=0, tensors=(),
        metrics=tuple(Metric(name=name, value=value) for name, value in sorted(journal.metrics.items())),
        num_examples=journal.num_examples, num_validation=journal.num_validation,
    )  # fmt: skip


def _header(entry: UploadEntry, statement: LedgerStatement, submission: Envelope | None = None) -> UploadHeader:
    """The header of the upload that an entry records."""
    manifest = Manifest(
        tuple(Entry(TensorSpec(row.name, row.dtype, row.shape, row.bundle), row.sha256) for row in entry.tensors)
    )
    return UploadHeader(
        upload_id=entry.upload_id, study=entry.study, revision=entry.revision, digest=entry.study_digest or "",
        round=entry.round, attempt=entry.attempt, manifest=manifest,
        metrics=tuple((row.name, row.value) for row in entry.metrics), num_examples=entry.num_examples or 0,
        num_validation=entry.num_validation or 0, ledger=statement, submission=submission,
    )  # fmt: skip


def _control(methods: Sequence[MethodBytes]) -> list[ControlEntry]:
    """The entry of what was counted; none if nothing was."""
    return [ControlEntry(methods=tuple(methods), bytes=sum(row.bytes for row in methods))] if methods else []
