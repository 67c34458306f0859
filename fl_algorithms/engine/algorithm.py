"""What a method does at a site, as hooks. Their defaults are FedAvg; a method replaces those in which it differs.

    h1 receive         load the shared tensors                     h5 after_backward  edit gradients
    h2 before_round    snapshot, mix, distil, freeze               h6 after_step
    h3 phases          what is trained, in which order             h7 after_round     patch weights, keep something
    h4 loss            of one batch                                h8 to_send         what leaves
                                                                   h9 candidates      which models there are to judge

A method never loops over batches and never opens a file. It sees a ``Context``, and keeps what it needs between rounds
in ``context.kept`` (tensors) and ``context.notes`` (plain JSON), which the site's vault stores, and what it needs for
one round in ``context.scratch``.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_algorithms import architectures, registry
from fl_algorithms.engine.device import CPU, Device, device_of
from fl_algorithms.engine.footprint import row_bytes
from fl_algorithms.engine.judging import Judged, evaluation_parts, judged_by, reduced_loss
from fl_algorithms.engine.training import Batch, Networks, Optimizers, Phase
from fl_algorithms.methods.settings import HeadSettings, MethodSettings
from fl_algorithms.models import checks
from fl_algorithms.rows import COLUMNS, MASKS
from fl_algorithms.settings.models import BODY_AND_HEAD
from fl_algorithms.study import ResolvedStudy, SiteStudy
from fl_algorithms.tasks.base import Inputs, PublicData, SiteData, Split, Task
from wardround.errors import BadData
from wardround.tensors.manifests import MODEL, TensorSpec

if TYPE_CHECKING:
    from fl_algorithms.engine.together import Stack

Downlink = Mapping[str, Mapping[str, Tensor]]  # bundle -> name -> tensor
Uplink = dict[str, dict[str, Tensor]]  # the same, deltas
OURS = "fl_algorithms."  # where a network that nobody brought is made


Names = Callable[[nn.Module], Collection[str]]  # chooses among the names of a network's state


def matching(*patterns: str) -> Names:
    """The names that match one of ``patterns``, as a shell matches file names."""
    return lambda network: [name for name in network.state_dict() if any(fnmatchcase(name, p) for p in patterns)]


def all_but(names: Names) -> Names:
    """The names that ``names`` does not choose."""
    return lambda network: network.state_dict().keys() - set(names(network))


EVERYTHING = matching("*")


def parameters_of(context: "Context", names: Names, slot: str = MODEL) -> tuple[str, ...]:
    """What ``names`` chooses of a slot's network, as ``Phase.trainable`` takes it."""
    return tuple(f"{slot}/{name}" for name in sorted(names(context.networks[slot])))


@dataclass(frozen=True)
class Share:
    """The tensors of one slot that leave, as one bundle. Everything that no share names is private."""

    slot: str = MODEL
    names: Names = EVERYTHING

    @property
    def bundle(self) -> str:
        return self.slot

    def tensors(self, networks: Networks) -> dict[str, Tensor]:
        """Name -> the live tensor, sorted by name. A buffer of whole numbers never leaves, whatever the names say; no
        network holds other numbers than those and float32: ``fl_algorithms.models.checks``.
        """
        chosen = set(self.names(networks[self.slot]))
        return {
            name: tensor
            for name, tensor in sorted(networks[self.slot].state_dict().items())
            if tensor.dtype == torch.float32 and name in chosen
        }


@dataclass(frozen=True)
class Candidate:
    """A model that may become the site's best one.

    The best is chosen inside one ``pool``; the first candidate of a new pool ends the competition of the old.
    """

    pool: str
    networks: Networks


@dataclass
class Context:
    """All that a method sees at a site in a round. Networks, ``base`` and ``kept`` are on ``device``."""

    study: SiteStudy
    site: str
    settings: MethodSettings
    task: Task
    data: SiteData
    algorithm: "Algorithm"
    networks: dict[str, nn.Module]
    optimizers: Optimizers
    round_number: int = 0
    base: Downlink = field(default_factory=dict)  # as downloaded; never aliased by a network
    kept: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)  # forgotten when the round ends
    steps: int = 0  # optimizer steps done in this round
    device: Device = CPU

    @property
    def position(self) -> int:
        """The site's place among the study's sites, which are sorted."""
        return self.study.study.sites.index(self.site)

    @property
    def public_data(self) -> PublicData:
        """The study's public data set.

        Raises:
            BadData: it was not read.
        """
        if self.data.public_data is None:
            raise BadData(f"algorithm `{self.study.method.name}` needs the study's public data set, which was not read")
        return self.data.public_data

    def validation_loss(self, networks: Networks) -> float:
        """The mean loss on the site's validation split, as the study reduces it."""
        return reduced_loss(judged(self.algorithm, networks, self.data.validation, self.task).losses, self.study)

    def headline(self, networks: Networks) -> float | None:
        """The task's headline metric on the site's validation split, an error with its sign turned, so that more is
        better; None where it is undefined.
        """
        found, name = judged(self.algorithm, networks, self.data.validation, self.task), self.task.headline
        score = found.metrics(fit_outputs(self, networks, found))[name]
        return -score if score is not None and name in self.study.task.row.smaller_is_better else score


