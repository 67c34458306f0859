"""A checkpoint's tensors: copies on the CPU; or, where nothing changed since the download, the downloaded ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Context
from fl_algorithms.engine.device import HERE, at_home
from fl_algorithms.engine.partition import all_tensors
from fl_algorithms.engine.training import Networks


def taken(networks: Networks, came: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Every parameter and buffer as it is now, by name. ``came``: what ``downloaded`` gives, to share; or nothing."""
    tensors = dict[str, Tensor]()
    for key, tensor in all_tensors(networks).items():
        found = came.get(tensor.data_ptr())
        tensors[key] = found if found is not None and have_same_bits(found, tensor) else at_home(tensor)
    return tensors


def downloaded(context: Context) -> dict[int, Tensor]:
    """The downloaded tensors, by where the live ones of the same names lie."""
    return {
        tensor.data_ptr(): context.base[share.bundle][name]
        for share in context.algorithm.shares
        for name, tensor in share.tensors(context.networks).items()
        if name in context.base.get(share.bundle, {})
    }


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both are float32 on the CPU, ``one`` in the plain order of memory, and equal to the bit."""
    if one.dtype != torch.float32 or (one.dtype, one.shape) != (other.dtype, other.shape) or not one.is_contiguous():
        return False
    if one.device != HERE or other.device != HERE:
        return False
    bits = torch.int32
    return torch.equal(one.detach().view(bits), other.detach().contiguous().view(bits))
