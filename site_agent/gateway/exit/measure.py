"""What an update's file holds, measured in one pass: each tensor's digest, norm and largest magnitude; and a tag."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from site_agent.gateway.consent import approvals as consents
from site_agent.state.directory import Consent
from site_agent.state.offer import encoding_in
from wardround.errors import BadData
from wardround.records.ledger.entries import TensorRow
from wardround.tensors.codecs import fault, widened
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Entry, Manifest, TensorSpec
from wardround.tensors.tags import Tag, Tagger

BLOCK = 64 * 1024  # elements looked at in one piece


@dataclass(frozen=True)
class Measured:
    """What an update's file holds: its manifest, and its tensors' rows in the ledger.

    ``tag``: of the payload, by which this process knows it again when it sends it; None without a file.
    """

    manifest: Manifest
    rows: tuple[TensorRow, ...]
    tag: Tag | None


NOTHING = Measured(Manifest(()), (), None)  # of a closing validation


def measure(file: Path, consent: Consent) -> Measured:
    """Measure an update's file.

    Reads the file once, 64 Ki values at a time. Norm and largest magnitude are over the finite values; ``nonfinite``
    counts the others, with which nothing leaves. In an encoding they are of the numbers that leave, as they leave.

    Raises:
        BadData: the file does not hold exactly the approved tensors, or in an encoding what that never writes.
    """
    with TensorFile(file) as tensors:
        consents.check_tensors(tensors.specs, consent.upload, consent.study, "the trainer's update")
        _refuse_unwritten(tensors, consent)
        tagger = Tagger()
        rows = tuple(_row(tensors, spec, tagger) for spec in tensors.specs)
    manifest = Manifest(tuple(Entry(spec, row.sha256) for spec, row in zip(tensors.specs, rows, strict=True)))
    return Measured(manifest, rows, tagger.tag())


def _refuse_unwritten(tensors: TensorFile, consent: Consent) -> None:
    """Places in another order, or a scale and its numbers of the other sign, are the same update: which of these is
    sent would tell more than the values do.

    Raises:
        BadData: naming the tensor.
    """
    encoding, sent = encoding_in(consent.document).encoding, set(consent.upload)
    shared = [spec for spec in consent.download if sent.issuperset(encoding.parts(spec))]
    if key := fault(encoding, shared, tensors):
        raise BadData(
            f"tensor `{key}` of the trainer's update holds what encoding `{encoding.name}` never writes",
            code="DECLINED_TRAINING_FAILED",
        )


def _row(tensors: TensorFile, spec: TensorSpec, tagger: Tagger) -> TensorRow:
    digest, squares, largest, nonfinite = hashlib.sha256(), 0.0, 0.0, 0
    count = math.prod(spec.shape)
    for start in range(0, count, BLOCK):
        block = tensors.numbers(spec.key, start, min(BLOCK, count - start))
        data = block.view("u1").data  # while it is in the processor's cache: hashed, tagged and measured
        digest.update(data)
        tagger.update(data)
        numbers = widened(block) if spec.dtype == "BF16" else block
        wide = numbers.astype(np.float64)
        square = float(np.einsum("i,i->", wide, wide))  # one thread; a BLAS would wake one for each core
        if not math.isfinite(square):  # squares of float32 are finite in float64, and so is their sum
            finite = np.isfinite(wide)
            nonfinite += int(wide.size - finite.sum())
            numbers = wide = wide[finite]
            square = float(np.einsum("i,i->", wide, wide))
        squares += square
        largest = max(largest, float(numbers.max(initial=0)), -float(numbers.min(initial=0)))
    return TensorRow(
        bundle=spec.bundle, name=spec.name, dtype=spec.dtype, shape=spec.shape, encoding="raw", bytes=spec.bytes,
        sha256=digest.hexdigest(), l2=f"{math.sqrt(squares):.9e}", max_abs=f"{largest:.9e}", nonfinite=nonfinite,
    )  # fmt: skip