Hook = Callable[[Context], None]
BatchHook = Callable[[Context, Batch], None]


Builder = Callable[[SiteStudy, Task], nn.Module]


def nothing(context: Context) -> None:
    return None


def study_network(study: SiteStudy, task: Task) -> nn.Module:
    """The network that [model] names, for the task's inputs and outputs.

    Raises:
        BadData: it has not what the study's method needs, or as its implementation says.
    """
    row, shape, outputs = study.model.row, task.input_shape, task.outputs
    inputs = shape[0] if row.takes == COLUMNS else shape
    network: nn.Module = architectures.built(row, study.model.settings, inputs, outputs)
    if not row.implementation.startswith(OURS):
        checks.refuse_other_answer(network, row.name, shape, (outputs, *(shape[1:] if row.takes == MASKS else ())))
    needs = study.method.row.needs
    if study.method.settings.head_patterns not in ((), HeadSettings().head):
        needs -= {BODY_AND_HEAD}  # the study itself says what the head is
    checks.refuse_without(network, needs, row.name, study.method.name)
    return network


def load_shared(context: Context) -> None:
    """h1: the shared tensors as downloaded, by name.

    Raises:
        BadData: the download's names or shapes are not the shared ones.
    """
    for share in context.algorithm.shares:
        load_bundle(context, share)


def beginning_as_shared(slot: str) -> Hook:
    """h1: ``load_shared``; and the first time a site receives a model, the network of ``slot`` becomes that model."""

    def receive(context: Context) -> None:
        load_shared(context)
        if not context.notes.get(f"{slot}_began"):
            context.networks[slot].load_state_dict(context.networks[MODEL].state_dict())
            context.notes[f"{slot}_began"] = True

    return receive


def load_bundle(context: Context, share: Share) -> None:
    """The tensors of one share as downloaded, by name. Raises BadData as ``load_shared``."""
    mine = share.tensors(context.networks)
    came = context.base.get(share.bundle, {})
    if mine.keys() != came.keys():
        odd = sorted(mine.keys() ^ came.keys())[0]
        raise BadData(
            f"the round's model has {len(came)} tensors in `{share.bundle}`, this site shares {len(mine)}; "
            f"`{odd}` stands in one of them only"
        )
    with torch.no_grad():
        for name, tensor in mine.items():
            if tensor.shape != came[name].shape:
                raise BadData(
                    f"`{name}` in the round's model is {list(came[name].shape)}, here it is {list(tensor.shape)}"
                )
            tensor.copy_(came[name])


def one_phase(context: Context) -> tuple[Phase, ...]:
    """h3: everything together, as long as the study says."""
    return (Phase(),)


def task_loss(context: Context, batch: Batch) -> Tensor:
    """h4: the mean of the task's loss over the batch."""
    return loss_of(context, context.algorithm.infer(context.networks, batch.x), batch)


def loss_of(context: Context, logits: Tensor, batch: Batch) -> Tensor:
    """The mean of the task's loss of these logits, in float32: a scalar."""
    return context.task.loss(logits.float(), batch.y)


def loss_of_slot(slot: str) -> Callable[[Context, Batch], Tensor]:
    """h4: the task's loss of one network alone."""
    return lambda context, batch: loss_of(context, context.networks[slot](batch.x), batch)


def shared_deltas(context: Context) -> Uplink:
    """h8: float32(local - base) of each shared tensor, contiguous copies on the CPU."""
    return {
        share.bundle: {
            name: (tensor.detach() - context.base[share.bundle][name]).to("cpu").contiguous()
            for name, tensor in share.tensors(context.networks).items()
        }
        for share in context.algorithm.shares
    }


def downloaded_only(context: Context, trained: bool) -> tuple[Candidate, ...]:
    """h9: the model as it is after the download, private parts beside the shared ones."""
    return () if trained else (Candidate("downloaded", context.networks),)


