"""The facts of the audit report, read once from a site's ledgers: each study's uploads, decisions and approval.

Nothing here judges: a ledger that was changed has no facts, and ``verify`` says so before anybody asks for them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from site_agent.audit.files import LedgerFiles
from site_agent.audit.form import lines as lines_of
from site_agent.audit.secure import sums_in
from site_agent.audit.summaries import SummaryFacts, facts_of_summary
from site_agent.state.directory import exposed, tensor_rows
from wardround.errors import BadData
from wardround.records.ledger.decided import HoldEntry, ReleasedEntry
from wardround.records.ledger.entries import (
    BlockedEntry,
    ConsentEntry,
    ControlEntry,
    IdentityEntry,
    ReceiptEntry,
    ResendEntry,
    TensorRow,
    UploadEntry,
)
from wardround.records.ledger.secure import SecureEntry
from wardround.records.ledger.summary import SummaryEntry
from wardround.records.receipts import NOT_RECEIVED, Receipt
from wardround.signing import canonical
from wardround.terminal import escaped


@dataclass(frozen=True)
class Tensor:
    """One tensor of a study: all its uploads together where it left, one copy where it stays."""

    name: str
    dtype: str
    shape: str
    times: int = 0
    bytes: int = 0
    why: str = ""  # it stays


@dataclass(frozen=True)
class UploadFacts:
    """One update that left. ``norm`` is the L2 norm over all its tensors; None where it has none."""

    time: str
    round: int
    bytes: int
    tries: int
    norm: float | None
    metrics: tuple[tuple[str, str], ...]
    answer: str  # the coordinator's, or "" for none
    receipt: str  # the receipt's id
    numbers_alone: bool  # no tensor in it
    validated: bool  # a model was judged, and nothing trained for it


@dataclass(frozen=True)
class Decision:
    """What was held back, released, rejected or blocked at this site."""

    time: str
    round: str
    what: str
    why: str


@dataclass(frozen=True)
class Approval:
    """A consent as it lies at the site."""

    tensors: int  # that may leave
    stays: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Approved:
    approval: Approval
    own_model: str  # what of the model is this site's alone, as its trainer says


@dataclass(frozen=True)
class StudyFacts:
    name: str
    consents: tuple[str, ...]  # what people decided, oldest first, in words
    exposure: str  # who has what is this site's own; "" where no approval says it
    uploads: tuple[UploadFacts, ...]
    tensors: tuple[Tensor, ...]  # that left
    approval: Approval | None
    decisions: tuple[Decision, ...]
    sums: tuple[tuple[str, ...], ...] = ()  # with secure aggregation: what ``secure.SUM_HEADS`` names, of each round


@dataclass(frozen=True)
class LedgerFacts:
    """Everything of a site's ledgers, oldest line first. Texts are "" where no line tells them."""

    site: str
    federation: str
    authority: str
    first_time: str
    last_time: str
    control_bytes: int
    studies: tuple[StudyFacts, ...]
    summaries: tuple[SummaryFacts, ...] = ()


Stopped = BlockedEntry | HoldEntry


@dataclass
class _Study:
    """The ledger's entries about one study, each with its time."""

    uploads: list[tuple[str, UploadEntry]] = field(default_factory=list)
    consents: list[tuple[str, ConsentEntry]] = field(default_factory=list)
    stopped: list[tuple[str, Stopped]] = field(default_factory=list)
    secure: list[SecureEntry] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)  # of uploads that were sent again, by id
    approved: _Approved | None = None


def facts_of(ledgers: Sequence[LedgerFiles], consents: Mapping[str, bytes]) -> LedgerFacts:
    """The facts in ``ledgers``, of one site and oldest first, and in its approvals, STUDY.json each.

    Raises:
        BadData: a line of the ledger, or a consent, cannot be read.
    """
    studies: dict[str, _Study] = defaultdict(_Study)
    receipts: dict[str, Receipt] = {}
    identity: IdentityEntry | None = None
    summaries: list[SummaryFacts] = []
    control = 0
    first = last = ""
    for line in chain.from_iterable(map(lines_of, ledgers)):
        first, last = first or line.ts, line.ts
        match line.entry:
            case UploadEntry() as upload:
                studies[upload.study].uploads.append((line.ts, upload))
            case ResendEntry() as resend:
                studies[resend.study].tries[resend.upload_id] = resend.try_
            case ReceiptEntry() as answer:
                receipts[answer.upload_id] = answer.receipt
            case IdentityEntry():
                identity = line.entry
            case ControlEntry():
                control += line.entry.bytes
            case SummaryEntry() as summary:
                summaries.append(facts_of_summary(when(line.ts), summary))
            case SecureEntry() as secure:
                studies[secure.study].secure.append(secure)
            case ConsentEntry() as consent:
                studies[consent.study].consents.append((line.ts, consent))
            case BlockedEntry() | HoldEntry() as stopped:
                studies[stopped.study].stopped.append((line.ts, stopped))
    for name, data in consents.items():
        studies[name.removesuffix(".json")].approved = _approved(name, data)
    return LedgerFacts(
        site=(identity.site if identity is not None else None) or "",
        federation=(identity.federation if identity is not None else None) or "",
        authority=(identity.authority_sha256 if identity is not None else None) or "",
        first_time=first,
        last_time=last,
        control_bytes=control,
        studies=tuple(_study_facts(name, study, receipts) for name, study in sorted(studies.items())),
        summaries=tuple(summaries),
    )


