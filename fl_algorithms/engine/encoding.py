"""What leaves in a study's encoding, and what it leaves out: kept at the site, and added to the next update.

Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD and
Other Gradient Compression Schemes, ICML 2019. https://arxiv.org/abs/1901.09847
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Uplink
from fl_algorithms.engine.training import flat_key
from wardround.records.encoding import EncodingSection
from wardround.tensors.codecs import Decoded, InMemoryNumbers, Numbers, encoded
from wardround.tensors.manifests import MODEL, TensorSpec


class Encoder:
    """One site's. ``rest`` is what its last update left out, by flat key, on the CPU: a part of its private state."""

    def __init__(self, section: EncodingSection, specs: Sequence[TensorSpec]) -> None:
        self._section, self._encoding = section, section.encoding
        self._specs = rest_specs(section, specs)
        self.rest: dict[str, Tensor] = {}

    def load(self, rest: Mapping[str, Tensor]) -> None:
        """Go on with what an earlier session left out."""
        self.rest = {key: tensor.clone() for key, tensor in rest.items()}

    def sent(self, uplink: Uplink) -> Uplink:
        """The tensors that leave for these deltas. Without an encoding, the deltas themselves."""
        if not self._encoding.is_lossy:
            return uplink
        found = {bundle: dict(tensors) for bundle, tensors in uplink.items()}
        for spec in self._specs:
            delta = found[spec.bundle].pop(spec.name).numpy().reshape(-1)
            rest = self.rest.get(flat_key(spec.key))
            values = delta if rest is None else delta + rest.numpy().reshape(-1)
            numbers = encoded(self._encoding, spec, values)
            for key, array in numbers.items():
                bundle, _, name = key.rpartition("/")
                found.setdefault(bundle or MODEL, {})[name] = as_tensor(array)
            if self._section.keeps_rest:
                arrived = Decoded(self._encoding, (spec,), InMemoryNumbers(numbers)).block(spec.key, 0, len(values))
                self.rest[flat_key(spec.key)] = torch.from_numpy(values - arrived).reshape(spec.shape)
        return found


def rest_specs(section: EncodingSection, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Of these float32 tensors, those that leave otherwise than they are."""
    return tuple(spec for spec in specs if section.encoding.parts(spec) != (spec,))


def arrived(section: EncodingSection, specs: Sequence[TensorSpec], uplink: Uplink) -> Uplink:
    """The float32 values of what left for ``specs``, as the coordinator reads them."""
    if not section.encoding.is_lossy:
        return uplink
    numbers = {
        name if bundle == MODEL else f"{bundle}/{name}": as_numbers(tensor)
        for bundle, tensors in uplink.items()
        for name, tensor in tensors.items()
    }
    source = Decoded(section.encoding, specs, InMemoryNumbers(numbers))
    values: Uplink = {}
    for spec in specs:
        block = torch.from_numpy(source.block(spec.key, 0, prod(spec.shape)))
        values.setdefault(spec.bundle, {})[spec.name] = block.reshape(spec.shape)
    return values


def as_tensor(numbers: Numbers) -> Tensor:
    """An array of ``wardround.tensors.codecs`` as torch has it."""
    if numbers.dtype == np.dtype("<u2"):
        return torch.from_numpy(numbers.view("<i2")).view(torch.bfloat16)
    return torch.from_numpy(numbers)


def as_numbers(tensor: Tensor) -> Numbers:
    """And back. Shares its memory."""
    numbers: Numbers = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return numbers.view("<u2") if tensor.dtype == torch.bfloat16 else numbers
