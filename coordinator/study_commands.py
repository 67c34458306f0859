"""What the operator's commands about studies do, in the running service or in the command itself when none runs."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from coordinator import creation
from coordinator.answers import StudyCreated, StudyEdited, StudyList, StudyRenewed, StudyRow
from coordinator.context import Context
from coordinator.requests import EditStudy
from coordinator.secure_roster import with_roster
from coordinator.studies import editing, fits, report
from coordinator.studies.events import Start, Stop
from coordinator.studies.renewal import renewed
from coordinator.studies.report import Sites
from coordinator.studies.state import ENDED, Phase
from coordinator.studies.study import Study, archived_studies
from coordinator.study_answers import StudyFits, StudyReport, StudyStatus
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.records.study import StudyFile

REST = 20  # times as long as one status took, a follower waits for the next: following costs a twentieth at most
MAX_REST_S = 1.0
Progress = Callable[[StudyStatus], None]


class StudyCommands:
    """The studies of one coordinator, as its operator has them.

    Args:
        undecided: (study, site) of the updates that are here and not yet decided.
    """

    def __init__(self, context: Context, undecided: Callable[[], frozenset[tuple[str, str]]] = frozenset) -> None:
        self._context = context
        self._engine = context.engine
        self._store = context.store
        self._undecided = undecided

    def create(
        self, document: Mapping[str, object], initial: str, public_data: str | None = None, agreed: str = ""
    ) -> StudyCreated:
        """Offer a resolved study to its sites. See ``creation.create``."""
        file = ResolvedStudy(StudyFile.from_document(document))
        self._known(file.study.name)
        public = None if public_data is None else Path(public_data)
        return creation.create(self._context, file, Path(initial), public, agreed)

    def start(self, study: str) -> StudyStatus:
        """Start a study, or continue a paused one.

        Raises:
            NeedsPerson: it has ended.
            DamagedModel: its newest model is damaged.
        """
        present = self._study(study)
        phase = present.state.phase
        if phase in ENDED:
            raise NeedsPerson(
                f"study `{study}` is {phase}: it cannot be started again",
                hint="change the study file (a new title is enough) and create it as a new revision",
            )
        if phase in (Phase.CREATED, Phase.PAUSED):
            self._context.blobs.whole_model(present.newest, again=True)
            self._engine.happened(study, Start())
        return self.status(study)

    def stop(self, study: str) -> StudyStatus:
        """Stop a study for good. One that has ended stays as it is."""
        if self._study(study).state.phase not in ENDED:
            self._engine.happened(study, Stop())
        return self.status(study)

    def renew(self, study: str) -> StudyRenewed:
        """Begin a new revision of a study from its newest model that is whole here; the one before is stopped.

        Raises:
            NeedsPerson: it is finished.
            DamagedModel: none of its models is whole.
        """
        present = self._study(study)
        if present.state.phase == Phase.FINISHED:
            raise NeedsPerson(f"study `{study}` is finished: there is nothing to go on with")
        new = renewed(present, self._context.blobs)
        self.stop(study)
        added = creation.add(self._context, new.file, new.manifest)
        return StudyRenewed(
            id=study, revision=added.revision, study_digest=added.digest, model=new.model, rounds=added.rules.rounds
        )

    def edit(self, request: EditStudy, agreed: str = "") -> StudyEdited:
        """Begin a new revision of a study with other settings; the one before is stopped.

        It goes on from the newest model, or begins from another initial one. Where the study was waiting or running,
        the new revision waits for its sites at once.

        Raises:
            NeedsPerson: the study has ended.
            BadData: the document is of another study, says the same, or shares other tensors without an initial model.
            WardroundError: as ``create``.
        """
        present = self._study(request.study)
        if present.state.phase in ENDED:
            raise NeedsPerson(
                f"study `{present.name}` is {present.state.phase}: there is nothing to go on with",
                hint="`coordinator study create FILE` offers a new revision",
            )
        after = ResolvedStudy(StudyFile.from_document(request.document))
        if not editing.shares_otherwise(present.resolved, after):
            after = with_roster(self._store, after, present.shared)
        editing.refuse_unfit(present, after)
        model, added = self._add_edited(present, after, request, agreed)
        if started := present.state.phase in (Phase.WAITING, Phase.RUNNING):
            self._engine.happened(present.name, Start())
        sites, before = added.rules.sites, present.state.ready
        return StudyEdited(
            id=added.name, revision=added.revision, study_digest=added.digest, model=model, rounds=added.rules.rounds,
            changes=editing.changes(present.resolved, added.resolved), started=started,
            approve_again=tuple(site for site in sites if site in before),
            approve_first=tuple(site for site in sites if site not in before),
            gone=tuple(site for site in present.rules.sites if site not in sites),
        )  # fmt: skip

    def _add_edited(self, present: Study, after: ResolvedStudy, request: EditStudy, agreed: str) -> tuple[int, Study]:
        """Stop ``present`` and add ``after``; the round of the model that it begins from, and the study."""
        context, model = self._context, 0
        if request.initial is not None:
            file, manifest = after, creation.keep_initial(context, after, Path(request.initial), agreed)
        elif editing.shares_otherwise(present.resolved, after):
            raise BadData(
                f"study `{present.name}` would share other tensors than now, so its models are no beginning for it",
                hint="`fl-lab init FILE --out initial.safetensors`, then "
                f"`coordinator study edit {present.name} FILE --initial initial.safetensors`",
            )
        else:
            creation.refuse_unready(context, after, None)
            new = renewed(present, context.blobs, after, all_rounds=request.rounds)
            file, manifest, model = new.file, new.manifest, new.model
        self.stop(present.name)
        return model, creation.add(context, file, manifest)

    def archive(self, study: str) -> StudyStatus:
        """Tell nobody of an ended study any more: no site, and no list. Its models, receipts and report stay.

        Raises:
            NeedsPerson: it has not ended.
        """
        present = self._study(study)
        if present.state.phase not in ENDED:
            raise NeedsPerson(
                f"study `{study}` is {present.state.phase}: only one that has ended can be archived",
                hint=f"`coordinator study stop {study}` ends it for good",
            )
        status = self.status(study)
        if self._engine.find(study) is not None:
            self._engine.archive(study)
        return status

    def listed(self, *, archived: bool) -> StudyList:
        """The studies here, with the archived ones if they are asked for."""
        rows = [(study, False) for study in self._engine.studies()]
        if archived:
            with self._store.read() as session:
                rows += [(study, True) for study in archived_studies(session, self._context.config.plugins)]
        return StudyList(
            studies=tuple(
                StudyRow(
                    id=study.name, revision=study.revision, state=study.state.phase.value, round=study.state.models,
                    rounds=study.rules.rounds, archived=is_archived, title=study.resolved.study.title,
                    sites=len(study.rules.sites), approved=len(study.state.ready), why=study.state.why,
                )
                for study, is_archived in sorted(rows, key=lambda row: row[0].name)
            )
        )  # fmt: skip

    def status(self, study: str) -> StudyStatus:
        """How a study stands now."""
        present = self._study(study)
        now = self._now(present)
        with self._store.read() as session:
            return report.status(present, session, now)

    def fits(self, name: str) -> StudyFits:
        """Whose data fits a study. Raises as ``status``."""
        study = self._study(name)
        with self._store.read() as session:
            return fits.of(session, study)

    def report(self, study: str) -> StudyReport:
        """All that is known of a study."""
        present = self._study(study)
        now = self._now(present)
        with self._store.read() as session:
            return report.full(present, session, self._context.config.federation, now)

    def follow(self, study: str, progress: Progress) -> StudyStatus:
        """Give the status now and after changes to ``progress``, until the study has ended or paused.

        Raises:
            Unavailable: the service goes down before.
        """
        self._study(study)
        changes = self._engine.follow(study)
        try:
            while True:
                began = time.monotonic()
                status = self.status(study)
                progress(status)
                if status.state in (*ENDED, Phase.PAUSED):
                    return status
                if not changes.wait(min(MAX_REST_S, REST * (time.monotonic() - began))):
                    raise Unavailable(
                        "the service is shutting down; the study goes on when it runs again",
                        hint=f"then: `coordinator study status {study} --follow`",
                    )
        finally:
            self._engine.unfollow(changes)

    def _study(self, name: str) -> Study:
        """Raises BadData: there is no such study. NeedsPerson: its record is damaged."""
        study = self._known(name)
        if study is None:
            with self._store.read() as session:
                study = next(iter(archived_studies(session, self._context.config.plugins, name)), None)
        if study is None:
            known = ", ".join(study.name for study in self._engine.studies()) or "none yet"
            raise BadData(f"there is no study `{name[:64]}` here", hint=f"studies here: {known}")
        return study

    def _known(self, name: str) -> Study | None:
        """Raises NeedsPerson: the study's record is damaged."""
        study = self._engine.find(name)
        if study is None and (why := self._engine.unreadable().get(name)) is not None:
            raise NeedsPerson(
                f"the record of study `{name}` is damaged here: {why}",
                hint="the other studies go on; restore the state directory from a backup, or give the new study "
                "another name",
            )
        return study

    def _now(self, study: Study) -> Sites:
        return Sites(
            busy=frozenset(site for name, site in self._undecided() if name == study.name),
            held=self._engine.holding(study),
            connected=self._engine.connected(),
        )
