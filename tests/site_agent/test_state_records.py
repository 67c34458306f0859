"""Every record of a site's state and of its control socket is read back as it was written, and as nothing else."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from site_agent.gateway import requests, service_requests
from site_agent.gateway.consent.account import Account, Group, Line
from site_agent.gateway.consent.facts import facts
from site_agent.gateway.consent.preview import Preview
from site_agent.gateway.request_form import Answer, Done
from site_agent.gateway.requests import AnyRequest, request_from
from site_agent.state import codec
from site_agent.state.consent import APPROVED, WITHDRAWN, Consent, Endorsement, Shown, TrainedData
from site_agent.state.journal import Journal
from site_agent.state.offer import Offer
from site_agent.state.person import Account as User
from site_agent.state.person import Person
from site_agent.state.site import Site
from tools.fuzz.examples import SiteFiles, described
from wardround.errors import BadData, TryAgain, UsageProblem
from wardround.local.durable import StorageFailed
from wardround.records.ledger.entries import TensorRow
from wardround.records.summaries.figures import ColumnFigures
from wardround.records.trainer import FilesStatus, PrivateTensor, Weights
from wardround.signing import canonical
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

SITE = SiteFiles()
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
PLAIN = st.text("abcXYZ._-0", min_size=1, max_size=12)
COUNT = st.integers(0, canonical.MAX_INTEGER)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
TEXTS = st.dictionaries(TEXT, TEXT, max_size=3)
SPECS = st.builds(
    TensorSpec, PLAIN, st.sampled_from(["F32", "F16", "I64"]), st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(["model", "network_1"]),
)  # fmt: skip
TENSORS = st.lists(SPECS, max_size=3).map(tuple)
MANIFESTS = st.lists(st.builds(Entry, SPECS, HEX), max_size=3, unique_by=lambda entry: entry.spec.key).map(
    lambda entries: Manifest(tuple(entries))
)
USERS = st.builds(User, TEXT, COUNT)
PERSONS = st.builds(Person, TEXT, COUNT, st.sampled_from(["", "sudo"]), st.none() | USERS)
SHOWN = st.builds(Shown, HEX, HEX, COUNT, TEXT, TEXTS)
PRIVATE = st.builds(
    PrivateTensor, name=PLAIN, dtype=PLAIN.map(lambda text: text[:8]), shape=st.lists(COUNT, max_size=3), bytes=COUNT,
    why=PLAIN,
)  # fmt: skip
CONSENTS = st.builds(
    Consent, study=PLAIN, revision=COUNT, study_digest=HEX, upload=TENSORS,
    metrics=st.lists(TEXT, max_size=2).map(tuple), counts=TEXT, private=st.lists(PRIVATE, max_size=2).map(tuple),
    data=st.builds(TrainedData, TEXT, HEX, TEXT, TEXT, TEXT), rows=COUNT, validation_rows=COUNT, approved_by=PERSONS,
    approved_at=TEXT, state=st.sampled_from([APPROVED, WITHDRAWN]), download=TENSORS,
    exposure=st.sampled_from(["", "coordinator", "sites"]), personalized=TEXT, document=st.just(SITE.offer.document),
    attempts=COUNT, account=SHOWN, files=st.builds(FilesStatus, data=HEX, weights=st.just("") | HEX),
    withdrawn_by=st.none() | PERSONS, withdrawn_at=TEXT, also_by=st.lists(PERSONS, max_size=2).map(tuple),
)  # fmt: skip
LINES = st.lists(st.builds(Line, TEXT, TEXT, st.none() | TEXT), max_size=3).map(tuple)
GROUPS = st.lists(st.builds(Group, TEXT, LINES), max_size=3).map(tuple)
ACCOUNTS = st.builds(Account, PLAIN, COUNT, HEX, TEXT, GROUPS, LINES, TEXT)
JOURNALS = st.builds(
    Journal, study=PLAIN, revision=COUNT, round=COUNT, attempt=COUNT, phase=TEXT, num_examples=COUNT, metrics=TEXTS,
    applied=st.booleans(), consent=HEX,
)  # fmt: skip
RECORDS = (
    st.builds(Site, TEXT, TEXT, TEXT, HEX, HEX, COUNT)
    | st.builds(lambda manifest, state: replace(SITE.offer, initial_model=manifest, state=state), MANIFESTS, TEXT)
    | SHOWN
    | CONSENTS
    | JOURNALS
    | st.builds(Endorsement, HEX, st.builds(TrainedData, TEXT, HEX), st.lists(PERSONS, max_size=2).map(tuple))
)
REQUESTS = st.one_of(
    *(st.builds(kind) for kind in (service_requests.Status, service_requests.Refresh, service_requests.FetchReceipts))
) | st.one_of(
    st.builds(requests.GetPreview, TEXT, TEXT),
    st.builds(requests.Approve, TEXT, TEXT, HEX, PERSONS),
    st.builds(requests.Withdraw, TEXT, PERSONS),
    st.builds(requests.SendFit, TEXT, TEXT, HEX, st.booleans(), COUNT, PERSONS),
    st.builds(requests.ListSummaries),
    st.builds(requests.GetSummary, TEXT, TEXT),
    st.builds(requests.TellSummary, TEXT, TEXT, HEX, st.booleans(), PERSONS),
    st.builds(requests.GetWaiting, TEXT, COUNT),
    st.builds(requests.Decide, TEXT, COUNT, st.sampled_from(["released", "rejected"]), HEX, PERSONS),
    st.builds(requests.PutPolicy, TEXT, HEX, PERSONS),
    st.builds(requests.Leave, PERSONS),
)
ROWS = st.builds(
    TensorRow, bundle=PLAIN, name=PLAIN, dtype=PLAIN, shape=st.lists(COUNT, max_size=2).map(tuple), encoding=PLAIN,
    bytes=COUNT, sha256=HEX, l2=PLAIN, max_abs=PLAIN, nonfinite=COUNT,
)  # fmt: skip
FIGURES = st.builds(ColumnFigures, values=COUNT, mean=st.just("1.5"), categories=st.lists(COUNT, max_size=2).map(tuple))
TELLING = st.builds(
    requests.TellingColumn, TEXT, TEXT, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple), FIGURES
)  # fmt: skip
ANSWERS = st.one_of(
    st.builds(service_requests.ServiceStatus, st.booleans(), COUNT, TEXT),
    st.builds(Done),
    st.builds(service_requests.Receipts, COUNT),
    st.builds(requests.Approved, st.booleans(), COUNT, HEX, TEXT, TEXT),
    st.builds(requests.Withdrawn, st.booleans()),
    st.builds(requests.Fit, st.booleans(), COUNT),
    st.builds(
        requests.OfferedSummaries,
        st.lists(
            st.builds(requests.OfferedSummary, TEXT, TEXT, COUNT, TEXT, st.just({"sites": ["a"]})), max_size=2
        ).map(tuple),
    ),
    st.builds(
        requests.ShownSummary, TEXT, TEXT, TEXT, HEX, COUNT, COUNT, st.lists(TELLING, max_size=2).map(tuple), TEXT,
        st.lists(TEXT, max_size=2).map(tuple), st.lists(TEXT, max_size=2).map(tuple),
    ),
    st.builds(requests.Told, COUNT),
    st.builds(
        requests.Waiting, PLAIN, COUNT, COUNT, HEX,
        st.lists(ROWS, max_size=2).map(tuple),
        COUNT, TEXTS, COUNT, COUNT,
    ),
    st.builds(requests.Decided, st.booleans()),
    st.builds(requests.PolicyPut, HEX),
    st.builds(requests.Left, st.lists(PLAIN, max_size=2).map(tuple)),
)  # fmt: skip


def over_the_socket(document: dict[str, Any]) -> dict[str, Any]:
    crossed: dict[str, Any] = json.loads(json.dumps(document))
    return crossed


@settings(max_examples=150, deadline=None)
@given(RECORDS)
def test_a_record_of_the_state_is_read_back_from_its_file(record: Any) -> None:
    data = codec.to_bytes(record)
    assert codec.from_bytes(type(record), data) == record
    assert canonical.loads(data) == codec.to_document(record)


@settings(max_examples=100, deadline=None)
@given(REQUESTS)
def test_a_request_crosses_the_control_socket(request: AnyRequest) -> None:
    assert request_from(over_the_socket(request.document())) == request


@settings(max_examples=100, deadline=None)
@given(ANSWERS)
def test_an_answer_crosses_the_control_socket(answer: Answer) -> None:
    assert type(answer).from_document(over_the_socket(answer.document())) == answer


@settings(max_examples=60, deadline=None)
@given(ACCOUNTS, st.booleans())
def test_a_preview_crosses_the_control_socket_with_its_accounts_digest(account: Account, has_policy: bool) -> None:
    weights = Weights(digest="ab" * 32, used=1, drawn=["a"], unused=[])
    own = described(SITE.offer.upload, SITE.consent.private).model_copy(update={"weights": weights})
    preview = Preview(account, facts(SITE.offer, own), "patients", has_policy)
    document = over_the_socket(preview.document())
    assert Preview.from_document(document) == preview
    assert document["digest"] == account.digest


def test_each_request_has_one_command_and_an_answer() -> None:
    assert set(requests.REQUESTS) == {
        "status", "refresh", "receipts", "preview", "approve", "withdraw", "fit", "summaries", "summary",
        "tell", "waiting", "decide", "policy", "proposed", "take_back_policy", "leave", "peers", "know", "forget",
        "check_sum",
    }  # fmt: skip
    assert len(requests.REQUESTS) == len(get_args(AnyRequest))
    assert requests.Withdraw("hearts", Person("dpo", 1)).answer_from({"reported": True}) == requests.Withdrawn(True)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"command": "rename"}, "the running service knows no command 'rename'"),
        ({"command": None}, "the running service knows no command 'None'"),
        ({"command": "withdraw", "study": "hearts"}, "the request's `by` is missing, unknown, or not of its form"),
        ({"command": "refresh", "now": 1}, "the request's `now` is missing, unknown, or not of its form"),
        ({"command": "decide", "study": "s", "round": True, "decision": "released", "update": "", "by": {}},
         "the request's `round` is missing, unknown, or not of its form"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        request_from(document)
    assert refused.value.message == message
    assert "release" in refused.value.hint


@pytest.mark.parametrize("answer", [{}, {"reported": 1}, {"reported": True, "more": 1}])
def test_an_answer_of_another_release_is_named(answer: dict[str, Any]) -> None:
    with pytest.raises(BadData, match="the running service's answer to `withdraw` has not its form") as refused:
        requests.Withdraw("hearts", Person("dpo", 1)).answer_from(answer)
    assert refused.value.hint == "the service and this command must be of the same release; start the service again"


@pytest.mark.parametrize("name", sorted(SITE.files()))
def test_a_file_without_one_of_its_fields_or_with_one_more_is_damaged(tmp_path: Path, name: str) -> None:
    """What is not there is not filled in: a person has not seen it."""
    kinds = {"identity": Site, "offers": Offer, "consents": Consent, "journal": Journal, "previews": Shown}
    kind = kinds[name.partition("/")[0]]
    document = json.loads(SITE.files()[name])
    path = tmp_path / "file.json"
    for changed in [
        {**document, "more": 1},
        *({**document, key: None} for key in document if document[key] is not None),
    ]:
        path.write_text(json.dumps(changed))
        with pytest.raises(
            BadData, match=f"is damaged or of another version: .* the fields of {kind.__name__.lower()}"
        ):
            codec.read(path, kind)
    for key in document:
        path.write_text(json.dumps({other: document[other] for other in document if other != key}))
        with pytest.raises(BadData, match="is damaged or of another version"):
            codec.read(path, kind)
    path.write_text(json.dumps(document, indent=1))
    assert codec.to_document(codec.read(path, kind)) == document


def test_a_file_that_the_disk_does_not_give_back_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restoring a backup would be the wrong advice: the service starts again, and reads it then."""
    path = tmp_path / "journal.json"
    path.write_bytes(codec.to_bytes(Journal("hearts")))

    def fail(self: Path) -> bytes:
        raise OSError(wrong, os.strerror(wrong))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        wrong = errno.EIO
        with pytest.raises(
            StorageFailed, match=rf"{path}: the disk failed to read it \(Input/output error\)"
        ) as failed:
            codec.read(path, Journal)
        wrong = errno.ENOSPC
        with pytest.raises(TryAgain, match=rf"{path} cannot be read now \(No space left on device\)"):
            codec.read(path, Journal)
    assert failed.value.hint == "check the disk, then start again: what was durable before is still there"
    assert codec.read(path, Journal).study == "hearts"
