"""What a network must be before a study can use it, whoever wrote it: each tensor known, once, by a name that can
travel, and every parameter float32.
"""

import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_algorithms.models.unet import UnetBody
from fl_algorithms.settings.models import BODY_AND_HEAD, DEPTHS, TWO_EXTRACTORS
from wardround.errors import BadData

NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")  # of a tensor; without two dots beside each other
LONGEST = 200
# What a network, or a library's constructor, may raise about sizes and arguments that it does not take.
WHAT_NETWORKS_RAISE = (
    TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError, ArithmeticError,
)  # fmt: skip
PARTS: Mapping[str, tuple[str, ...]] = {
    BODY_AND_HEAD: ("body", "head"),
    TWO_EXTRACTORS: ("shared_extractor", "private_extractor", "head"),
}
ADAPTER = "`fl_algorithms.models.adapters` has what divides a network of yours in one line: `BodyHead`, `TwoExtractors`"


def refuse_unusable(network: nn.Module, model: str) -> None:
    """Of a network just built. ``model``: its name, for messages.

    Raises:
        BadData: a parameter is made on first use or is not float32, a buffer holds numbers of another size, a name
            could not travel, or two names are one tensor.
    """
    for name, parameter in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(parameter):
            raise BadData(
                f"model `{model}`: `{name}` gets its size when the first sample comes, so nobody could say before what "
                "leaves",
                hint="give each layer its size, as `nn.Linear(64, 2)` in place of `nn.LazyLinear(2)`",
            )
    state = network.state_dict()
    for name in state:
        if not NAME.fullmatch(name) or len(name) > LONGEST:
            raise BadData(
                f"model `{model}`: a tensor is called {name[:60]!r}, which is not 1 to {LONGEST} of A-Z a-z 0-9 _ "
                "-, with single dots between",
                hint="give the module another name where the network is made",
            )
    _refuse_other_types(network, state, model)
    if (pair := tied(state)) is not None:
        raise BadData(
            f"model `{model}`: `{pair[0]}` and `{pair[1]}` are one tensor under two names, so that what is private "
            "under one of them could leave under the other",
            hint="register it once, or make two tensors: `nn.Parameter(first.detach().clone())`",
        )


def _refuse_other_types(network: nn.Module, state: Mapping[str, Tensor], model: str) -> None:
    """A parameter that is not float32 would stay at each site without a word; so would a buffer of other floats."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    for name, tensor in state.items():
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if tensor.dtype == torch.float32 or (whole and name not in parameters):
            continue
        kind = "parameter" if name in parameters else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        hint = "`network.float()` where it is made; on a card, training steps are in bfloat16 by themselves"
        if whole:
            hint = "whole numbers are a buffer: `self.register_buffer(name, tensor)`, and never leave"
        raise BadData(f"model `{model}`: {kind} `{name}` is {dtype}, and what sites exchange is float32", hint=hint)


def tied(state: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Two names whose tensors share memory; None if there are none."""
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in state.items():
        if not tensor.numel():
            continue
        start = tensor.data_ptr()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (steps + 1) * tensor.element_size()
        spans = seen.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other_start, other_end, other in spans:
            if start < other_end and other_start < end:
                return other, name
        spans.append((start, end, name))
    return None


def refuse_other_answer(network: nn.Module, model: str, shape: Sequence[int], answer: Sequence[int]) -> None:
    """Of a network that somebody brought.

    Args:
        shape: of one sample.
        answer: what it must say of one: (outputs,), or for masks (outputs, *size).

    Raises:
        BadData: it does not take such samples, answers in another shape, or gets tensors when it is first used.
    """
    before, training = set(network.state_dict()), network.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for rows in (2, 1):
            try:
                found = network.eval()(torch.zeros(rows, *shape))
            except WHAT_NETWORKS_RAISE as error:
                said = " ".join(str(error).split())[:200]
                raise BadData(
                    f"model `{model}` does not take a batch of {[rows, *shape]}: {type(error).__name__}: {said}",
                    hint="its first layer takes the inputs that it is called with",
                ) from None
            given = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            if given != [rows, *answer]:
                raise BadData(
                    f"model `{model}` answers {given} to a batch of {[rows, *shape]}, the task needs {[rows, *answer]}",
                    hint="its last layer has the number of outputs that it is called with; one logit for two classes",
                )
    network.train(training)
    if new := sorted(set(network.state_dict()) - before):
        raise BadData(
            f"model `{model}` has a tensor `{new[0]}` only after it is first used, so nobody could say before what "
            "leaves",
            hint="make every layer where the network is made",
        )


def refuse_unlike(network: nn.Module, again: nn.Module, model: str) -> None:
    """Raises BadData: the same network, made a second time, has other tensors than the first."""
    first, second = ({name: tensor.shape for name, tensor in one.state_dict().items()} for one in (network, again))
    names = sorted(first.keys() | second.keys())
    differing = next((name for name in names if first.get(name) != second.get(name)), None)
    if differing is not None:
        found = " and then ".join(f"{list(one[differing])}" if differing in one else "none" for one in (first, second))
        raise BadData(
            f"model `{model}` has other tensors each time it is made: `{differing}` was {found}",
            hint="its layers must follow from its settings, its inputs and its outputs alone, at every site",
        )


def refuse_without(network: nn.Module, needs: Collection[str], model: str, method: str) -> None:
    """Raises BadData: the network, as it came out, has not the parts that its method needs."""
    for need in sorted(needs):
        parts = {name for name, _ in network.named_children()}
        lacking = [part for part in PARTS.get(need, ()) if part not in parts]
        if lacking:
            raise BadData(
                f"model `{model}`, as it is built, has no `{lacking[0]}`, and algorithm `{method}` needs {need}",
                hint=ADAPTER,
            )
        if need == DEPTHS and not isinstance(getattr(network, "body", None), UnetBody):
            raise BadData(f"model `{model}`, as it is built, has no {need}, which algorithm `{method}` needs")
