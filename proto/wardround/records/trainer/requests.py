"""What the gateway, or a command, asks of the trainer. A request's class names the class of its answer.

describe          Described     which tensors of a study this site would upload, download and keep
inspect           Inspected     what data holds, without a study
check             Checked       what a study makes of the data
examine           Examined      all of the data that does not fit a study, or as check
summarize         Summarized    the figures of a site's table that may be told outside, before there is a study
draft_mapping     Drafted       how a site's table becomes a study's, for a person to edit
draft_summary_mapping Drafted   the same for a summary request
stat_files        FilesStat     how the data's files lie there now; reads no patient
hash_files        FileDigests   the digests of the data's files now
train             Trained       one round; ``Progress`` while it lasts
validate          Validated     the closing round: numbers alone
commit, discard   Done          what became of a round's update
finish            Done          the study has ended
list_checkpoints  Checkpoints   export    Exported      predict   Predicted      write_program  Exported
device            Device        status    Status        abort     Done
"""

from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from wardround.errors import BadData, TryAgain
from wardround.records.trainer.answers import (
    Answer,
    Checked,
    Checkpoints,
    Described,
    Device,
    Done,
    Drafted,
    Examined,
    Exported,
    FileDigests,
    FilesStat,
    Inspected,
    Predicted,
    Status,
    Summarized,
    Trained,
    Validated,
)
from wardround.records.trainer.failures import TRAINING_FAILED, checked, first_fault
from wardround.records.trainer.fields import Count, Digest, Name, NetworkLabel, NoDigest, Path, SiteName, Staged, Strict
from wardround.terminal import quoted

A = TypeVar("A", bound=Answer, covariant=True)
StudyDocument = dict[str, JsonValue]  # the resolved study's; whether it is one is for ``records.study`` to say
Rounds = Annotated[dict[SiteName, list[Count]], Field(max_length=10_000)]


class Request(Strict, Generic[A]):
    """One request, whose answer is an ``A``. Making one raises BadData: a field is not of its form."""

    command: str

    if not TYPE_CHECKING:  # where types are checked, a request is made of its fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                command = type(self).model_fields["command"].default
                raise BadData(f"not a request `{command}` to the trainer: {first_fault(error)}") from None

    @classmethod
    def answer_class(cls) -> type[A]:
        """``A`` itself."""
        arguments = (base.__pydantic_generic_metadata__["args"] for base in cls.__mro__ if issubclass(base, Request))
        answer: type[A] = next(given for given in arguments if given)[0]
        return answer

    def answer_from(self, document: Any) -> A:
        """The answer to this request.

        Raises:
            BrokenProtocol: it is none.
        """
        return checked(self.answer_class(), document, f"its answer to `{self.command}`")

    def to_document(self) -> dict[str, Any]:
        """As it is sent."""
        return self.model_dump()


class ApprovedData(Strict):
    """What a person approved that is trained on. ``network`` and ``weights`` are "" where there is no choice."""

    name: Name
    digest: Digest
    network: NetworkLabel = ""
    weights: NoDigest = ""


class DataFiles(Strict):
    """Where data lies, and the columns of this site's tables: the keys of data.toml that say so."""

    table: Path | None = None
    test: Path | None = None
    arrays: Path | None = None
    test_arrays: Path | None = None
    images: Path | None = None
    labels: Path | None = None
    masks: Path | None = None
    test_images: Path | None = None
    test_labels: Path | None = None
    test_masks: Path | None = None
    files: Path | None = None
    test_files: Path | None = None
    mapping: Path | None = None
    label: Name = ""
    image: Name = ""
    patient: Name = ""
    weights: Path | None = None


class OfStudy(Strict):
    """Which study, at which site, on which approved data."""

    study: StudyDocument
    revision: Count
    study_digest: Digest
    site: SiteName
    data: ApprovedData


class OfRound(OfStudy):
    """Which round, and the model that it begins with: a file in the staging folder, and its manifest's digest."""

    round: Count
    base: Staged
    base_digest: Digest


class Describe(Request[Described]):
    """Needs torch and reads no patient. ``data`` is a name, "" for what the study assigns to this site."""

    command: Literal["describe"] = "describe"
    study: StudyDocument
    site: SiteName
    data: Name = ""


class Inspect(Request[Inspected]):
    """Needs no study."""

    command: Literal["inspect"] = "inspect"
    files: DataFiles


class Check(Request[Checked]):
    """Reads the data called ``data`` as a study would."""

    command: Literal["check"] = "check"
    study: StudyDocument
    site: SiteName
    data: Name


class Examine(Request[Examined]):
    """Reads the data called ``data`` as a study would, to its end whatever does not fit."""

    command: Literal["examine"] = "examine"
    study: StudyDocument
    site: SiteName
    data: Name


class DraftMapping(Request[Drafted]):
    """Reads the table of the data called ``data``, and writes a mapping of it to ``out``, which must be new."""

    command: Literal["draft_mapping"] = "draft_mapping"
    study: StudyDocument
    site: SiteName
    data: Name
    out: Path


