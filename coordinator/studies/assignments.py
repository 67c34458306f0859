"""What each site should do now, from what is known of its study."""

import logging

from coordinator.models.downloads import Downloads
from coordinator.storage.database import Store
from coordinator.studies.course import course_of
from coordinator.studies.state import Phase
from coordinator.studies.study import Study
from wardround.errors import BadData
from wardround.local.durable import StorageFailed
from wardround.records.assignment import STOP, TRAIN, VALIDATE, Assignment, Contribution, ModelRef, StopReason

ENDED_REASONS = {
    Phase.PAUSED: StopReason.PAUSED, Phase.FINISHED: StopReason.FINISHED, Phase.STOPPED: StopReason.STOPPED,
}  # fmt: skip
log = logging.getLogger(__name__)


class Assignments:
    """The assignments of one coordinator's sites. Read from the store; of finished studies once."""

    def __init__(self, store: Store, downloads: Downloads) -> None:
        self._store = store
        self._downloads = downloads
        self._finished: dict[tuple[str, int], tuple[Contribution, ...]] = {}  # nothing in it changes any more

    def of(self, study: Study, site: str) -> Assignment | None:
        """What this site should do now; None if nothing, or if its model cannot be read: the round misses it then."""
        state = study.state
        revision = (study.name, study.revision, study.digest)
        if state.phase == Phase.RUNNING and state.round and state.open_round:
            models = self._models(study, site) if site in state.round.unanswered else None
            if models is None:
                return None
            kind = VALIDATE if state.round.closing or site in study.rules.evaluators else TRAIN
            return Assignment(*revision, state.round.number, state.round.attempt, kind, *models)
        if state.phase in ENDED_REASONS and site in state.ready:
            base, best = self._models(study, site) or (ModelRef(state.models, study.newest), None)
            shown = state.last
            return Assignment(
                *revision, shown.number if shown else 1, shown.attempt if shown else 1, STOP, base, best,
                ENDED_REASONS[state.phase], self._contributions(study),
            )  # fmt: skip
        return None

    def _models(self, study: Study, site: str) -> tuple[ModelRef, ModelRef | None] | None:
        """The newest model and the best one, as this site downloads them; None where that cannot be said."""
        number, best = study.state.models, study.best.round
        try:
            base = ModelRef(number, self._downloads.digest(study.aggregator, site, number, study.newest))
            if best is None:
                return base, None
            return base, ModelRef(best, self._downloads.digest(study.aggregator, site, best, study.best_digest))
        except BadData as error:
            log.error("%s: the model for site %s: %s", study.name, site, error.message)
            return None
        except StorageFailed:
            raise
        except Exception:  # of this study's method: the site's stream carries other studies too
            log.exception("%s: the model for site %s cannot be said", study.name, site)
            return None

    def _contributions(self, study: Study) -> tuple[Contribution, ...]:
        """Of a finished study each site's rounds: contributed, capped, left out."""
        if study.state.phase != Phase.FINISHED:
            return ()
        key = (study.name, study.revision)
        if key not in self._finished:
            self._finished[key] = self._read_contributions(study)
        return self._finished[key]

    def _read_contributions(self, study: Study) -> tuple[Contribution, ...]:
        with self._store.read() as session:
            course = course_of(session, study)
        return tuple(
            Contribution(
                site, tuple(course.contributed[site]), tuple(course.capped[site]), tuple(course.left_out[site])
            )
            for site in study.rules.sites
        )
