"""What several commands need: the state directory, the running service if there is one, and fresh offers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.cli import say
from wardround.errors import TryAgain, Unavailable

if TYPE_CHECKING:
    from site_agent.gateway.commands import CommandHandler
    from site_agent.gateway.request_form import A, Request
    from site_agent.state.directory import SiteState
    from site_agent.state.offer import Offer
    from site_agent.state.site import Site

SERVICE_S = 600  # approving reads the table, perhaps after the round under way


def joined(state: Path) -> "tuple[SiteState, Site]":
    """Raises NeedsPerson: no site here, or one that left."""
    from site_agent.state.directory import SiteState

    here = SiteState(state)
    return here, here.site()


def kept(state: Path) -> list[Path]:
    """What no command writes onto: the state directory, and the data that has a name there."""
    from site_agent.trainer.data import sources

    return sources.protected(state)


def ask_service(
    here: "SiteState", request: "Request[A]", progress: Callable[[Any], Any] | None = None
) -> "A | None":  # fmt: skip
    """Ask the running service; None where none runs."""
    from wardround.local import control, liveness

    if not control.serves(here.root, here.control):
        return None
    answer = control.call(here.control, request.document(), progress, timeout_s=SERVICE_S, silent_s=liveness.SILENT_S)
    return request.answer_from(answer)


def ask_or_do(
    here: "SiteState",
    request: "Request[A]",
    do: "Callable[[CommandHandler], A]",
    progress: Callable[[Any], Any] | None = None,
) -> "A":
    """What the running service answers; where none runs, what ``do`` answers, with this site's state held."""
    answer = ask_service(here, request, progress)
    if answer is not None:
        return answer
    from site_agent.gateway.setup import handler_alone

    try:
        with handler_alone(here) as (handler, _interrupt):
            return do(handler)
    except TryAgain:
        if (answer := ask_service(here, request, progress)) is None:  # else it has just been started
            raise
        return answer


def refresh(here: "SiteState") -> None:
    """Bring the offers up to date. When the coordinator cannot be reached, say so and go on with what is known."""
    from site_agent.gateway.service_requests import Refresh

    try:
        if ask_service(here, Refresh()) is None:
            from site_agent.gateway.setup import handler_alone

            with handler_alone(here) as (handler, interrupt):
                handler.refresh(interrupt)
    except (Unavailable, TryAgain) as error:
        say(f"the coordinator cannot be reached now ({error.message}); this is its last answer")


def offered(here: "SiteState", study: str) -> "Offer":
    """Raises UsageProblem: the coordinator has offered no such study."""
    refresh(here)
    return here.offer(study)
