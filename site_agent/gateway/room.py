"""A round waits a while for room on the hospital's disk, before it is declined."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.interrupt import Interrupt
from wardround.errors import CannotWrite
from wardround.local.durable import StorageFailed
from wardround.local.rate_limit import RateLimitedLog

ROOM_S = 300  # of a deadline that is an hour by default; a study that needs every site pauses when one declines twice
LONGEST_S = 20  # between two tries
T = TypeVar("T")
log = RateLimitedLog(logging.getLogger(__name__))


def with_room(act: Callable[[], T], what: str, interrupt: Interrupt) -> T:
    """What ``act`` returns. While the disk takes nothing it is done again, and the log says so; ``act`` goes on where
    it was, or begins anew.

    Args:
        what: is done, for the log.

    Raises:
        CannotWrite: there was no room for ``ROOM_S``, or the disk failed so that a retry proves nothing.
        Interrupted: it was called off meanwhile.
    """
    until, waits = 0.0, backoff(longest_s=LONGEST_S)
    while True:
        try:
            return act()
        except CannotWrite as error:
            until = until or time.monotonic() + ROOM_S
            if isinstance(error, StorageFailed) or time.monotonic() >= until:
                raise
            log.warning("%s waits for the disk: %s", what, f"{error.message}; {error.hint}".removesuffix("; "))
            interrupt.wait(next(waits))
