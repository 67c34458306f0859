"""``site-agent doctor``: what keeps this site from taking part, each with its fix."""

from typing import TYPE_CHECKING

import typer

from site_agent.cli.options import State
from site_agent.cli.service import ask_service, joined
from wardround.cli import Json
from wardround.errors import NeedsPerson, WardroundError

if TYPE_CHECKING:
    from site_agent.gateway.service_requests import ServiceStatus
    from site_agent.state.directory import SiteState


def doctor(state: State, json: Json = False) -> None:
    """Look for what keeps this site from taking part: cause and fix, a line each. Changes nothing. Exits 78 if there
    is a problem.
    """
    from site_agent.doctor import examine
    from wardround.checkup import has_problem, shown

    here, site = joined(state)
    findings = list(shown(examine(here, site, _service(here), lambda: _refresh(here)), json=json))
    if has_problem(findings):
        raise typer.Exit(NeedsPerson.exit_code)


def _service(here: "SiteState") -> "ServiceStatus | None":
    from site_agent.gateway.service_requests import Status

    try:
        return ask_service(here, Status())
    except WardroundError:
        return None  # it holds the place and does not answer, which the doctor says


def _refresh(here: "SiteState") -> None:
    from site_agent.gateway.service_requests import Refresh

    if ask_service(here, Refresh()) is None:
        from site_agent.gateway.setup import handler_alone

        with handler_alone(here) as (handler, interrupt):
            handler.refresh(interrupt)
