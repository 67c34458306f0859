"""What each site should do now, from what is known of its study."""

import logging

from coordinator.models.downloads import Downloads
from coordinator.storage.database import Store
from coordinator.studies.lifecycle import Phase
from coordinator.studies.study import (
    ENDED_REASONS,
    Assignment,
    ModelRef,
    Study,
    accounts,
    contributed_rounds,
    rounds_of,
)
from wardround.errors import BadData
from wardround.local.durable import StorageFailed

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
        if life.phase == Phase.RUNNING and life.round and not life.aggregating:
            models = self._models(study, site) if site in life.round.unanswered else None
            if models is None:
                return None
            kind = "validate" if life.round.closing else "train"
            return Assignment(*common, kind, life.round.number, life.round.attempt, *models)
        if life.phase in ENDED_REASONS and site in life.ready:
            base, best = self._models(study, site) or (ModelRef(life.models, study.newest), None)
            shown = life.last
            return Assignment(
                *common, "stop", shown.number if shown else 1, shown.attempt if shown else 1, base, best,
                ENDED_REASONS[life.phase], *self._participation(study),
            )  # fmt: skip
        return None

    def _models(self, study: Study, site: str) -> tuple[ModelRef, ModelRef | None] | None:
        """The newest model and the best one, as this site downloads them; None where that cannot be said."""
        number, best = study.life.models, study.best.round
        try:
            base = ModelRef(number, self._downloads.digest(study, site, number, study.newest))
            if best is None:
                return base, None
            return base, ModelRef(best, self._downloads.digest(study, site, best, study.best_digest))
        except BadData as error:
            log.error("%s: the model for site %s: %s", study.name, site, error.message)
            return None
        except StorageFailed:
            raise
        except Exception:  # of this study's method: the site's stream carries other studies too
            log.exception("%s: the model for site %s cannot be said", study.name, site)
            return None

    def _participation(self, study: Study) -> tuple[dict[str, list[int]], dict[str, list[int]], dict[str, list[int]]]:
        """Of a finished study each site's rounds: contributed, capped, left out."""
        if study.life.phase != Phase.FINISHED:
            return {}, {}, {}
        sites = study.rules.sites
        with self._store.read() as read:
            made = accounts(study, read)
            contributed = contributed_rounds(study, read)
        capped = rounds_of(sites, [(number, account.capped) for number, account in made])
        return contributed, capped, rounds_of(sites, [(number, account.left_out) for number, account in made])
