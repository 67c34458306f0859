"""The form of what a command and the running service say to each other: one JSON object each way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, get_args

from pydantic import ConfigDict

from site_agent.state import codec
from site_agent.state.codec import STRICT
from wardround.errors import BadData

if TYPE_CHECKING:
    from site_agent.gateway.consent.preview import Preview


class Answer:
    """An answer that is one JSON object of its fields."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def document(self) -> dict[str, Any]:
        return codec.to_document(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError: it is another answer."""
        return codec.from_document(cls, document)


@dataclass(frozen=True)
class Done(Answer):
    """It was done, and there is nothing to say of it."""


A = TypeVar("A", bound="Answer | Preview")


class Request(Generic[A]):
    """One request, whose answer is an ``A``."""

    command: ClassVar[str]
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def document(self) -> dict[str, Any]:
        return {**codec.to_document(self), "command": self.command}

    def answer_from(self, document: Mapping[str, Any]) -> A:
        """The service's answer.

        Raises:
            BadData: it is no answer to this request.
        """
        kind: Any = get_args(type(self).__orig_bases__[0])[0]  # type: ignore[attr-defined]
        try:
            answer: A = kind.from_document(document)
            return answer
        except (ValueError, KeyError, BadData):
            raise BadData(
                f"the running service's answer to `{self.command}` has not its form",
                hint="the service and this command must be of the same release; start the service again",
            ) from None
