"""What a trainer may say: every answer and every failure, in one strict form. With anything else it broke its protocol.

The trainer runs code of others over data of others, so that nothing it says is more than data here. Lengths, counts and
names are bounded; its failures have codes of their own, which are no words of the coordinator's; its sentences are
shown as its own, on one line, cut.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from wardround.errors import BY_EXIT_CODE, BadData, WardroundError
from wardround.terminal import escaped, is_plain, quoted

TRAINING_FAILED = "DECLINED_TRAINING_FAILED"
MOST_SAID = 400  # characters of a sentence of its
MAX_PARTS = {"describe": 600_000}  # values of one answer: a large network has many tensors
FEW_PARTS = 20_000
LONGEST = 4 * 1024 * 1024  # bytes of one answer
# Its codes, and what of it may be told to the coordinator.
CODES = {
    "": "",
    "data_changed": "DECLINED_DATA_CHANGED",
    "data_invalid": "DECLINED_DATA_INVALID",
    "model_mismatch": "DECLINED_MODEL_MISMATCH",
    "training_failed": TRAINING_FAILED,
    "resources": "DECLINED_RESOURCES",
}
_OWN = {told: own for own, told in CODES.items()}


def _plain(text: str) -> str:
    if not is_plain(text):
        raise ValueError("holds a control character")
    return text


_BIG = 2**53 - 1  # what every JSON reader keeps exactly
Count = Annotated[int, Field(ge=0, le=_BIG)]
Told = Annotated[int, Field(ge=-_BIG, le=_BIG)]  # whether it may leave is for the exit to say
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Words = Annotated[str, Field(max_length=65536), AfterValidator(lambda text: escaped(text, MOST_SAID))]  # prose, cut
Place = Annotated[str, Field(max_length=4096), AfterValidator(_plain)]
Shape = Annotated[list[Count], Field(max_length=16)]
Staged = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
Metric = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
Key = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
Value = Annotated[str, Field(max_length=40), AfterValidator(_plain)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


Form = TypeVar("Form", bound=_Strict)


class Leaf(_Strict):
    """A tensor that leaves or comes."""

    bundle: Annotated[str, Field(max_length=40), AfterValidator(_plain)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
    dtype: Annotated[str, Field(max_length=8), AfterValidator(_plain)]
    shape: Shape
    bytes: Count


class Stay(_Strict):
    """A tensor that stays, and why."""

    name: Words
    dtype: Annotated[str, Field(max_length=8), AfterValidator(_plain)]
    shape: Shape
    bytes: Count
    why: Words


class Weights(_Strict):
    """What a file of weights gives to the tensors that stay."""

    digest: Digest
    used: Count
    drawn: Annotated[list[Words], Field(max_length=20_000)]
    unused: Annotated[list[Words], Field(max_length=20_000)]


class Described(_Strict):
    """Of ``describe``."""

    leaves: Annotated[list[Leaf], Field(max_length=20_000)]
    comes: Annotated[list[Leaf], Field(max_length=20_000)]
    stays: Annotated[list[Stay], Field(max_length=20_000)]
    exposure: Literal["", "coordinator", "sites"]
    apart: Words
    network: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,40}$")]
    model: Words
    parameters: Count
    weights: Weights | None


class Inspected(_Strict):
    """Of ``inspect``."""

    digest: Digest
    rows: Count
    test_rows: Count | None
    columns: Count | None
    patients: Count | None
    weights: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Seen(_Strict):
    """Digests over the status of the data's files and of the weights'; "" where none are named."""

    data: Digest
    weights: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Looked(Seen):
    """Of ``look``. ``missing`` and ``unreadable`` are keys of data.toml."""

    bytes: Count
    missing: Annotated[list[Key], Field(max_length=10_000)]
    unreadable: Annotated[list[Key], Field(max_length=10_000)]


class Digests(_Strict):
    """Of ``digests``."""

    digest: Digest
    weights: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Checked(_Strict):
    """Of ``check``."""

    digest: Digest
    rows: Count
    train_rows: Count
    validation_rows: Count
    test_rows: Count | None = None
    gives: Literal["columns", "masks", "images", "classes", ""] = ""
    classes: Annotated[dict[Words, Count], Field(max_length=10_000)] = {}
    common: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    weights: Weights | None
    warnings: Annotated[list[Words], Field(max_length=100)]
    seen: Seen


class Validated(_Strict):
    """Of ``validate``."""

    num_examples: Told
    num_validation: Told
    metrics: Annotated[dict[Metric, Value], Field(max_length=64)]


class Trained(Validated):
    """Of ``train``. ``update`` is a file's name in the staging folder."""

    update: Staged


