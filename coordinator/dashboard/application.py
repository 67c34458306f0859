"""The dashboard's addresses, and the process that serves them."""

import datetime
from pathlib import Path

from coordinator.dashboard import pages
from coordinator.dashboard.source import Source
from coordinator.requests import READ_SOCKET
from wardround.local import directory
from wardround.pages.blocks import Page
from wardround.records.schema import read_toml
from wardround.web.application import Application, View, Visit
from wardround.web.live import Live
from wardround.web.passwords import Users
from wardround.web.serving import Place, serve

SECTIONS = (("Studies", "/"), ("Sites", "/sites"))


def application(federation: str, source: Source, users: Users, live: Live, *, secure: bool = False) -> Application:
    """The dashboard of one coordinator."""

    def studies(visit: Visit) -> Page:
        rows = source.studies().studies
        return pages.studies_page(rows, {row.id: source.status(row.id) for row in rows}, source.sites())

    def study(visit: Visit) -> Page:
        name = visit.path["study"]
        return pages.study_page(source.report(name), source.fits(name))

    def sites(visit: Visit) -> Page:
        return pages.sites_page(source.sites(), datetime.datetime.now(datetime.UTC))

    views = (View("/", studies), View("/studies/{study}", study), View("/sites", sites, "/sites"))
    title = " · ".join(filter(None, ("Wardround", federation)))
    return Application(
        title, "wardround-coordinator", SECTIONS, views, users, live, secure=secure, is_ready=source.is_there
    )


def users_file(state: Path) -> Path:
    """Who may log in."""
    return state / "dashboard" / "users.json"


def run(state: Path, socket: Path | None, place: Place) -> None:
    """Serve the dashboard until SIGTERM. The coordinator need not run: its pages say that it does not.

    Args:
        state: where its users are; the coordinator's own, or a folder of the dashboard's user.
        socket: of the service, for readers; None for the one in ``state``.

    Raises:
        Unavailable: it cannot listen there.
    """
    config = state / directory.COORDINATOR
    federation = str(read_toml(config).get("federation", "")) if directory.exists(config) else ""
    live = Live()
    source = Source(socket or state / READ_SOCKET, live)
    source.watch()
    try:
        serve(place, application(federation, source, Users(users_file(state)), live, secure=place.secure), live)
    finally:
        source.end()
