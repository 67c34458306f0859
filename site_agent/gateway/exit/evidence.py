"""Receipts of the coordinator that the ledger cannot hold, kept beside it: what came, about which upload, and why not.

One JSON file each in ``ledger/evidence``. The first ones stay; their number and size are bounded, because whoever lies
once can do it without end.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from site_agent.state.directory import now_text
from wardround.errors import CannotWrite, NeedsPerson
from wardround.local import durable
from wardround.signing import canonical
from wardround.signing.dsse import Envelope

FOLDER = "evidence"
MAX_FILES = 64
MAX_PAYLOAD = 64 * 1024  # bytes of a receipt's text that are kept; its SHA-256 is of all of it
log = logging.getLogger(__name__)


class HostileReceipt(NeedsPerson):
    """The coordinator answered an upload with something that cannot stand in the ledger."""


class Evidence:
    """The folder of one ledger. Safe for one writer; anyone may read."""

    def __init__(self, ledger: Path) -> None:
        self._folder = ledger / FOLDER
        self.uploads = {row["upload_id"] for row in read(ledger)}

    def keep(self, upload: Mapping[str, Any], envelope: Envelope, why: str) -> HostileReceipt:
        """Keep what came as the receipt of ``upload``, an `upload` record. Returns the error that says so.

        Raises:
            StorageFailed: the disk failed.
        """
        text = _words(upload, envelope, why)
        said = hashlib.sha256(envelope.payload + envelope.signature).hexdigest()
        path = self._folder / f"{upload['upload_id'][:32]}-{said[:12]}.json"
        kept = path.exists() or self._write(path, text)
        self.uploads.add(upload["upload_id"])
        return HostileReceipt(
            f"the coordinator's receipt for upload {upload['upload_id'][:12]}… cannot stand in the ledger: {why}; "
            f"the ledger is as it was, the upload counts as unresolved, and nothing more of `{upload['study']}` is sent"
            + (f"; what came is kept in {path}" if kept else "; what came could not be kept"),
            hint="show this to the coordinator's operator. If they restored it from an older copy: `site-agent audit "
            "reopen` begins a new ledger that cites this one",
            code="DECLINED_POLICY",
        )

    def _write(self, path: Path, text: bytes) -> bool:
        try:
            durable.make_folder(self._folder)
            if sum(1 for _ in self._folder.glob("*.json")) >= MAX_FILES:
                return False
            durable.write_file(path, text)
        except CannotWrite as error:
            if isinstance(error, durable.StorageFailed):
                raise
            log.error("%s; a receipt that cannot be believed is not kept", error.message)
            return False
        return True


def read(ledger: Path) -> list[dict[str, Any]]:
    """What is kept beside a ledger, oldest first: at, why, upload_id, study, round, payload_base64, file."""
    rows = []
    for path in sorted((ledger / FOLDER).glob("*.json")):
        try:
            row = json.loads(path.read_bytes())
            shown = {name: str(row[name]) for name in ("at", "why", "upload_id", "study", "round", "payload_base64")}
            rows.append({**shown, "file": path.name})
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # nobody's word depends on it
    return sorted(rows, key=lambda row: row["at"])


def _words(upload: Mapping[str, Any], envelope: Envelope, why: str) -> bytes:
    came = envelope.payload
    document = {
        "at": now_text(), "why": why, "upload_id": upload["upload_id"], "study": upload["study"],
        "revision": upload["revision"], "round": upload["round"], "payload_bytes": len(came),
        "payload_sha256": hashlib.sha256(came).hexdigest(),
        "payload_base64": base64.b64encode(came[:MAX_PAYLOAD]).decode(),
        "payload_type": envelope.payload_type[:200], "keyid": envelope.keyid[:200],
        "signature_base64": base64.b64encode(envelope.signature[:200]).decode(),
    }  # fmt: skip
    return canonical.dumps(document) + b"\n"
