"""The connection in use, which is replaced when the certificate is; and the pause before a call is tried again."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.meter import Meter
from wardround.errors import RefusedForGood, TryAgain, WardroundError

ENDED = "CERTIFICATE_EXPIRED"
MOST_TRIES = 4  # in a row, in which a channel does not reach the coordinator, before another takes its place
log = logging.getLogger(__name__)


class Session:
    """A site's connection to the coordinator, whichever certificate it has. Safe to use from several threads.

    Calls under way end on the old connection, new ones begin on the new one.

    Args:
        connect: makes a connection with the certificate that is valid now.
        renews: whether this site can renew a certificate that has ended, by itself.
    """

    def __init__(self, connect: Callable[[Meter], Connection], renews: Callable[[], bool] = lambda: False) -> None:
        self._renews = renews
        self.meter = Meter()
        self._connect = connect
        self._lock = threading.Lock()
        self._current = connect(self.meter)
        self._users: dict[Connection, int] = {self._current: 0}
        self._bytes_up = 0
        self._change = threading.Condition()
        self._times_connected = self._tries = 0

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """The connection to call on, which is not closed before the block ends.

        Raises:
            TryAgain: the block raised that the certificate has ended (the machine was suspended, or its clock was set),
                and the site can renew it.
        """
        with self._lock:
            connection = self._current
            self._users[connection] += 1
        try:
            yield connection
        except RefusedForGood as error:
            if error.code == ENDED and self._renews():
                raise TryAgain(error.message, hint="the agent renews it with the same key", code=ENDED) from None
            raise
        finally:
            with self._lock:
                self._users[connection] -= 1
            self._close_unused()

    def replace(self) -> None:
        """Connect anew: the certificate is another."""
        fresh = self._connect(self.meter)
        with self._lock:
            self._users[fresh] = 0
            self._current = fresh
        self._close_unused()

    @property
    def times_connected(self) -> int:
        """How often the coordinator was reached anew."""
        return self._times_connected

    def note_connected(self) -> None:
        """The coordinator was reached anew: whoever pauses goes on at once."""
        with self._change:
            self._times_connected, self._tries = self._times_connected + 1, 0
            self._change.notify_all()

    def note_unreachable(self) -> None:
        """The coordinator was not reached. After some tries a new channel takes the place of the present one.

        One was seen that was connected, and on which gRPC sent no call; it would be in use until the next renewal.
        """
        with self._change:
            self._tries += 1
            again = self._tries % MOST_TRIES == 0
        if again:
            try:
                self.replace()
            except (OSError, WardroundError) as error:  # the present one needs no file
                log.warning("the connection stays as it is: %s", error)

    def pause(self, seconds: float, times_connected: int, interrupt: Interrupt) -> None:
        """Wait before a call is tried again, or until the coordinator was reached anew.

        Args:
            times_connected: what it was when the call that failed began.

        Raises:
            Interrupted: the work was called off.
        """
        with interrupt.ending(self._wake), self._change:
            self._change.wait_for(lambda: interrupt.thrown or self._times_connected != times_connected, seconds)
        interrupt.check()

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def is_current(self, connection: Connection) -> bool:
        """Whether new calls would go this way. Once ``replace`` has returned, the old one is not."""
        with self._lock:
            return connection is self._current

    def bytes_up(self) -> int:
        """Payload bytes handed to gRPC since the beginning, over all connections."""
        with self._lock:
            return self._bytes_up + sum(connection.bytes_up for connection in self._users)

    def close(self) -> None:
        with self._lock:
            for connection in self._users:
                connection.close()

    def _close_unused(self) -> None:
        with self._lock:
            unused = [
                connection
                for connection, users in self._users.items()
                if users == 0 and connection is not self._current
            ]
            for connection in unused:
                self._bytes_up += connection.bytes_up
                del self._users[connection]
        for connection in unused:
            connection.close()
