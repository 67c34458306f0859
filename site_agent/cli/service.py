"""What several commands need: the state directory, the running service if there is one, and fresh offers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.cli import say
from wardround.errors import TryAgain, Unavailable

if TYPE_CHECKING:
    from site_agent.state.directory import Offer, Site, SiteState

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


def ask_service(here: "SiteState", command: str, progress: Callable[[Any], Any] | None = None, **fields: Any) -> Any:
    """Ask the running service; None where none runs (its answers are never None)."""
    from wardround.local import control

    if not control.is_listening(here.control):
        return None
    return control.call(here.control, {**fields, "command": command}, progress, timeout_s=SERVICE_S)


def refresh(here: "SiteState") -> None:
    """Bring the offers up to date. When the coordinator cannot be reached, say so and go on with what is known."""
    try:
        if ask_service(here, "refresh") is None:
            from site_agent.gateway.commands import alone

            with alone(here) as (desk, interrupt):
                desk.refresh(interrupt)
    except (Unavailable, TryAgain) as error:
        say(f"the coordinator cannot be asked now ({error.message}); this is what it said before")


def offered(here: "SiteState", study: str) -> "Offer":
    """Raises UsageProblem: the coordinator has offered no such study."""
    refresh(here)
    return here.offer(study)
