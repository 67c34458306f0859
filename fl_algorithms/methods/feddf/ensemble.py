"""Ensemble distillation: students learn what teachers say together about the rows of a public data set.

The server aggregator asks for it. Where its process has no torch, this is a process of its own, whose input is a line
of JSON and then the networks' payloads, and whose output is a line of JSON and then the students' payloads.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import algorithm_of, compute_logits
from fl_algorithms.engine.device import CPU, Device, at_home, make_deterministic
from fl_algorithms.engine.judging import validation_loss
from fl_algorithms.engine.partition import all_tensors, build, task_of, upload_specs
from fl_algorithms.engine.training import Batch, Batches, only_trainable, run_steps, seeded, trainable_parameters
from fl_algorithms.methods.distillation.client import class_logits
from fl_algorithms.methods.feddf import EarlyStopping, FedDfSettings
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import BeyondFloat32
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import PublicData, Split
from fl_algorithms.tasks.public_data import read_public_data, require_public_data
from fl_algorithms.tasks.selection import chosen
from wardround.errors import BadData, WardroundError
from wardround.records.study import StudyFile
from wardround.tensors.manifests import TensorSpec

Network = Mapping[str, Tensor]  # the leaving tensors by key
MAX_HEAD = 1 << 24
CLIP = 5.0  # norm of a step's gradient
PURPOSE = "distil"


def answer(request: IO[bytes], reply: IO[bytes], public_data: PublicData | None = None, device: Device = CPU) -> None:
    """Read networks from ``request``, distil, and write the students to ``reply``.

    Args:
        public_data: the set as read; None: it lies where the request says.

    Raises:
        BadData: the set is not the study's, or the request is cut short.
        BeyondFloat32: what one teacher says is no number.
    """
    head = json.loads(request.readline(MAX_HEAD))
    study = resolve(StudyFile.from_document(head["study"]), lab=True)  # whoever asks has seen to its plug-ins
    make_deterministic(study.study.threads)
    if public_data is None:
        path = Path(head["public_data"])
        require_public_data(study, path, "create the study again with the right file")
        public_data = read_public_data(study, task_of(study), path)
    own = {site: study.at(site) for site in (*head["students"], *head["teachers"])}
    specs = {site: upload_specs(one, algorithm_of(one), _networks(one)) for site, one in own.items()}
    students, teachers = (
        [(own[site], _read(request, specs[site])) for site in head[kind]] for kind in ("students", "teachers")
    )
    targets = ensemble_targets(public_data, teachers, head["teachers"], device)
    done = [distilled(one, public_data, student, targets, head["round"], device) for one, student in students]
    reply.write(b'{"ok": true}\n')
    for site, student in zip(head["students"], done, strict=True):
        for spec in specs[site]:
            reply.write(student[spec.key].contiguous().numpy().astype("<f4", copy=False).tobytes())


def ensemble_targets(
    public_data: PublicData,
    teachers: Sequence[tuple[SiteStudy, Network]],
    sites: Sequence[str] = (),
    device: Device = CPU,
) -> Tensor:
    """softmax(mean of the teachers' logits) of each row: (n, classes), float32. AvgLogits of the paper.

    Args:
        teachers: each with the study as its site trains it, ``ResolvedStudy.at``. sites: whose they are.

    Raises:
        BeyondFloat32: a logit of one is no number, as a network with a negative variance gives them.
    """
    total = torch.zeros(())
    for place, (study, teacher) in enumerate(teachers):
        networks = _networks(study)
        device.place(networks)
        _load(networks, teacher)
        logits = class_logits(compute_logits(algorithm_of(study), networks, public_data.x)).double()
        if not bool(torch.isfinite(logits).all()):
            site = sites[place] if sites else ""
            raise BeyondFloat32("the network says of the public data set what is no number", site=site)
        total = total + logits
    return torch.softmax(total / len(teachers), dim=1).float()


def distilled(
    study: SiteStudy,
    public_data: PublicData,
    student: Network,
    targets: Tensor,
    round_number: int,
    device: Device = CPU,
) -> dict[str, Tensor]:
    """The student after its steps: Adam with a cosine that ends at 0, the gradient cut to a norm of 5.

    Every student of a round sees the same batches. A last batch that is not full is left out. With early stopping the
    rows held out are in no batch, and their classes say which of the student's steps is kept.

    Raises:
        BadData: early stopping, and the public data set was read without its classes.
    """
    settings = study.method.settings
    assert isinstance(settings, FedDfSettings)
    networks, algorithm, taught_by = _networks(study), algorithm_of(study), device.bring(targets)
    device.place(networks)
    _load(networks, student)
    if settings.distil_steps:
        changed = {"batch_size": settings.distil_batch_size, "iterator": "round", "drop_last": True}
        own = study.changed(training=changed)
        taught, held_out = _parts(study, public_data, settings)
        batches = Batches(taught.x, taught.y, own, "", round_number, PURPOSE, {}, device)
        parameters = trainable_parameters(networks, ["*"])
        optimizer = torch.optim.Adam(parameters.values(), lr=settings.distil_learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.distil_steps)

        def loss(batch: Batch) -> Tensor:
            logits = class_logits(algorithm.infer(networks, batch.x))
            return F.kl_div(F.log_softmax(logits.float(), dim=1), taught_by[batch.y], reduction="batchmean")

        def train(steps: int) -> None:
            with only_trainable(networks, parameters):
                run_steps(
                    batches,
                    steps,
                    optimizer,
                    loss,
                    lambda _: nn.utils.clip_grad_norm_(parameters.values(), CLIP),
                    lambda _: schedule.step(),
                    device=device,
                )

        def judged(split: Split) -> float:
            return validation_loss(compute_logits(algorithm, networks, split.x), split, task_of(study), study)

        with seeded(stream_seed(study.study.seed, "", round_number, f"noise.{PURPOSE}")):
            if settings.early_stopping is None or held_out is None:
                train(settings.distil_steps)
            else:
                keep_best(networks, train, partial(judged, held_out), settings.distil_steps, settings.early_stopping)
    return {key: at_home(tensor) for key, tensor in all_tensors(networks).items() if key in student}


def keep_best(
    networks: Mapping[str, nn.Module],
    train: Callable[[int], None],
    judged: Callable[[], float],
    steps: int,
    stopping: EarlyStopping,
) -> None:
    """Train until ``patience`` steps brought no lower loss, ``steps`` at most. The networks end as they were at the
    lowest, of equal ones the first; as they were at the start, if no step made them better.

    Args:
        train: makes so many steps more.
        judged: the loss of the networks as they are; what is not finite is never the lowest.
    """
    live = all_tensors(networks)
    done = best_step = 0
    best, lowest = {key: tensor.detach().clone() for key, tensor in live.items()}, judged()
    while done < steps and done - best_step < stopping.patience:
        more = min(stopping.every, steps - done)
        train(more)
        done += more
        found = judged()
        if found < lowest or (math.isfinite(found) and not math.isfinite(lowest)):
            best, lowest, best_step = {key: tensor.detach().clone() for key, tensor in live.items()}, found, done
    _load(networks, best)


def _parts(study: SiteStudy, public_data: PublicData, settings: FedDfSettings) -> tuple[Split, Split | None]:
    """The rows to learn from, whose ``y`` are their places, and those held out, with their classes: the end of a
    permutation from the stream (seed, "", 0, "distil.split"), alike in all rounds.
    """
    places = torch.arange(len(public_data.x))
    if settings.early_stopping is None:
        return Split(public_data.x, places), None
    if public_data.y is None:
        raise BadData("`early_stopping` in [algorithm] needs the public data set's classes, which were not read")
    seed = stream_seed(study.study.seed, "", 0, f"{PURPOSE}.split")
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    taught, held_out = torch.tensor_split(order, [len(order) - settings.early_stopping.held_out(len(order))])
    return chosen(Split(public_data.x, places), taught), chosen(Split(public_data.x, public_data.y), held_out)


def _networks(study: SiteStudy) -> dict[str, nn.Module]:
    return build(study, task_of(study), algorithm_of(study), site="")


def _load(networks: Mapping[str, nn.Module], values: Network) -> None:
    live = all_tensors(networks)
    with torch.no_grad():
        for key, value in values.items():
            live[key].copy_(value)


def _read(request: IO[bytes], specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    found = {}
    for spec in specs:
        data = request.read(spec.bytes)
        if len(data) < spec.bytes:
            raise BadData("what is to be distilled was cut short")
        found[spec.key] = torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32)).reshape(spec.shape)
    return found


def main() -> None:
    """Answer one request on the standard streams; what goes wrong is the answer's first line."""
    try:
        answer(sys.stdin.buffer, sys.stdout.buffer)
    except WardroundError as error:
        said = {"error": error.message, "hint": error.hint, "site": getattr(error, "site", "")}
        sys.stdout.buffer.write(json.dumps(said).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
