"""Pretrained weights in place of the drawn initial model, as far as a file has them. Nothing is downloaded."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import all_tensors, build, initial_model, task_of
from fl_algorithms.engine.weights import SHOWN, read, require_fit
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData

MISFIT_HINT = "set the network's sizes in [model] to the file's, or take the tensor out of the file"


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


def weighted(study: ResolvedStudy, path: Path) -> Weighted:
    """A resolved study's initial model with the tensors of ``path``, a safetensors file, in it.

    Raises:
        BadData: it is no such file; a tensor is not the study's, of another shape, not float32 or not finite; or none
            of them is shared.
    """
    found, start = read(path).tensors, initial_model(study)
    own = study.at("")
    private = all_tensors(build(own, task_of(own), algorithm_of(own), site="")).keys() - start.keys()
    for name, tensor in found.items():
        if name in private:
            continue
        if name not in start:
            raise BadData(
                f"{path}: the study's network has no tensor `{name[:80]}`",
                hint=f"rename it or take it out of the file; there are: {', '.join(sorted(start)[:SHOWN])}",
            )
        require_fit(path, name, tensor, start[name], MISFIT_HINT)
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
