"""FedDF's server half: the weighted mean of the sites' networks, which then learns what they say together.

    target(u) = softmax(mean_i logits_i(u))        KL(target || student) is lowered on the rows u of the common set

The coordinator holds a copy of the common set, and sees each site's network on its own. ``pfeddf`` distils into one
student for each site, which begins as that site's network; of a site that did not answer, the student stays.

Distilling needs torch: ``fl_algorithms.ensemble`` does it, in a process of its own where this one has no torch.

Lin, Kong, Stich, Jaggi, Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020, Algorithm 1,
for one architecture. Without early stopping, which needs labelled rows, the number of steps is fixed.
https://arxiv.org/abs/2006.07242
"""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np

from fl_algorithms import catalog
from fl_algorithms.server.halves import (
    F64,
    BlockSource,
    Kept,
    Round,
    ServerHalf,
    Sink,
    Specs,
    Update,
    mean_delta,
    write_tensor,
)
from fl_algorithms.settings.methods import FedDfSettings
from wardround.errors import BadData
from wardround.study import StudyFile
from wardround.tensors import TensorSpec

ENSEMBLE = "fl_algorithms.ensemble"
Write = Callable[[Sink], None]  # gives a network's payload: the leaving tensors in their order
NO_TORCH = "pip install 'wardround[site]' where the coordinator runs"


def feddf(settings: FedDfSettings, study: StudyFile, leaves: Specs) -> ServerHalf:
    """What is kept is the one student."""

    def aggregate(round_: Round) -> None:
        student = partial(_mean, leaves, round_)
        with distilled(study, round_, [student], _teachers(leaves, round_, leaves)) as reply:
            for spec in leaves:
                write_tensor(spec, partial(_next, reply), round_.sink)

    return ServerHalf(leaves, tuple(Kept(spec, spec.key) for spec in leaves), leaves, aggregate)


def pfeddf(settings: FedDfSettings, study: StudyFile, leaves: Specs) -> ServerHalf:
    """What is kept is a student for each site; they begin alike."""
    sites = study.study.sites
    own = [
        tuple(TensorSpec(spec.key, spec.dtype, spec.shape, f"site_{i}") for spec in leaves) for i in range(len(sites))
    ]
    keeps = tuple(Kept(mine, spec.key) for specs in own for mine, spec in zip(specs, leaves, strict=True))

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        return tuple(spec.key for spec in own[sites.index(site)])

    def aggregate(round_: Round) -> None:
        answered = {update.site for update in round_.updates}
        teachers: list[Write] = []
        for update in round_.updates:
            teachers += _teachers(leaves, Round(0, round_.kept, [update], len), own[sites.index(update.site)])
        with distilled(study, round_, teachers, teachers) as reply:
            for site, specs in zip(sites, own, strict=True):
                for spec in specs:
                    old = partial(_kept, round_.kept, spec.key)
                    write_tensor(spec, partial(_next, reply) if site in answered else old, round_.sink)

    return ServerHalf(leaves, keeps, leaves, aggregate, chosen)


@contextmanager
def distilled(
    study: StudyFile, round_: Round, students: Sequence[Write], teachers: Sequence[Write]
) -> Iterator[IO[bytes]]:
    """The students' payloads after they have learnt from the teachers, one after another, as a stream to be read.

    Raises:
        BadData: torch is missing, there is no common set, or the process that distils failed.
    """
    name = study.algorithm.name
    if round_.common is None:
        raise BadData(f"algorithm `{name}` distils at the coordinator, which has no copy of the common set")
    path = str(round_.common) if isinstance(round_.common, Path) else None
    head = {
        "study": study.document(), "round": round_.number, "common": path, "students": len(students),
        "teachers": len(teachers),
    }  # fmt: skip

    def ask(request: IO[bytes]) -> None:
        request.write(json.dumps(head).encode() + b"\n")
        for write in (*students, *teachers):
            write(request.write)

    if "torch" in sys.modules:  # the lab, which has torch anyway
        request, reply = io.BytesIO(), io.BytesIO()
        ask(request)
        request.seek(0)
        catalog.load(f"{ENSEMBLE}:answer")(request, reply, None if path is not None else round_.common)
        reply.seek(0)
        reply.readline()
        yield reply
        return
    require_torch(name)
    command = [sys.executable, "-P", "-m", ENSEMBLE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            ask(child.stdin)
            child.stdin.close()
        except BrokenPipeError:
            pass  # it says why, or its exit code does
        try:
            said = json.loads(child.stdout.readline() or b"{}")
            if said.get("ok") is not True:
                why = said.get("error") or f"the process that distils ended with exit code {child.wait()}"
                raise BadData(f"algorithm `{name}`: {why}", hint=str(said.get("hint", "")))
            yield child.stdout
        finally:
            child.kill()


def require_torch(algorithm: str) -> None:
    """Raises BadData: torch is not installed here."""
    if find_spec("torch") is None:
        raise BadData(
            f"algorithm `{algorithm}` distils at the coordinator, which needs torch, and it is not installed here",
            hint=NO_TORCH,
        )


def _teachers(leaves: Specs, round_: Round, bases: Specs) -> list[Write]:
    """Each site's network: what it downloaded, kept as ``bases``, and its delta."""
    return [partial(_network, leaves, round_.kept, bases, update) for update in round_.updates]


def _network(leaves: Specs, kept: BlockSource, bases: Specs, update: Update, sink: Sink) -> None:
    for spec, base in zip(leaves, bases, strict=True):

        def value(start: int, count: int, key: str = spec.key, base: str = base.key) -> F64:
            return _kept(kept, base, start, count) + update.deltas.block(key, start, count)

        write_tensor(spec, value, sink)


def _mean(leaves: Specs, round_: Round, sink: Sink) -> None:
    for spec in leaves:

        def value(start: int, count: int, key: str = spec.key) -> F64:
            return mean_delta(round_.updates, key, start, count) + round_.kept.block(key, start, count)

        write_tensor(spec, value, sink)


def _kept(kept: BlockSource, key: str, start: int, count: int) -> F64:
    return kept.block(key, start, count).astype(np.float64)


def _next(reply: IO[bytes], start: int, count: int) -> F64:
    """The next numbers of the stream; ``write_tensor`` asks in their order."""
    data = reply.read(4 * count)
    if len(data) < 4 * count:
        raise BadData("the process that distils ended before it had answered", hint="is there enough memory for it?")
    return np.frombuffer(data, "<f4").astype(np.float64)