class Checkpoint(_Strict):
    """One row of ``checkpoints``."""

    kind: Literal["best_local", "fine_tuned", "latest", "best_global"]
    round: Count
    score: float | None
    metric: Words
    split: Words
    val_loss: float | None
    path: Place
    digest: Digest


class Checkpoints(_Strict):
    """Of ``checkpoints`` and ``finish``."""

    checkpoints: Annotated[list[Checkpoint], Field(max_length=16)]


class Exported(_Strict):
    """Of ``export``."""

    files: Annotated[list[Place], Field(max_length=16)]


class Predicted(_Strict):
    """Of ``predict``."""

    rows: Count
    out: Place


class Device(_Strict):
    """Of ``device``."""

    device: Words


class Hello(_Strict):
    """What a worker says first: what isolates it. The names of what is missing are ``trainer.isolation``'s."""

    isolation: Literal["network-namespace", "seccomp", "none"]
    missing: Annotated[list[Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]], Field(max_length=16)]
    pid: Count


class Status(_Strict):
    """Of ``status``."""

    isolation: Literal["network-namespace", "seccomp", "none"]
    missing: Annotated[list[Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]], Field(max_length=16)]
    user: Annotated[str, Field(max_length=64), AfterValidator(_plain)]
    uid: Count
    worker: Count | None
    device: Words


class Nothing(_Strict):
    """Of ``commit``, ``discard`` and ``abort``."""


class Progress(_Strict):
    """Of ``train``, while it lasts."""

    step: Count
    steps: Count


class Failure(_Strict):
    """Why a request was not done. Its sentences may hold anything: they are escaped when they are shown."""

    message: Annotated[str, Field(max_length=65536)]
    hint: Annotated[str, Field(max_length=65536)]
    exit_code: Literal[64, 65, 70, 73, 75, 77, 78]
    code: Literal["", "data_changed", "data_invalid", "model_mismatch", "training_failed", "resources"]


ANSWERS: dict[str, type[_Strict]] = {
    "describe": Described, "inspect": Inspected, "check": Checked, "look": Looked, "digests": Digests,
    "train": Trained, "validate": Validated,
    "commit": Nothing, "discard": Nothing, "abort": Nothing, "finish": Checkpoints, "checkpoints": Checkpoints,
    "export": Exported, "predict": Predicted, "device": Device, "status": Status,
}  # fmt: skip


class BrokenProtocol(BadData):
    """The trainer said something else than it may."""


def broken(what: str) -> BrokenProtocol:
    """The failure of such a trainer."""
    return BrokenProtocol(
        f"the trainer broke its protocol: {what}",
        hint="gateway and trainer must be of the same release; if they are, do not trust this trainer",
        code=TRAINING_FAILED,
    )


def answer(command: str, said: Any) -> dict[str, Any]:
    """The answer to ``command``, which has its form.

    Raises:
        BrokenProtocol: it has not.
    """
    if command not in ANSWERS:
        raise broken(f"an answer to {quoted(command, 40)}, which nobody may ask")
    return _checked(ANSWERS[command], said, f"its answer to `{command}`").model_dump()


def progress(said: Any) -> dict[str, int]:
    """Raises BrokenProtocol: it has not its form."""
    return _checked(Progress, said, "its progress").model_dump()


def hello(said: Any) -> Hello:
    """Raises BrokenProtocol: it has not its form."""
    return _checked(Hello, said, "its first words")


def failure(said: Any) -> WardroundError:
    """Its failure, as what it may be here: never one that ends the agent. Not yet marked as its words."""
    try:
        failed = _checked(Failure, said, "its failure")
    except BrokenProtocol as error:
        return error
    kind = BY_EXIT_CODE[failed.exit_code]
    return kind(escaped(failed.message, MOST_SAID), hint=escaped(failed.hint, MOST_SAID), code=CODES[failed.code])


def said(error: WardroundError) -> dict[str, Any]:
    """A failure as a trainer says it."""
    own = _OWN.get(error.code, "training_failed" if error.code else "")
    exit_code = error.exit_code if error.exit_code in (64, 65, 70, 73, 75, 77, 78) else 70
    return {"message": error.message[:65536], "hint": error.hint[:65536], "exit_code": exit_code, "code": own}


def marked(error: WardroundError) -> WardroundError:
    """A trainer's failure as people see it: its words are in quotation marks, so that nobody takes them for ours."""
    if isinstance(error, BrokenProtocol):
        return error
    hint = f"the trainer adds: {quoted(error.hint, MOST_SAID)}" if error.hint else ""
    return type(error)(f"the trainer says: {quoted(error.message, MOST_SAID)}", hint=hint, code=error.code)


def _checked(form: type[Form], said: Any, what: str) -> Form:
    try:
        return form.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise broken(f"{what}: {quoted(place, 80)}: {first['type']}") from None
