"""The header of an upload: what a site says about an update before its first byte, and what it says of its ledger.

The site makes it, the coordinator reads it; ``to_message`` and ``from_message`` alone know how it stands in
``UploadOpen``. Who sends it is not in it: the site is whoever its certificate names.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from wardround.errors import BadData
from wardround.records.messages import envelope_message, manifest_from, manifest_message
from wardround.records.receipts import MAX_NEW_LINES, LedgerHead
from wardround.records.secure_messages import statement_from
from wardround.records.study import METRIC_NAME, STUDY_NAME
from wardround.signing import canonical
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import MAX_TENSORS, Manifest
from wardround.v1 import federation_pb2 as pb

MAX_METRICS = 64
MAX_METRIC_VALUE = 40  # characters
MAX_LEDGER_ID = 64  # characters


@dataclass(frozen=True)
class LedgerStatement:
    """A ledger's signed head, and the hashes of the lines that led to it since a head that the coordinator knows."""

    head: LedgerHead
    signature: bytes
    new_lines: tuple[bytes, ...]

    @classmethod
    def from_message(cls, head: pb.LedgerHead, new_lines: Sequence[bytes]) -> "LedgerStatement":
        """Forms and lengths are checked here; whether it is true is not.

        Raises:
            BadData: MESSAGE_MALFORMED, also for more than ``MAX_NEW_LINES`` lines.
        """
        fits = (
            len(head.head) == 32
            and len(head.signature) == 64
            and 1 <= len(head.ledger_id) <= MAX_LEDGER_ID
            and head.lines < 2**53
            and len(new_lines) <= MAX_NEW_LINES
            and all(len(line) == 32 for line in new_lines)
        )
        if not fits:
            raise BadData("what is said of the ledger has not its form", code="MESSAGE_MALFORMED")
        return cls(LedgerHead(head.ledger_id, head.lines, head.head.hex()), head.signature, tuple(new_lines))

    def head_message(self) -> pb.LedgerHead:
        """The head with its signature; ``new_lines`` stand beside it in the message."""
        head = self.head
        return pb.LedgerHead(
            ledger_id=head.ledger_id, lines=head.lines, head=bytes.fromhex(head.head), signature=self.signature
        )


@dataclass(frozen=True)
class UploadHeader:
    """What a site opens an upload with. Digests and the id are hex; metrics are (name, decimal string)."""

    upload_id: str
    study: str
    revision: int
    digest: str  # of the study
    round: int
    attempt: int
    manifest: Manifest  # without entries for a closing validation
    metrics: tuple[tuple[str, str], ...]
    num_examples: int
    num_validation: int
    ledger: LedgerStatement
    submission: Envelope | None = None  # with secure aggregation: "this masked vector is mine"

    @cached_property
    def content(self) -> str:
        """Digest of all but the id and the ledger, which may have grown when the same upload is opened again."""
        return canonical.digest(
            {
                "study": self.study, "revision": self.revision, "digest": self.digest, "round": self.round,
                "attempt": self.attempt, "manifest": self.manifest.digest(),
                "metrics": [list(pair) for pair in self.metrics],
                "num_examples": self.num_examples, "num_validation": self.num_validation,
                **({"submission": _digest(self.submission)} if self.submission is not None else {}),
            }
        )  # fmt: skip

    @classmethod
    def from_message(cls, message: pb.UploadOpen, most_tensors: int = MAX_TENSORS) -> "UploadHeader":
        """Forms and lengths are checked here; whether it may count is for the coordinator's admission.

        Args:
            most_tensors: how many the manifest may name.

        Raises:
            BadData: MESSAGE_MALFORMED, or a manifest that is none.
        """
        fits = (
            STUDY_NAME.fullmatch(message.study)
            and len(message.digest) == 32
            and len(message.metrics) <= MAX_METRICS
            and all(
                METRIC_NAME.fullmatch(metric.name) and len(metric.value) <= MAX_METRIC_VALUE
                for metric in message.metrics
            )
            and all(count < 2**53 for count in (message.num_examples, message.num_validation))
        )
        if not fits:
            raise BadData("the upload's header has not its form", code="MESSAGE_MALFORMED")
        return cls(
            upload_id=upload_id_from(message.upload_id), study=message.study, revision=message.revision,
            digest=message.digest.hex(), round=message.round, attempt=message.attempt,
            manifest=manifest_from(message.manifest, most_tensors),
            metrics=tuple((metric.name, metric.value) for metric in message.metrics),
            num_examples=message.num_examples, num_validation=message.num_validation,
            ledger=LedgerStatement.from_message(message.ledger, message.new_line_hashes),
            submission=statement_from(message.submission) if message.HasField("submission") else None,
        )  # fmt: skip

    def to_message(self) -> pb.UploadOpen:
        return pb.UploadOpen(
            upload_id=bytes.fromhex(self.upload_id), study=self.study, revision=self.revision,
            digest=bytes.fromhex(self.digest), round=self.round, attempt=self.attempt,
            manifest=manifest_message(self.manifest),
            metrics=[pb.Metric(name=name, value=value) for name, value in self.metrics],
            num_examples=self.num_examples, num_validation=self.num_validation,
            ledger=self.ledger.head_message(), new_line_hashes=self.ledger.new_lines,
            submission=None if self.submission is None else envelope_message(self.submission),
        )  # fmt: skip


def _digest(statement: Envelope) -> str:
    return hashlib.sha256(statement.payload + statement.signature).hexdigest()


def upload_id_from(data: bytes) -> str:
    """An upload's id as hex.

    Raises:
        BadData: MESSAGE_MALFORMED, it is not 16 bytes.
    """
    if len(data) != 16:
        raise BadData(f"an upload id of {len(data)} bytes, 16 are wanted", code="MESSAGE_MALFORMED")
    return data.hex()
