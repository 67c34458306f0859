"""Many small networks trained at once: one phase of several sites and seeds as one batch of models.

    stack     the same tensor of every network becomes one, with a first axis of models
    vmap      the method's own loss and its gradient, for all models in one call (torch.func)
    step      one optimizer over the stacked tensors: its arithmetic is element by element, so each model's is its own

The batches are those of ``phases``, row by row. The rounding is not: a product of all models' matrices adds in another
order, and dropout draws for all models from one stream. So the bits differ from a hospital's, and depend on which
models are trained together. This is for the lab alone, and it says so.

What a method's loss knows of a site must be in the networks, the download and the batch. ``METHODS`` names the methods
of which that is known; others are refused.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.utils.rnn import pad_sequence

from fl_algorithms.engine.algorithm import Context, Downlink, compute_logits
from fl_algorithms.engine.phases import Prepared, prepared
from fl_algorithms.engine.session import BATCH_NORMS, OpenRound, SiteSession
from fl_algorithms.engine.training import Batch, Optimizers, Phase, only_trainable, seeded
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import Task
from wardround.errors import BadData

METHODS = (
    "fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi", "fedprox", "fenda", "fedper", "fedbabu", "fedrep",
    "lgfedavg", "ditto", "fedsoup", "silo",
)  # fmt: skip
PLAIN = "leave out `--engine batched`"
PROBED = 64  # rows in the test of whether all sites' tasks judge alike

Tensors = dict[str, Tensor]  # "SLOT/NAME" -> a tensor, of all models where its first axis says so
Loss = Callable[[Context, Batch], Tensor]


@dataclass(frozen=True)
class Member:
    """A model of the batch: a session in its open round, and the phase as it would run alone."""

    session: SiteSession
    opened: OpenRound
    made: Prepared

    @property
    def context(self) -> Context:
        return self.opened.context


class Together:
    """The models that are trained together throughout a run: their optimizers and their rows on the device."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[Any, ...], _Stack] = {}

    def train(self, opened: Sequence[tuple[SiteSession, OpenRound]]) -> list[dict[str, list[float]]]:
        """Every phase of these open rounds, which are of one round and one method.

        Returns:
            for each, phase -> the loss of each step.

        Raises:
            BadData: the method, the network or the rows cannot be trained together; the message says why.
        """
        losses: list[dict[str, list[float]]] = [{} for _ in opened]
        for place in range(len(opened[0][1].phases)):
            groups: dict[tuple[Any, ...], list[tuple[int, Member]]] = defaultdict(list)
            for number, (session, one) in enumerate(opened):
                phase = one.phases[place]
                _refuse(one.context, phase)
                member = Member(session, one, prepared(one.context, phase, session.place(phase)))
                groups[_alike(member, phase)].append((number, member))
            for key, members in groups.items():
                stack, phase = self._stacks.setdefault(key, _Stack()), members[0][1].opened.phases[place]
                found = stack.run([member for _, member in members], phase)
                for (number, _), of_model in zip(members, found.T.tolist(), strict=True):
                    losses[number].setdefault(phase.name, []).extend(of_model)
        return losses


