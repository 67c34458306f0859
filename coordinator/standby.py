"""A coordinator that waits until it may lead: where several stand on one database, one serves and the others wait.

The one that waits listens on no port of the sites. Its commands are answered with where they are to be given.
"""

import logging
from collections.abc import Callable

from coordinator.context import leading_store
from coordinator.state_directory import State
from coordinator.storage.database import Store
from coordinator.storage.lease import LedByAnother
from wardround.errors import TryAgain, Unavailable
from wardround.local.control import ControlServer
from wardround.local.event import Latch

MOST_S, LEAST_S = 2.0, 0.2  # between two looks at the lease
log = logging.getLogger(__name__)


class Standby:
    """The commands' socket of a coordinator that waits, and what its operator is told."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._why = ""
        self._control: ControlServer | None = None

    def waits(self, why: str) -> None:
        """Say for what, if that is new, and answer commands with it."""
        if why == self._why:
            return
        self._why = why
        if self._control is None:
            self._control = ControlServer(self._state.control, self._refuse)
        log.warning("standby, waiting: %s", why)
        print(f"standby, waiting: {why}", flush=True)

    def _refuse(self, request: object, progress: object) -> object:
        raise TryAgain(f"this coordinator is a standby and waits: {self._why}", hint="give the command there")

    def close(self) -> None:
        if self._control is not None:
            self._control.close()


def wait_to_lead(state: State, ended: Latch, fatal: Callable[[BaseException], None]) -> Store | None:
    """The database, as soon as this process leads on it; None where ``ended`` was set before.

    A server that cannot be reached is waited for too.

    Raises:
        NeedsPerson: the database is damaged or of another version.
        NotPermitted: the server lets this user not in.
    """
    storage = state.config().storage
    if not storage.database:
        return leading_store(state, fatal)
    look_s = min(MOST_S, max(LEAST_S, storage.lease_s / 10))
    standby = Standby(state)
    try:
        while not ended.is_set():
            try:
                return leading_store(state, fatal)
            except LedByAnother as led:
                standby.waits(f"the coordinator of {led.holder} leads")
            except (TryAgain, Unavailable) as error:
                standby.waits(error.message)
            ended.wait(look_s)
    finally:
        standby.close()
    return None
