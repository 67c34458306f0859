"""How a command gets its answer: from the running service, or, when none runs, in this process.

Without a service, the command takes the state directory's lock for as long as it needs.
"""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from wardround.errors import NeedsPerson, TryAgain, Unavailable
from wardround.local.directory import quoted

if TYPE_CHECKING:
    from coordinator.answers import Answer
    from coordinator.journal_records import Proposed
    from coordinator.requests import Request

ANSWER_S = 120
A = TypeVar("A", bound="Answer")
Progress = Callable[[object], None]  # gets plain JSON, as it comes over the control socket


def ask(
    state: Path,
    request: "Request",
    answer: type[A],
    *,
    progress: Progress = lambda item: None,
    timeout_s: float | None = ANSWER_S,
) -> A:
    """Ask the running service; when none runs, do the same here.

    Args:
        answer: what the request is answered with.
        progress: called with each progress item.
        timeout_s: how long the service may take; None for as long as it runs.

    Raises:
        NeedsPerson: there is no coordinator at ``state``.
        Waits: the command waits for a second person, and did nothing.
        Unavailable: the service does not answer, or does not run and ``request`` needs it.
        WardroundError: what the command itself raises.
    """
    from coordinator.requests import FollowStudy
    from wardround.local import control, directory
    from wardround.local.person import who

    request = request.model_copy(update={"by": who()})
    socket = state / "control.sock"
    directory.refuse_other(state, "coordinator")  # a site's agent that runs there would answer

    def from_service() -> A:
        return _answered(control.call(socket, request.to_document(), progress, timeout_s=timeout_s), answer)

    if control.serves(state, socket):
        return from_service()
    refuse_no_coordinator(state)
    if isinstance(request, FollowStudy):
        raise Unavailable(
            f"the coordinator at {state} does not run", hint=f"`coordinator serve --state {quoted(state)}`"
        )
    try:
        return _answered(_answer_here(state, request, progress), answer)
    except TryAgain:
        if not control.serves(state, socket):  # else it has just been started, and took the lock meanwhile
            raise
        return from_service()


def _answered(document: object, answer: type[A]) -> A:
    """Raises Waits: a second person must give the command too."""
    from coordinator.journal_records import Proposed

    if isinstance(document, dict) and document.keys() == Proposed.model_fields.keys():
        raise waits(Proposed.from_document(document))
    return answer.from_document(document)


class Waits(NeedsPerson):
    """The command is a proposal, and did nothing."""


def waits(proposed: "Proposed") -> Waits:
    """What the first person is told: that nothing is done, and what the second person types."""
    beside = f"; {proposed.beside}" if proposed.beside else ""
    return Waits(
        f"{proposed.what}: proposed by {proposed.by} in line {proposed.proposal} of the journal{beside}; nothing is "
        "done before a second person gives it too",
        hint=f"until {proposed.until}, somebody with another login gives the same command: "
        f"`{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
    )


def refuse_no_coordinator(state: Path) -> None:
    """Raises NeedsPerson: there is no coordinator at ``state``, or this user may not look."""
    from wardround.local import directory

    directory.refuse_other(state, "coordinator")
    if not directory.exists(state / directory.COORDINATOR):
        raise NeedsPerson(
            f"{state} holds no coordinator",
            hint=f"make one: `coordinator init --state {quoted(state)} --federation NAME --address HOST:PORT`",
        )


def _answer_here(state: Path, request: "Request", progress: Progress) -> object:
    from coordinator.administration import Administration
    from coordinator.context import Context, raise_fatal
    from coordinator.state_directory import State
    from wardround.local.durable import StateLock

    with StateLock(state, f"coordinator {request.command}"):
        context = Context(State(state), wall_clock=time.time, monotonic=time.monotonic, fatal=raise_fatal)
        try:
            return Administration(context).run(request.to_document(), progress)
        finally:
            context.close()
