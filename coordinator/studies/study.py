"""The study record: one revision of a study as the coordinator has it now, in memory and as a row of the store."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from pydantic import ConfigDict, TypeAdapter
from sqlalchemy.orm import Session

from coordinator.metric_answers import VAL_LOSS
from coordinator.models.kept import manifest_of
from coordinator.storage import tables
from coordinator.storage.database import Store, changed
from coordinator.studies.failures import reason_of
from coordinator.studies.plugins import admit_allowed
from coordinator.studies.state import Round, Rules, StudyState
from coordinator.studies.terms import UpdateTerms
from fl_algorithms.server.aggregator import ServerAggregator, server_aggregator
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.limits import Account
from fl_algorithms.study import ResolvedStudy
from wardround.local.durable import StorageFailed
from wardround.records.architectures import encoded_of, uploaded
from wardround.records.offer import StudyOffer
from wardround.records.plugins import PluginTable
from wardround.records.study import StudyFile
from wardround.secure.coordinator import Attempt
from wardround.secure.documents import attempt_from_document
from wardround.tensors.manifests import Manifest, TensorSpec

log = logging.getLogger(__name__)
_JSON = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))  # a third of what `json` takes


@dataclass(frozen=True)
class Saved:
    """Both clocks when a state was written; what the monotonic one showed means something only beside that state."""

    wall_clock: float = 0.0
    monotonic: float = 0.0

    def round_left(self, state: StudyState) -> float:
        return state.round.deadline - self.monotonic if state.round else 0.0

    def start_left(self, state: StudyState) -> float:
        return state.start_by - self.monotonic


Change = Callable[["Study"], "Study"]


def unchanged(study: "Study") -> "Study":
    return study


@dataclass(frozen=True)
class Study:
    """One revision of a study and how it goes.

    Attributes:
        manifest: of the initial model: what every update holds; of unlike networks, its site's part.
        allowed: whose code may run at this coordinator beside ours.
        newest: digest of what is kept of the newest model. best_digest: of the best global model, or "".
        attempt: with secure aggregation, what the sites have told in the attempt under way.
    """

    name: str
    revision: int
    digest: str
    resolved: ResolvedStudy
    manifest: Manifest
    state: StudyState
    newest: str
    one_global_model: bool
    created_s: int
    best: BestGlobal = field(default_factory=BestGlobal)
    best_digest: str = ""
    saved: Saved = field(default_factory=Saved)
    allowed: PluginTable = field(default=PluginTable(), compare=False)
    attempt: Attempt | None = field(default=None, compare=False)

    @property
    def initial(self) -> str:
        return self.manifest.digest()

    @property
    def offer(self) -> StudyOffer:
        """The study as it is offered to its sites now."""
        return StudyOffer(self.revision, self.digest, self.state.phase.value, self.resolved.file, self.manifest)

    @cached_property
    def rules(self) -> Rules:
        section, secure = self.resolved.study, self.resolved.secure_aggregation
        return Rules(
            section.sites, section.rounds, section.needed, section.round_deadline_s, section.start_deadline_s,
            measured=section.deadlines == "measured", finish_late=section.late_updates == "finish",
            evaluators=frozenset(section.evaluators),
            threshold=secure.rules(len(section.sites)).threshold if secure is not None else 0,
        )  # fmt: skip

    @property
    def shared(self) -> tuple[TensorSpec, ...]:
        return self.manifest.specs

    def uploaded_by(self, site: str) -> tuple[TensorSpec, ...]:
        """The tensors of every update of ``site``, in the study's encoding."""
        return uploaded(self.resolved.file, site, self.shared)

    def terms_of(self, site: str) -> UpdateTerms:
        """What is asked of the values of ``site``'s updates."""
        file = self.resolved.file
        return UpdateTerms(file.study.max_update_norm, file.encoding.encoding, encoded_of(file, site, self.shared))

    @property
    def bytes_per_update(self) -> int:
        """Of the largest, where sites' networks are unlike each other."""
        return max(sum(spec.bytes for spec in self.uploaded_by(site)) for site in self.rules.sites)

    @cached_property
    def aggregator(self) -> ServerAggregator:
        """The server aggregator of its method.

        Raises:
            BadData: the method as it is installed now does not know the study's settings.
            WardroundError: it is a plug-in's, and may not run here: see ``plugins.admit_allowed``.
        """
        admit_allowed(self.resolved, self.allowed)
        return server_aggregator(self.resolved, self.shared)

    @property
    def offered(self) -> tuple[tuple[int, str], ...]:
        """The models that a site may download, each with the digest of what is kept of it."""
        found = [(self.state.models, self.newest)]
        if self.best.round is not None:
            found.append((self.best.round, self.best_digest))
        if self.aggregator.passes:
            found.append((0, self.initial))
        return tuple(found)

    @property
    def models(self) -> frozenset[str]:
        """The model files that must stay."""
        return frozenset({self.initial, self.newest, self.best_digest} - {""})

    def waits_for(self, revision: int, current: Round) -> bool:
        """Whether the aggregation of this round of this revision is what the study waits for."""
        return self.revision == revision and self.state.aggregating and self.state.round == current

    def saved_at(self, wall_clock: float, monotonic: float) -> "Study":
        return replace(self, saved=Saved(wall_clock, monotonic))

    def judged(self, ended: Round, base: str, session: Session) -> "Study":
        """The best global model is known after ``ended``: its sites' losses judge the model that they downloaded."""
        if not self.one_global_model:
            return self
        losses = summed_loss(self, ended, session) if self.rules.threshold else reported_losses(ended, session)
        best = self.best.offered(ended.number - 1, losses, self.resolved.limits.max_weight)
        return self if best is self.best else replace(self, best=best, best_digest=base)

    def row(self) -> tables.Study:
        """What the store keeps of it."""
        return tables.Study(
            name=self.name, revision=self.revision, digest=self.digest, document=json.dumps(self.resolved.document()),
            initial=self.initial, created_s=self.created_s, **self._course(),
        )  # fmt: skip

    def write(self, session: Session) -> None:
        """Write down how it goes; what is offered never changes."""
        changed(session, _WRITE, of_name=self.name, of_revision=self.revision, **self._course())

    def _course(self) -> dict[str, str]:
        saved = self.saved
        state = {"state": self.state.document(), "wall_clock": saved.wall_clock, "monotonic": saved.monotonic}
        best = {**self.best.document(), "digest": self.best_digest}
        return {"newest": self.newest, "best": json.dumps(best), "state": _text(state)}


