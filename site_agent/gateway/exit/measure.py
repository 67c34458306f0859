"""What an update's file holds, measured in one pass: each tensor's digest, norm and largest magnitude."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from site_agent.gateway.consent import approvals as consents
from site_agent.state.directory import Consent
from wardround.tensors.manifests import Entry, Manifest, TensorFile, TensorSpec

BLOCK = 64 * 1024  # float32 elements looked at in one piece


@dataclass(frozen=True)
class MeasuredTensor:
    """A tensor of an update.

    ``l2`` (its L2 norm) and ``max_abs`` (its largest magnitude) are decimals over the finite values; ``nonfinite``
    counts the others, with which nothing leaves.
    """

    entry: Entry
    l2: str
    max_abs: str
    nonfinite: int

    def document(self) -> dict[str, object]:
        """Its row in the ledger's `upload` line."""
        return {**self.entry.document(), "l2": self.l2, "max_abs": self.max_abs, "nonfinite": self.nonfinite}


def measure(file: Path, consent: Consent) -> tuple[Manifest, list[MeasuredTensor]]:
    """The manifest of an update's file, and its tensors as they are measured. Reads the file once, 256 KiB at a time.

    Raises:
        BadData: the file does not hold exactly the approved tensors.
    """
    with TensorFile(file) as tensors:
        consents.check_tensors(tensors.specs, consent.leaves, consent.study, "the trainer's update")
        measured = [_measured(tensors, spec) for spec in tensors.specs]
    return Manifest(tuple(tensor.entry for tensor in measured)), measured


def _measured(tensors: TensorFile, spec: TensorSpec) -> MeasuredTensor:
    digest, squares, largest, nonfinite = hashlib.sha256(), 0.0, 0.0, 0
    count = math.prod(spec.shape)
    for start in range(0, count, BLOCK):
        block = tensors.block(spec.key, start, min(BLOCK, count - start))
        digest.update(block.data)
        wide = block.astype(np.float64)
        finite = np.isfinite(wide)
        if not finite.all():
            nonfinite += int(wide.size - finite.sum())
            wide = wide[finite]
        squares += float(np.einsum("i,i->", wide, wide))  # one thread; a BLAS would wake one for each core
        largest = max(largest, float(np.abs(wide).max(initial=0.0)))
    entry = Entry(spec, digest.hexdigest())
    return MeasuredTensor(entry, f"{math.sqrt(squares):.9e}", f"{largest:.9e}", nonfinite)
