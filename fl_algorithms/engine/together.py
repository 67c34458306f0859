"""Many small networks trained at once: one phase of several sites and seeds as one batch of models.

    stack     the same tensor of every network becomes one, with a first axis of models
    vmap      the method's own loss and its gradient, for all models in one call (torch.func)
    step      one optimizer over the stacked tensors: its arithmetic is element by element, so each model's is its own

The batches are those of ``phases``, row by row. The rounding is not: a product of all models' matrices adds in another
order, and dropout draws for all models from one stream. So the bits differ from a hospital's, and depend on which
models are trained together. This is for the lab alone, and it says so.

What a method's loss knows of a site must be in the networks, the download and the batch: whoever calls this knows that
of the method.
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
from fl_algorithms.engine.phases import BATCH_NORMS, Prepared, prepared
from fl_algorithms.engine.session import OpenRound, SiteSession
from fl_algorithms.engine.training import Batch, Optimizers, Phase, only_trainable, seeded
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import Task
from wardround.errors import BadData
from wardround.records.study import TrainingSection

KNOWN = (
    "optimizer", "learning_rate", "weight_decay", "momentum", "betas", "batch_size", "local_steps", "local_epochs",
    "drop_last", "optimizer_lifetime", "iterator", "init_private", "sampling",
)  # fmt: skip
"""The settings of [training] that are followed here; another one must be left as it is by default."""
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
        self._stacks: dict[tuple[Any, ...], Stack] = {}

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
                stack, phase = self._stacks.setdefault(key, Stack()), members[0][1].opened.phases[place]
                found = stack.run([member for _, member in members], phase)
                for (number, _), of_model in zip(members, found.T.tolist(), strict=True):
                    losses[number].setdefault(phase.name, []).extend(of_model)
        return losses


class Stack:
    """Models of one kind in one phase: their tensors, with a first axis of models, and the optimizers over them.

    Attributes:
        values: "SLOT/NAME" -> the tensor of all models; steps change it in place.
        first_step: whether this step is the round's first, as a method's ``after_step_together`` may ask.
    """

    def __init__(self) -> None:
        self.values: Tensors = {}
        self.first_step = True
        self._optimizers: dict[str, tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]] = {}
        self._changed: set[str] = set()
        self._rows: tuple[Tensor, Tensor] | None = None
        self._batch: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._base: dict[str, Tensors] = {}

    def run(self, members: Sequence[Member], phase: Phase) -> Tensor:
        """Train ``phase``, write the result into each member's networks. The losses: (steps, models)."""
        self._context, made = members[0].context, members[0].made
        live = [_tensors(member.context.networks) for member in members]
        self._load(live)
        order, weights = _order(members, made.steps)
        x, y = self._data(members)
        models, losses = torch.arange(len(members))[:, None], torch.empty(made.steps, len(members))
        noise = stream_seed(
            self._context.study.study.seed, "", self._context.round_number, f"noise.{phase.name}.together"
        )
        after_step = self._context.algorithm.after_step_together
        with seeded(noise), only_trainable(self._context.networks, made.parameters), _explained(self._context):
            touched, asks_base = _touched(members[0])
            self._base = _stacked_bundles([member.context.base for member in members]) if asks_base else {}
            gradients = self._gradients(made.loss, touched, whole=weights is None)
            for number, rows in enumerate(order):
                self.first_step = number == 0
                self._batch = x[models, rows], y[models, rows], None if weights is None else weights[number]
                found, losses[number] = gradients()
                self.step(phase.optimizer, found, phase.learning_rate)
                if after_step is not None:
                    after_step(self)
        with torch.no_grad():
            for name in self._changed:
                for tensors, value in zip(live, self.values[name].unbind(), strict=True):
                    tensors[name].copy_(value)
        for member in members:
            member.context.steps += made.steps
        return losses

    def gradients(self, loss: Loss, slots: Sequence[str]) -> Tensors:
        """Of ``loss`` on this step's batch, by the parameters of these slots; for each model its own."""
        names = [
            f"{slot}/{name}" for slot in slots for name, one in self._context.networks[slot].named_parameters()
        ]  # fmt: skip
        assert self._batch is not None
        found, _ = self._gradients(loss, names, whole=self._batch[2] is None)()
        return found

    def step(self, optimizer: str, gradients: Tensors, learning_rate: float | None = None) -> None:
        """A step of the optimizer of that key, over what ``gradients`` names."""
        if optimizer not in self._optimizers:
            parameters = {name: nn.Parameter(self.values[name]) for name in gradients}
            made = Optimizers(self._context.study.training).get(optimizer, parameters, learning_rate)
            self._optimizers[optimizer] = made, parameters
        made, parameters = self._optimizers[optimizer]
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        made.step()
        self._changed.update(gradients)

    def put(self, name: str, value: Tensor) -> None:
        """Set a tensor of all models."""
        self.values[name].copy_(value)
        self._changed.add(name)

    def _load(self, live: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the members' values. The optimizers keep their moments, where the study has it so."""
        self._changed = set()
        if self._context.study.training.optimizer_lifetime == "round":
            self._optimizers = {}
        with torch.no_grad():
            for name in live[0]:
                value = torch.stack([tensors[name].detach() for tensors in live])
                if name in self.values:
                    self.values[name].copy_(value)
                else:
                    self.values[name] = value

    def _data(self, members: Sequence[Member]) -> tuple[Tensor, Tensor]:
        """(models, rows, features) and (models, rows): the training rows, which no round changes."""
        if self._rows is None:
            _refuse_unlike_tasks(members)
            splits = [member.context.data.train for member in members]
            x = pad_sequence([_table(split.x) for split in splits], batch_first=True)
            self._rows = x, pad_sequence([split.y for split in splits], batch_first=True)
        return self._rows

    def _gradients(self, loss: Loss, names: Sequence[str], *, whole: bool) -> Callable[[], tuple[Tensors, Tensor]]:
        """What gives each model's gradients by ``names`` and its loss on this step's batch."""
        call = _Call(self._context, loss)
        inside = {name: f"networks.{name.replace('/', '.', 1)}" for name in self.values}

        def of_one(trained: Tensors, others: Tensors, base: Any, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
            tensors = {inside[key]: tensor for key, tensor in (trained | others).items()}
            found: Tensor = functional_call(call, tensors, (base, x, y, weight))
            return found

        batched = vmap(
            grad_and_value(of_one), in_dims=(0, 0, 0, 0, 0, None if whole else 0), randomness="different"
        )  # fmt: skip
        trained = {name: self.values[name] for name in names}
        others = {name: value for name, value in self.values.items() if name not in trained}

        def gradients() -> tuple[Tensors, Tensor]:
            assert self._batch is not None
            found: tuple[Tensors, Tensor] = batched(trained, others, self._base, *self._batch)
            return found

        return gradients


class _Call(nn.Module):
    """A loss as a function of the networks' tensors."""

    def __init__(self, context: Context, loss: Loss) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(context.networks)
        self._context, self._loss = context, loss

    def forward(self, base: Downlink, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        task: Any = self._context.task if weight is None else _Weighed(self._context.task, weight)
        return self._loss(replace(self._context, base=base, task=task), Batch(x, y))


class _Weighed:
    """A task whose mean leaves out the rows that only fill a short batch."""

    def __init__(self, task: Task, weight: Tensor) -> None:
        self._task, self._weight = task, weight

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (self._task.losses(logits, y) * self._weight).sum() / self._weight.sum()


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
    if algorithm.after_backward or phase.rows or (algorithm.after_step and not algorithm.after_step_together):
        why = f"method `{study.method.name}` with these settings, which does more than a step for each batch"
    elif not isinstance(context.data.train.x, Tensor):
        why = "images: only tables"
    elif any(isinstance(module, BATCH_NORMS) for one in context.networks.values() for module in one.modules()):
        why = f"model `{study.model.name}` with batch norms, whose statistics are a batch's own"
    for name, field in TrainingSection.model_fields.items():
        if name not in KNOWN and getattr(study.training, name) != field.get_default(call_default_factory=True):
            why = f"`{name}` in [training]"
    if why:
        raise BadData(f"the batched engine does not train {why}", hint=PLAIN)


def _refuse_unlike_tasks(members: Sequence[Member]) -> None:
    """One model's loss is taken for all of them, row by row. Raises BadData: a site weighs its classes otherwise, or
    rows are compared with one another.
    """
    split = members[0].context.data.train
    outputs = compute_logits(members[0].context.algorithm, members[0].context.networks, _table(split.x)[:PROBED])
    said = [member.context.task.losses(outputs, split.y[:PROBED]) for member in members]
    task = members[0].context.task
    if not torch.allclose(task.losses(outputs[:1], split.y[:1]), said[0][:1]):
        raise BadData("the batched engine does not train a loss that compares rows with one another", hint=PLAIN)
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


def _stacked_bundles(each: Sequence[Downlink]) -> dict[str, Tensors]:
    return {
        bundle: {name: torch.stack([one[bundle][name] for one in each]) for name in part}
        for bundle, part in each[0].items()
    }


def _table(x: object) -> Tensor:
    assert isinstance(x, Tensor)  # ``_refuse`` has seen to it
    return x