def _text(state: object) -> str:
    """As JSON. Why a study paused may name a folder, whose name need not be Unicode: the faster writer refuses that."""
    try:
        return _JSON.dump_json(state).decode()
    except ValueError:
        return json.dumps(state)


def _write() -> sa.Update:
    table = tables.Study
    chosen = (table.name == sa.bindparam("of_name"), table.revision == sa.bindparam("of_revision"))
    return sa.update(table).where(*chosen).values({
        name: sa.bindparam(name) for name in ("newest", "best", "state")
    })  # fmt: skip


_WRITE = _write()


def new_study(
    file: ResolvedStudy, manifest: Manifest, revision: int, created_s: int, allowed: PluginTable = PluginTable()
) -> Study:
    """A study at its beginning. What is kept of its initial model is that itself, until the caller says otherwise."""
    digest = manifest.digest()
    return Study(
        name=file.study.name, revision=revision, digest=file.digest(digest), resolved=file, manifest=manifest,
        state=StudyState(), newest=digest, one_global_model=file.one_global_model,
        created_s=created_s, allowed=allowed,
    )  # fmt: skip


def last_revision(session: Session, name: str) -> int:
    """The newest revision of a study that there ever was here; 0 for a name that is new."""
    return session.scalar(sa.select(sa.func.max(tables.Study.revision)).where(tables.Study.name == name)) or 0