class _Stack:
    """Models of one kind, with one phase's optimizer."""

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._trained: dict[str, nn.Parameter] = {}
        self._rows: tuple[Tensor, Tensor] | None = None

    def run(self, members: Sequence[Member], phase: Phase) -> Tensor:
        """Train ``phase``, write the result into each member's networks. The losses: (steps, models)."""
        first = members[0].context
        steps, training = members[0].made.steps, first.study.training
        if training.optimizer_lifetime == "round":
            self._optimizer = None
        places, weights = _order(members, steps)
        noise = stream_seed(first.study.study.seed, "", first.round_number, f"noise.{phase.name}.together")
        with seeded(noise), only_trainable(first.networks, members[0].made.parameters):
            touched, asks_base = _touched(members[0])
            live = [_tensors(member.context.networks) for member in members]
            self._load(touched, live, first, phase)
            others = {name: _stacked(live, name) for name in live[0] if name not in touched}
            base = _stacked_bundles([member.context.base for member in members]) if asks_base else {}
            step = _gradients(first, members[0].made.loss, whole=weights is None)
            x, y = self._data(members)
            models = torch.arange(len(members))[:, None]
            losses = torch.empty(steps, len(members))
            with _explained(first):
                for number in range(steps):
                    rows = places[number]
                    weight = weights[number] if weights is not None else torch.ones(len(members), 1)
                    parameters = {name: parameter.detach() for name, parameter in self._trained.items()}
                    found, losses[number] = step(
                        parameters, others, base, x[models, rows], y[models, rows], weight
                    )  # fmt: skip
                    for name, gradient in found.items():
                        self._trained[name].grad = gradient
                    assert self._optimizer is not None
                    self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._trained.items():
                for tensors, value in zip(live, parameter.unbind(), strict=True):
                    tensors[name].copy_(value)
        for member in members:
            member.context.steps += steps
        return losses

    def _load(
        self, touched: Sequence[str], live: Sequence[Mapping[str, Tensor]], context: Context, phase: Phase
    ) -> None:
        """Take the members' values, and an optimizer for them, with the moments it had."""
        values = {name: _stacked(live, name) for name in touched}
        if self._optimizer is None or self._trained.keys() != values.keys():
            self._trained = {name: nn.Parameter(value) for name, value in values.items()}
            made = Optimizers(context.study.training)
            self._optimizer = made.get(phase.optimizer, self._trained, phase.learning_rate)
            return
        with torch.no_grad():
            for name, value in values.items():
                self._trained[name].copy_(value)

    def _data(self, members: Sequence[Member]) -> tuple[Tensor, Tensor]:
        """(models, rows, features) and (models, rows): the training rows, which no round changes."""
        if self._rows is None:
            _refuse_unlike_tasks(members)
            splits = [member.context.data.train for member in members]
            x = pad_sequence([_table(split.x) for split in splits], batch_first=True)
            self._rows = x, pad_sequence([split.y for split in splits], batch_first=True)
        return self._rows


class _Call(nn.Module):
    """The method's loss as a function of the networks' tensors."""

    def __init__(self, context: Context, loss: Loss, *, whole: bool) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(context.networks)
        self._context, self._loss, self._whole = context, loss, whole

    def forward(self, base: Downlink, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        task = self._context.task if self._whole else _Weighed(self._context.task, weight)
        return self._loss(replace(self._context, base=base, task=task), Batch(x, y))


class _Weighed:
    """A task whose mean leaves out the rows that only fill a short batch."""

    def __init__(self, task: Task, weight: Tensor) -> None:
        self._task, self._weight = task, weight

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (self._task.losses(logits, y) * self._weight).sum() / self._weight.sum()


def _gradients(context: Context, loss: Loss, *, whole: bool) -> Callable[..., tuple[Tensors, Tensor]]:
    """(trained, other tensors, download, x, y, weights), all of all models -> each model's gradients and loss."""
    call = _Call(context, loss, whole=whole)

    def of_one(trained: Tensors, others: Tensors, base: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        tensors = {f"networks.{key.replace('/', '.', 1)}": tensor for key, tensor in (trained | others).items()}
        found: Tensor = functional_call(call, tensors, (base, x, y, weight))
        return found

    batched: Callable[..., tuple[Tensors, Tensor]] = vmap(grad_and_value(of_one), randomness="different")
    return batched


def _order(members: Sequence[Member], steps: int) -> tuple[Tensor, Tensor | None]:
    """Which rows each step takes: (steps, models, batch); and 1 for each that counts, None where all do."""
    each = [member.made.batches.places(steps) for member in members]
    widest = max(size for _, sizes in each for size in sizes)
    if all(size == widest for _, sizes in each for size in sizes):
        return torch.stack([rows.view(steps, widest) for rows, _ in each], dim=1), None
    padded = torch.zeros(steps, len(members), widest, dtype=torch.int64)
    counts = torch.arange(widest) < torch.tensor([sizes for _, sizes in each]).T[:, :, None]
    for model, (rows, _) in enumerate(each):
        padded[:, model][counts[:, model]] = rows
    return padded, counts.float()


def _touched(member: Member) -> tuple[list[str], bool]:
    """The trained parameters that the loss depends on (a gradient of nothing moves none, and of zeros it would), and
    whether it asks for the download.
    """
    context, made = member.context, member.made
    split, base = context.data.train, _Asked(context.base)
    for parameter in made.parameters.values():
        parameter.grad = None
    made.loss(replace(context, base=base), Batch(_table(split.x)[:2], split.y[:2])).backward()  # type: ignore[no-untyped-call]
    found = [name for name, parameter in made.parameters.items() if parameter.grad is not None]
    for parameter in made.parameters.values():
        parameter.grad = None
    return found, base.asked


class _Asked(dict[str, Mapping[str, Tensor]]):
    """A download that remembers whether anyone looked at it."""

    asked = False

    def __getitem__(self, bundle: str) -> Mapping[str, Tensor]:
        self.asked = True
        return super().__getitem__(bundle)


def _alike(member: Member, phase: Phase) -> tuple[Any, ...]:
    """What models must have in common to be one batch."""
    tensors = _tensors(member.context.networks)
    return (
        phase.name, phase.optimizer, member.made.steps,
        tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())),
        tuple(sorted(member.made.parameters)),
    )  # fmt: skip


