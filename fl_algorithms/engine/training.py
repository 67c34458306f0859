"""The local loop: batches, optimizers, and one phase of steps over them.

A *phase* trains some parameters for some steps with one optimizer; most methods have one. Everything random comes from
named streams (``streams``), and what survives a round is exported as tensors and JSON.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fl_algorithms.engine.batches import Batch as Batch
from fl_algorithms.engine.batches import Batches as Batches
from fl_algorithms.engine.device import CPU, Device, at_home, like, seen_at_home
from fl_algorithms.engine.diverged import Diverged
from fl_algorithms.tasks.base import Inputs
from wardround.errors import BadData
from wardround.records.study import TrainingSection

Networks = Mapping[str, nn.Module]  # slot -> network
Progress = Callable[[int, int], None]  # (steps done, steps in all)
Watch = Callable[[str, Tensor], object]  # (phase, the loss of a step, without gradient)
PROGRESS_EVERY = 10


@dataclass(frozen=True)
class Phase:
    """What one run of steps trains.

    Attributes:
        name: also the streams' name, so that two phases draw apart and "" draws as FedAvg does.
        trainable: patterns of "SLOT/PARAMETER"; the rest is frozen, its dropout and statistics too.
        steps, epochs: how long; both None: as the study says.
        optimizer: phases with the same key continue one optimizer.
        learning_rate: None: as the study says.
        loss: (context, batch) -> a scalar; None: the method's ``loss``.
        rows: (inputs, what the loss sees as y) in place of the site's training rows.
        batch_size: of ``rows``.
    """

    name: str = ""
    trainable: tuple[str, ...] = ("*",)
    steps: int | None = None
    epochs: int | None = None
    optimizer: str = "main"
    learning_rate: float | None = None
    loss: Callable[[Any, Batch], Tensor] | None = None
    rows: tuple[Inputs, Tensor] | None = None
    batch_size: int = 32


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's default generator as one stream, and leave it as it was. Other devices' draw as it too."""
    with torch.random.fork_rng(devices=[]):
        if _has_accelerator():  # also one that nobody used yet: it is seeded at its first use
            torch.manual_seed(seed)
        else:  # the same on the CPU; `torch.manual_seed` writes the stack down for each kind of device that is not here
            torch.default_generator.manual_seed(seed)
        yield


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


class Optimizers:
    """A site's optimizers by key, each over the parameters of the phase that used it first."""

    def __init__(self, training: TrainingSection) -> None:
        self._training = training
        self._made: dict[str, tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]] = {}
        self._kept: Mapping[str, Tensor] = {}
        self._factor = 1.0

    def begin_round(self) -> None:
        if self._training.optimizer_lifetime == "round":
            self.forget()

    def forget(self) -> None:
        """Start all of them anew."""
        self._made.clear()
        self._kept = {}

    def get(
        self, key: str, parameters: dict[str, nn.Parameter], learning_rate: float | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer of ``key``, with the moments it had. ``learning_rate``: None: as the study says.

        Raises:
            BadData: kept moments are not of these parameters' shapes.
        """
        if key not in self._made:
            optimizer = _make(self._training, list(parameters.values()), learning_rate)
            self._restore(optimizer, key, parameters)
            self._made[key] = (optimizer, parameters)
            if self._factor != 1:
                _scale(optimizer, self._factor)
        return self._made[key][0]

    def scale(self, factor: float) -> None:
        """Multiply each optimizer's learning rate, those of phases to come too, in place of an earlier ``factor``."""
        self._factor = factor
        for optimizer, _ in self._made.values():
            _scale(optimizer, factor)

    def export(self, *, copies: bool = True) -> dict[str, Tensor]:
        """Every moment as a tensor on the CPU: "KEY..SLOT..PARAMETER.MOMENT".

        Args:
            copies: False shares memory where it can, for a reader who is done before the next step.
        """
        taken = at_home if copies else seen_at_home
        tensors = {name: taken(value) for name, value in self._kept.items()}
        for key, (optimizer, parameters) in self._made.items():
            for name, parameter in parameters.items():
                for moment, value in optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        tensors[f"{_kept_name(key, name)}.{moment}"] = taken(torch.as_tensor(value))
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what ``export`` gave; each optimizer gets its part when it is first used."""
        self._made.clear()
        self._kept = dict(tensors)

    def _restore(self, optimizer: torch.optim.Optimizer, key: str, parameters: dict[str, nn.Parameter]) -> None:
        mine = {name: value for name, value in self._kept.items() if name.startswith(f"{key}..")}
        self._kept = {name: value for name, value in self._kept.items() if name not in mine}
        owners = {_kept_name(key, name): parameter for name, parameter in parameters.items()}
        for name, value in mine.items():
            owner, _, moment = name.rpartition(".")
            parameter = owners.get(owner)
            if parameter is None or (value.dim() and value.shape != parameter.shape):
                raise BadData(f"the kept state does not fit the study's network: optimizer state `{name}`")
            optimizer.state[parameter][moment] = like(value, parameter)


def flat_key(key: str) -> str:
    """A tensor's key without "/": "SLOT/NAME" becomes "SLOT..NAME", and no tensor of a network is called so."""
    return key.replace("/", "..")


def _scale(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def _kept_name(key: str, parameter: str) -> str:
    return f"{key}..{flat_key(parameter)}"


def _make(
    training: TrainingSection, parameters: list[nn.Parameter], learning_rate: float | None
) -> torch.optim.Optimizer:
    rate = training.learning_rate if learning_rate is None else learning_rate
    decay = training.weight_decay
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=training.momentum, weight_decay=decay, fused=True)
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=rate, betas=training.betas, weight_decay=decay, fused=True)


