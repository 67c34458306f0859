"""The ledger in other programs' forms: JSON, CSV for a spreadsheet, OCSF for a security team's collector."""

import csv
import datetime
import io
import json
from collections.abc import Iterable
from typing import Any

from site_agent.audit.show import words
from wardround import __version__
from wardround.local.outputs import inert

COLUMNS = (
    "seq", "ts", "type", "study", "revision", "round", "attempt", "upload_id", "tensors", "bytes", "num_examples",
    "num_validation", "decision", "code", "by", "words",
)  # fmt: skip
OCSF_VERSION = "1.3.0"
API_ACTIVITY, CREATE, READ, UPDATE, DELETE, OTHER = 6003, 1, 2, 3, 4, 99
SUCCESS, FAILURE = 1, 2
ACTIVITIES = {
    "upload": CREATE, "resend": CREATE, "consent": UPDATE, "policy": UPDATE, "released": UPDATE, "rejected": UPDATE,
    "left": DELETE,
}  # fmt: skip


def as_json(records: Iterable[dict[str, Any]]) -> str:
    """One object with all records, as they stand in the ledger."""
    return json.dumps({"records": list(records)}, indent=1, ensure_ascii=False) + "\n"


def as_csv(records: Iterable[dict[str, Any]]) -> str:
    """A row for each record. Text that a spreadsheet would run as a formula has an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for record in records:
        row = _row(record)
        writer.writerow([inert(str(row.get(name, ""))) for name in COLUMNS])
    return out.getvalue()


def as_ocsf(records: Iterable[dict[str, Any]]) -> str:
    """One OCSF event a line: API Activity (6003), the record itself under ``unmapped``.

    Source: OCSF 1.3.0, https://schema.ocsf.io/1.3.0/classes/api_activity
    """
    site = ""
    lines = []
    for record in records:
        site = record.get("site", site)
        lines.append(json.dumps(_event(record, site), ensure_ascii=False) + "\n")
    return "".join(lines)


FORMATS = {"json": as_json, "csv": as_csv, "ocsf": as_ocsf}


def _row(record: dict[str, Any]) -> dict[str, Any]:
    about = json.loads(record["envelope"]["payload"]) if record["type"] == "receipt" else record
    places = ("study", "revision", "round", "attempt", "num_examples", "num_validation", "decision", "code")
    row = {name: about.get(name, "") for name in places}
    size = next((about[name] for name in ("payload_bytes", "bytes", "bytes_up") if name in about), "")
    return {
        **row,
        **{name: record.get(name, "") for name in ("seq", "ts", "type", "upload_id")},
        "tensors": len(record["tensors"]) if "tensors" in record else "",
        "bytes": size,
        "by": record.get("by", {}).get("name", ""),
        "words": words(record),
    }


def _event(record: dict[str, Any], site: str) -> dict[str, Any]:
    kind = record["type"]
    activity = ACTIVITIES.get(kind, OTHER)
    row = _row(record)
    failed = kind in ("blocked", "rejected") or row["decision"] == "refused"
    by = record.get("by")
    user = {"name": by["name"], "uid": str(by["uid"])} if by is not None else {"name": "site-agent"}
    return {
        "category_uid": 6,
        "category_name": "Application Activity",
        "class_uid": API_ACTIVITY,
        "class_name": "API Activity",
        "activity_id": activity,
        "type_uid": API_ACTIVITY * 100 + activity,
        "time": _milliseconds(record["ts"]),
        "severity_id": 3 if failed else 1,
        "status_id": FAILURE if failed else SUCCESS,
        "status_code": row["code"],
        "message": words(record),
        "metadata": {
            "version": OCSF_VERSION,
            "product": {"name": "Wardround", "vendor_name": "Wardround", "version": __version__},
            "uid": f"{record['prev']}:{record['seq']}",
            "sequence": record["seq"],
        },
        "actor": {"user": user, "app_name": "site-agent"},
        "api": {"operation": kind, "service": {"name": "wardround"}, "request": {"uid": record.get("upload_id", "")}},
        "src_endpoint": {"name": site or "site"},
        "dst_endpoint": {"name": record.get("destination") or record.get("peer") or "coordinator"},
        "unmapped": record,
    }


def _milliseconds(text: str) -> int:
    try:
        return round(datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)
    except ValueError:
        return 0