def _refuse(context: Context, phase: Phase) -> None:
    """Raises BadData: what is not known to be trained together as it is alone."""
    study, algorithm = context.study, context.algorithm
    why = ""
    if study.method.name not in METHODS:
        why = f"method `{study.method.name}`: only {', '.join(METHODS)}"
    elif algorithm.after_backward is not None or algorithm.after_step is not None or phase.rows is not None:
        why = f"method `{study.method.name}` with these settings, which does more than a step for each batch"
    elif not isinstance(context.data.train.x, Tensor):
        why = "images: only tables"
    elif any(isinstance(module, BATCH_NORMS) for one in context.networks.values() for module in one.modules()):
        why = f"model `{study.model.name}` with batch norms, whose statistics are a batch's own"
    if why:
        raise BadData(f"the batched engine does not train {why}", hint=PLAIN)


def _refuse_unlike_tasks(members: Sequence[Member]) -> None:
    """One model's loss is taken for all of them. Raises BadData: a site weighs its classes otherwise."""
    split = members[0].context.data.train
    outputs = compute_logits(members[0].context.algorithm, members[0].context.networks, _table(split.x)[:PROBED])
    said = [member.context.task.losses(outputs, split.y[:PROBED]) for member in members]
    if any(not torch.equal(said[0], other) for other in said[1:]):
        raise BadData(
            "the batched engine does not train a loss that each site weighs by its own rows",
            hint=f'`class_weights` in [task] other than "balanced"; or {PLAIN}',
        )


@contextmanager
def _explained(context: Context) -> Iterator[None]:
    """Raises BadData: torch's vmap cannot do what the network or the loss does."""
    try:
        yield
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise BadData(
            f"the batched engine cannot train model `{context.study.model.name}` by method "
            f"`{context.study.method.name}`: {str(error).splitlines()[0][:200]}",
            hint=PLAIN,
        ) from None


def _tensors(networks: Mapping[str, nn.Module]) -> Tensors:
    """ "SLOT/NAME" -> the live tensor."""
    return {f"{slot}/{name}": one for slot, network in networks.items() for name, one in network.state_dict().items()}


def _stacked(each: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.stack([tensors[name].detach() for tensors in each])


def _stacked_bundles(each: Sequence[Downlink]) -> dict[str, Tensors]:
    return {
        bundle: {name: _stacked([one[bundle] for one in each], name) for name in part}
        for bundle, part in each[0].items()
    }


def _table(x: object) -> Tensor:
    assert isinstance(x, Tensor)  # ``_refuse`` has seen to it
    return x
