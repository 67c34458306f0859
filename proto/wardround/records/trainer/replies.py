"""What a worker writes, one reply a line: who it is, how far it is, an answer, or why there is none."""

from dataclasses import dataclass
from typing import Any

from wardround.records.trainer.answers import Alive, Answer, Hello, Progress
from wardround.records.trainer.failures import Failure, broken
from wardround.terminal import quoted


@dataclass(frozen=True)
class Result:
    """An answer as it was sent: the request that it answers reads it, see ``Request.answer_from``."""

    document: object


Reply = Hello | Alive | Progress | Result | Failure


def reply_document(reply: Hello | Alive | Progress | Answer | Failure) -> dict[str, Any]:
    """A reply as it is sent: its kind, and what it holds."""
    match reply:
        case Hello():
            kind = "hello"
        case Alive():
            kind = "alive"
        case Progress():
            kind = "progress"
        case Failure():
            kind = "error"
        case Answer():
            kind = "result"
    return {kind: reply.model_dump()}


def reply_from(document: dict[str, Any]) -> Reply:
    """The reply that ``document`` is.

    Raises:
        BrokenProtocol: it is none.
    """
    if len(document) != 1:
        raise broken(f"a reply of {len(document)} kinds")
    [(kind, held)] = document.items()
    match kind:
        case "hello":
            return Hello.from_document(held)
        case "alive":
            return Alive.from_document(held)
        case "progress":
            return Progress.from_document(held)
        case "result":
            return Result(held)
        case "error":
            return Failure.from_document(held)
        case _:
            raise broken(f"a reply of kind {quoted(kind, 40)}")
