"""A checkpoint of PyTorch, read in a process of its own: the only place where `torch.load` is called.

    1. `isolate` of the trainer: no network, no way into another process, before torch is imported
    2. size: the file, and what its archive says that it unpacks to
    3. `torch.load(..., weights_only=True)`: tensors, numbers and containers; a file that asks for any other code is
       refused, by the name of what it asks for
    4. size again: no tensor claims more numbers than it holds
    5. the tensors, as a safetensors file, which is all that the other process reads

What this does not do: judge the numbers. ``convert`` looks at names, shapes and whether they are finite.
"""

import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fl_algorithms.engine.weights import MAX_BYTES, read
from wardround.cli import say_error
from wardround.errors import BadData, WardroundError

# How this module is run; the isolation must come before anything that could start a thread.
READ = (
    "from site_agent.trainer.isolation import kernel; kernel.isolate(); "
    "from fl_algorithms.lab.checkpoint import main; main()"
)
INSIDE = (  # where training loops put a network's state
    "state_dict", "model_state_dict", "model", "module", "net", "network", "network_weights", "weights", "params",
)  # fmt: skip
AGAIN = (
    "where it was made: `safetensors.torch.save_file(network.state_dict(), FILE)`, or "
    "`torch.save(network.state_dict(), FILE)`"
)


def main() -> None:
    """Read the checkpoint ``sys.argv[1]`` and write its tensors to ``sys.argv[2]``."""
    try:
        tensors = tensors_of(Path(sys.argv[1]))
        safetensors.torch.save_file(tensors, sys.argv[2])
    except WardroundError as error:
        say_error(error)
        sys.exit(error.exit_code)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Name -> tensor of the network's state in a checkpoint of PyTorch or a safetensors file.

    Raises:
        BadData: it cannot be read, is too large, asks for code, or holds no tensors.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(9)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    if begins[8:] == b"{":
        return dict(read(path).tensors)
    _refuse_large(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of the reader
        wanted = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
        if wanted is not None:
            raise BadData(
                f"{path} holds more than tensors: to read it, code of `{wanted[1]}` would have to run", hint=AGAIN
            ) from None
        raise BadData(f"{path}: not a checkpoint of PyTorch, or damaged ({type(error).__name__})", hint=AGAIN) from None
    state = state_in(loaded)
    if state is None:
        raise BadData(f"{path} holds no network's state: no tensors by name", hint=AGAIN)
    if sum(tensor.numel() * tensor.element_size() for tensor in state.values()) > MAX_BYTES:
        raise BadData(f"{path}: its tensors claim more than {MAX_BYTES >> 20} MiB")
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def state_in(loaded: Any) -> dict[str, Tensor] | None:
    """The network's state in what a training loop saved: itself, or under one of the usual names."""
    if not isinstance(loaded, Mapping):
        return None
    tensors = {
        name: value
        for name, value in loaded.items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
    }
    if tensors:
        return tensors
    return next((found for name in INSIDE if (found := state_in(loaded.get(name))) is not None), None)


def _refuse_large(path: Path) -> None:
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                size = max(size, sum(part.file_size for part in archive.infolist()))
        except (zipfile.BadZipFile, OSError, ValueError):
            raise BadData(f"{path}: not a checkpoint of PyTorch, or damaged (its archive)", hint=AGAIN) from None
    if size > MAX_BYTES:
        raise BadData(f"{path} unpacks to {size >> 20} MiB; a checkpoint may have {MAX_BYTES >> 20}")
