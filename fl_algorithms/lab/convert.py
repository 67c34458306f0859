"""A checkpoint of torchvision, timm or a training of your own, as a safetensors file with the names of a study."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import all_tensors, build, task_of
from fl_algorithms.engine.weights import read
from fl_algorithms.lab.checkpoint import READ
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData

READING_S = 600
WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "network.")  # of DataParallel, torch.compile, training loops
PARTS = ("body.", "shared_extractor.", "private_extractor.")  # where a network of another library stands in ours
COLORS = 3
MISSING = "not in the checkpoint"


@dataclass(frozen=True)
class Converted:
    """The tensors to be written.

    Attributes:
        tensors: by name.
        drawn: what the study's network has and the checkpoint has not: name -> why.
        unused: the checkpoint's tensors that nothing was made of.
    """

    tensors: dict[str, Tensor]
    drawn: dict[str, str]
    unused: tuple[str, ...]


def read_apart(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, read by an isolated process; without the names' wrappers, floats as float32.

    Raises:
        BadData: that process could not read them; the message is its own.
    """
    with tempfile.TemporaryDirectory(prefix="wardround-convert-") as folder:
        out = Path(folder) / "tensors.safetensors"
        line = [sys.executable, "-P", "-c", READ, str(path.absolute()), str(out)]
        try:
            done = subprocess.run(
                line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=READING_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise BadData(f"{path} was not read in {READING_S} s") from None
        if done.returncode != 0:
            said = dict(line.split(": ", 1) for line in done.stderr.splitlines() if ": " in line)
            raise BadData(
                said.get("error", f"{path}: the process that reads it ended with {done.returncode}"),
                hint=said.get("hint", ""),
            )
        tensors = dict(read(out).tensors)
    return {name: _as_float32(tensor) for name, tensor in unwrapped(tensors).items()}


def unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without a prefix that all names have because of how the network was trained."""
    for wrapper in WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            return unwrapped({name.removeprefix(wrapper): tensor for name, tensor in tensors.items()})
    return dict(tensors)


def renamed(tensors: Mapping[str, Tensor], prefix: str) -> Converted:
    """Every tensor, with ``prefix`` before its name."""
    return Converted({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, {}, ())


def fitted(tensors: Mapping[str, Tensor], study: ResolvedStudy, *, gray: bool) -> Converted:
    """Those of ``tensors`` that fit a tensor of a resolved study's network by name and shape, under the study's names.

    Args:
        gray: a first layer for three colors becomes one for a single channel: the sum over its colors.

    Raises:
        BadData: none of them fits, or one that fits is not finite.
    """
    own = study.at("")
    wanted = all_tensors(build(own, task_of(own), algorithm_of(own), site=""))
    found: dict[str, Tensor] = {}
    drawn: dict[str, str] = {}
    used = set()
    for key, target in wanted.items():
        why = MISSING
        for name in theirs(key):
            if name not in tensors:
                continue
            tensor = _for_gray(tensors[name], target) if gray else tensors[name]
            if tensor.shape == target.shape and tensor.dtype == target.dtype:
                found[key] = tensor.clone()  # what becomes two tensors is two
                used.add(name)
                break
            why = f"`{name}` is {list(tensors[name].shape)}, the study's is {list(target.shape)}"
        else:
            drawn[key] = why
    if not found:
        raise BadData(
            f"none of the checkpoint's {len(tensors)} tensors fits model `{study.model.name}`",
            hint=f"the checkpoint has {_some(tensors)}; the study's network has {_some(wanted)}",
        )
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise BadData(f"the checkpoint's tensor for `{name}` holds nan or infinite numbers")
    missing = dict(sorted(drawn.items(), key=lambda item: item[1] == MISSING))  # what has another shape comes first
    return Converted(found, missing, tuple(name for name in tensors if name not in used))


def theirs(key: str) -> Iterator[str]:
    """What a tensor of the study's network may be called in a checkpoint, the likeliest first."""
    name = key.rpartition("/")[2]
    for part in PARTS:
        if name.startswith(part):
            inner = name.removeprefix(part)
            yield inner
            if inner.startswith("0."):  # torchvision's convolutions, before our mean over the image
                yield f"features.{inner.removeprefix('0.')}"
                yield inner.removeprefix("0.")
    yield name


def _for_gray(tensor: Tensor, target: Tensor) -> Tensor:
    if tensor.dim() > 2 and tensor.shape[1] == COLORS and target.dim() == tensor.dim() and target.shape[1] == 1:
        return tensor.sum(dim=1, keepdim=True)
    return tensor


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.is_floating_point else tensor


def _some(names: Mapping[str, Tensor]) -> str:
    return ", ".join(f"`{name[:60]}`" for name in list(names)[:3])