def one_slot(slot: str) -> Callable[[Networks, Tensor], Tensor]:
    """h9: the logits of one network alone."""

    def infer(networks: Networks, x: Tensor) -> Tensor:
        logits: Tensor = networks[slot](x)
        return logits

    return infer


one_model = one_slot(MODEL)


def no_tensors(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return ()


def frozen_copy(network: nn.Module, values: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy in evaluation mode that takes no gradient; ``values`` replace tensors of its state by name."""
    twin = copy.deepcopy(network).eval().requires_grad_(False)
    state = twin.state_dict()
    for name, value in (values or {}).items():
        state[name].copy_(value)
    return twin


@dataclass(frozen=True)
class Algorithm:
    """What a method does at a site.

    Attributes:
        slots: the networks that it owns, by name. One made by ``study_network`` begins as the study's network does, any
            other from a stream of its slot's name.
        shares: what leaves of the networks; the rest is private.
        extras: (networks, study) -> what leaves beside, in bundles of its own; it starts as zeros, and ``to_send`` adds
            it. Float32.
        keeps: (networks, study) -> what the method keeps beside its networks, for the preview.
        candidates: (context, trained) -> the models to judge after the download, and again after training.
        after_step_together: ``after_step`` for many models at once, as the lab's batched engine trains them; a method
            with ``after_step`` alone is not trained so.
        infer: (networks, x) -> logits.
    """

    slots: Mapping[str, Builder] = field(default_factory=lambda: {MODEL: study_network})
    shares: tuple[Share, ...] = (Share(),)
    extras: Callable[[Networks, SiteStudy], tuple[TensorSpec, ...]] = no_tensors
    keeps: Callable[[Networks, SiteStudy], tuple[TensorSpec, ...]] = no_tensors
    receive: Hook = load_shared
    before_round: Hook = nothing
    phases: Callable[[Context], tuple[Phase, ...]] = one_phase
    loss: Callable[[Context, Batch], Tensor] = task_loss
    after_backward: BatchHook | None = None
    after_step: BatchHook | None = None
    after_step_together: "Callable[[Stack], None] | None" = None
    after_round: Hook = nothing
    to_send: Callable[[Context], Uplink] = shared_deltas
    candidates: Callable[[Context, bool], tuple[Candidate, ...]] = downloaded_only
    infer: Callable[[Networks, Tensor], Tensor] = one_model


def algorithm_of(study: ResolvedStudy) -> Algorithm:
    """What the study's method does at a site, with a soup if the study asks for one."""
    settings = study.method.settings
    algorithm: Algorithm = registry.load(study.method.row.client)(settings)
    for wrapper in settings.wrappers:
        algorithm = registry.load(wrapper.implementation)(algorithm, wrapper.settings)
    return algorithm


def compute_logits(
    algorithm: Algorithm, networks: Networks, x: Inputs, tell: Callable[[int], object] = lambda rows: None
) -> Tensor:
    """Logits (n, outputs) on the CPU, in evaluation mode, without gradient, in passes of as many rows as fit. The
    networks must be in that mode already, and may be on any device.

    Args:
        tell: called after each pass, with its number of rows.
    """
    where = device_of(networks)
    logits = []
    with torch.no_grad():
        each = row_bytes(algorithm.infer, networks, x)
        for part in evaluation_parts(x, each):
            logits.append(algorithm.infer(networks, part.to(where)).to("cpu"))
            tell(len(part))
        return torch.cat(logits)


def fit_outputs(context: Context, networks: Networks, validation: Judged) -> dict[str, Any]:
    """``Task.fit_outputs`` of these networks, which were judged on the validation split. Nothing is fitted to outputs
    that are judged row by row.
    """
    data, validation_logits = context.data, validation.logits
    if validation_logits is None:
        return {}

    def outputs_of(split: Split) -> Tensor:
        return validation_logits if split is data.validation else compute_logits(context.algorithm, networks, split.x)

    return context.task.fit_outputs(outputs_of, data)


def kinds_of(context: Context) -> Tensor | None:
    """What each training row is, where the study draws each kind equally often."""
    balanced = context.study.training.sampling == "balanced"
    return context.task.kinds(context.data.train.y) if balanced else None


def judged(algorithm: Algorithm, networks: Networks, split: Split, task: Task) -> Judged:
    """``networks``, in evaluation mode, on ``split``."""
    return judged_by(lambda x: compute_logits(algorithm, networks, x), split, task)