class Summarize(Request[Summarized]):
    """Reads the table of the data called ``data`` for a summary ``request``, a document.

    ``min_count`` and ``digits``: how coarsely numbers are told, by the policy.
    """

    command: Literal["summarize"] = "summarize"
    request: StudyDocument
    data: Name
    min_count: Count
    digits: Count


class DraftSummaryMapping(Request[Drafted]):
    """Reads the table of the data called ``data``, and writes a mapping of it for a summary ``request``, a document."""

    command: Literal["draft_summary_mapping"] = "draft_summary_mapping"
    request: StudyDocument
    data: Name
    out: Path


class StatFiles(Request[FilesStat]):
    """Looks at the status of the files of the data called ``data``."""

    command: Literal["stat_files"] = "stat_files"
    data: Name


class HashFiles(Request[FileDigests]):
    """Reads every byte of the data called ``data``."""

    command: Literal["hash_files"] = "hash_files"
    data: Name


class Train(OfRound, Request[Trained]):
    """Asked again before it is decided, it gives the same update."""

    command: Literal["train"] = "train"


class Validate(OfRound, Request[Validated]):
    """The closing round."""

    command: Literal["validate"] = "validate"


class Commit(Request[Done]):
    """The update of a round was accepted: the private state after it is current from here on."""

    command: Literal["commit"] = "commit"
    study: Name
    revision: Count
    round: Count


class Discard(Request[Done]):
    """The update of a round does not count: the private state after it is dropped."""

    command: Literal["discard"] = "discard"
    study: Name
    revision: Count
    round: Count


class BestModel(Strict):
    """The best global model: a file in the staging folder, and the round whose model it is."""

    round: Count
    file: Staged


class Finish(OfStudy, Request[Done]):
    """The study has ended.

    Attributes:
        best: None where the study keeps none.
        contributors, capped, left_out: by site the rounds to which it contributed, in which it counted for less than
            its rows, and in which its update was beyond the study's limits.
    """

    command: Literal["finish"] = "finish"
    best: BestModel | None
    contributors: Rounds = Field(default_factory=dict)
    capped: Rounds = Field(default_factory=dict)
    left_out: Rounds = Field(default_factory=dict)


class ListCheckpoints(Request[Checkpoints]):
    """The newest revision's."""

    command: Literal["list_checkpoints"] = "list_checkpoints"
    study: Name


class Export(Request[Exported]):
    """Copies a checkpoint into the folder ``out``. ``force``: replaces what is there."""

    command: Literal["export"] = "export"
    study: Name
    checkpoint: Name
    out: Path
    force: bool = False


class WriteProgram(Request[Exported]):
    """Writes a checkpoint's network as text into the folder ``out``, where ``Export`` has written its weights. Needs
    torch. ``onnx``: and as ONNX.
    """

    command: Literal["write_program"] = "write_program"
    study: Name
    checkpoint: Name
    out: Path
    onnx: bool = False
    force: bool = False


class Predict(Request[Predicted]):
    """Applies a checkpoint to the one of ``table``, ``images``, ``arrays`` and ``files`` that is given.

    Attributes:
        id: a column of the table that is written beside each prediction; "" for none.
    """

    command: Literal["predict"] = "predict"
    study: Name
    checkpoint: Name
    table: Path | None = None
    images: Path | None = None
    arrays: Path | None = None
    files: Path | None = None
    id: Name = ""
    out: Path
    force: bool = False


class GetDevice(Request[Device]):
    """What rounds are trained on."""

    command: Literal["device"] = "device"


class GetStatus(Request[Status]):
    """Answered by the listener itself."""

    command: Literal["status"] = "status"


class Abort(Request[Done]):
    """Ends the training or validation of one round at once, or takes it out of the queue. Of another, nothing."""

    command: Literal["abort"] = "abort"
    study_digest: Digest
    revision: Count
    round: Count


AnyRequest = (
    Describe | Inspect | Check | Examine | Summarize | DraftMapping | DraftSummaryMapping | StatFiles | HashFiles
    | Train | Validate | Commit | Discard | Finish | ListCheckpoints | Export | WriteProgram | Predict | GetDevice
    | GetStatus | Abort
)  # fmt: skip
_UNION: TypeAdapter[AnyRequest] = TypeAdapter(
    Annotated[AnyRequest, Field(discriminator="command")], config=ConfigDict(defer_build=True)
)
COMMANDS: dict[str, type[AnyRequest]] = {
    str(form.model_fields["command"].default): form for form in AnyRequest.__args__
}


def request_from(document: Any) -> AnyRequest:
    """The request that ``document`` is.

    Raises:
        TryAgain: this release knows no such request, or not in this form.
    """
    hint = "gateway and trainer must be of the same release; start both again"
    command = str(document.get("command")) if isinstance(document, dict) else ""
    if command not in COMMANDS:
        raise TryAgain(f"the trainer knows no request {quoted(command, 40)}", hint=hint, code=TRAINING_FAILED)
    try:
        return _UNION.validate_python(document)
    except BadData as error:
        raise TryAgain(error.message, hint=hint, code=TRAINING_FAILED) from None
