"""The one exit. What leaves is checked against consent and policy, and in the ledger before its first byte is sent.

``record`` is the only maker of a ``Departure`` and ``send`` the only caller of the upload; so nothing is sent that the
ledger does not hold. Both read the gateway's own copy of an update (``take``) and never the trainer's file, which the
trainer may change at any time. A line of the ledger lets an update out once: what is sent again has a line of its own.
"""

import hashlib
import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from site_agent.gateway.connection.client import TRIES_IN_TROUBLE, Connection, Line, pauses
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.messages import Opening, Tried
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.exit.enforcement import Gate
from site_agent.gateway.exit.evidence import HostileReceipt
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.staging import Staging
from site_agent.state.directory import Consent, Journal
from wardround import refusals
from wardround.errors import BadData, NotPermitted, TryAgain, Unavailable
from wardround.records.receipts import OutOfOrder, Receipt
from wardround.records.study import ReportedSection
from wardround.signing import canonical
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import MAX_HEADER, MODEL, Entry, Manifest, TensorFile, TensorSpec
from wardround.terminal import quoted

MAX_TRIES = 100  # lines that one update may have, however short its tries are: the ledger is not a peer's to fill
BLOCK = 64 * 1024  # float32 elements looked at in one piece
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Departure:
    """An update that the ledger holds and that may be sent. ``file`` is the gateway's own copy, None for a closing
    validation; ``begun``: its line may have been used up, so that it needs another.
    """

    upload_id: str
    study: str
    revision: int
    digest: str
    round: int
    attempt: int
    manifest: Manifest
    metrics: dict[str, str]
    num_examples: int
    num_validation: int
    file: Path | None
    begun: bool = False


def take(staging: Staging, name: str, consent: Consent, copy: Path) -> str:
    """Copy what the trainer handed over to ``copy``, a place of the gateway's own. The digest of the copy's manifest.

    Raises:
        BadData: it is no plain file, larger than what was approved, or no safetensors file.
        CannotWrite: there is no room for it.
    """
    staging.take(name, copy, 8 + MAX_HEADER + sum(spec.bytes for spec in consents.specs(consent.leaves)))
    with TensorFile(copy) as file:
        return file.manifest().digest()


def update_digest(journal: Journal, destination: str, manifest_sha256: str = "") -> str:
    """One digest over everything of an assignment that would leave: what a person releases is this and nothing else.

    Args:
        journal: names study, kind, round, attempt, metrics and counts.
        manifest_sha256: of the measured tensors; as the journal has it, if not given.
    """
    manifest_sha256 = manifest_sha256 or journal.update_digest or Manifest(()).digest()
    return canonical.digest(_facts(journal, destination, manifest_sha256))


def _facts(journal: Journal, destination: str, manifest_sha256: str) -> dict[str, Any]:
    """Everything that would leave, as the ledger's `upload` line has it."""
    return {
        "study": journal.study, "revision": journal.revision, "study_digest": journal.study_digest,
        "kind": journal.kind, "round": journal.round, "attempt": journal.attempt, "destination": destination,
        "manifest_sha256": manifest_sha256,
        "metrics": [{"name": name, "value": value} for name, value in sorted(journal.metrics.items())],
        "num_examples": journal.num_examples, "num_validation": journal.num_validation,
    }  # fmt: skip