def archived_studies(session: Session, allowed: PluginTable, name: str = "") -> list[Study]:
    """The latest revision of each study that is archived, or of the one of that name alone."""
    table = tables.Study
    chosen = sa.select(table).where(table.archived_s.is_not(None), *([table.name == name] if name else []))
    rows = session.scalars(chosen.order_by(table.name, table.revision)).all()
    latest = [row for row in rows if last_revision(session, row.name) == row.revision]
    return [study_from_row(session, row, allowed) for row in latest]


def put_away(session: Session, name: str, now_s: int) -> None:
    """Archive all revisions of a study."""
    table = tables.Study
    session.execute(sa.update(table).where(table.name == name, table.archived_s.is_(None)).values(archived_s=now_s))


def load_studies(store: Store, allowed: PluginTable = PluginTable()) -> tuple[dict[str, Study], dict[str, str]]:
    """The latest revision of every study that is not archived; and of those whose record is damaged, in what way."""
    studies: dict[str, Study] = {}
    unreadable: dict[str, str] = {}
    with store.read() as session:
        in_order = sa.select(tables.Study).order_by(tables.Study.name, tables.Study.revision)
        for row in session.scalars(in_order):  # the later revision replaces the earlier
            if row.archived_s is not None:
                continue  # and so are its earlier revisions
            try:
                studies[row.name] = study_from_row(session, row, allowed)
                unreadable.pop(row.name, None)
            except StorageFailed:
                raise
            except Exception as error:  # whatever stands in that row, it is that study's failure alone
                log.exception("%s: what is kept of revision %s cannot be read", row.name, row.revision)
                studies.pop(row.name, None)
                unreadable[row.name] = reason_of(error)
    return studies, unreadable


def study_from_row(session: Session, row: tables.Study, allowed: PluginTable) -> Study:
    """What ``Study.row`` made. Raises an error of any kind: what is kept is damaged."""
    file = ResolvedStudy(StudyFile.from_document(json.loads(row.document), f"study {row.name}"))
    study = new_study(file, manifest_of(session, row.initial), row.revision, row.created_s, allowed)
    kept, best = json.loads(row.state), json.loads(row.best)
    state = StudyState.from_document(kept["state"])
    return replace(
        study, digest=row.digest, newest=row.newest, state=state, attempt=_attempt(session, study, state),
        saved=Saved(kept["wall_clock"], kept["monotonic"]),
        best=BestGlobal.from_document(best), best_digest=best["digest"],
    )  # fmt: skip


def _attempt(session: Session, study: Study, state: StudyState) -> Attempt | None:
    """What sites told in the attempt that goes on, or waits for the study to."""
    current = state.round or state.last
    if not study.rules.threshold or current is None:
        return None
    row = session.get(tables.SecureAttempt, (study.name, study.revision, current.number, current.attempt))
    return attempt_from_document(json.loads(row.document)) if row is not None else None


def summed_loss(study: Study, ended: Round, session: Session) -> list[tuple[str, int]]:
    """With secure aggregation: the validation loss over all sites, as of one; none where no sum was made."""
    row = session.get(tables.Round, (study.name, study.revision, ended.number, ended.attempt))
    account = Account.from_document(json.loads(row.account)) if row is not None and row.account else Account()
    return [(repr(account.metrics[VAL_LOSS]), 1)] if VAL_LOSS in account.metrics else []


def uploads_in(ended: Round, session: Session) -> list[tuple[str, tables.Upload]]:
    """Each accepted site and its upload."""
    table = tables.Upload
    wanted = {site: ended.answers[site].upload for site in ended.accepted}
    found = {row.id: row for row in session.scalars(sa.select(table).where(table.id.in_(wanted.values())))}
    return [(site, found[upload]) for site, upload in wanted.items()]


def reported_losses(ended: Round, session: Session) -> list[tuple[str, int]]:
    """Each accepted site's validation loss and validation rows, as it reported them."""
    return [
        (value, upload.num_validation)
        for _, upload in uploads_in(ended, session)
        for name, value in upload.reported_metrics
        if name == VAL_LOSS
    ]