def norm_of(tensors: Sequence[TensorRow]) -> float | None:
    """The L2 norm of a whole update, from its tensors' norms; None where there is none."""
    try:
        squares = [float(row.l2) ** 2 if row.l2 is not None else math.nan for row in tensors]
    except (ValueError, OverflowError):
        return None
    norm = math.sqrt(sum(squares))
    return norm if squares and math.isfinite(norm) else None


def _approved(name: str, data: bytes) -> _Approved:
    """A consent's file as far as a report tells it.

    Raises:
        BadData: the file is damaged.
    """
    try:
        consent = canonical.read(data)
        stays, tensors = tensor_rows(consent["stays"]), consent["leaves"]
        if not isinstance(tensors, list):
            raise TypeError
    except (BadData, KeyError, TypeError, ValueError, AttributeError):
        raise BadData(
            f"consents/{escaped(name, 80)} is damaged: it holds no consent", hint="restore it from a backup"
        ) from None
    rows = (Tensor(row["name"], row["dtype"], _shape(row["shape"]), why=str(row.get("why", ""))) for row in stays)
    return _Approved(Approval(len(tensors), tuple(rows)), str(consent.get("apart", "")))


def _study_facts(name: str, study: _Study, receipts: Mapping[str, Receipt]) -> StudyFacts:
    exposure = (study.consents[-1][1].exposure or "") if study.consents else ""
    return StudyFacts(
        name=name,
        consents=tuple(
            f"{consent.event} by {_people(consent)} on {when(time)}" + _code(consent)
            for time, consent in study.consents
        ),
        exposure=exposed(exposure, study.approved.own_model if study.approved is not None else "") if exposure else "",
        uploads=tuple(
            _upload(time, upload, study.tries.get(upload.upload_id, 1), receipts.get(upload.upload_id))
            for time, upload in study.uploads
        ),
        tensors=_left([upload for _, upload in study.uploads]),
        approval=study.approved.approval if study.approved is not None else None,
        decisions=tuple(_decision(time, entry) for time, entry in study.stopped),
        sums=sums_in(study.secure),
    )


def _people(consent: ConsentEntry) -> str:
    """Who decided, by name; of an approval by several people, all of them."""
    last = consent.by.name if consent.by is not None else "somebody"
    return " and ".join([last, *(person.name for person in consent.also_by or ())])


def _code(consent: ConsentEntry) -> str:
    """Whose code may run with this consent besides ours, in words."""
    plugins = [f"{row.name} {row.version} (SHA-256 {row.sha256 or 'not known'})" for row in consent.plugins or ()]
    return f", with code of plug-in {' and '.join(plugins)}" if plugins else ""


def _upload(time: str, upload: UploadEntry, tries: int, receipt: Receipt | None) -> UploadFacts:
    return UploadFacts(
        time=when(time),
        round=upload.round,
        bytes=upload.payload_bytes,
        tries=tries,
        norm=norm_of(upload.tensors),
        metrics=tuple((metric.name, metric.value) for metric in upload.metrics),
        answer=_answer(receipt) if receipt is not None else "",
        receipt=receipt.receipt_id if receipt is not None else "",
        numbers_alone=not upload.tensors,
        validated=upload.kind == "validate",
    )


def _answer(receipt: Receipt) -> str:
    words = "not received" if receipt.decision == NOT_RECEIVED else receipt.decision
    return " ".join(filter(None, (words, receipt.code, receipt.tensor)))


def _left(uploads: Sequence[UploadEntry]) -> tuple[Tensor, ...]:
    """Each tensor that ever left: how often, how many bytes in all."""
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for upload in uploads:
        for row in upload.tensors:
            sizes[row.name, row.dtype, _shape(row.shape)].append(row.bytes)
    return tuple(Tensor(*key, len(each), sum(each)) for key, each in sizes.items())


def _decision(time: str, entry: Stopped) -> Decision:
    round_ = str(entry.round) if entry.round is not None else ""
    if isinstance(entry, BlockedEntry):
        why = [entry.what or "", entry.rule or ""]
    else:
        before = (entry.also_by or ()) if isinstance(entry, ReleasedEntry) else ()
        names = [person.name for person in (entry.by, *before) if person is not None]
        why = [f"by {' and '.join(names)}" if names else ""]
    return Decision(when(time), round_, entry.type, "; ".join(filter(None, why)))


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "1"


def when(text: str) -> str:
    """A time as a person reads it: to the minute, UTC."""
    return f"{text[:10]} {text[11:16]} UTC" if len(text) >= 16 else text
