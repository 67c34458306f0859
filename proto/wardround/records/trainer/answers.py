"""What a trainer answers, and what it sends before: a class for each answer, in one strict form."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from wardround.records.checkpoints import CheckpointKind
from wardround.records.summaries.figures import ColumnFigures
from wardround.records.summaries.request import MOST_COLUMNS
from wardround.records.trainer.failures import checked
from wardround.records.trainer.fields import (
    MOST_TENSORS,
    Bundle,
    Count,
    Digest,
    Dtype,
    Isolation,
    Key,
    Measures,
    Metric,
    NetworkLabel,
    NoDigest,
    Place,
    Reported,
    Shape,
    Staged,
    Strict,
    TensorName,
    UserName,
    Value,
    Words,
)

MOST_FINDINGS = 500  # of one answer
SHOWN_LINES = 3  # of one finding


class Answer(Strict):
    """One answer. ``max_parts`` bounds how many values its JSON may hold."""

    max_parts: ClassVar[int] = 20_000

    def to_document(self) -> dict[str, Any]:
        """As it is sent."""
        return self.model_dump()


class TensorRow(Strict):
    """A tensor that is uploaded or downloaded."""

    bundle: Bundle
    name: TensorName
    dtype: Dtype
    shape: Shape
    bytes: Count


class PrivateTensor(Strict):
    """A tensor that never leaves the site, and why."""

    name: Words
    dtype: Dtype
    shape: Shape
    bytes: Count
    why: Words


class Weights(Strict):
    """What a file of weights gives to the private tensors.

    Attributes:
        used: how many of them begin with it.
        drawn: those that it lacks, which begin as the study's seed draws them.
        unused: the file's tensors that are shared in this study, or not in its network.
    """

    digest: Digest
    used: Count
    drawn: Annotated[list[Words], Field(max_length=MOST_TENSORS)]
    unused: Annotated[list[Words], Field(max_length=MOST_TENSORS)]


class Described(Answer):
    """Which tensors of a study this site would upload and download, and which are private.

    Attributes:
        exposure: who has a model of this site alone: nobody, the coordinator, or the other sites too.
        personalized: what of it they have, in words.
        network: the label of the one that this site trains; "" where the study has one.
        model: its name.
        weights: of the file that the data names; None where it names none, or no data was named.
        averages: whether the coordinator's next model is the last one and the mean of the updates, and nothing else.
    """

    max_parts: ClassVar[int] = 600_000  # a large network has many tensors

    upload: Annotated[list[TensorRow], Field(max_length=MOST_TENSORS)]
    download: Annotated[list[TensorRow], Field(max_length=MOST_TENSORS)]
    private: Annotated[list[PrivateTensor], Field(max_length=MOST_TENSORS)]
    exposure: Literal["", "coordinator", "sites"]
    personalized: Words
    network: NetworkLabel
    model: Words
    parameters: Count
    weights: Weights | None
    averages: bool = False


class Inspected(Answer):
    """What data holds, without a study. ``rows`` is None where only a plug-in can tell, ``columns`` of images,
    ``patients`` where no column names them; of images, ``forms`` says of their kind, modality, size and spacing how
    often each is there.
    """

    digest: Digest
    rows: Count | None
    test_rows: Count | None
    columns: Count | None
    patients: Count | None
    forms: dict[str, dict[str, Count]] = Field(default_factory=dict)
    weights: NoDigest


class FilesStatus(Strict):
    """Digests over size, time and inode of the data's files, and of the weights' ("" where none are named)."""

    data: Digest
    weights: NoDigest


class FilesStat(Answer):
    """How the files lie there now. ``missing`` and ``unreadable`` are keys of data.toml, ``bytes`` of the data."""

    status: FilesStatus
    bytes: Count
    missing: Annotated[list[Key], Field(max_length=10_000)]
    unreadable: Annotated[list[Key], Field(max_length=10_000)]


class FileDigests(Answer):
    """Digests over every byte of the data, and of the weights ("" where none are named)."""

    data: Digest
    weights: NoDigest


class Checked(Answer):
    """What a study makes of the data.

    Attributes:
        gives: what the study's task gives to a network.
        classes: how many rows are of each class; of masks, how many have a pixel of it.
        common: the digest of the study's common set, "" where it has none.
        status: how the files lay there just before they were read.
    """

    digest: Digest
    rows: Count
    train_rows: Count
    validation_rows: Count
    test_rows: Count | None
    gives: Literal["columns", "masks", "images"]
    classes: Annotated[dict[Words, Count], Field(max_length=10_000)]
    common: NoDigest
    weights: Weights | None
    warnings: Annotated[list[Words], Field(max_length=100)]
    status: FilesStatus


class Finding(Strict):
    """One thing of a site's data that does not fit a study, or that a person should know. Holds no value.

    Attributes:
        file: the file's name, without its folder.
        column: as the study calls it; "" of a thing that concerns the whole file.
        here: what this site calls it, where that differs.
        rows: in how many rows it is so; None where it is no number of rows.
        lines: the first of them.
    """

    file: Words
    column: Words
    here: Words
    what: Words
    rows: Count | None
    lines: Annotated[list[Count], Field(max_length=SHOWN_LINES)]
    hint: Words


class Examined(Answer):
    """All of the data that does not fit, or what the study makes of it.

    Attributes:
        findings: what does not fit.
        more: how many findings there are beyond those that are sent.
        checked: None where the data does not fit.
    """

    findings: Annotated[list[Finding], Field(max_length=MOST_FINDINGS)]
    more: Count
    checked: Checked | None


class Summarized(Answer):
    """The figures of a table for a summary request, in its order; the gateway looks at each before anything leaves.

    Attributes:
        sources: this site's name of each column that the request reads, the ends of dates among them; "" where it has
            none. After them, what else of this site's was read for these, by its mapping.
        notes: what a person should know before.
    """

    rows: Count
    columns: Annotated[list[ColumnFigures], Field(max_length=MOST_COLUMNS)]
    sources: Annotated[list[Place], Field(max_length=4 * MOST_COLUMNS)]
    notes: Annotated[list[Words], Field(max_length=1024)]


class Drafted(Answer):
    """A mapping was written: of how many columns, how many need none, and how many a person must fill in."""

    out: Place
    columns: Count
    as_they_are: Count
    open: Count


class Validated(Answer):
    """The numbers of a round, in the form that the study says.

    ``own_loss``: the downloaded model's, on this site's validation rows, exactly; "" where there are none. It stays.
    """

    num_examples: Reported
    num_validation: Reported
    metrics: Annotated[dict[Metric, Value], Field(max_length=64)]
    own_loss: Value = ""


class Trained(Validated):
    """The same, and the name of the file of deltas in the staging folder."""

    update: Staged


class Checkpoint(Strict):
    """A kept model, with its scores on this site's own data."""

    kind: CheckpointKind
    round: Count
    score: float | None
    metric: Words
    split: Words
    val_loss: float | None
    path: Place
    digest: Digest
    why: Words = ""


