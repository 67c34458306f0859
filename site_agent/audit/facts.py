"""What a report tells of a site's ledgers, read from them once: each study's uploads, decisions and approval.

Nothing here judges: a ledger that was changed has no facts, and ``verify`` says so before anybody asks for them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from site_agent.audit.files import LedgerFiles
from site_agent.audit.form import receipt_in, records
from site_agent.state.directory import exposed, tensor_rows
from wardround.errors import BadData
from wardround.records.receipts import NOT_RECEIVED
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
    closing: bool = False  # the validation after the last round


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
class StudyFacts:
    name: str
    consents: tuple[str, ...]  # what people decided, oldest first, in words
    exposure: str  # who has what is this site's own; "" where no approval says it
    uploads: tuple[UploadFacts, ...]
    tensors: tuple[Tensor, ...]  # that left
    approval: Approval | None
    decisions: tuple[Decision, ...]


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


@dataclass
class _Lines:
    """The records of one study."""

    uploads: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)  # blocked, held, released, rejected
    consents: list[dict[str, Any]] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)  # of uploads that were sent again, by id
    approved: dict[str, Any] | None = None  # the consent's file


def facts_of(ledgers: Sequence[LedgerFiles], consents: Mapping[str, bytes]) -> LedgerFacts:
    """The facts in ``ledgers``, of one site and oldest first, and in its approvals, STUDY.json each.

    Raises:
        BadData: a line of the ledger, or a consent, cannot be read.
    """
    studies: dict[str, _Lines] = defaultdict(_Lines)
    receipts: dict[str, dict[str, Any]] = {}
    identity: dict[str, Any] = {}
    control = 0
    first = last = ""
    for record in chain.from_iterable(map(records, ledgers)):
        first, last = first or record["ts"], record["ts"]
        match record["type"]:
            case "upload":
                studies[record["study"]].uploads.append(record)
            case "resend":
                studies[record["study"]].tries[record["upload_id"]] = record["try"]
            case "receipt":
                receipts[record["upload_id"]] = receipt_in(record)
            case "identity":
                identity = record
            case "control":
                control += record["bytes"]
            case "consent":
                studies[record["study"]].consents.append(record)
            case "blocked" | "held" | "released" | "rejected":
                studies[record["study"]].others.append(record)
    for name, data in consents.items():
        studies[name.removesuffix(".json")].approved = _approved(name, data)
    return LedgerFacts(
        site=identity.get("site", ""),
        federation=identity.get("federation", ""),
        authority=identity.get("authority_sha256", ""),
        first_time=first,
        last_time=last,
        control_bytes=control,
        studies=tuple(_study(name, lines, receipts) for name, lines in sorted(studies.items())),
    )


def norm_of(tensors: Sequence[Mapping[str, Any]]) -> float | None:
    """The L2 norm of a whole update, from its tensors' norms; None where there is none."""
    try:
        squares = [float(row["l2"]) ** 2 for row in tensors]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    norm = math.sqrt(sum(squares))
    return norm if squares and math.isfinite(norm) else None


def _approved(name: str, data: bytes) -> dict[str, Any]:
    """A consent as far as a report tells it: ``leaves``, ``stays`` and ``apart``.

    Raises:
        BadData: the file is damaged.
    """
    try:
        consent = canonical.read(data)
        tensor_rows(consent["stays"])
        if not isinstance(consent["leaves"], list):
            raise TypeError
    except (BadData, KeyError, TypeError, ValueError, AttributeError):
        raise BadData(
            f"consents/{escaped(name, 80)} is damaged: it holds no consent", hint="restore it from a backup"
        ) from None
    return consent  # type: ignore[no-any-return]


def _study(name: str, lines: _Lines, receipts: Mapping[str, dict[str, Any]]) -> StudyFacts:
    exposures = [str(record.get("exposure", "")) for record in lines.consents]
    apart = str((lines.approved or {}).get("apart", ""))
    return StudyFacts(
        name=name,
        consents=tuple(
            f"{record['event']} by {record.get('by', {}).get('name', 'somebody')} on {when(record['ts'])}"
            for record in lines.consents
        ),
        exposure=exposed(exposures[-1], apart) if exposures and exposures[-1] else "",
        uploads=tuple(_upload(record, lines.tries, receipts) for record in lines.uploads),
        tensors=_left(lines.uploads),
        approval=_approval(lines.approved),
        decisions=tuple(
            Decision(when(record["ts"]), str(record.get("round", "")), record["type"], _why(record))
            for record in lines.others
        ),
    )


def _upload(record: dict[str, Any], tries: Mapping[str, int], receipts: Mapping[str, dict[str, Any]]) -> UploadFacts:
    receipt = receipts.get(record["upload_id"])
    return UploadFacts(
        time=when(record["ts"]),
        round=record["round"],
        bytes=record["payload_bytes"],
        tries=tries.get(record["upload_id"], 1),
        norm=norm_of(record["tensors"]),
        metrics=tuple((metric["name"], metric["value"]) for metric in record["metrics"]),
        answer=_answer(receipt) if receipt is not None else "",
        receipt=receipt["receipt_id"] if receipt is not None else "",
        numbers_alone=not record["tensors"],
        closing=record.get("kind") == "validate",
    )


def _answer(receipt: Mapping[str, Any]) -> str:
    words = "not received" if receipt["decision"] == NOT_RECEIVED else receipt["decision"]
    return " ".join(filter(None, (words, receipt["code"], receipt["tensor"])))


def _left(uploads: Sequence[dict[str, Any]]) -> tuple[Tensor, ...]:
    """Each tensor that ever left: how often, how many bytes in all."""
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for upload in uploads:
        for row in upload["tensors"]:
            sizes[row["name"], row["dtype"], _shape(row)].append(row["bytes"])
    return tuple(
        Tensor(name, dtype, shape, len(each), sum(each)) for (name, dtype, shape), each in sizes.items()
    )  # fmt: skip


def _approval(consent: Mapping[str, Any] | None) -> Approval | None:
    if consent is None:
        return None
    stays = (
        Tensor(row["name"], row["dtype"], _shape(row), why=str(row.get("why", ""))) for row in consent["stays"]
    )  # fmt: skip
    return Approval(len(consent["leaves"]), tuple(stays))


def _why(record: Mapping[str, Any]) -> str:
    by = f"by {record['by']['name']}" if "by" in record else ""
    return "; ".join(text for text in (str(record.get("what", "")), str(record.get("rule", "")), by) if text)


def _shape(row: Mapping[str, Any]) -> str:
    return " × ".join(map(str, row["shape"])) or "1"


def when(text: str) -> str:
    """A time as a person reads it: to the minute, UTC."""
    return f"{text[:10]} {text[11:16]} UTC" if len(text) >= 16 else text
