"""What each site should do now, from what is known of its study."""

import logging

from coordinator.downloads import Downloads
from coordinator.roster import ENDED_REASONS, Assignment, ModelRef, Study, contributed_rounds
from coordinator.store import Store
from coordinator.study import Phase
from wardround.errors import BadData

log = logging.getLogger(__name__)


class Assignments:
    """The assignments of one coordinator's sites. Read from the store, never kept."""

    def __init__(self, records: Store, downloads: Downloads) -> None:
        self._store = records
        self._downloads = downloads

    def of(self, study: Study, site: str) -> Assignment | None:
        """What this site should do now; None if nothing, or if its model cannot be read: the round misses it then."""
        life = study.life
        common = (study.name, study.revision, study.digest)
        try:
            if life.phase == Phase.RUNNING and life.round and not life.aggregating:
                if site not in life.round.unanswered:
                    return None
                kind = "validate" if life.round.closing else "train"
                models = self._models(study, site)
                return Assignment(*common, kind, life.round.number, life.round.attempt, *models)
            if life.phase in ENDED_REASONS and site in life.ready:
                shown = life.last
                return Assignment(
                    *common, "stop", shown.number if shown else 1, shown.attempt if shown else 1,
                    *self._models(study, site), ENDED_REASONS[life.phase], self._contributed(study),
                )  # fmt: skip
        except BadData as error:
            log.error("%s: site %s is asked nothing: %s", study.name, site, error.message)
        return None

    def _models(self, study: Study, site: str) -> tuple[ModelRef, ModelRef | None]:
        """The newest model and the best one, as this site downloads them."""
        base = ModelRef(study.life.models, self._downloads.digest(study, site, study.life.models, study.newest))
        if study.best.round is None:
            return base, None
        best = self._downloads.digest(study, site, study.best.round, study.best_digest)
        return base, ModelRef(study.best.round, best)

    def _contributed(self, study: Study) -> dict[str, list[int]]:
        if study.life.phase != Phase.FINISHED:
            return {}
        with self._store.read() as read:
            return contributed_rounds(study, read)
