"""Ledger records for people: which to show, and each in a few words."""

import fnmatch
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from site_agent.audit.form import records
from site_agent.gateway.consent.facts import size
from site_agent.state import person
from wardround.records.receipts import NOT_RECEIVED
from wardround.terminal import escaped


def chosen(
    folder: Path, study: str | None = None, round_: int | None = None, tensor: str | None = None
) -> Iterator[dict[str, Any]]:
    """The records of one study, one round; with ``tensor`` (a pattern as in a shell) uploads alone, and of them only
    the tensors that match. A receipt belongs to its upload's study and round, also one that says that the coordinator
    does not know the upload and so names neither."""
    uploads: dict[str, dict[str, Any]] = {}
    for record in records(folder):
        place = record
        if record["type"] == "upload":
            uploads[record["upload_id"]] = {"study": record["study"], "round": record["round"]}
        elif record["type"] == "receipt":
            place = uploads.get(record["upload_id"]) or json.loads(record["envelope"]["payload"])
        if study is not None and place.get("study") != study:
            continue
        if round_ is not None and (place.get("round") != round_ or place.get("study") is None):
            continue
        if tensor is not None:
            matching = [row for row in record.get("tensors", []) if fnmatch.fnmatchcase(row["name"], tensor)]
            if not matching:
                continue
            record = {**record, "tensors": matching}
        yield record


def words(line: dict[str, Any]) -> str:
    """One record in a few words, on one line that can be shown. Whatever a record lacks is left out; whatever is
    unknown is shown as it stands."""
    before = f"; {line['left_out']} more before it have no line" if line.get("left_out") else ""
    return escaped(_words(line) + before)


def _words(line: dict[str, Any]) -> str:
    kind = line["type"]
    place = f"{line.get('study', '')} round {line.get('round', '?')}"
    by = f" by {person.text(line['by'])}" if "by" in line else ""
    match kind:
        case "upload":
            told = ", ".join(f"{metric['name']}={metric['value']}" for metric in line["metrics"])
            return (
                f"{place}.{line['attempt']}: {_count(line['tensors'])}, {size(line['payload_bytes'])}; {told}; "
                f"n={line.get('num_examples', '?')}/{line.get('num_validation', '?')}"
            )
        case "resend":
            before = f"; {size(line['sent'])} were sent before it" if "sent" in line else ""
            return f"{place}.{line['attempt']}: try {line['try']}, {size(line['payload_bytes'])} at most{before}"
        case "receipt":
            receipt = json.loads(line["envelope"]["payload"])
            if receipt["decision"] == NOT_RECEIVED:
                return f"upload {line['upload_id'][:12]}…: {NOT_RECEIVED}: the coordinator does not know it"
            return f"{receipt['study']} round {receipt['round']}: {receipt['decision']} {receipt['code']}".rstrip()
        case "declare":
            return f"{line['study']} {line['standing']} {line.get('code', '')}".rstrip()
        case "consent":
            network = f", network {line['network']}" if "network" in line else ""
            weights = f", weights {str(line['weights_digest'])[:12]}" if "weights_digest" in line else ""
            return f"{line['study']} {line['event']}{by}{network}{weights}"
        case "session":
            sent = f", {size(line['bytes_up'])} sent" if "bytes_up" in line else ""
            return f"{line['event']} {line.get('peer', '')}{sent}"
        case "control":
            calls = ", ".join(f"{row['method']} {row['count']}x" for row in line.get("methods", []))
            return f"{size(line['bytes'])} beside updates: {calls}".rstrip(": ")
        case "blocked":
            return f"{place}: nothing left: {line.get('what', '')}: {line.get('rule', '')}".rstrip(": ")
        case "held" | "released" | "rejected":
            return f"{place} {kind}{by}"
        case "policy":
            return f"{line['event']} {str(line.get('sha256', ''))[:12]}".rstrip()
        case "identity":
            return f"{line.get('event', '')} for {line.get('site', '?')}, to {line.get('not_after', '?')}"
        case "genesis":
            before = f", continues {line['continues']['ledger_id']}" if "continues" in line else ""
            return f"ledger {line['ledger_id']} begun by {line.get('software', '?')}{before}"
        case "left":
            return f"the membership ended{by}"
        case "recovered":
            return f"{line.get('torn_bytes', 0)} torn bytes cut"
        case _:
            return "written by a newer version"


def _count(tensors: list[Any]) -> str:
    """The numbers that close a study have a round of their own after the last, and no tensor."""
    return f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}" if tensors else "numbers alone"


def tensor_words(row: dict[str, Any]) -> str:
    """One tensor of an upload."""
    norm = f", norm {row['l2']}" if "l2" in row else ""
    return escaped(f"{row['name']} {row['dtype']} {row['shape']}, {size(row['bytes'])}{norm}, sha256 {row['sha256']}")
