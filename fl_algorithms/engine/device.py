"""Where networks train. Everything that depends on it is here; methods see tensors that lie where they belong.

    networks, the download, kept tensors, batches      on the device
    random draws, augmentation, logits that are judged  on the CPU
    deltas, checkpoints, what is kept between rounds    float32 copies on the CPU, in the plain order of memory

On CUDA training steps compute in bfloat16 where the card has it (its range is that of float32, so no loss is scaled);
weights, gradients, moments and everything that is judged stay float32. Operations without a deterministic form are
refused, so a round that is repeated on the same card gives the same bits; another device gives others.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fl_algorithms.engine.hardware import Hardware
from wardround.errors import BadData, TryAgain, UsageProblem

Bundles = Mapping[str, Mapping[str, Tensor]]  # bundle -> name -> tensor
HERE = torch.device("cpu")
CHANCE = "does not have a deterministic implementation"  # in what torch then says
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it torch refuses matrix products as not deterministic


def make_deterministic(threads: int) -> None:
    """Make this process's torch give the same bits again: deterministic kernels, ``threads`` threads."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """``make_deterministic`` for a while. On leaving, torch's flags, threads and random generators are as they were."""
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before, state = torch.get_num_threads(), torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    make_deterministic(threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
        torch.set_num_threads(before)
        torch.set_rng_state(state)
        if cards:
            torch.cuda.set_rng_state_all(cards)


@dataclass(frozen=True)
class Device:
    """A device and how it is used.

    Attributes:
        precision: of the products in a training step; None: as the weights.
        channels_last: the order in memory of the weights of convolutions in two dimensions, and so of their features.
        workers: processes that read coming batches, where images are read from their files in each epoch.
        name: as cards and reports have it.
    """

    where: torch.device = HERE
    precision: torch.dtype | None = None
    channels_last: bool = False
    workers: int = 0
    name: str = "cpu"

    def place(self, networks: Mapping[str, nn.Module]) -> None:
        """Bring networks here; they stay the same objects with the same parameters."""
        for network in networks.values():
            network.to(self.where)
            if self.channels_last:
                network.to(memory_format=torch.channels_last)

    def bring(self, tensor: Tensor) -> Tensor:
        """``tensor`` here; on CUDA without waiting for it, by way of pinned memory."""
        if tensor.device.type == self.where.type == "cpu":
            return tensor  # as ``to`` would, which takes a microsecond to say so
        if self.where.type != "cuda" or tensor.is_cuda:
            return tensor.to(self.where)
        return tensor.pin_memory().to(self.where, non_blocking=True)

    def bring_all(self, bundles: Bundles) -> dict[str, dict[str, Tensor]]:
        return {bundle: {name: self.bring(one) for name, one in part.items()} for bundle, part in bundles.items()}

    def arithmetic(self) -> AbstractContextManager[object]:
        """Around the loss of one training step: what it rounds of the weights is forgotten at the end."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.where.type, dtype=self.precision)

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Around training: what this device cannot do becomes an error of ours, with a hint.

        Raises:
            TryAgain: its memory is full.
            BadData: the study needs what it cannot compute twice alike.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise TryAgain(
                f"the memory of {self.name} is full",
                hint="end other programs on it; or train this study on the CPU: `--device cpu`",
                code="DECLINED_RESOURCES",
            ) from None
        except RuntimeError as error:
            operation, found, _ = str(error).partition(f" {CHANCE}")
            if not found:
                raise
            raise BadData(
                f"the study's network or loss needs `{operation[:80]}`, which {self.name} cannot compute to the same "
                "bits twice",
                hint="train this study on the CPU: `--device cpu`",
                code="DECLINED_RESOURCES",
            ) from None


CPU = Device()


def device_for(hardware: Hardware) -> Device:
    """The device that a party chose, tried with one number.

    Raises:
        UsageProblem: it is not there, or cannot be used.
    """
    if hardware.device == "cpu" or (hardware.device == "auto" and not torch.cuda.is_available()):
        return Device(workers=hardware.workers)
    unusable = partial(
        UsageProblem,
        hint="`nvidia-smi` says what is there; under systemd the unit must be given the card; else `--device cpu`",
        code="DECLINED_RESOURCES",
    )
    if not torch.cuda.is_available():
        raise unusable(f"torch {torch.__version__} finds no CUDA device")
    for name, value in CUBLAS.items():
        os.environ.setdefault(name, value)
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        raise unusable(f"the CUDA device cannot be used: {str(error).partition(chr(10))[0]}") from None
    precision = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    name = f"cuda, {torch.cuda.get_device_name()}, {'bfloat16' if precision else 'float32'}"
    return Device(torch.device("cuda"), precision, channels_last=True, workers=hardware.workers, name=name)


def device_of(networks: Mapping[str, nn.Module]) -> torch.device:
    """Where networks that belong together lie."""
    found = (parameter.device for network in networks.values() for parameter in network.parameters())
    return next(found, HERE)


def at_home(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in the plain order of memory, without gradient."""
    return tensor.detach().to(HERE, copy=True, memory_format=torch.contiguous_format)


def seen_at_home(tensor: Tensor) -> Tensor:
    """The same, and no copy where it lies there in that order already."""
    return tensor.detach().to(HERE).contiguous()


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy where ``parameter`` lies; of its shape, also in its order of memory, as fused optimizers want it."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