def trainable_parameters(networks: Networks, patterns: Iterable[str]) -> dict[str, nn.Parameter]:
    """Those whose "SLOT/PARAMETER" matches one of ``patterns``; what the network itself holds fixed is never one."""
    patterns = tuple(patterns)
    return {
        f"{slot}/{name}": parameter
        for slot, network in networks.items()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and any(fnmatchcase(f"{slot}/{name}", pattern) for pattern in patterns)
    }


@contextmanager
def only_trainable(networks: Networks, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Freeze the other parameters, with the dropout and statistics of modules that hold nothing else; undo it after.

    On leaving, every network is in evaluation mode.
    """
    chosen = {id(parameter) for parameter in parameters.values()}
    frozen = [p for network in networks.values() for p in network.parameters() if p.requires_grad]
    frozen = [parameter for parameter in frozen if id(parameter) not in chosen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for network in networks.values():
        _train(network, chosen)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for network in networks.values():
            network.eval()


@contextmanager
def evaluating(networks: Networks, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Evaluation mode in the midst of a phase that trains ``parameters``."""
    for network in networks.values():
        network.eval()
    yield
    chosen = {id(parameter) for parameter in parameters.values()}
    for network in networks.values():
        _train(network, chosen)


def _train(module: nn.Module, chosen: set[int]) -> None:
    own = [id(parameter) for parameter in module.parameters()]
    if own and not chosen.intersection(own):
        module.eval()
        return
    module.training = True
    for child in module.children():
        _train(child, chosen)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float | None) -> None:
    """Scale the gradient down to ``norm``, over all ``parameters``, where it is larger. None: leave it."""
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, norm)


def run_steps(
    batches: Batches,
    steps: int,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch], Tensor],
    after_backward: Callable[[Batch], Any] | None = None,
    after_step: Callable[[Batch], Any] | None = None,
    progress: Progress | None = None,
    device: Device = CPU,
    before_step: Callable[[int], Any] | None = None,
    is_last: Callable[[int], bool] | None = None,
) -> int:
    """``steps`` times: a batch, its ``loss`` (a scalar), its gradient, a step. Gives the number of steps.

    Args:
        before_step: called with the step's number, from 0.
        is_last: called with how many steps there have been; True ends early.

    Raises:
        TryAgain, BadData: as ``Batches.take`` and ``Device.explaining_errors``; or rows cannot be read.
        Diverged: a loss is not finite; on another device than the CPU this is noticed every few steps.
    """
    step = 0
    learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    at_once = device.where.type == "cpu"  # another device would have to be waited for
    with closing(batches.take(steps)) as taken, device.explaining_errors():
        for step, batch in enumerate(taken, start=1):
            if before_step is not None:
                before_step(step - 1)
            for parameter in learned:  # `zero_grad`, which costs 5 % of a small step to say that it begins
                parameter.grad = None
            with device.arithmetic():
                found = loss(batch)
            shown = step % PROGRESS_EVERY == 0 or step == steps
            if (at_once or shown or step == 1) and not math.isfinite(found.item()):
                raise _not_finite(step, steps)
            found.backward()  # type: ignore[no-untyped-call]
            if after_backward is not None:
                after_backward(batch)
            optimizer.step()
            if after_step is not None:
                after_step(batch)
            if progress is not None and shown:
                progress(step, steps)
            if is_last is not None and is_last(step):
                break
    return step


def _not_finite(step: int, steps: int) -> Diverged:
    what = "the first batch already" if step == 1 else f"step {step} of {steps}"
    hint = "a smaller `learning_rate`, or `clip_norm` in the study's [training]"
    if step == 1:
        hint = "look for extreme values in the data, and at the study's scale for them; the steps have not begun"
    return Diverged(f"the loss is not finite in {what}", hint=hint, code="DECLINED_TRAINING_FAILED")
