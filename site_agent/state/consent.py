"""What a person was shown and approved: `previews/STUDY.json` and `consents/STUDY.json`."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field

from site_agent.state import codec
from site_agent.state.codec import STRICT
from site_agent.state.journal import Journal
from site_agent.state.offer import StudyDocument, plugins_in, reported_of, rounds_of
from site_agent.state.person import KnownPerson, Person
from site_agent.state.tensors import Specs
from wardround.records.plugins import Plugin
from wardround.records.study import ReportedSection
from wardround.records.trainer import ApprovedData, FilesStatus, PrivateTensor

APPROVED: Final = "approved"
WITHDRAWN: Final = "withdrawn"
DATA_CHANGED = "DECLINED_DATA_CHANGED"
OWN_MODEL = "this site's own model"  # where the trainer gives no other words for it
Exposure = Literal["", "coordinator", "sites"]  # who else has a model of this site alone


def _with_rounds(document: StudyDocument) -> StudyDocument:
    study = document.get("study")
    if not (isinstance(study, dict) and type(study.get("rounds")) is int):
        raise ValueError("settings without the study's rounds")
    return document


@dataclass(frozen=True)
class Shown:
    """An account of a study as a person was shown it: its digest, when, and its lines."""

    digest: str
    study_digest: str
    revision: int
    at: str
    lines: dict[str, str]

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class TrainedData:
    """What is trained on, by the name in `data add` and by digests.

    Attributes:
        network: the label of the network that this site trains; "" where the study has one.
        common: the digest of the study's public data set; "" where it has none.
        weights: the digest of the file that the private tensors begin with; "" where there is none.
    """

    name: str
    digest: str
    network: str = ""
    common: str = ""
    weights: str = ""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Consent:
    """What a person approved: one exact study, the exact tensors and numbers of an update, and one set of data.

    Attributes:
        upload, download: the tensors of every update, and those that a round begins with.
        private: what the installed model keeps here.
        exposure: who else has a model of this site alone; ``personalized`` is what that is, in words.
        document: the resolved study, as it was when it was approved: perhaps by an older release.
        attempts: how often each of its rounds may be asked for.
        files: how the data's files lay there when they were read for the approval.
        averages: whether the next model is the last one and the mean of the updates, so that a sum gives its bits.
        also_by: who approved exactly this before ``approved_by`` did, where the policy wants more than one person.
    """

    study: str
    revision: int
    study_digest: str
    upload: Annotated[Specs, Field(alias="leaves")]
    metrics: tuple[str, ...]
    counts: str
    private: Annotated[tuple[PrivateTensor, ...], Field(alias="stays")]
    data: TrainedData
    rows: int
    validation_rows: int
    approved_by: KnownPerson
    approved_at: str
    state: Literal["approved", "withdrawn"]
    download: Annotated[Specs, Field(alias="comes")]
    exposure: Exposure
    personalized: Annotated[str, Field(alias="apart")]
    document: Annotated[StudyDocument, AfterValidator(_with_rounds)]
    attempts: int
    account: Shown
    files: Annotated[FilesStatus, Field(alias="seen")]
    withdrawn_by: KnownPerson | None = None
    withdrawn_at: str = ""
    also_by: tuple[KnownPerson, ...] = ()
    averages: bool = False

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def to_bytes(self) -> bytes:
        """The bytes of its file."""
        return codec.to_bytes(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of its file: another each time that somebody approves."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def people(self) -> tuple[Person, ...]:
        """Everyone who approved it, each once."""
        return (*self.also_by, self.approved_by)

    @property
    def rounds(self) -> int:
        """How many rounds were approved; one more, the closing one, may ask for numbers."""
        return rounds_of(self.document)

    @cached_property
    def reported(self) -> ReportedSection:
        """Which numbers go with an update, and how exactly. Raises BadData: this release does not know their form."""
        return reported_of(self.document, self.study)

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Whose code may run for it besides ours. Raises BadData: as ``reported``."""
        return plugins_in(self.document)

    @property
    def evaluates(self) -> bool:
        """Whether nothing was approved but to judge models: no tensor may leave, so nothing is trained."""
        return not self.upload

    @property
    def approved_data(self) -> ApprovedData:
        """What is trained on, as the trainer is told of it."""
        data = self.data
        return ApprovedData(name=data.name, digest=data.digest, network=data.network, weights=data.weights)

    @property
    def is_secure(self) -> bool:
        """Whether updates leave with masks alone."""
        return self.document.get("secure_aggregation") is not None

    @property
    def train_rows(self) -> int:
        """The rows that a study trains on: all but those that it validates with. The data's digest pins both."""
        return self.rows - self.validation_rows


@dataclass(frozen=True)
class Endorsement:
    """What some people approved who are not enough by the policy: nothing of it is in force.

    Attributes:
        account: the digest of the account that each was shown. data: what each approved it for.
        by: who, in their order.
    """

    account: str
    data: TrainedData
    by: tuple[KnownPerson, ...]

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def is_of(self, consent: Consent) -> bool:
        """Whether they approved exactly what ``consent`` is of."""
        return (self.account, self.data) == (consent.account.digest, consent.data)


def data_changed(consent: Consent, journal: Journal) -> bool:
    """Whether the last assignment was declined because what would be trained on is not what was approved, and nobody
    has approved since.
    """
    return journal.declined == DATA_CHANGED and consent.approved_at <= journal.declined_at


def exposed(exposure: str, personalized: str = "") -> str:
    """Who else has a model of this site alone, by the study's exposure.

    Args:
        personalized: what it is, in the trainer's words.
    """
    if not exposure:
        return "the coordinator keeps nothing that is this site's alone"
    kept = f"the coordinator keeps apart {personalized or OWN_MODEL}"
    return f"{kept}, and sends it to the other sites" if exposure == "sites" else kept
