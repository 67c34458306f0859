"""A thread of the agent: run to its end, and its error is the agent's."""

import logging
from collections.abc import Callable

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.setup import as_needs_person, is_fatal
from site_agent.state.site import Site
from wardround.errors import RefusedForGood, WardroundError
from wardround.local import descriptors
from wardround.local.durable import StorageFailed

log = logging.getLogger(__name__)


def guarded(
    act: Callable[[], None], stopping: Interrupt, again: Callable[[], object], fail: Callable[[WardroundError], object],
    site: Site,
) -> None:  # fmt: skip
    """Run a thread's work, again after a moment without a file descriptor. ``fail`` gets an error that no retry helps.

    Args:
        again: is called before each further run: whoever was to do something may have been stopped by it.
    """
    name, waits = act.__name__.strip("_"), backoff()
    try:
        while _ran_out(act):
            log.error("this process has no file descriptor left; %s goes on when it has", name)
            stopping.wait(next(waits))
            again()
    except Interrupted:
        return
    except WardroundError as error:
        fail(as_needs_person(error, site) if is_fatal(error) else error)
    except Exception as error:
        log.exception("the agent's %s thread failed", name)
        fail(WardroundError(f"a fault in the program ended the agent: {type(error).__name__}"))


def _ran_out(act: Callable[[], None]) -> bool:
    """Whether a thread's work ended because there was no file descriptor; False when it is done."""
    try:
        act()
    except Exception as error:
        if isinstance(error, StorageFailed | RefusedForGood) or not descriptors.ran_out(error):
            raise
        return True
    return False
