"""Pretrained weights out of a safetensors file: those that a site begins its own, private tensors with.

What is shared comes from the coordinator and is never taken from here. Nothing is downloaded.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import DTYPES, all_tensors, build, download_specs, task_of, upload_specs
from fl_algorithms.study import SiteStudy
from wardround.errors import BadData

MAX_BYTES = 4 << 30  # of a file, which is read whole
SHOWN = 12  # names in a hint


@dataclass(frozen=True)
class File:
    """A file of weights: SHA-256 (hex) of the bytes that were read, and the tensors in them."""

    digest: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class OwnWeights:
    """What a site's private tensors begin with.

    Attributes:
        digest: SHA-256 (hex) of the file.
        tensors: by name, as ``all_tensors`` has it.
        drawn: the private tensors that the file does not have, so that they are as the study's seed draws them.
        unused: those of the file that are shared in this study, or not in its network.
    """

    digest: str
    tensors: dict[str, Tensor]
    drawn: tuple[str, ...]
    unused: tuple[str, ...]


def own_weights(study: SiteStudy, site: str, path: Path) -> OwnWeights:
    """The tensors of ``path`` that stay at ``site`` in a resolved study of one network.

    Raises:
        BadData: as ``read``; a private tensor is of another shape or type, or not finite; none of them stays; or the
            method must begin alike at every site.
    """
    if study.method.row.same_start:
        raise BadData(
            f"algorithm `{study.method.name}` needs the same initial weights at every site, and {path} is this "
            "site's alone",
            hint=WITHOUT,
        )
    algorithm = algorithm_of(study)
    networks = build(study, task_of(study), algorithm, site)
    upload = upload_specs(study, algorithm, networks)
    travels = {spec.key for spec in (*upload, *download_specs(study, upload))}
    private = {name: tensor for name, tensor in all_tensors(networks).items() if name not in travels}
    file = read(path)
    used = {name: file.tensors[name] for name in private if name in file.tensors}
    if not used:
        there = f"there are: {', '.join(sorted(private)[:SHOWN])}" if private else WITHOUT
        raise BadData(
            f"{path}: none of its {len(file.tensors)} tensors is one that stays here in study `{study.study.name}`",
            hint=there,
        )
    for name, tensor in used.items():
        require_fit(path, name, tensor, private[name], WITHOUT)
    return OwnWeights(
        file.digest,
        used,
        tuple(sorted(private.keys() - used.keys())),
        tuple(sorted(file.tensors.keys() - used.keys())),
    )


def read(path: Path) -> File:
    """Read a file of weights, once.

    Raises:
        BadData: it cannot be read, is too large, or is no safetensors file.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise BadData(f"{path} is no file")
        if size > MAX_BYTES:
            raise BadData(f"{path} has {size >> 20} MiB; a file of weights may have {MAX_BYTES >> 20}")
        with path.open("rb") as file:
            data = file.read(size)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise BadData(
            f"{path}: not a safetensors file, or damaged ({type(error).__name__})",
            hint="`fl-lab convert FILE OUT.safetensors` makes one of a PyTorch checkpoint; pickles are never read here",
        ) from None
    return File(hashlib.sha256(data).hexdigest(), tensors)


def require_fit(path: Path, name: str, tensor: Tensor, wanted: Tensor, hint: str) -> None:
    """Raises BadData: ``tensor`` is of another shape or type than the study's tensor, or not finite."""
    if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
        raise BadData(
            f"{path}: `{name}` is {DTYPES.get(tensor.dtype, '?')} {list(tensor.shape)}, the study's is "
            f"{DTYPES[wanted.dtype]} {list(wanted.shape)}",
            hint=hint,
        )
    if bad := int(tensor.numel() - torch.isfinite(tensor).sum()):
        raise BadData(f"{path}: {bad} of the {tensor.numel()} numbers of `{name}` are nan or infinite")


WITHOUT = (
    "take the tensors that do not fit out of the file, or name the data without it: `site-agent data add` without "
    "`--weights`"
)
