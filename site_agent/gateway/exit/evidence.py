"""Keeps the coordinator's receipts that the ledger cannot hold, beside it: what came, about which upload, why not.

One JSON file each in ``ledger/evidence``. The first ones stay; their number and size are bounded, because whoever lies
once can do it without end: of one upload ``MOST_OF_ONE`` are kept, so that its lies use up no other's place, and the
others are counted in ``UPLOAD.left-out``. The first lie about an upload is always kept; when there are ``MAX_FILES``,
without its text, by its digest. How many uploads there are is for the policy's quotas to bound.
"""

import base64
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from site_agent.state.directory import now_text
from wardround.errors import CannotWrite, NeedsPerson
from wardround.local import durable
from wardround.signing import canonical
from wardround.signing.dsse import Envelope

if TYPE_CHECKING:
    from wardround.records.ledger.entries import UploadEntry

FOLDER = "evidence"
TEXTS = ("at", "why", "upload_id", "study", "round", "payload_base64")  # of a file, that ``read`` gives
MAX_FILES = 64  # beyond them only the first of an upload, by its digest
MOST_OF_ONE = 4  # of one upload
MAX_PAYLOAD = 64 * 1024  # bytes of a receipt's text that are kept; its SHA-256 is of all of it
log = logging.getLogger(__name__)


class HostileReceipt(NeedsPerson):
    """The coordinator answered an upload with something that cannot stand in the ledger."""


@dataclass(frozen=True)
class KeptReceipt:
    """One file of the folder. ``payload_base64`` is what was signed; ``left_out`` more about that upload were only
    counted."""

    at: str
    why: str
    upload_id: str
    study: str
    round: str
    payload_base64: str
    file: str
    left_out: int


class Evidence:
    """The folder of one ledger. Safe for one writer; anyone may read."""

    def __init__(self, ledger: Path) -> None:
        self._folder = ledger / FOLDER
        self.uploads = {kept.upload_id for kept in read(ledger)}

    def keep(self, upload: "UploadEntry", envelope: Envelope, why: str) -> HostileReceipt:
        """Keep what came as the receipt of ``upload``. Returns the error that says so.

        Raises:
            StorageFailed: the disk failed.
        """
        upload_id = upload.upload_id
        digest = hashlib.sha256(envelope.payload + envelope.signature).hexdigest()
        path = self._folder / f"{upload_id[:32]}-{digest[:12]}.json"
        kept = path.exists() or self._write(path, upload, envelope, why)
        self.uploads.add(upload_id)
        return HostileReceipt(
            f"the coordinator's receipt for upload {upload_id[:12]}… cannot stand in the ledger: {why}; "
            f"the ledger is as it was, the upload counts as unresolved, and nothing more of `{upload.study}` is sent"
            + (f"; what came is kept in {path}" if kept else self._why_not_kept(upload_id)),
            hint="show this to the coordinator's operator. If they restored it from an older copy: `site-agent audit "
            "rollover` begins a new ledger that cites this one",
            code="DECLINED_POLICY",
        )

    def _write(self, path: Path, upload: "UploadEntry", envelope: Envelope, why: str) -> bool:
        """Keep one more, or count it where this upload has its share. Whether it is kept."""
        try:
            durable.make_folder(self._folder)
            names = [file.name for file in self._folder.glob("*.json")]
            of_this = sum(name.startswith(upload.upload_id[:32]) for name in names)
            if of_this >= MOST_OF_ONE or (of_this and len(names) >= MAX_FILES):
                left_out = _left_out(self._folder, upload.upload_id) + 1
                durable.write_file(_count_file(self._folder, upload.upload_id), b"%d\n" % left_out)
                return False
            durable.write_file(path, _document(upload, envelope, why, MAX_PAYLOAD if len(names) < MAX_FILES else 0))
        except CannotWrite as error:
            if isinstance(error, durable.StorageFailed):
                raise
            log.error("%s; a receipt that cannot be believed is not kept", error.message)
            return False
        return True

    def _why_not_kept(self, upload_id: str) -> str:
        left_out = _left_out(self._folder, upload_id)
        if not left_out:
            return "; what came could not be kept"
        return f"; what came is not kept: the first ones about this upload are, and {left_out} more were counted"


def read(ledger: Path) -> list[KeptReceipt]:
    """What is kept beside a ledger, oldest first. A file that cannot be read is left out: no verdict depends on it."""
    rows, folder = [], ledger / FOLDER
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_bytes())
            texts = {name: str(document[name]) for name in TEXTS}
            rows.append(KeptReceipt(**texts, file=path.name, left_out=_left_out(folder, texts["upload_id"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return sorted(rows, key=lambda kept: kept.at)


def _count_file(folder: Path, upload_id: str) -> Path:
    return folder / f"{upload_id[:32]}.left-out"


def _left_out(folder: Path, upload_id: str) -> int:
    """How many lies about an upload were counted alone; 0 where no count can be read: no verdict depends on it."""
    try:
        text = _count_file(folder, upload_id).read_bytes()[:20]
        return int(text) if text.strip().isdigit() else 0
    except (OSError, ValueError):
        return 0


def _document(upload: "UploadEntry", envelope: Envelope, why: str, most: int) -> bytes:
    """The file's text, with at most so many bytes of what was signed."""
    document = {
        "at": now_text(), "why": why, "upload_id": upload.upload_id, "study": upload.study,
        "revision": upload.revision, "round": upload.round, "payload_bytes": len(envelope.payload),
        "payload_sha256": hashlib.sha256(envelope.payload).hexdigest(),
        "payload_base64": base64.b64encode(envelope.payload[:most]).decode(),
        "payload_type": envelope.payload_type[:200], "keyid": envelope.keyid[:200],
        "signature_base64": base64.b64encode(envelope.signature[:200]).decode(),
    }  # fmt: skip
    return canonical.dumps(document) + b"\n"
