"""How a trainer fails, and what becomes of it: an error of ours, whose sentences are shown as the trainer's own.

A trainer's codes are its own and no names of the coordinator's refusals; of a failure only the code may go further than
the hospital, and none ends the agent.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from wardround.errors import BY_EXIT_CODE, BadData, WardroundError
from wardround.records.trainer.fields import MOST_SHOWN, Strict
from wardround.terminal import escaped, quoted

TRAINING_FAILED = "DECLINED_TRAINING_FAILED"
LONGEST = 4 * 1024 * 1024  # bytes of one answer
CODES = {  # a trainer's code -> what of it may be said to the coordinator
    "": "",
    "data_changed": "DECLINED_DATA_CHANGED",
    "data_invalid": "DECLINED_DATA_INVALID",
    "model_mismatch": "DECLINED_MODEL_MISMATCH",
    "training_failed": TRAINING_FAILED,
    "resources": "DECLINED_RESOURCES",
}
EXIT_CODES = (64, 65, 70, 73, 75, 77, 78)
MAX_SENTENCE = 65536
_OWN = {declined: own for own, declined in CODES.items()}
Form = TypeVar("Form", bound=Strict)


class BrokenProtocol(BadData):
    """The trainer sent something that its protocol does not have."""


class Failure(Strict):
    """Why a request was not done. Its sentences may hold anything: they are escaped when they are shown."""

    message: Annotated[str, Field(min_length=1, max_length=MAX_SENTENCE)]
    hint: Annotated[str, Field(max_length=MAX_SENTENCE)]
    exit_code: Literal[64, 65, 70, 73, 75, 77, 78]
    code: Literal["", "data_changed", "data_invalid", "model_mismatch", "training_failed", "resources"]

    @classmethod
    def of(cls, error: WardroundError) -> "Failure":
        """A failure as a trainer sends it."""
        return cls.model_validate({
            "message": error.message[:MAX_SENTENCE] or "it failed without saying why",
            "hint": error.hint[:MAX_SENTENCE],
            "exit_code": error.exit_code if error.exit_code in EXIT_CODES else 70, "code": own_code(error),
        })  # fmt: skip

    @classmethod
    def from_document(cls, document: Any) -> "Failure":
        """Raises BrokenProtocol: it has another form."""
        return checked(cls, document, "its failure")

    def error(self) -> WardroundError:
        """The same as an error of ours: never one that ends the agent. Not yet ``marked``."""
        kind = BY_EXIT_CODE[self.exit_code]
        return kind(escaped(self.message, MOST_SHOWN), hint=escaped(self.hint, MOST_SHOWN), code=CODES[self.code])


def own_code(error: WardroundError) -> str:
    """The trainer's code for an error that has one of the coordinator's."""
    return _OWN.get(error.code, "training_failed" if error.code else "")


def broken(what: str) -> BrokenProtocol:
    """The failure of a trainer that sent ``what``."""
    return BrokenProtocol(
        f"the trainer broke its protocol: {what}",
        hint="gateway and trainer must be of the same release; if they are, do not trust this trainer",
        code=TRAINING_FAILED,
    )


def error_from(document: Any) -> WardroundError:
    """The error that a failure stands for, not yet ``marked``; ``BrokenProtocol`` if it has another form."""
    try:
        return Failure.from_document(document).error()
    except BrokenProtocol as error:
        return error


def marked(error: WardroundError) -> WardroundError:
    """A trainer's failure as people see it: its words are in quotation marks, so that nobody takes them for ours."""
    if isinstance(error, BrokenProtocol):
        return error
    hint = f"the trainer adds: {quoted(error.hint, MOST_SHOWN)}" if error.hint else ""
    return type(error)(f"the trainer says: {quoted(error.message, MOST_SHOWN)}", hint=hint, code=error.code)


def checked(form: type[Form], document: Any, what: str) -> Form:
    """``document`` as a ``form``.

    Raises:
        BrokenProtocol: it has another form; the message names ``what`` it is and the first field, never a value.
    """
    try:
        return form.model_validate(document)
    except ValidationError as error:
        raise broken(f"{what}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first field that a document has wrong, and how."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{quoted(place, 80)}: {first['type']}"