def record(
    ledger: Ledger,
    gate: Gate,
    meter: Meter,
    journal: Journal,
    consent: Consent,
    told: ReportedSection,
    file: Path | None,
) -> Departure | None:
    """Check an update against consent and policy and write it into the ledger, after what was said beside updates.

    1. the numbers and tensors are those that were approved, and each value is finite
    2. the policy allows every one of them, and the quotas the bytes
    3. where the policy wants a person's word, it was given for exactly this
    4. the ledger holds what else was sent until now
    5. the ledger holds this update

    Args:
        journal: names round, attempt, metrics and counts.
        file: the gateway's own copy of the deltas, None for a closing validation.

    Returns:
        None: it waits for a person, and the ledger says so.

    Raises:
        BadData: it is not what was approved. NotPermitted: the policy denies it, or a person rejected it. Either way
            the ledger says so, and nothing may leave.
        CannotWrite: the ledger does not take it; nothing may leave.
    """
    try:
        consents.check_numbers(journal.metrics, journal.num_examples, journal.num_validation, consent, told)  # 1
        manifest, rows = measure(file, consent) if file is not None else (Manifest(()), [])
    except BadData as error:
        gate.block(journal, "the update", f"consent: {error.message}")
        raise
    _refuse_nonfinite(rows, gate, journal)
    gate.refuse_denied(journal, consent, told, manifest.specs, sorted(journal.metrics))  # 2
    facts = _facts(journal, gate.coordinator, manifest.digest())
    update = canonical.digest(facts)
    if gate.holds(journal, update):  # 3
        return None
    upload_id = uuid.uuid4().hex
    upload = {**facts, "upload_id": upload_id, "update": update, "payload_bytes": manifest.bytes, "tensors": rows}
    with meter.taken() as methods:
        ledger.append_all([*_control(methods), ("upload", upload)])  # 4 and 5, in this order, with one fsync
    return _departure(ledger.unresolved[upload_id], file)


def record_control(ledger: Ledger, meter: Meter) -> None:
    """Write what was sent beside updates since the last time into the ledger, if anything was."""
    with meter.taken() as methods:
        ledger.append_all(_control(methods))


