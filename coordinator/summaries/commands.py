"""What the operator's commands about summaries do, in the running service or in the command itself."""

from collections.abc import Callable, Mapping

import sqlalchemy as sa

from coordinator.storage import tables
from coordinator.storage.database import Store
from coordinator.summaries import keeping
from coordinator.summaries.pooling import pooled
from coordinator.summary_answers import SiteTold, SummaryCreated, SummaryList, SummaryShown
from wardround.records.summaries.request import SummaryRequest


class Summaries:
    """The summary requests of one coordinator."""

    def __init__(self, store: Store, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._wall_clock = wall_clock

    def create(self, document: Mapping[str, object]) -> SummaryCreated:
        """Offer a request to its sites, who answer it by a person each, or never.

        Raises:
            BadData: it is no request.
            NeedsPerson: sites have answered another one of its name, or too many are open.
        """
        request = SummaryRequest.from_document(document)
        with self._store.write() as session:
            new = keeping.create(session, request, int(self._wall_clock()))
            known = set(session.scalars(sa.select(tables.Site.name).where(tables.Site.revoked_s.is_(None))))
        return SummaryCreated(
            name=request.name, digest=request.digest, new=new,
            not_enrolled=tuple(site for site in request.sites if site not in known),
        )  # fmt: skip

    def list(self) -> SummaryList:
        """Every request."""
        with self._store.read() as session:
            return SummaryList(requests=tuple(keeping.listed(session)))

    def show(self, name: str) -> SummaryShown:
        """What the sites told for a request, each and together. Raises BadData: there is no such request."""
        with self._store.read() as session:
            request, is_open, told = keeping.told(session, name)
        sites = {site: SiteTold(figures=said[0], said=said[1]) for site, said in told.items()}
        return SummaryShown(
            name=name, open=is_open, request=request.document(),
            sites={site: sites.get(site) for site in request.sites},
            pooled=pooled(request, [figures for figures, _ in told.values()]),
        )  # fmt: skip

    def close(self, name: str) -> SummaryList:
        """Offer a request no longer; what was told stays. Raises BadData: there is no such request."""
        with self._store.write() as session:
            keeping.close(session, name)
        return self.list()
