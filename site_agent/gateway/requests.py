"""What a command asks of the running service over `control.sock`, and what it answers: a class for each.

status    ServiceStatus    whether the coordinator is reached, and as which user the service runs
refresh   Done             ask the coordinator for its studies
receipts  Receipts         ask the coordinator for its copy of this site's receipts
preview   Preview          the account of a study
approve   Approved         approve exactly what was shown
withdraw  Withdrawn        take an approval back
fit       Fit              tell the coordinator whether data fits a study
summaries OfferedSummaries  the coordinator's summary requests
summary   ShownSummary     the figures that would leave for one of them
tell      Told             let exactly what was shown leave
waiting   Waiting          the update that waits for a person
decide    Decided          release or reject it
policy    PolicyPut        put another policy in force
proposed  Proposed         the change of the policy that waits for further people
take_back_policy Done      let it count no more
peers     ShownPeers       a study's members, and who of them is known to people here
know      Done             record that a member's key was compared with its people
forget    Done             take that back
check_sum ShownSum         look at blocks of a round's sum
leave     Left             end the membership
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import JsonValue, PlainSerializer, PlainValidator, ValidationError

from site_agent.gateway.consent.preview import Preview
from site_agent.gateway.peer_requests import CheckSum, ForgetPeer, GetPeers, KnowPeer
from site_agent.gateway.policy_requests import GetProposed, TakeBackPolicy
from site_agent.gateway.request_form import Answer, Request
from site_agent.gateway.service_requests import FetchReceipts, Refresh, Status
from site_agent.state import codec
from site_agent.state.person import KnownPerson
from wardround.errors import UsageProblem
from wardround.records.ledger.entries import TensorRow
from wardround.records.summaries.figures import ColumnFigures

ReleaseDecision = Literal["released", "rejected"]
MeasuredTensor = Annotated[TensorRow, PlainValidator(TensorRow.from_document), PlainSerializer(TensorRow.document)]


@dataclass(frozen=True)
class Approved(Answer):
    """``reported``: whether the coordinator was told already."""

    reported: bool
    rows: int
    study_digest: str
    exposure: str
    personalized: str


@dataclass(frozen=True)
class Withdrawn(Answer):
    """``reported``: whether the coordinator was told already."""

    reported: bool


@dataclass(frozen=True)
class PolicyPut(Answer):
    """The digest of the policy in force."""

    sha256: str


@dataclass(frozen=True)
class Fit(Answer):
    """What the coordinator was told of data: whether it fits, and its rows in the form of the study's counts."""

    fits: bool
    rows: int


@dataclass(frozen=True)
class OfferedSummary:
    """One of the coordinator's summary requests.

    Attributes:
        columns: how many it asks about.
        told: when figures for it left last; "" for never.
        request: all that it asks, plain JSON.
    """

    name: str
    title: str
    columns: int
    told: str
    request: dict[str, JsonValue]


@dataclass(frozen=True)
class OfferedSummaries(Answer):
    """Those that are open."""

    requests: tuple[OfferedSummary, ...]


def no_summary_request(name: str, known: Iterable[str]) -> UsageProblem:
    """The error where the coordinator has no summary request of that name for this site, but those of ``known``."""
    return UsageProblem(
        f"the coordinator has no summary request `{name[:64]}` here", hint=f"it has: {', '.join(known) or 'none'}"
    )


@dataclass(frozen=True)
class TellingColumn:
    """One column of a summary request, and what would be told of it.

    Attributes:
        here: what this site calls it; "" where it has none.
        until: to which other date a date is counted; "" of all else.
        words: what its rows are counted by, in the order of ``figures.categories``.
    """

    column: str
    kind: str
    here: str
    until: str
    words: tuple[str, ...]
    figures: ColumnFigures


@dataclass(frozen=True)
class ShownSummary(Answer):
    """All that would leave for one summary request.

    Attributes:
        digest: over all of it; a person lets exactly this leave.
        denied: what of it the policy does not let leave, and by which rule; "" where all of it may.
        before: of which of this site's columns figures have left already, and for which request and when.
        notes: what the trainer says a person should know.
    """

    request: str
    title: str
    data: str
    digest: str
    min_count: int
    rows: int
    columns: tuple[TellingColumn, ...]
    denied: str
    before: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Told(Answer):
    """How many numbers left."""

    numbers: int


