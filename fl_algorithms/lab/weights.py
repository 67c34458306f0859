"""Pretrained weights in place of the drawn initial model, as far as a file has them. Nothing is downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fl_algorithms.client.algorithm import algorithm_of
from fl_algorithms.client.partition import DTYPES, all_tensors, build, initial_model, task_of
from wardround.errors import BadData
from wardround.study import StudyFile

SHOWN = 12  # names in a hint


@dataclass(frozen=True)
class Weighted:
    """An initial model.

    Attributes:
        tensors: what leaves a site before the first round, by name, in the order of the payload.
        drawn: those of ``tensors`` that the file does not have, so that they are as the study's seed drew them.
        unused: those of the file that stay at each site in this study, so that nobody starts from them.
    """

    tensors: dict[str, Tensor]
    drawn: tuple[str, ...]
    unused: tuple[str, ...]


def weighted(study: StudyFile, path: Path) -> Weighted:
    """A resolved study's initial model with the tensors of ``path``, a safetensors file, in it.

    Raises:
        BadData: it is no such file; a tensor is not the study's, of another shape, not float32 or not finite; or none
            of them is shared.
    """
    found, start = _read(path), initial_model(study)
    private = all_tensors(build(study, task_of(study), algorithm_of(study), site="")).keys() - start.keys()
    for name, tensor in found.items():
        if name in private:
            continue
        if name not in start:
            raise BadData(
                f"{path}: the study's network has no tensor `{name[:80]}`",
                hint=f"rename it or take it out of the file; there are: {', '.join(sorted(start)[:SHOWN])}",
            )
        _require_fit(path, name, tensor, start[name])
    used = {name: found[name].clone() for name in start if name in found}
    if not used:
        raise BadData(
            f"{path}: none of its {len(found)} tensors is one that the study shares",
            hint=f"there are: {', '.join(sorted(start)[:SHOWN])}",
        )
    return Weighted(
        {name: used.get(name, tensor) for name, tensor in start.items()},
        tuple(name for name in start if name not in used),
        tuple(sorted(found.keys() & private)),
    )


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        found: dict[str, Tensor] = safetensors.torch.load(path.read_bytes())
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise BadData(
            f"{path}: not a safetensors file, or damaged ({type(error).__name__})",
            hint="`safetensors.torch.save_file(network.state_dict(), FILE)` writes one; pickles are never read",
        ) from None
    return found


def _require_fit(path: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise BadData(
            f"{path}: `{name}` is {DTYPES.get(found.dtype, '?')} {list(found.shape)}, the study's is "
            f"{DTYPES[wanted.dtype]} {list(wanted.shape)}",
            hint="set the network's sizes in [model] to the file's, or take the tensor out of the file",
        )
    if bad := int(found.numel() - torch.isfinite(found).sum()):
        raise BadData(f"{path}: {bad} of the {found.numel()} numbers of `{name}` are nan or infinite")
