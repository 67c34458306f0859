"""What the commands ask of the coordinator, one record for each command, and how it stands on the control socket.

A request is one JSON object: the name of its ``command`` and its fields. Light enough for a command's start: no gRPC,
no database, no numpy.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, JsonValue, PlainSerializer, ValidationError

from wardround.errors import UsageProblem
from wardround.local.person import Person
from wardround.records.schema import Strict

READ_SOCKET = "read.sock"  # in the state directory: where questions alone are answered
AskingPerson = Annotated[Person, BeforeValidator(Person.from_document), PlainSerializer(Person.document)]


class Request(Strict):
    """What all requests have in common. ``by``: the person who asks, as the command knows it."""

    command: str
    by: AskingPerson | None = None

    def to_document(self) -> dict[str, JsonValue]:
        """Plain JSON; ``request_from`` reads it."""
        return self.model_dump(mode="json")

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> Self:
        """What ``document`` gave, of this class.

        Raises:
            UsageProblem: a field is missing, of another type, or not known.
        """
        try:
            return cls.model_validate(document, strict=True)
        except ValidationError as error:
            raise _wrong_field(document, error) from None


class Invite(Request):
    """Make an invitation for ``site``, valid for ``expires_s`` seconds."""

    command: Literal["invite"] = "invite"
    site: str
    expires_s: int


class ListSites(Request):
    """List all sites."""

    command: Literal["sites"] = "sites"


class Revoke(Request):
    """Refuse ``site`` from now on."""

    command: Literal["revoke"] = "revoke"
    site: str


class ShowAuthority(Request):
    """What signs the sites' certificates, and which root stands behind each site's."""

    command: Literal["authority"] = "authority"


class LeaveRoot(Request):
    """Let an intermediate sign, and remove the root's key, which the command has written elsewhere."""

    command: Literal["authority-leave-root"] = "authority-leave-root"


class RequestIntermediate(Request):
    """Make a key for a new intermediate, and a request for its certificate."""

    command: Literal["authority-request"] = "authority-request"


class InstallIntermediate(Request):
    """Take an intermediate into service. ``bundle``: its certificate, its root, and what vouches for that, PEM."""

    command: Literal["authority-install"] = "authority-install"
    bundle: str


class RetireRoot(Request):
    """Trust the newest root alone. ``anyway``: also where that locks sites out."""

    command: Literal["authority-retire"] = "authority-retire"
    anyway: bool


class NoteRootExport(Request):
    """Write down that the root's key is about to go into a file, which the command makes itself."""

    command: Literal["authority-export-root"] = "authority-export-root"


class CopyReceipts(Request):
    """Copy every receipt of ``site``: a progress item each, and last the signed statement about them."""

    command: Literal["receipts"] = "receipts"
    site: str


class RollOver(Request):
    """Accept the new ledger of ``site``; ``ledger`` is its id."""

    command: Literal["rollover"] = "rollover"
    site: str
    ledger: str


class CreateStudy(Request):
    """Offer a study to its sites.

    Attributes:
        document: the resolved study.
        initial: path of the initial shared tensors, a safetensors file.
        public_data: path of the public data set, for a method that distills at the coordinator.
    """

    command: Literal["create"] = "create"
    document: dict[str, JsonValue]
    initial: str
    public_data: str | None = None


class StudyRequest(Request):
    """A request about one study, by its name."""

    study: str


class StartStudy(StudyRequest):
    """Start a study, or continue a paused one."""

    command: Literal["start"] = "start"


class StopStudy(StudyRequest):
    """Stop a study for good."""

    command: Literal["stop"] = "stop"


class RenewStudy(StudyRequest):
    """Begin a new revision of a study from its newest model."""

    command: Literal["renew"] = "renew"


class EditStudy(StudyRequest):
    """Begin a new revision of a study with other settings.

    Attributes:
        document: the resolved study.
        initial: path of the initial shared tensors; None to go on from the study's newest model.
        rounds: it has as many rounds as the document says; else those that are left.
    """

    command: Literal["edit"] = "edit"
    document: dict[str, JsonValue]
    initial: str | None = None
    rounds: bool = False


class ArchiveStudy(StudyRequest):
    """Tell no site of an ended study any more."""

    command: Literal["archive"] = "archive"


class ListStudies(Request):
    """List the studies; with ``archived`` also those that are."""

    command: Literal["studies"] = "studies"
    archived: bool = False


