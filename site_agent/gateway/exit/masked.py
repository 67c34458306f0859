"""An update that leaves with masks: what the ledger says of it, and what is kept to show an auditor more."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wardround.records.ledger.entries import TensorRow, UploadEntry
from wardround.records.ledger.secure import MaskedUpload
from wardround.signing import canonical
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import Manifest

EQUAL, ROWS = "equal", "rows"  # what a site counts for


@dataclass(frozen=True)
class MaskedUpdate:
    """An update's integers with their masks, in a file of the gateway's own.

    Attributes:
        blocks: the digest of its blocks' digests, which ``submission`` is this site's signature of.
        context, group: digests of the attempt, and of the sites whose masks are in it.
        largest_weight: of one site; 1 where all count alike. bits: a value is rounded to multiples of 2^-bits.
    """

    file: Path
    manifest: Manifest
    blocks: str
    submission: Envelope
    context: str
    group: str
    largest_weight: int
    bits: int

    def entry(self, plain: UploadEntry, upload_id: str, commitment: str) -> UploadEntry:
        """The ledger's entry of it: no count and no metric of this site stands beside it in clear."""
        rows = tuple(
            TensorRow(
                bundle=entry.spec.bundle, name=entry.spec.name, dtype=entry.spec.dtype, shape=entry.spec.shape,
                encoding="raw", bytes=entry.spec.bytes, sha256=entry.sha256,
            )
            for entry in self.manifest.entries
        )  # fmt: skip
        weighting = EQUAL if self.largest_weight == 1 else ROWS
        said = MaskedUpload(
            context=self.context, group=self.group, blocks=self.blocks, plain=commitment, weighting=weighting,
            bits=self.bits,
        )  # fmt: skip
        return replace(
            plain, upload_id=upload_id, manifest_sha256=self.manifest.digest(), payload_bytes=self.manifest.bytes,
            tensors=rows, metrics=(), num_examples=0, num_validation=0, masked=said,
        )  # fmt: skip


@dataclass(frozen=True)
class Masking:
    """``make`` writes the masked update; ``keep`` keeps, under an upload's id, what its commitment is made of."""

    make: Callable[[], MaskedUpdate]
    keep: Callable[[str, object], object]

    def commit(self, upload_id: str, plain: UploadEntry, rows: Sequence[TensorRow]) -> str:
        """A commitment to all that the masks hide: the site's manifest, counts and metrics. The salt stays here."""
        opened = {"salt": os.urandom(32).hex(), "left": plain.left()}
        self.keep(upload_id, {**opened, "tensors": [row.document() for row in rows]})
        return canonical.digest(opened)
