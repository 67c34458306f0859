"""What may be asked on the socket for readers: questions alone, for the dashboard, which is a process of its own.

A fault or an attack in a reader cannot change anything here: a request of another kind is refused before it is looked
at, whoever sends it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator import requests
from coordinator.answers import Answer, Changed
from coordinator.studies.engine import Engine
from wardround.errors import NotPermitted, Unavailable


@dataclass(frozen=True)
class Readers:
    """Where questions alone are answered, and to whom beside the service's user and root. ``uid``: None for nobody."""

    socket: Path
    uid: int | None = None

    @property
    def users(self) -> frozenset[int]:
        return frozenset({os.geteuid(), 0} | ({self.uid} if self.uid is not None else set()))

    @property
    def mode(self) -> int:
        """Of the socket: where somebody else reads, the kernel's word on who connects decides."""
        return 0o600 if self.uid is None else 0o666


READS = (
    requests.ListSites, requests.ListStudies, requests.ShowStatus, requests.ShowFits, requests.ShowReport,
    requests.WatchAll, requests.ListWaiting,
)  # fmt: skip
REST_S = 0.5  # at least, between two words to one reader
AGAIN_S = 30.0  # after which the same is said again: whoever went away is noticed
Handler = Callable[[Mapping[str, object], Callable[[object], None]], object]


def questions_alone(handler: Handler) -> Handler:
    """``handler`` for readers.

    Raises (when it is called):
        NotPermitted: the request is none of ``READS``.
    """

    def answer(document: Mapping[str, object], progress: Callable[[object], None]) -> object:
        request = requests.request_from(document)
        if not isinstance(request, READS):
            raise NotPermitted(
                f"a reader asked for `{request.command}`: on this socket questions alone are answered",
                hint="the commands speak to control.sock, as the service's user",
            )
        return handler(document, progress)

    return answer


def watch(engine: Engine, progress: Callable[[Changed], None]) -> Answer:
    """Say at first and after each change that something changed, until whoever watches goes away.

    ``times`` grows with each change; an item with the same number says that there was none.

    Raises:
        Unavailable: the service goes down.
    """
    changes, times = engine.follow(""), 0
    try:
        while True:
            progress(Changed(times=times))
            try:
                if not changes.wait(REST_S, AGAIN_S):
                    raise Unavailable("the service is shutting down")
                times += 1
            except TimeoutError:
                continue
    finally:
        engine.unfollow(changes)
