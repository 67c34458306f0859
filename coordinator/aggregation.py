"""What the coordinator keeps of a study's model, before the first round and after each: files in, a file out.

What is computed is the server half of the study's method. Here are only the files: opened, fed in site order, and the
result made durable. It can be cut off anywhere and done again, to the same bits.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from coordinator.blobs import Blobs
from fl_algorithms.server.halves import Round, ServerHalf, Update
from wardround.errors import BadData
from wardround.tensors import Manifest, TensorFile


def begin(blobs: Blobs, half: ServerHalf, initial: Manifest, label: str) -> Manifest:
    """Make durable what is kept before the first round, and return its manifest.

    Args:
        initial: of the initial model, which is there. label: of the file while it is written.
    """
    if half.passes:
        return initial
    with TensorFile(blobs.model(initial.digest())) as model, blobs.new_model(half.kept_specs, label) as new:
        half.start(model, new.write)
        return new.keep()


def aggregate(
    blobs: Blobs,
    half: ServerHalf,
    kept: str,
    updates: Sequence[tuple[str, int, str]],
    round_number: int,
    label: str,
    common: Path | None = None,
) -> Manifest:
    """Make durable what is kept after a round, and return its manifest.

    Args:
        kept: digest of what was kept when the round opened.
        updates: (site, number of examples as told, upload id), of the accepted; any order.
        label: of the file while it is written.
        common: the coordinator's copy of the common set, for a half that distils.

    Raises:
        BadData: the result is beyond float32, or what was kept is damaged on disk.
    """
    with ExitStack() as stack:
        before = stack.enter_context(TensorFile(blobs.model(kept)))
        if before.manifest().digest() != kept:
            raise BadData(f"{before.path} no longer has the digest of its name")
        accepted = tuple(
            Update(site, count, stack.enter_context(TensorFile(blobs.spool(upload))))
            for site, count, upload in sorted(updates)
        )
        new = stack.enter_context(blobs.new_model(half.kept_specs, label))
        half.aggregate(Round(round_number, before, accepted, new.write, common))
        return new.keep()
