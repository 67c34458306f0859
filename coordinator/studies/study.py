"""What the engine keeps of a study and of a connected site, in memory: the study with its life, the site's stream."""

import json
import queue
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from coordinator.storage import database
from coordinator.storage.database import Records, Row
from coordinator.studies.lifecycle import Life, Outcome, Phase, Round, Rules
from coordinator.updates.admission import Known
from fl_algorithms import catalog
from fl_algorithms.server.aggregator import ServerAggregator, server_aggregator
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.limits import Account
from wardround.records.architectures import own_tensors
from wardround.records.study import StudyFile
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

VAL_LOSS = "val_loss"
ENDED_REASONS = {Phase.PAUSED: "PAUSED", Phase.FINISHED: "FINISHED", Phase.STOPPED: "STOPPED"}


@dataclass(frozen=True)
class Saved:
    """The two clocks when a life was written; the ticks mean something only beside each other."""

    wall: float = 0.0
    ticks: float = 0.0

    def round_left(self, life: Life) -> float:
        return life.round.deadline - self.ticks if life.round else 0.0

    def start_left(self, life: Life) -> float:
        return life.start_by - self.ticks


@dataclass(frozen=True)
class Study:
    """One revision of a study and how it goes.

    Attributes:
        manifest: of the initial model: what every update holds; of unlike networks, its site's part.
        newest: digest of what is kept of the newest model. best_digest: of the best global model, or "".
    """

    name: str
    revision: int
    digest: str
    file: StudyFile
    manifest: Manifest
    life: Life
    newest: str
    one_global_model: bool
    created_s: int
    best: BestGlobal = field(default_factory=BestGlobal)
    best_digest: str = ""
    saved: Saved = field(default_factory=Saved)

    @property
    def initial(self) -> str:
        return self.manifest.digest()

    @property
    def rules(self) -> Rules:
        section = self.file.study
        return Rules(section.sites, section.rounds, section.needed, section.round_deadline_s, section.start_deadline_s)

    @property
    def shared(self) -> tuple[TensorSpec, ...]:
        return self.manifest.specs

    @property
    def bytes_per_update(self) -> int:
        """Of the largest, where sites' networks are unlike each other."""
        parts = [own_tensors(self.file, site, self.shared).values() for site in self.rules.sites]
        return max(sum(spec.bytes for spec in specs) for specs in parts)

    @property
    def known(self) -> Known:
        return Known(self.revision, self.digest, self.file, self.shared, self.life)

    @cached_property
    def half(self) -> ServerAggregator:
        """The server aggregator of its method.

        Raises:
            BadData: the method as it is installed now does not know the study's settings.
        """
        return server_aggregator(self.file, self.shared)

    @property
    def offered(self) -> tuple[tuple[int, str], ...]:
        """The models that a site may download, each with the digest of what is kept of it."""
        found = [(self.life.models, self.newest)]
        if self.best.round is not None:
            found.append((self.best.round, self.best_digest))
        if self.half.passes:
            found.append((0, self.initial))
        return tuple(found)

    @property
    def models(self) -> frozenset[str]:
        """The model files that must stay."""
        return frozenset({self.initial, self.newest, self.best_digest} - {""})

    def saved_at(self, wall: float, ticks: float) -> "Study":
        return replace(self, saved=Saved(wall, ticks))

    def judged(self, one: Round, base: str, records: Records) -> "Study":
        """With the best global model after ``one`` closed: its sites' losses judge the model that they downloaded."""
        if not self.one_global_model:
            return self
        best = self.best.offered(one.number - 1, told_losses(one, records), self.file.limits.max_weight)
        return self if best is self.best else replace(self, best=best, best_digest=base)

    def row(self, wall: float, ticks: float) -> Row:
        life = {"life": self.life.document(), "wall": wall, "ticks": ticks}
        return {
            "name": self.name, "revision": self.revision, "digest": self.digest,
            "document": json.dumps(self.file.document()), "initial": self.initial, "newest": self.newest,
            "best": json.dumps({**self.best.document(), "digest": self.best_digest}), "life": json.dumps(life),
            "created_s": self.created_s,
        }  # fmt: skip


