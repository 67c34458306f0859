"""The dashboard's addresses, and the process that serves them."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.dashboard import pages
from coordinator.dashboard.source import Source
from wardround.local import directory
from wardround.pages.blocks import Page
from wardround.records.schema import read_toml
from wardround.web.application import Application, View, Visit
from wardround.web.live import Live
from wardround.web.passwords import Users
from wardround.web.serving import Place, serve

if TYPE_CHECKING:
    from wardround.web.oidc import Provider

SECTIONS = (("Studies", "/"), ("Sites", "/sites"))


def application(
    federation: str, source: Source, users: Users, live: Live, *, secure: bool = False,
    provider: "Provider | None" = None,
) -> Application:  # fmt: skip
    """The dashboard of one coordinator."""

    def studies(visit: Visit) -> Page:
        rows = source.studies().studies
        return pages.studies_page(
            rows, {row.id: source.status(row.id) for row in rows}, source.sites(), source.waiting()
        )

    def study(visit: Visit) -> Page:
        name = visit.path["study"]
        return pages.study_page(source.report(name), source.fits(name))

    def sites(visit: Visit) -> Page:
        return pages.sites_page(source.sites(), datetime.datetime.now(datetime.UTC))

    views = (View("/", studies), View("/studies/{study}", study), View("/sites", sites, "/sites"))
    title = " · ".join(filter(None, ("Wardround", federation)))
    return Application(
        title, "wardround-coordinator", SECTIONS, views, users, live, secure=secure, is_ready=source.is_there,
        provider=provider, add_user="coordinator dashboard user add NAME",
    )  # fmt: skip


def run(state: Path | None, socket: Path, users: Users, place: Place, provider: "Provider | None" = None) -> None:
    """Serve the dashboard until SIGTERM. The coordinator need not run: its pages say that it does not.

    Args:
        state: the coordinator's, for its federation's name; None where this user may not look into it.
        socket: of the service, for readers.
        provider: of OpenID Connect, with which people may log in as well.

    Raises:
        Unavailable: it cannot listen there.
    """
    federation = str(read_toml(state / directory.COORDINATOR).get("federation", "")) if state is not None else ""
    live = Live()
    source = Source(socket, live)
    source.watch()
    try:
        serve(place, application(federation, source, users, live, secure=place.secure, provider=provider), live)
    finally:
        source.end()
