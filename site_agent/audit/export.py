"""Exports ledger lines for other programs: JSON, CSV for a spreadsheet, OCSF for a security team's collector."""

import csv
import datetime
import io
import json
from collections.abc import Iterable
from dataclasses import asdict

from site_agent.audit.show import words
from wardround import __version__
from wardround.local.outputs import inert
from wardround.records.ledger.base import Person
from wardround.records.ledger.decided import HoldEntry, PolicyEntry, ProposalEntry
from wardround.records.ledger.entries import (
    ConsentEntry,
    DeclareEntry,
    Entry,
    IdentityEntry,
    LeftEntry,
    ReceiptEntry,
    ResendEntry,
    SessionEntry,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.ledger.summary import SummaryEntry
from wardround.records.receipts import REFUSED

COLUMNS = (
    "seq", "ts", "type", "study", "revision", "round", "attempt", "upload_id", "tensors", "bytes", "num_examples",
    "num_validation", "decision", "code", "by", "words",
)  # fmt: skip
OCSF_VERSION = "1.3.0"
API_ACTIVITY, CREATE, READ, UPDATE, DELETE, OTHER = 6003, 1, 2, 3, 4, 99
SUCCESS, FAILURE = 1, 2
ACTIVITIES = {
    "upload": CREATE, "resend": CREATE, "summary": CREATE, "consent": UPDATE, "policy": UPDATE, "released": UPDATE,
    "rejected": UPDATE, "left": DELETE,
}  # fmt: skip


def as_json(lines: Iterable[Line]) -> str:
    """One object with all records, as they stand in the ledger."""
    return json.dumps({"records": [line.document() for line in lines]}, indent=1, ensure_ascii=False) + "\n"


def as_csv(lines: Iterable[Line]) -> str:
    """A row for each line. Text that a spreadsheet would run as a formula has an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for line in lines:
        row = _row(line)
        writer.writerow([inert(str(row.get(name, ""))) for name in COLUMNS])
    return out.getvalue()


def as_ocsf(lines: Iterable[Line]) -> str:
    """One OCSF event for each line: API Activity (6003), the record itself under ``unmapped``.

    Source: OCSF 1.3.0, https://schema.ocsf.io/1.3.0/classes/api_activity
    """
    site = ""
    events = []
    for line in lines:
        if isinstance(line.entry, IdentityEntry):
            site = line.entry.site or site
        events.append(json.dumps(_event(line, site), ensure_ascii=False) + "\n")
    return "".join(events)


FORMATS = {"json": as_json, "csv": as_csv, "ocsf": as_ocsf}


def _row(line: Line) -> dict[str, object]:
    """A line's columns; "" or nothing where it does not say them."""
    own = line.document()
    about = asdict(line.entry.receipt) if isinstance(line.entry, ReceiptEntry) else own
    places = ("study", "revision", "round", "attempt", "num_examples", "num_validation", "decision", "code")
    return {
        **{name: about.get(name, "") for name in places},
        **{name: own.get(name, "") for name in ("seq", "ts", "type", "upload_id")},
        "tensors": len(line.entry.tensors) if isinstance(line.entry, UploadEntry) else "",
        "bytes": next((about[name] for name in ("payload_bytes", "bytes", "bytes_up") if name in about), ""),
        "by": by.name if (by := _by(line.entry)) is not None else "",
        "words": words(line),
    }


def _event(line: Line, site: str) -> dict[str, object]:
    kind, by = line.type, _by(line.entry)
    activity = ACTIVITIES.get(kind, OTHER)
    receipt = line.entry.receipt if isinstance(line.entry, ReceiptEntry) else None
    failed = kind in ("blocked", "rejected") or (receipt is not None and receipt.decision == REFUSED)
    user = {"name": by.name, "uid": str(by.uid)} if by is not None else {"name": "site-agent"}
    return {
        "category_uid": 6,
        "category_name": "Application Activity",
        "class_uid": API_ACTIVITY,
        "class_name": "API Activity",
        "activity_id": activity,
        "type_uid": API_ACTIVITY * 100 + activity,
        "time": _milliseconds(line.ts),
        "severity_id": 3 if failed else 1,
        "status_id": FAILURE if failed else SUCCESS,
        "status_code": receipt.code if receipt is not None else _code(line.entry),
        "message": words(line),
        "metadata": {
            "version": OCSF_VERSION,
            "product": {"name": "Wardround", "vendor_name": "Wardround", "version": __version__},
            "uid": f"{line.prev}:{line.seq}",
            "sequence": line.seq,
        },
        "actor": {"user": user, "app_name": "site-agent"},
        "api": {"operation": kind, "service": {"name": "wardround"}, "request": {"uid": _upload_id(line.entry)}},
        "src_endpoint": {"name": site or "site"},
        "dst_endpoint": {"name": _destination(line.entry) or "coordinator"},
        "unmapped": line.document(),
    }


def _by(entry: Entry) -> Person | None:
    named = ConsentEntry | HoldEntry | LeftEntry | PolicyEntry | ProposalEntry | SummaryEntry
    return entry.by if isinstance(entry, named) else None


def _code(entry: Entry) -> str:
    return (entry.code or "") if isinstance(entry, DeclareEntry) else ""


def _upload_id(entry: Entry) -> str:
    return entry.upload_id if isinstance(entry, UploadEntry | ResendEntry | ReceiptEntry) else ""


def _destination(entry: Entry) -> str:
    """Where it went: an update or a summary to the coordinator that the line names, a connection to its address."""
    if isinstance(entry, UploadEntry | SummaryEntry):
        return entry.destination or ""
    return (entry.peer or "") if isinstance(entry, SessionEntry) else ""


def _milliseconds(text: str) -> int:
    try:
        return round(datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)
    except ValueError:
        return 0
