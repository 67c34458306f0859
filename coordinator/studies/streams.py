"""What is sent to connected sites, and told to commands that follow a study; a thread waits at the other end of each.

Only the thread that owns the studies changes who is connected.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.studies.study import Study
from wardround.records.assignment import Assignment
from wardround.records.event import CertificateFork, Goodbye
from wardround.records.secure_messages import SecureShown


class End:
    """Nothing more comes on this stream."""


END = End()
Message = Study | Assignment | SecureShown | CertificateFork | Goodbye  # of a study, what is offered when it is sent
Item = Message | End


@dataclass
class Stream:
    """What goes to one connected site, in order. A thread waits at the other end."""

    _items: "queue.SimpleQueue[Item]" = field(default_factory=queue.SimpleQueue)

    def put(self, item: Message) -> None:
        self._items.put(item)

    def goodbye(self) -> None:
        """The coordinator goes down."""
        self._items.put(Goodbye())

    def end(self) -> None:
        """The site connected again elsewhere, or its connection broke."""
        self._items.put(END)

    def get(self) -> Item:
        """The next item; waits for it."""
        return self._items.get()


class Changes:
    """What a follower of a study is told: that something changed, and that the service goes down."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._changed = False
        self._ended = False

    def tell(self) -> None:
        """Something changed. Changes that the follower has not looked at are one."""
        with self._told:
            self._changed = True
            self._told.notify_all()

    def end(self) -> None:
        """The service goes down."""
        with self._told:
            self._ended = True
            self._told.notify_all()

    def wait(self, rest_s: float = 0.0, timeout_s: float | None = None) -> bool:
        """Rest, then wait for a change, unless there was one meanwhile. False: the service goes down.

        Raises:
            TimeoutError: there was none in ``timeout_s`` after the rest.
        """
        with self._told:
            self._told.wait_for(lambda: self._ended, rest_s)
            if not self._told.wait_for(lambda: self._changed or self._ended, timeout_s):
                raise TimeoutError
            self._changed = False
            return not self._ended


class Streams:
    """The streams of the connected sites, one a site, and the queues of those who follow a study."""

    def __init__(self) -> None:
        self._of_sites: dict[str, Stream] = {}
        self._followers: list[tuple[str, Changes]] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self._of_sites)

    def __len__(self) -> int:
        """Of sites and followers."""
        return len(self._of_sites) + len(self._followers)

    def open(self, site: str, stream: Stream) -> None:
        """From now on a site is sent to by ``stream``; one that it had before ends."""
        if old := self._of_sites.get(site):
            old.end()
        self._of_sites[site] = stream
        self.tell_followers("")

    def close(self, site: str, stream: Stream) -> None:
        if self._of_sites.get(site) is stream:
            del self._of_sites[site]
            self.tell_followers("")

    def push(self, site: str, item: Message | None) -> None:
        """Send something to a site, if it is connected."""
        if item is not None and (stream := self._of_sites.get(site)):
            stream.put(item)

    def follow(self, study: str) -> Changes:
        """Where the changes of a study are told from now on; of "", those of all studies and of who is connected."""
        changes = Changes()
        self._followers.append((study, changes))
        return changes

    def unfollow(self, changes: Changes) -> None:
        self._followers = [pair for pair in self._followers if pair[1] is not changes]

    def tell_followers(self, study: str) -> None:
        for followed, changes in self._followers:
            if followed in ("", study):
                changes.tell()

    def say_goodbye(self) -> None:
        """Tell everyone that the service goes down."""
        for stream in self._of_sites.values():
            stream.goodbye()
        for _, changes in self._followers:
            changes.end()