class Checkpoints(Answer):
    """The kept models of a study."""

    checkpoints: Annotated[list[Checkpoint], Field(max_length=16)]


class Exported(Answer):
    """The files that were written."""

    files: Annotated[list[Place], Field(max_length=16)]


class Predicted(Answer):
    """How many rows were predicted, where they were written, and what they rest on."""

    rows: Count
    out: Place
    notes: Annotated[list[Words], Field(max_length=1024)] = Field(default_factory=list)


class Device(Answer):
    """What rounds are trained on."""

    device: Words


class Status(Answer):
    """What isolates the trainer, and who it runs as. ``worker`` is the process id of the warm worker, if there is one.

    ``missing`` has the measures of isolation that are not in force, by the names of ``trainer.isolation``.
    """

    isolation: Isolation
    missing: Measures
    user: UserName
    uid: Count
    worker: Count | None
    device: Words


class Done(Answer):
    """It was done, and there is nothing to say of it."""


class Alive(Strict):
    """Every few seconds while a request lasts: the worker is not stopped, and not hung."""

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Raises BrokenProtocol: it has another form."""
        return checked(cls, document, "its beat")


class Hello(Strict):
    """What a worker sends first: what isolates it, and the measures that are not in force."""

    isolation: Isolation
    missing: Measures

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Raises BrokenProtocol: it has another form."""
        return checked(cls, document, "its first words")


class Progress(Strict):
    """How far a round's training is."""

    step: Count
    steps: Count

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Raises BrokenProtocol: it has another form."""
        return checked(cls, document, "its progress")
