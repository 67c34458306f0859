"""Ledger lines for `audit show`: which to show, and each in a few words."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from site_agent.audit.form import lines
from site_agent.audit.secure import words_of_secure
from site_agent.audit.summaries import words_of_summary
from site_agent.gateway.consent.facts import size
from wardround.records.ledger.base import Person
from wardround.records.ledger.decided import (
    EndorsedEntry,
    HeldEntry,
    PolicyEntry,
    ProposalEntry,
    RejectedEntry,
    ReleasedEntry,
)
from wardround.records.ledger.entries import (
    BlockedEntry,
    ConsentEntry,
    ControlEntry,
    DeclareEntry,
    Entry,
    GenesisEntry,
    IdentityEntry,
    LeftEntry,
    LimitedEntry,
    ReceiptEntry,
    RecoveredEntry,
    ResendEntry,
    SessionEntry,
    TensorRow,
    UnknownEntry,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.ledger.secure import PeerEntry, SecureEntry
from wardround.records.ledger.summary import SummaryEntry
from wardround.records.receipts import NOT_RECEIVED
from wardround.terminal import escaped

Place = tuple[str | None, int | None]  # study and round; None where a line names none


def chosen(
    folder: Path, study: str | None = None, round_: int | None = None, tensor: str | None = None
) -> Iterator[Line]:
    """The lines about one study, one round; with ``tensor`` (a pattern as in a shell) uploads alone, and of them only
    the tensors that match. A receipt belongs to its upload's study and round, also one that says that the coordinator
    does not know the upload and so names neither."""
    uploads: dict[str, Place] = {}
    for line in lines(folder):
        entry = line.entry
        if isinstance(entry, UploadEntry):
            uploads[entry.upload_id] = entry.place
        line_study, line_round = _place(entry, uploads)
        if study is not None and line_study != study:
            continue
        if round_ is not None and (line_round != round_ or line_study is None):
            continue
        if tensor is None:
            yield line
        elif isinstance(entry, UploadEntry):
            matching = tuple(row for row in entry.tensors if fnmatch.fnmatchcase(row.name, tensor))
            if matching:
                yield replace(line, entry=replace(entry, tensors=matching))


def words(line: Line) -> str:
    """A line in a few words, on one line that can be shown. What it lacks is left out, or shown as "?"."""
    entry = line.entry
    more = (
        f"; {entry.left_out} more before it have no line" if isinstance(entry, LimitedEntry) and entry.left_out else ""
    )
    return escaped(_words(entry) + more)


def tensor_words(row: TensorRow) -> str:
    """One tensor of an upload."""
    norm = f", norm {row.l2}" if row.l2 is not None else ""
    return escaped(f"{row.name} {row.dtype} {list(row.shape)}, {size(row.bytes)}{norm}, sha256 {row.sha256}")


def _place(entry: Entry, uploads: dict[str, Place]) -> Place:
    if isinstance(entry, ReceiptEntry):
        return uploads.get(entry.upload_id) or (entry.receipt.study, entry.receipt.round)
    return entry.place


def _words(entry: Entry) -> str:
    match entry:
        case UploadEntry():
            return _upload_words(entry)
        case ResendEntry():
            before = f"; {size(entry.sent)} were sent before it" if entry.sent is not None else ""
            most = f"{size(entry.payload_bytes)} at most"
            return f"{_about(entry)}.{entry.attempt}: try {entry.try_}, {most}{before}"
        case ReceiptEntry():
            return _receipt_words(entry)
        case DeclareEntry():
            counted = f", {entry.num_examples} rows" if entry.num_examples is not None else ""
            expected = f" for {entry.estimate_s} s" if entry.estimate_s else ""
            said = f"{entry.study} {entry.standing} {entry.code or ''}".rstrip()
            return said + counted + expected + _by_words(entry.by)
        case SummaryEntry():
            return words_of_summary(entry)
        case ConsentEntry():
            network = f", network {entry.network}" if entry.network is not None else ""
            weights = f", weights {entry.weights_digest[:12]}" if entry.weights_digest is not None else ""
            plugins = "".join(f", code of plug-in {row.name} {row.version}" for row in entry.plugins or ())
            by = _by_words(entry.by) + _also(entry.also_by)
            return f"{entry.study} {entry.event}{by}{network}{weights}{plugins}"
        case SessionEntry():
            sent = f", {size(entry.bytes_up)} sent" if entry.bytes_up is not None else ""
            return f"{entry.event} {entry.peer or ''}{sent}"
        case ControlEntry():
            calls = ", ".join(f"{row.method} {row.count}x" for row in entry.methods or ())
            return f"{size(entry.bytes)} beside updates: {calls}".rstrip(": ")
        case BlockedEntry():
            return f"{_about(entry)}: nothing left: {entry.what or ''}: {entry.rule or ''}".rstrip(": ")
        case ReleasedEntry():
            return f"{_about(entry)} {entry.type}{_by_words(entry.by)}{_also(entry.also_by)}"
        case HeldEntry() | EndorsedEntry() | RejectedEntry():
            return f"{_about(entry)} {entry.type}{_by_words(entry.by)}"
        case PolicyEntry():
            return f"{entry.event} {(entry.sha256 or '')[:12]}".rstrip() + _by_words(entry.by) + _also(entry.also_by)
        case ProposalEntry():
            return f"{entry.event} {entry.policy_sha256[:12]}{_by_words(entry.by)}{_also(entry.also_by)}"
        case IdentityEntry():
            return f"{entry.event or ''} for {_or_unknown(entry.site)}, to {_or_unknown(entry.not_after)}"
        case GenesisEntry():
            cited = f", continues {entry.continues.ledger_id}" if entry.continues is not None else ""
            return f"ledger {entry.ledger_id} begun by {_or_unknown(entry.software)}{cited}"
        case LeftEntry():
            return f"the membership ended{_by_words(entry.by)}"
        case PeerEntry() | SecureEntry():
            return words_of_secure(entry) + (_by_words(entry.by) if isinstance(entry, PeerEntry) else "")
        case RecoveredEntry():
            return f"{entry.torn_bytes or 0} torn bytes cut"
        case UnknownEntry():
            return "written by a newer version"


def _upload_words(entry: UploadEntry) -> str:
    if entry.masked is not None:
        blocks = entry.masked.blocks[:12]
        return f"{_about(entry)}.{entry.attempt}: {size(entry.payload_bytes)} with masks, of blocks {blocks}…"
    reported = ", ".join(f"{metric.name}={metric.value}" for metric in entry.metrics)
    return (
        f"{_about(entry)}.{entry.attempt}: {_count(entry.tensors)}, {size(entry.payload_bytes)}; {reported}; "
        f"n={_or_unknown(entry.num_examples)}/{_or_unknown(entry.num_validation)}"
    )


def _receipt_words(entry: ReceiptEntry) -> str:
    receipt = entry.receipt
    if receipt.decision == NOT_RECEIVED:
        return f"upload {entry.upload_id[:12]}…: {NOT_RECEIVED}: the coordinator does not know it"
    return f"{receipt.study} round {receipt.round}: {receipt.decision} {receipt.code}".rstrip()


def _also(people: Sequence[Person] | None) -> str:
    return "".join(f" and {person.words()}" for person in people or ())


def _by_words(by: Person | None) -> str:
    """Who decided, after what they decided; "" where it is not said."""
    return f" by {by.words()}" if by is not None else ""


def _about(entry: Entry) -> str:
    study, round_ = entry.place
    return f"{study} round {_or_unknown(round_)}"


def _or_unknown(value: str | int | None) -> str:
    return "?" if value is None else str(value)


def _count(tensors: Sequence[TensorRow]) -> str:
    """The numbers that close a study have a round of their own after the last, and no tensor."""
    return f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}" if tensors else "numbers alone"