@dataclass(frozen=True)
class Waiting(Answer):
    """All of an update that waits for a person: its tensors as the ledger will have them, and every number.

    Attributes:
        update: the digest over it, which a decision names.
        persons: how many different people must release it. endorsed: who would so far.
    """

    study: str
    revision: int
    round: int
    update: str
    tensors: tuple[MeasuredTensor, ...]
    payload_bytes: int
    metrics: dict[str, str]
    num_examples: int
    num_validation: int
    persons: int
    endorsed: tuple[str, ...]


@dataclass(frozen=True)
class Decided(Answer):
    """``goes_on``: whether the round goes on at once; else when the coordinator asks for it again."""

    goes_on: bool


@dataclass(frozen=True)
class Left(Answer):
    """``unreported``: the studies whose withdrawal the coordinator was not told."""

    unreported: tuple[str, ...]


@dataclass(frozen=True)
class GetPreview(Request[Preview]):
    """``data``: with the network and the weights of this data; "": as approved before, or as assigned."""

    command = "preview"

    study: str
    data: str


@dataclass(frozen=True)
class Approve(Request[Approved]):
    """``digest`` is that of the account that was shown."""

    command = "approve"

    study: str
    data: str
    digest: str
    by: KnownPerson


@dataclass(frozen=True)
class Withdraw(Request[Withdrawn]):
    """From here on nothing of the study leaves."""

    command = "withdraw"
    study: str
    by: KnownPerson


@dataclass(frozen=True)
class SendFit(Request[Fit]):
    """Exactly what was shown: of the study with this digest, whether data fits, and its rows. Fails where the
    coordinator is not reached."""

    command = "fit"
    study: str
    data: str
    digest: str
    fits: bool
    rows: int
    by: KnownPerson


@dataclass(frozen=True)
class ListSummaries(Request[OfferedSummaries]):
    """Fails where the coordinator is not reached."""

    command = "summaries"


@dataclass(frozen=True)
class GetSummary(Request[ShownSummary]):
    """Of the data called ``data``, for the summary request ``request``. Fails where the coordinator is not reached."""

    command = "summary"
    request: str
    data: str


@dataclass(frozen=True)
class TellSummary(Request[Told]):
    """``digest`` is of what was shown; ``again``: also of columns of which figures have left before."""

    command = "tell"
    request: str
    data: str
    digest: str
    again: bool
    by: KnownPerson


@dataclass(frozen=True)
class GetWaiting(Request[Waiting]):
    """Every tensor with its norms, and every number."""

    command = "waiting"
    study: str
    round: int


@dataclass(frozen=True)
class Decide(Request[Decided]):
    """``update`` is the digest of the update that was shown."""

    command = "decide"

    study: str
    round: int
    decision: ReleaseDecision
    update: str
    by: KnownPerson


@dataclass(frozen=True)
class PutPolicy(Request[PolicyPut]):
    """``text`` is the policy; ``before`` the digest of the one that the person saw, "" for none."""

    command = "policy"
    text: str
    before: str
    by: KnownPerson


@dataclass(frozen=True)
class Leave(Request[Left]):
    """Every study is withdrawn first."""

    command = "leave"
    by: KnownPerson


AnyRequest = (
    Status | Refresh | FetchReceipts | GetPreview | Approve | Withdraw | SendFit | ListSummaries | GetSummary
    | TellSummary | GetWaiting | Decide | PutPolicy | GetProposed | TakeBackPolicy | GetPeers | KnowPeer | ForgetPeer
    | CheckSum | Leave
)  # fmt: skip
REQUESTS: dict[str, type[AnyRequest]] = {kind.command: kind for kind in get_args(AnyRequest)}


def request_from(document: Mapping[str, Any]) -> AnyRequest:
    """The request of a command.

    Raises:
        UsageProblem: this release knows no such request, or not in this form.
    """
    command = document.get("command")
    kind = REQUESTS.get(command) if isinstance(command, str) else None
    if kind is None:
        raise UsageProblem(
            f"the running service knows no command {str(command)[:40]!r}", hint="is it of an older release?"
        )
    try:
        return codec.from_document(kind, {key: value for key, value in document.items() if key != "command"})
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors(include_url=False, include_input=False)[0]["loc"])
        raise UsageProblem(
            f"the request's `{field[:80]}` is missing, unknown, or not of its form",
            hint="the service and this command must be of the same release; start the service again",
        ) from None
