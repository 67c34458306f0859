"""What crosses the control socket: every request and answer out and back, and what is said of a wrong one."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import answers, member_answers, requests, summary_answers
from coordinator.answers import Answer, SiteList
from coordinator.journal_records import (
    JournalCopied,
    JournalText,
    Proposed,
    SecondPersonApplied,
    WaitingList,
)
from coordinator.metric_answers import ModelMeans, ReportedNumbers, StudyMetrics
from coordinator.requests import Request, request_from
from coordinator.study_answers import (
    AcceptedUpdate,
    AttemptReport,
    BestRound,
    SiteReport,
    SiteStatus,
    StudyFits,
    StudyReport,
    StudyStatus,
)
from wardround.errors import Unavailable, UsageProblem
from wardround.records.schema import Strict
from wardround.records.summaries.figures import ColumnFigures, SiteFigures


def build_below(kind: type[Strict]) -> None:
    """Validators are built when a record is first used; until then no strategy sees its fields."""
    for below in kind.__subclasses__():
        below.model_rebuild()
        build_below(below)


build_below(Strict)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
DOCUMENTS = st.dictionaries(st.text(), JSON, max_size=3)
BY_SITE = st.dictionaries(st.text(), FINITE, max_size=2)
st.register_type_strategy(BestRound, st.builds(BestRound, val_loss=FINITE))
st.register_type_strategy(
    AttemptReport,
    st.builds(
        AttemptReport, seconds=st.none() | FINITE, val_loss=st.none() | FINITE, norms=BY_SITE, limits=BY_SITE,
        shares=BY_SITE,
    ),
)  # fmt: skip
st.register_type_strategy(AcceptedUpdate, st.builds(AcceptedUpdate, seconds=st.none() | FINITE))
st.register_type_strategy(SiteStatus, st.builds(SiteStatus, seconds=st.none() | FINITE))
st.register_type_strategy(SiteReport, st.builds(SiteReport, seconds=st.none() | FINITE))
st.register_type_strategy(ModelMeans, st.builds(ModelMeans, metrics=BY_SITE))
st.register_type_strategy(ReportedNumbers, st.builds(ReportedNumbers, seconds=st.none() | FINITE))
st.register_type_strategy(StudyReport, st.builds(StudyReport, study=DOCUMENTS))
st.register_type_strategy(requests.CreateSummary, st.builds(requests.CreateSummary, document=DOCUMENTS))
MULTIPLES = st.integers(0, 2**40).map(lambda number: 10 * number)
COLUMNS = st.builds(
    ColumnFigures, absent=st.booleans(), values=MULTIPLES, missing=MULTIPLES, unfit=MULTIPLES, other=MULTIPLES,
    mean=st.sampled_from(["", "1.5"]), std=st.just(""), low=st.just("-1e+05"), high=st.just(""),
    categories=st.lists(MULTIPLES, max_size=3).map(tuple),
)  # fmt: skip
FIGURES = st.builds(
    SiteFigures, request=st.just("icu"), digest=st.just("ab" * 32), min_count=st.just(10), digits=st.integers(1, 4),
    rows=MULTIPLES, columns=st.lists(COLUMNS, max_size=2).map(tuple),
)  # fmt: skip
TOLD = st.builds(summary_answers.SiteTold, figures=FIGURES)
st.register_type_strategy(
    summary_answers.SummaryShown,
    st.builds(
        summary_answers.SummaryShown, request=DOCUMENTS, sites=st.dictionaries(st.text(), st.none() | TOLD, max_size=2)
    ),
)
st.register_type_strategy(requests.EditStudy, st.builds(requests.EditStudy, document=DOCUMENTS))
st.register_type_strategy(requests.CreateStudy, st.builds(requests.CreateStudy, document=DOCUMENTS))

OF_A_STUDY = (
    requests.StartStudy, requests.StopStudy, requests.ShowStatus, requests.ShowFits, requests.ShowReport,
    requests.FollowStudy, requests.RenewStudy, requests.ArchiveStudy, requests.EditStudy, requests.NoteModelExport,
)  # fmt: skip
REQUESTS = (
    requests.Invite, requests.ListSites, requests.Revoke, requests.CopyReceipts, requests.RollOver,
    requests.CreateStudy, requests.ListStudies, requests.WatchAll, requests.ShowAuthority, requests.LeaveRoot,
    requests.RequestIntermediate, requests.InstallIntermediate, requests.RetireRoot, *OF_A_STUDY,
    requests.MakeSnapshot, requests.NoteExport, requests.CopyJournal, requests.CreateSummary, requests.ListSummaries,
    requests.ShowSummary, requests.CloseSummary, requests.NoteRootExport, requests.ListWaiting, requests.TakeBack,
    requests.ApplySecondPerson,
)  # fmt: skip
ANSWERS = (
    answers.InvitationMade, SiteList, answers.Revoked, member_answers.ReceiptsCopied, member_answers.RolledOver,
    answers.StudyCreated, answers.StudyEdited, JournalCopied, JournalText, StudyMetrics, answers.Changed,
    StudyStatus, StudyReport, StudyFits, answers.StudyRenewed, answers.StudyList, answers.SnapshotMade,
    member_answers.AuthorityStatus, member_answers.IntermediateRequested, member_answers.Noted,
    Proposed, SecondPersonApplied, WaitingList,
    summary_answers.SummaryCreated, summary_answers.SummaryList, summary_answers.SummaryShown,
)  # fmt: skip


@given(st.one_of([st.from_type(kind) for kind in REQUESTS]))
def test_a_request_comes_back_as_it_was(request_: Request) -> None:
    assert request_from(json.loads(json.dumps(request_.to_document()))) == request_


@settings(deadline=None)
@given(st.one_of([st.from_type(kind) for kind in ANSWERS]))
def test_an_answer_comes_back_as_it_was(answer: Answer) -> None:
    document = json.loads(json.dumps(answer.document()))
    assert type(answer).from_document(document) == answer
    assert type(answer).from_document(document).document() == document


def test_every_request_that_there_is_came_back() -> None:
    """A new one must stand in the round trip above, and be known by its command."""
    made = {kind for kind in requests.__dict__.values() if isinstance(kind, type) and issubclass(kind, Request)}
    assert made - {Request, requests.StudyRequest, requests.SummaryRequest} == set(REQUESTS)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        pytest.param({"command": "dance"}, "the running service knows no command `dance`", id="no such command"),
        pytest.param({"study": "trial"}, "the running service knows no command ``", id="no command"),
        pytest.param({"command": "status"}, "the command `status` lacks its field `study`", id="a field is missing"),
        pytest.param(
            {"command": "status", "study": "trial", "more": 1}, "the command `status` has no field `more`", id="unknown"
        ),
        pytest.param(
            {"command": "invite", "site": "a", "expires_s": "3600"},
            "the command `invite`: the field `expires_s` is not valid: input should be a valid integer",
            id="a text for a number",
        ),
        pytest.param(
            {"command": "invite", "site": "a", "expires_s": True},
            "the command `invite`: the field `expires_s` is not valid: input should be a valid integer",
            id="a bool for a number",
        ),
        pytest.param(
            {"command": "create", "document": [], "initial": "x"},
            "the command `create`: the field `document` is not valid: input should be a valid dictionary",
            id="a list for a table",
        ),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        request_from(document)
    assert refused.value.message == sentence
    assert refused.value.hint == "the service and the command are of different versions: restart the service"


def nested(levels: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for _ in range(levels):
        table = {"a": table}
    return table


@pytest.mark.parametrize("document", [nested(5000), {"a": float("nan")}, {"a": (1, 2)}], ids=["deep", "nan", "a tuple"])
def test_a_study_that_is_no_document_of_ours_is_refused_before_it_is_read(document: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem, match="the command `create`: the field `document` is not valid: "):
        request_from({"command": "create", "document": document, "initial": "x"})


@pytest.mark.parametrize("document", [None, [], {}, {"sites": [], "receipt_key": "", "more": 1}], ids=str)
def test_an_answer_of_another_version_is_named_as_that(document: Any) -> None:
    with pytest.raises(Unavailable) as refused:
        SiteList.from_document(document)
    assert refused.value.message == "the running service gave an answer that this command does not know"
    assert refused.value.hint == "the service and the command are of different versions: restart the service"


def test_a_report_prints_the_keys_of_the_status_first() -> None:
    """Scripts read them; their order is what people see."""
    keys = list(StudyReport.model_fields)
    assert keys[: len(StudyStatus.model_fields)] == list(StudyStatus.model_fields)
