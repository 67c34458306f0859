"""FedDF's server aggregator: the weighted mean of the sites' networks, which then learns what they say together.

    target(u) = softmax(mean_i logits_i(u))        KL(target || student) is lowered on the rows u of the public data set

The coordinator holds a copy of the public data set, and sees each site's network on its own. ``pfeddf`` distills into
one student for each site, which begins as that site's network; of a site that did not answer, the student stays. Where
sites train unlike networks, ``feddf`` has a student for each of these, which begins as the mean of its own sites' and
learns from all.

Distilling needs torch: ``ensemble`` does it, in a process of its own where this one has no torch.

Lin, Kong, Stich, Jaggi, Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020, Algorithms 1
and 3. Without early stopping, which needs labeled rows, the number of steps is fixed.
https://arxiv.org/abs/2006.07242
"""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np

from fl_algorithms import registry
from fl_algorithms.methods.feddf import FedDfSettings
from fl_algorithms.server.aggregator import (
    F64,
    BeyondFloat32,
    BlockSource,
    Kept,
    Round,
    ServerAggregator,
    Sink,
    Specs,
    Update,
    write_tensor,
)
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.records.architectures import own_tensors
from wardround.tensors.manifests import TensorSpec

ENSEMBLE = "fl_algorithms.methods.feddf.ensemble"
Network = tuple[str, Callable[[Sink], None]]  # a site that trains it, and what gives its payload: that site's tensors
NO_TORCH = "pip install 'wardround[site]' where the coordinator runs"


@dataclass(frozen=True)
class Student:
    """A network that is kept, and whose it is: ``kept`` holds, in their order, what its sites call ``own``."""

    sites: tuple[str, ...]
    kept: Specs
    own: Specs


