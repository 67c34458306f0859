"""How the values of an update are written as it leaves: which tensors stand for the float32 tensors that are shared.

    float32    the tensors themselves
    bfloat16   each value rounded to 16 bits
    int8       each value as a whole number from -127 to 127, times a scale for each block: bundle "B_scale" beside "B"
    topk       the largest values of each tensor, and in bundle "B_index" where they stand; the others are left out

What leaves is tensors again, each with its name, dtype and digest, so a consent, a policy, a ledger and an admission
read it as they read everything else. Running statistics of norm layers stay float32, because a variance that is rounded
may become negative; and so does each tensor that an encoding would not make smaller. No numpy: ``codecs`` computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from wardround.errors import BadData
from wardround.tensors.manifests import ITEM_BYTES, TensorSpec

Name = Literal["float32", "bfloat16", "int8", "topk"]
SCALE, INDEX = "scale", "index"
STATISTICS = ("running_mean", "running_var")
MOST_ELEMENTS = 2**31  # of a tensor whose places are numbers of 32 bits


@dataclass(frozen=True)
class Encoding:
    """An encoding with its settings.

    Attributes:
        block: of int8: how many values have one scale.
        fraction: of topk: the part of a tensor's values that leaves.
    """

    name: Name = "float32"
    block: int = 256
    fraction: float = 0.01

    @property
    def is_lossy(self) -> bool:
        """Whether what arrives is other than what was computed."""
        return self.name != "float32"

    def kept(self, elements: int) -> int:
        """Of topk: how many values of so many leave; at least one."""
        return min(elements, max(1, ceil(self.fraction * elements)))

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that leave for one float32 tensor, that of its own name first.

        Raises:
            BadData: its bundle's name is too long for another beside it.
        """
        elements = prod(spec.shape)
        parts: tuple[TensorSpec, ...] = (spec,)
        if self.name == "float32" or spec.name.rpartition(".")[2] in STATISTICS or elements >= MOST_ELEMENTS:
            return parts
        if self.name == "bfloat16":
            parts = (replace(spec, dtype="BF16"),)
        elif self.name == "int8":
            parts = (replace(spec, dtype="I8"), beside(spec, SCALE, "F32", ceil(elements / self.block)))
        elif elements:
            kept = self.kept(elements)
            parts = (replace(spec, shape=(kept,)), beside(spec, INDEX, "I32", kept))
        return parts if sum(part.bytes for part in parts) < spec.bytes else (spec,)

    def sent(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The tensors that leave for these, in the order of the payload: wide dtypes first, then by name.

        Raises:
            BadData: two of them would have one name.
        """
        if not self.is_lossy:
            return tuple(specs)
        parts = [part for spec in specs for part in self.parts(spec)]
        if len({part.key for part in parts}) != len(parts):
            raise BadData(f"encoding `{self.name}` puts a bundle beside each, and the study has one of its name")
        return tuple(sorted(parts, key=lambda part: (-ITEM_BYTES[part.dtype], part.key)))


def beside(spec: TensorSpec, what: str, dtype: str, count: int) -> TensorSpec:
    """The tensor of ``count`` numbers that an encoding puts beside ``spec``."""
    return TensorSpec(spec.name, dtype, (count,), f"{spec.bundle}_{what}")


FLOAT32 = Encoding()