def new_study(file: StudyFile, manifest: Manifest, revision: int, created_s: int) -> Study:
    """A study at its beginning. What is kept of its initial model is that itself, until the caller says otherwise."""
    digest = manifest.digest()
    return Study(
        name=file.study.name, revision=revision, digest=file.digest(digest), file=file, manifest=manifest, life=Life(),
        newest=digest, one_global_model=catalog.method(file).one_global_model, created_s=created_s,
    )  # fmt: skip


def study_from_row(records: Records, row: Row) -> Study:
    model = records.get(database.models, digest=row["initial"])
    assert model is not None
    document = json.loads(row["document"])
    file = StudyFile.from_document(document, f"study {row['name']}")
    study = new_study(file, manifest_from_document(json.loads(model["manifest"])), row["revision"], row["created_s"])
    kept, best = json.loads(row["life"]), json.loads(row["best"])
    return replace(
        study, digest=row["digest"], newest=row["newest"], life=Life.from_document(kept["life"]),
        saved=Saved(kept["wall"], kept["ticks"]), best=BestGlobal.from_document(best), best_digest=best["digest"],
    )  # fmt: skip


def manifest_from_document(rows: list[dict[str, Any]]) -> Manifest:
    """What ``Manifest.document`` made."""
    return Manifest(
        tuple(
            Entry(TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), row["bundle"]), row["sha256"])
            for row in rows
        )
    )


def told_losses(one: Round, records: Records) -> list[tuple[str, int]]:
    """Each accepted site's validation loss as told, and its validation rows as told."""
    told = []
    for site in one.accepted:
        upload = records.upload(one.answers[site].upload)
        assert upload is not None
        told += [(value, upload.num_validation) for name, value in upload.metrics if name == VAL_LOSS]
    return told


@dataclass(frozen=True)
class ModelRef:
    round: int
    digest: str


@dataclass(frozen=True)
class Assignment:
    """What a site is asked. ``kind`` is train, validate or stop; ``reason`` a name of Stop.Reason."""

    study: str
    revision: int
    digest: str
    kind: str
    round: int
    attempt: int
    base: ModelRef
    best: ModelRef | None
    reason: str = ""
    contributed: Mapping[str, Sequence[int]] = field(default_factory=dict)  # site -> rounds, of a finished study
    capped: Mapping[str, Sequence[int]] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class TwoLines:
    """Two lines of the site's certificates live: somebody else holds its keys, or it was copied."""

    since_s: int


class _End:
    pass


GOODBYE, END = _End(), _End()
Item = Study | Assignment | TwoLines | _End


@dataclass
class Stream:
    """What goes to one connected site, in order. A thread waits at the other end."""

    _items: "queue.SimpleQueue[Item]" = field(default_factory=queue.SimpleQueue)

    def put(self, item: Study | Assignment | TwoLines) -> None:
        self._items.put(item)

    def goodbye(self) -> None:
        """The coordinator goes down."""
        self._items.put(GOODBYE)

    def end(self) -> None:
        """The site connected again elsewhere, or its line broke."""
        self._items.put(END)

    def get(self) -> Item:
        """The next item; waits for it."""
        return self._items.get()


def contributed_rounds(study: Study, records: Records) -> dict[str, list[int]]:
    """Each site's rounds whose model has its update in it."""
    contributed: dict[str, list[int]] = {site: [] for site in study.rules.sites}
    for row in records.all(database.rounds, study=study.name, revision=study.revision):
        if row["outcome"] == Outcome.CLOSED and not row["closing"]:
            for site, (kind, _, _) in json.loads(row["answers"]).items():
                if kind == "accepted":
                    contributed[site].append(row["number"])
    return contributed


def rounds_of(sites: Sequence[str], named: Sequence[tuple[int, Collection[str]]]) -> dict[str, list[int]]:
    """Each site's rounds in which it is named."""
    return {site: [number for number, those in named if site in those] for site in sites}


def accounts(study: Study, records: Records) -> list[tuple[int, Account]]:
    """The rounds whose model is made, in their order, with what became of each accepted update."""
    return [
        (row["number"], Account.from_document(json.loads(row["account"])))
        for row in records.all(database.rounds, study=study.name, revision=study.revision)
        if row["outcome"] == Outcome.CLOSED and row["account"]
    ]
