"""What a study asks of the values of an update, as it stands when the update is opened."""

from dataclasses import dataclass

from wardround.tensors.encodings import FLOAT32, Encoding
from wardround.tensors.manifests import TensorSpec


@dataclass(frozen=True)
class UpdateTerms:
    """Of the updates of one site.

    Attributes:
        max_norm: the largest L2 norm over all values; None for no limit.
        encoding, specs: how the values are written, and the float32 tensors that they are.
    """

    max_norm: float | None = None
    encoding: Encoding = FLOAT32
    specs: tuple[TensorSpec, ...] = ()