def feddf(settings: FedDfSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What is kept is a student for each network that sites train, where these are unlike each other; else one."""
    keys = {site: tuple(own_tensors(study.file, site, upload)) for site in study.study.sites}
    specs = {spec.key: spec for spec in upload}
    students = []
    for mine in dict.fromkeys(keys.values()):
        sites = tuple(site for site in keys if keys[site] == mine)
        own = tuple(own_tensors(study.file, sites[0], upload).values())
        students.append(Student(sites, tuple(specs[key] for key in mine), own))

    def aggregate(round_: Round) -> None:
        begin = [(student.sites[0], partial(_mean, student, round_)) for student in students]
        with distilled(study, round_, begin, _teachers(students, round_)) as reply:
            for student in students:
                for spec in student.kept:
                    write_tensor(spec, partial(_next, reply), round_.sink)

    keeps = tuple(Kept(spec, spec.key) for student in students for spec in student.kept)
    return replace(_aggregator(upload, keeps, students, aggregate), weighted=True)


def pfeddf(settings: FedDfSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What is kept is a student for each site; those of one network begin alike."""
    students, keeps = [], []
    for i, site in enumerate(study.study.sites):
        own = own_tensors(study.file, site, upload)
        kept = tuple(TensorSpec(spec.key, spec.dtype, spec.shape, f"site_{i}") for spec in own.values())
        students.append(Student((site,), kept, tuple(own.values())))
        keeps += [Kept(mine, key) for mine, key in zip(kept, own, strict=True)]

    def aggregate(round_: Round) -> None:
        answered = {update.site for update in round_.updates}
        teachers = _teachers(students, round_)
        with distilled(study, round_, teachers, teachers) as reply:
            for student in students:
                for spec in student.kept:
                    old = partial(_kept, round_.kept, spec.key)
                    new = answered.issuperset(student.sites)
                    write_tensor(spec, partial(_next, reply) if new else old, round_.sink)

    return _aggregator(upload, tuple(keeps), students, aggregate)


def _aggregator(
    upload: Specs, keeps: tuple[Kept, ...], students: Sequence[Student], aggregate: Callable[[Round], None]
) -> ServerAggregator:
    """Each site sends and downloads its student."""
    of = {site: student for student in students for site in student.sites}

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        return tuple(spec.key for spec in of[site].kept)

    unlike = {site: student.own for site, student in of.items() if student.own != upload}
    return ServerAggregator(upload, keeps, upload, aggregate, chosen, unlike)


@contextmanager
def distilled(
    study: ResolvedStudy, round_: Round, students: Sequence[Network], teachers: Sequence[Network]
) -> Iterator[IO[bytes]]:
    """The students' payloads after they have learned from the teachers, one after another, as a stream to be read.

    Raises:
        BadData: torch is missing, there is no public data set, or the process that distills failed.
        BeyondFloat32: what one site's network says is no number.
    """
    name = study.method.name
    if round_.public_data is None:
        raise BadData(f"algorithm `{name}` distills at the coordinator, which has no copy of the public data set")
    path = str(round_.public_data) if isinstance(round_.public_data, Path) else None
    head = {
        "study": study.document(), "round": round_.number, "public_data": path,
        "students": [site for site, _ in students], "teachers": [site for site, _ in teachers],
    }  # fmt: skip

    def ask(request: IO[bytes]) -> None:
        request.write(json.dumps(head).encode() + b"\n")
        for _, write in (*students, *teachers):
            write(request.write)

    if "torch" in sys.modules:  # the lab, which has torch anyway
        request, reply = io.BytesIO(), io.BytesIO()
        ask(request)
        request.seek(0)
        where = {} if round_.device is None else {"device": round_.device}
        public_data = None if path is not None else round_.public_data
        registry.load(f"{ENSEMBLE}:answer")(request, reply, public_data, **where)
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
                why = said.get("error") or f"the process that distills ended with exit code {child.wait()}"
                if (whose := said.get("site")) in [site for site, _ in teachers]:
                    raise BeyondFloat32(why, site=whose)
                raise BadData(f"algorithm `{name}`: {why}", hint=str(said.get("hint", "")))
            yield child.stdout
        finally:
            child.kill()


def require_torch(algorithm: str) -> None:
    """Raises BadData: torch is not installed here."""
    if find_spec("torch") is None:
        raise BadData(
            f"algorithm `{algorithm}` distills at the coordinator, which needs torch, and it is not installed here",
            hint=NO_TORCH,
        )


def _teachers(students: Sequence[Student], round_: Round) -> list[Network]:
    """Each site's network: what it downloaded, and its delta."""
    of = {site: student for student in students for site in student.sites}
    return [(update.site, partial(_network, of[update.site], round_.kept, update)) for update in round_.updates]


def _network(student: Student, kept: BlockSource, update: Update, sink: Sink) -> None:
    for base, spec in zip(student.kept, student.own, strict=True):

        def value(start: int, count: int, key: str = spec.key, base: str = base.key) -> F64:
            return _kept(kept, base, start, count) + update.deltas.block(key, start, count)

        write_tensor(spec, value, sink)


def _mean(student: Student, round_: Round, sink: Sink) -> None:
    """Over the student's sites that answered; as it was kept, where none did."""
    answered = any(update.site in student.sites for update in round_.updates)
    for base, spec in zip(student.kept, student.own, strict=True):

        def value(start: int, count: int, key: str = spec.key, base: str = base.key) -> F64:
            delta = round_.mean_delta(key, start, count, student.sites) if answered else np.zeros(count)
            return delta + round_.kept.block(base, start, count)

        write_tensor(spec, value, sink)


def _kept(kept: BlockSource, key: str, start: int, count: int) -> F64:
    return kept.block(key, start, count).astype(np.float64)


def _next(reply: IO[bytes], start: int, count: int) -> F64:
    """The next numbers of the stream; ``write_tensor`` asks in their order."""
    data = reply.read(4 * count)
    if len(data) < 4 * count:
        raise BadData("the process that distills ended before it had answered", hint="is there enough memory for it?")
    return np.frombuffer(data, "<f4").astype(np.float64)
