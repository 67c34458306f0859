"""Which running program of each site is connected: one at a time, and a copy of it is noticed.

An agent names itself with each connection by a random number that it draws when it starts. One that starts again is
another; one whose connection broke is the same. So where a program comes back whose place a younger one took, and the
younger one is still connected, two run with one identity: a copied machine, or two services on one state directory's
copy. The younger one stays; the older one is refused until the younger one has gone, or both would end each other's
connections without end.
"""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wardround.errors import TryAgain
from wardround.local.rate_limit import RateLimitedLog

MOST_REPLACED = 16  # of a site, remembered
log = RateLimitedLog(logging.getLogger(__name__))


class Instances:
    """The programs that are connected, by site. Safe to use from several threads. What it knows ends with the process.

    An instance is "" where an agent did not name itself; nothing is known of that one.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._connected: defaultdict[str, Counter[str]] = defaultdict(Counter)  # site -> instance -> its streams
        self._replaced: defaultdict[str, list[str]] = defaultdict(list)  # the newest last
        self._copied: dict[str, int] = {}

    def copied_since(self, site: str) -> int | None:
        """Since when two programs with a site's identity were seen (Unix time); None while there was one."""
        with self._lock:
            return self._copied.get(site)

    def refuse_copy(self, site: str, instance: str) -> None:
        """Refuse a program whose place a younger one took that is connected.

        Raises:
            TryAgain: SITE_CONNECTED_TWICE.
        """
        with self._lock:
            if not instance or instance not in self._replaced[site] or not self._others(site, instance):
                return
            self._copied.setdefault(site, int(self._wall_clock()))
        log.warning(
            "site %s: two programs run with its identity: this machine, or its state directory, was copied; the one "
            "that connected last is served, and the other one is refused", site,
        )  # fmt: skip
        raise TryAgain(
            f"another program with the identity of site `{site}` is connected",
            hint="was the machine copied? stop one of the two",
            code="SITE_CONNECTED_TWICE",
        )

    @contextmanager
    def connected(self, site: str, instance: str) -> Iterator[None]:
        """While the block lasts it is connected, in the place of any other. Raises as ``refuse_copy``."""
        self.refuse_copy(site, instance)
        with self._lock:
            replaced = [*self._replaced[site], *self._others(site, instance)]
            self._replaced[site] = [known for known in replaced if known != instance][-MOST_REPLACED:]
            self._connected[site][instance] += 1
        try:
            yield
        finally:
            with self._lock:
                self._connected[site][instance] -= 1
                if not self._connected[site][instance]:
                    del self._connected[site][instance]

    def _others(self, site: str, instance: str) -> list[str]:
        return [other for other in self._connected[site] if other not in ("", instance)]
