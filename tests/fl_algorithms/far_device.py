"""A second device where there is none: tensors that say they are elsewhere, compute here, and refuse to meet others.

A test runs under ``elsewhere()`` with ``FAR``. What works there gives the CPU's own bits; an operation on tensors of
both places fails as it would on a card, and so does reading one without bringing it home.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fl_algorithms.engine.device import HERE, Device

FAR = Device(torch.device("meta"), name="far")  # autograd takes "meta" as it takes the CPU; nothing else uses it here


class Far(Tensor):
    """``inner`` has the values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Far":
        made: Far = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=FAR.where
        )
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Far":
        return Far(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(function, args, kwargs or {})


def _done(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function.__name__.partition(".")[0]
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    far = any(isinstance(one, Far) for one in tensors)
    if kwargs.get("device") is not None:
        far = kwargs["device"].type == FAR.where.type
        kwargs = {**kwargs, "device": HERE}
    elif far and name != "copy_" and (odd := [one for one in tensors if not isinstance(one, Far) and one.dim()]):
        raise RuntimeError(f"{name}: tensors of two devices, {list(odd[0].shape)} is on the CPU")
    args, kwargs = tree_map(_inner, (args, kwargs))
    found = function(*args, **kwargs)
    return tree_map(lambda one: Far(one) if far and isinstance(one, Tensor) else one, found)


def _inner(one: Any) -> Any:
    return one.inner if isinstance(one, Far) else one


@contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    optimizers = import_module("torch.optim.optimizer")
    supported = [*optimizers._get_fused_kernels_supported_devices(), FAR.where.type]
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: supported)
    with _Mode():
        yield
