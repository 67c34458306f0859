"""An update with its masks, as a file of the gateway's own: integers of a ring, written a block at a time."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from site_agent.state.journal import Journal
from wardround.local import durable
from wardround.records import secure_round
from wardround.records.study import StudyFile
from wardround.secure.layout import Blocks, Layout, masked
from wardround.secure.masking import Mask
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import Manifest, PayloadHasher


@dataclass(frozen=True)
class MaskedVector:
    """A masked update that lies in its file: what leaves, and the digests of its blocks."""

    manifest: Manifest
    blocks: Blocks


def write(
    target: Path, plain: Path | None, file: StudyFile, layout: Layout, journal: Journal,
    masks: Mapping[str, Sequence[Mask]],
) -> MaskedVector:  # fmt: skip
    """Write the update in ``plain``, with its counts and metrics, as integers with masks. Memory holds one block.

    Args:
        plain: the gateway's own copy of the update; None for a closing validation.

    Raises:
        BeyondRange: a value is beyond the study's range; the message names the tensor.
        BadData: the site's rows are beyond the study's largest weight, or a metric beyond its range.
        CannotWrite: the disk is full.
    """
    weight = secure_round.weight_of(file, journal.num_examples, closing=plain is None)
    own = layout.numbers(weight, _metrics(journal))
    specs = secure_round.vector_specs(layout)
    hasher, digests = PayloadHasher(specs), list[str]()
    durable.remove(target)
    with durable.SpoolFile(target) as out:
        header = file_header(specs)
        out.write_at(0, header)
        place = len(header)
        source = TensorFile(plain) if plain is not None else None
        try:
            for block in masked(layout, source.block if source is not None else _nothing, weight, own, masks):
                hasher.update(block)
                digests.append(hashlib.sha256(block).hexdigest())
                out.write_at(place, block)
                place += len(block)
        finally:
            if source is not None:
                source.close()
        out.sync()
    return MaskedVector(hasher.manifest(), Blocks(tuple(digests)))


def _metrics(journal: Journal) -> dict[str, tuple[float, int]]:
    """Name -> value and rows; one that is undefined is not in it."""
    rows = journal.num_validation
    return {name: (float(text), rows) for name, text in journal.metrics.items() if text != "null" and rows > 0}


def _nothing(key: str, first: int, count: int) -> NDArray[np.float32]:
    raise AssertionError("a closing validation has no tensors")