def _control(methods: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The record of what was counted; none if nothing was."""
    return [("control", {"methods": methods, "bytes": sum(row["bytes"] for row in methods)})] if methods else []


def recorded(ledger: Ledger, upload_id: str, file: Path | None) -> Departure | None:
    """A departure that the ledger holds without a receipt, to be sent again; None if there is none of that id.

    How much of it was sent is not known any more, so it is sent under a line of its own.
    """
    entry = ledger.unresolved.get(upload_id)
    return replace(_departure(entry, file), begun=True) if entry is not None else None


def send(
    departure: Departure, line: Line, ledger: Ledger, gate: Gate, consent: Consent, told: ReportedSection,
    interrupt: Interrupt,
) -> Receipt:  # fmt: skip
    """Send it, as often as the line breaks, until there is a receipt; the receipt is in the ledger when this returns.

    The `upload` line lets out the first try. A try that the coordinator answered uses a line up; the next one writes a
    `resend` line before it says anything, if the policy as it is by then lets out all of it.

    Raises:
        Interrupted: called off; what was sent stays unresolved until the coordinator is asked.
        NotPermitted: the policy denies by now what it let pass, or it was sent so often that a quota is spent; what was
            sent stays unresolved.
        CannotWrite: the ledger does not take another line; nothing more is sent.
        HostileReceipt: the receipt is not the coordinator's, or is for something else; it is kept as evidence.
        WardroundError: the coordinator refused the call itself.
    """
    last = None if departure.begun else Tried()
    for tries, pause in enumerate(pauses(), 1):
        interrupt.check()
        if last is None or last.answered:
            _let_out_again(departure, last, ledger, gate, consent, told)
        last = Tried()
        try:
            with line.use() as connection:
                ledger.catch_up(connection.show_ledger)
                envelope = connection.upload(_opening(departure, ledger), departure.file, last, interrupt)
                return _take_receipt(departure.upload_id, envelope, connection, ledger)
        except (Unavailable, TryAgain) as error:
            interrupt.check()
            if error.code == refusals.TROUBLE and tries >= TRIES_IN_TROUBLE:
                raise  # it stays unresolved, and is asked about with the next connection
            log.warning("%s; trying again in %.1f s", error.message, pause)
            interrupt.wait(pause)
    raise AssertionError("pauses never end")


def _let_out_again(
    departure: Departure, last: Tried | None, ledger: Ledger, gate: Gate, consent: Consent, told: ReportedSection
) -> None:
    """Write the line under which a departure is sent once more, if the policy allows it and the quotas have room.

    Args:
        last: what was sent under the line before; None if that is not known, and then it counts for all of it.
    """
    tries = ledger.tries(departure.upload_id)
    if last is not None:
        ledger.sent(departure.upload_id, last.payload_bytes)
    gate.refuse_again(departure, consent, told, departure.manifest.specs, sorted(departure.metrics))
    if tries >= MAX_TRIES:
        gate.block(departure, "the update", f"it was begun {tries} times")
        raise NotPermitted(
            f"round {departure.round} of `{departure.study}` was begun {tries} times and has no receipt; it is not "
            "sent again",
            hint="the line to the coordinator breaks, or the coordinator breaks it; its operator may know why",
            code="DECLINED_POLICY",
        )
    known = {} if last is None else {"sent": last.payload_bytes}
    ledger.append(
        "resend", upload_id=departure.upload_id, study=departure.study, revision=departure.revision,
        round=departure.round, attempt=departure.attempt, payload_bytes=departure.manifest.bytes,
        **{"try": tries + 1}, **known,
    )  # fmt: skip
    log.info("round %d of `%s`: try %d", departure.round, departure.study, tries + 1)


def _take_receipt(upload_id: str, envelope: Envelope, connection: Connection, ledger: Ledger) -> Receipt:
    """The receipt of one upload, in the ledger. What is wrong with those of other uploads, which were asked for because
    this one follows them, does not undo it: they stay unresolved, and are asked about with the next connection.

    Raises: as ``take_receipts``, where this upload's is not in the ledger.
    """
    try:
        return take_receipts({upload_id: envelope}, connection, ledger)[upload_id]
    except (TryAgain, HostileReceipt) as error:
        receipt = ledger.receipt(upload_id)
        if receipt is None:
            raise
        log.error("%s", error.message)
        return receipt


def take_receipts(envelopes: Mapping[str, Envelope], connection: Connection, ledger: Ledger) -> dict[str, Receipt]:
    """What the coordinator answered, by upload id: judged, and in the ledger in the order of the receipts' chain.

    Where a receipt follows one that is not here, the coordinator is asked about the other uploads that have none: the
    line may have broken before that one came.

    Raises:
        HostileReceipt: one of them cannot stand in the ledger. It is kept as evidence, its upload stays unresolved, and
            the others are in the ledger.
        RefusedForGood: one says that this ledger is refused (LEDGER_...), and follows a receipt that this ledger lost.
        TryAgain: one follows a receipt of an upload that the coordinator has not decided yet; what could be taken is in
            the ledger.
    """
    taken, early = _chained(envelopes, ledger)
    if not early:
        return taken
    asked = {one: connection.inquire(one) for one in ledger.unresolved if one not in early}
    answers = {one: envelope for one, envelope in asked.items() if envelope is not None}
    more, early = _chained(answers | {one: envelopes[one] for one in early}, ledger)
    if early and len(answers) < len(asked):
        raise TryAgain("the coordinator decided uploads in another order than it tells of them")
    for upload_id, error in early.items():
        disputed = ledger.dispute(upload_id, (answers | {**envelopes})[upload_id], error.message)
        refuse_if_ledger_refused(error.receipt)
        raise disputed
    return taken | more


def _chained(envelopes: Mapping[str, Envelope], ledger: Ledger) -> tuple[dict[str, Receipt], dict[str, OutOfOrder]]:
    """Append what follows the ledger's last receipt, then what follows that. Returns it, and what follows neither."""
    taken: dict[str, Receipt] = {}
    hostile: HostileReceipt | None = None
    waiting = dict(envelopes)
    early: dict[str, OutOfOrder] = {}
    count = -1
    while count != len(waiting):
        count, early = len(waiting), {}
        for upload_id, envelope in list(waiting.items()):
            try:
                taken[upload_id] = ledger.resolve(upload_id, envelope)
            except OutOfOrder as error:
                early[upload_id] = error
                continue
            except BadData as error:
                hostile = ledger.dispute(upload_id, envelope, error.message)
            del waiting[upload_id]
    if hostile is not None:
        raise hostile
    return taken, early


def refuse_if_ledger_refused(receipt: Receipt) -> None:
    """Raises RefusedForGood: the coordinator does not take this site's ledger, and no retry helps."""
    if receipt.code in refusals.ENDED_LEDGERS:
        raise refusals.refused(receipt.code, f"round {receipt.round} of `{receipt.study}`")


def measure(file: Path, consent: Consent) -> tuple[Manifest, list[dict[str, Any]]]:
    """The manifest of an update's file, and its ledger rows: each tensor with digest, L2 norm, largest magnitude.

    Reads the file once, 256 KiB at a time. Norm and largest magnitude are over the finite values; ``nonfinite`` counts
    the others, with which nothing leaves.

    Raises:
        BadData: the file does not hold exactly the approved tensors.
    """
    with TensorFile(file) as tensors:
        consents.check_tensors(tensors.specs, consent.leaves, consent.study, "the trainer's update")
        rows = [_row(tensors, spec) for spec in tensors.specs]
        entries = tuple(Entry(spec, row["sha256"]) for spec, row in zip(tensors.specs, rows, strict=True))
    return Manifest(entries), rows


def _refuse_nonfinite(rows: list[dict[str, Any]], gate: Gate, journal: Journal) -> None:
    """Raises BadData: a tensor holds NaN or an infinity; the message and the ledger name the first."""
    bad = next((row for row in rows if row["nonfinite"]), None)
    if bad is None:
        return
    name = bad["name"] if bad["bundle"] == MODEL else f"{bad['bundle']}/{bad['name']}"
    said = f"{bad['nonfinite']} of {math.prod(bad['shape'])} values are not finite"
    gate.block(journal, name, said)
    raise BadData(
        f"tensor `{name}` of the update for `{journal.study}`: {said}; nothing was sent",
        hint="the training diverged: look at this site's data and the study's learning rate",
        code="DECLINED_TRAINING_FAILED",
    )


def _row(tensors: TensorFile, spec: TensorSpec) -> dict[str, Any]:
    digest, squares, largest, nonfinite = hashlib.sha256(), 0.0, 0.0, 0
    count = math.prod(spec.shape)
    for start in range(0, count, BLOCK):
        block = tensors.block(spec.key, start, min(BLOCK, count - start))
        digest.update(block.data)
        wide = block.astype(np.float64)
        finite = np.isfinite(wide)
        if not finite.all():
            nonfinite += int(wide.size - finite.sum())
            wide = wide[finite]
        squares += float(np.einsum("i,i->", wide, wide))  # one thread; a BLAS would wake one for each core
        largest = max(largest, float(np.abs(wide).max(initial=0.0)))
    return {
        "bundle": spec.bundle, "name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "encoding": "raw",
        "bytes": spec.bytes, "sha256": digest.hexdigest(), "l2": f"{math.sqrt(squares):.9e}",
        "max_abs": f"{largest:.9e}", "nonfinite": nonfinite,
    }  # fmt: skip


def _departure(entry: dict[str, Any], file: Path | None) -> Departure:
    manifest = Manifest(
        tuple(
            Entry(TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), row["bundle"]), row["sha256"])
            for row in entry["tensors"]
        )
    )
    return Departure(
        upload_id=entry["upload_id"], study=entry["study"], revision=entry["revision"], digest=entry["study_digest"],
        round=entry["round"], attempt=entry["attempt"], manifest=manifest,
        metrics={row["name"]: row["value"] for row in entry["metrics"]},
        num_examples=entry["num_examples"], num_validation=entry["num_validation"], file=file,
    )  # fmt: skip


def _opening(departure: Departure, ledger: Ledger) -> Opening:
    head, signature, hashes = ledger.statement()
    return Opening(
        upload_id=departure.upload_id, study=departure.study, revision=departure.revision, digest=departure.digest,
        round=departure.round, attempt=departure.attempt, manifest=departure.manifest, metrics=departure.metrics,
        num_examples=departure.num_examples, num_validation=departure.num_validation, ledger=head,
        ledger_signature=signature, new_line_hashes=hashes,
    )  # fmt: skip


def explain_refusal(receipt: Receipt) -> str:
    """A refusal in words, for the site's log."""
    tensor = f" (tensor {quoted(receipt.tensor)})" if receipt.tensor else ""
    why = refusals.explained(receipt.code)
    said = f"{receipt.code}, {why}" if why else quoted(receipt.code)
    return f"round {receipt.round} of `{receipt.study}` was refused: {said}{tensor}"
