"""The worker that makes the studies' next models, one after the other, and lets each study know.

Where the disk is full it waits for room, where the database is away for that, and goes on by itself; the updates and
the newest model stay as they are.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.conclusion import Conclusion, conclude
from coordinator.studies.state import Round
from coordinator.studies.study import Study
from wardround.errors import CannotWrite, TryAgain
from wardround.local import traces
from wardround.local.durable import StorageFailed

LATER_S = 5.0  # after which what did not fit on the disk is tried again
_ADVICE = {True: ", free some space", False: ""}
log = logging.getLogger(__name__)


class Aggregations:
    """Aggregations of one coordinator.

    Args:
        is_wanted: whether a study still waits for the aggregation of a round.
        concluded: lets a study know how it ended.
        fatal: called with an error after which the process must end, a failed disk.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        *,
        is_wanted: Callable[[Study, Round], bool],
        concluded: Callable[[Study, Round, Conclusion], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._store, self._blobs = store, blobs
        self._is_wanted, self._concluded, self._fatal = is_wanted, concluded, fatal
        self._stopping = threading.Event()
        self._workers: ThreadPoolExecutor | None = None

    def start(self) -> None:
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="aggregation")

    def stop(self) -> None:
        """Wait for the one under way; one that waits for room on the disk is done at the next start."""
        self._stopping.set()
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown()

    def submit(self, study: Study, current: Round) -> None:
        """Make the next model of a round's accepted updates. Without a running service the next start does it."""
        if workers := self._workers:
            workers.submit(self._aggregate, study, current)

    def _aggregate(self, study: Study, current: Round) -> None:
        try:
            while self._is_wanted(study, current):
                try:
                    with traces.span("aggregation", study.name, current.number):
                        end = conclude(self._store, self._blobs, study, current)
                    self._concluded(study, current, end)
                    return
                except StorageFailed:
                    raise
                except (CannotWrite, TryAgain) as error:
                    log.error(
                        "%s: round %d cannot be aggregated now: %s; trying again in %g s%s", study.name,
                        current.number, error.message, LATER_S, _ADVICE[isinstance(error, CannotWrite)],
                    )  # fmt: skip
                    if self._stopping.wait(LATER_S):
                        return
        except StorageFailed as error:
            self._fatal(error)