class MakeSnapshot(Request):
    """Keep what a backup is made of in a folder of the state directory."""

    command: Literal["snapshot"] = "snapshot"


class NoteExport(Request):
    """Write down that the keys are about to go into a file for a standby, which the command makes itself."""

    command: Literal["standby-export"] = "standby-export"


class ShowStatus(StudyRequest):
    """The status of a study now."""

    command: Literal["status"] = "status"


class NoteModelExport(StudyRequest):
    """Write down that a study's model is about to be written to files, which the command does itself.

    Attributes:
        round: that made it. model_digest: of what the coordinator keeps.
        site: whose download, where each has another; "" otherwise.
    """

    command: Literal["model-export"] = "model-export"
    round: int
    model_digest: str
    site: str = ""


class ListWaiting(Request):
    """List the commands that wait for a second person."""

    command: Literal["waiting"] = "waiting"


class TakeBack(Request):
    """Let the proposal in line ``number`` of the journal count no more."""

    command: Literal["take-back"] = "take-back"
    number: int


class ApplySecondPerson(Request):
    """Let those commands need a second person that the configuration names, and no others."""

    command: Literal["second-person"] = "second-person"


class CopyJournal(Request):
    """Copy the operator's journal: a progress item for each line, and last its signed head."""

    command: Literal["journal"] = "journal"


class ShowFits(StudyRequest):
    """Whose data fits a study, as the sites say."""

    command: Literal["fit"] = "fit"


class SummaryRequest(Request):
    """A request about one summary request, by its name."""

    name: str


class CreateSummary(Request):
    """Offer a summary request to its sites. ``document``: as ``wardround.records.summaries.request`` writes it."""

    command: Literal["summary_create"] = "summary_create"
    document: dict[str, JsonValue]


class ListSummaries(Request):
    """List all summary requests."""

    command: Literal["summary_list"] = "summary_list"


class ShowSummary(SummaryRequest):
    """What the sites told for a summary request, each and together."""

    command: Literal["summary_show"] = "summary_show"


class CloseSummary(SummaryRequest):
    """Offer a summary request no longer."""

    command: Literal["summary_close"] = "summary_close"


class ShowReport(StudyRequest):
    """The full report of a study."""

    command: Literal["report"] = "report"


class FollowStudy(StudyRequest):
    """The status of a study after each change, a progress item each, until it has ended or paused."""

    command: Literal["follow"] = "follow"


class WatchAll(Request):
    """That something changed, a progress item each, for as long as the service runs."""

    command: Literal["watch"] = "watch"


_KINDS: dict[object, type[Request]] = {
    kind.model_fields["command"].default: kind
    for kind in (
        Invite, ListSites, Revoke, ShowAuthority, LeaveRoot, RequestIntermediate, InstallIntermediate, RetireRoot,
        CopyReceipts, RollOver, CreateStudy, StartStudy, StopStudy, RenewStudy, EditStudy, ShowStatus, ShowFits,
        ShowReport, FollowStudy, ArchiveStudy, ListStudies, MakeSnapshot, NoteExport, NoteRootExport, NoteModelExport,
        ListWaiting, TakeBack, ApplySecondPerson, CopyJournal, WatchAll, CreateSummary, ListSummaries, ShowSummary,
        CloseSummary,
    )
}  # fmt: skip


def request_from(document: Mapping[str, object]) -> Request:
    """The request that ``document`` is.

    Raises:
        UsageProblem: its command is not known, or a field is missing, of another type, or not known.
    """
    name = document.get("command")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageProblem(
            f"the running service knows no command `{str(name or '')[:40]}`",
            hint="the service and the command are of different versions: restart the service",
        )
    return kind.from_document(document)


def _wrong_field(document: Mapping[str, object], error: ValidationError) -> UsageProblem:
    """The first fault, named by its field."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field, command = str(fault["loc"][0])[:40] if fault["loc"] else "", str(document.get("command", ""))[:40]
    hint = "the service and the command are of different versions: restart the service"
    if fault["type"] == "extra_forbidden":
        return UsageProblem(f"the command `{command}` has no field `{field}`", hint=hint)
    if fault["type"] == "missing":
        return UsageProblem(f"the command `{command}` lacks its field `{field}`", hint=hint)
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    return UsageProblem(f"the command `{command}`: the field `{field}` is not valid: {reason}", hint=hint)
