"""The accepted updates of a round and its model become the next model: files in, a file out, block by block.

What is computed is the server half of the study's method. Here are only the files: opened, fed in site order, and the
result made durable. It can be cut off anywhere and done again, to the same bits.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from coordinator.blobs import Blobs
from fl_algorithms.server.halves import HALVES
from wardround.errors import BadData
from wardround.tensors import Manifest, TensorFile


def aggregate(
    blobs: Blobs, half: str, base: str, updates: Sequence[tuple[str, int, str]], round_number: int, label: str
) -> Manifest:
    """Make the next model durable and return its manifest.

    Args:
        half: the row of ``fl_algorithms.server.halves`` that the study's method names.
        base: digest of the model that the sites downloaded.
        updates: (site, number of examples as told, upload id), of the accepted; any order.
        label: of the file while it is written.

    Raises:
        BadData: the result is beyond float32, or the base model is damaged on disk.
    """
    server = HALVES[half]
    with ExitStack() as stack:
        model = stack.enter_context(TensorFile(blobs.model(base)))
        if model.manifest().digest() != base:
            raise BadData(f"{model.path} no longer has the digest of its name")
        weighted = [
            (count, stack.enter_context(TensorFile(blobs.spool(upload)))) for _, count, upload in sorted(updates)
        ]
        new = stack.enter_context(blobs.new_model(model.specs, label))
        server.aggregate(model, weighted, model.specs, new.write)
        manifest = new.keep()
    server.after_aggregate(round_number)
    return manifest
