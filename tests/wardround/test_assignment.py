"""Assignments, declarations and the events of a watch, as both sides read and write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wardround.test_offer import OFFER
from tests.wardround.test_update import DIGESTS, NUMBERS
from wardround.errors import BadData
from wardround.records.assignment import (
    MAX_ROUNDS,
    STOP,
    TRAIN,
    UNKNOWN,
    VALIDATE,
    Assignment,
    Contribution,
    Declaration,
    ModelRef,
    SiteStatus,
    StopReason,
)
from wardround.records.codes import DECLINE_CODES, REFUSAL_CODES
from wardround.records.event import CertificateFork, Event, Goodbye, event_from, event_message
from wardround.v1 import federation_pb2 as pb

NAMES = st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,20}[a-z0-9]\Z")
REFS = st.builds(ModelRef, NUMBERS, DIGESTS)
ROUNDS = st.lists(st.integers(1, MAX_ROUNDS), max_size=4).map(tuple)
WORK: dict[str, Any] = {
    "study": NAMES, "revision": NUMBERS, "digest": DIGESTS, "round": NUMBERS, "attempt": NUMBERS,
    "base": st.none() | REFS, "best": st.none() | REFS,
}  # fmt: skip
ASSIGNMENTS = st.one_of(
    st.builds(Assignment, kind=st.sampled_from([TRAIN, VALIDATE]), **WORK),
    st.builds(
        Assignment, kind=st.just(STOP), reason=st.sampled_from(StopReason),
        contributions=st.lists(st.builds(Contribution, NAMES, ROUNDS, ROUNDS, ROUNDS), max_size=3).map(tuple), **WORK,
    ),
)  # fmt: skip
EVENTS = st.one_of(
    ASSIGNMENTS, st.just(OFFER), st.just(Goodbye()), st.builds(CertificateFork, st.integers(1, 2**33 - 1))
)
DECLARATIONS = st.one_of(
    st.builds(
        Declaration, NAMES, NUMBERS, DIGESTS, st.just(SiteStatus.DECLINED), NUMBERS, NUMBERS,
        st.sampled_from(sorted(DECLINE_CODES)),
    ),
    st.builds(
        Declaration, NAMES, NUMBERS, DIGESTS, st.sampled_from(sorted(set(SiteStatus) - {SiteStatus.DECLINED})),
        NUMBERS, NUMBERS,
    ),
)  # fmt: skip


@given(EVENTS)
def test_an_event_arrives_as_it_was_sent(event: Event) -> None:
    message = pb.Event.FromString(event_message(event).SerializeToString())
    assert event_from(message) == event


@given(DECLARATIONS)
def test_a_declaration_arrives_as_it_was_sent(declaration: Declaration) -> None:
    message = pb.DeclareRequest.FromString(declaration.to_message().SerializeToString())
    assert Declaration.from_message(message) == declaration


def test_every_reason_and_status_of_the_contract_has_its_name_here() -> None:
    assert {reason.upper() for reason in StopReason} == set(pb.Stop.Reason.keys())
    assert {"SITE_STATUS_UNSPECIFIED", *(status.upper() for status in SiteStatus)} == set(pb.SiteStatus.keys())
    assert DECLINE_CODES < REFUSAL_CODES
    assert "DECLINED_HELD" in DECLINE_CODES
    assert "SITE_REVOKED" not in DECLINE_CODES


def stop(**fields: Any) -> pb.Assignment:
    return pb.Assignment(study="heart", digest=bytes(32), stop=pb.Stop(**fields))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(pb.Assignment(study="../x", digest=bytes(32), train=pb.Train()), id="name"),
        pytest.param(pb.Assignment(study="heart", digest=bytes(31), train=pb.Train()), id="digest"),
        pytest.param(
            pb.Assignment(study="heart", digest=bytes(32), train=pb.Train(), base=pb.ModelRef(round=1)), id="base"
        ),
        pytest.param(
            pb.Assignment(study="heart", digest=bytes(32), train=pb.Train(), best=pb.ModelRef(digest=b"x")), id="best"
        ),
        pytest.param(stop(contributions=[pb.Contribution(site="a/b")]), id="site"),
        pytest.param(stop(contributions=[pb.Contribution(site="a", rounds=[0])]), id="round"),
        pytest.param(stop(contributions=[pb.Contribution(site="a", capped=[MAX_ROUNDS + 1])]), id="capped"),
        pytest.param(stop(contributions=[pb.Contribution(site="a", left_out=[0])]), id="left out"),
    ],
)
def test_an_assignment_of_another_form_is_refused(message: pb.Assignment) -> None:
    with pytest.raises(BadData, match="the coordinator's assignment has not its form") as refused:
        Assignment.from_message(message)
    assert refused.value.code == "MESSAGE_MALFORMED"


@pytest.mark.parametrize("since_s", [0, -1, 2**33, 2**62])
def test_a_certificate_fork_without_a_time_is_refused(since_s: int) -> None:
    with pytest.raises(BadData, match="warning of a certificate fork has no time"):
        event_from(pb.Event(certificate_fork=pb.CertificateFork(since_s=since_s)))


def test_an_event_of_a_kind_that_is_not_known_is_none() -> None:
    assert event_from(pb.Event(coordinator_version="0.2.0")) is None


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param(pb.DeclareRequest(study="heart"), "the declaration has no status", id="no status"),
        pytest.param(pb.DeclareRequest(status=pb.DECLINED), "a code that is not for that", id="no code"),
        pytest.param(
            pb.DeclareRequest(status=pb.DECLINED, code=pb.TENSOR_NORM), "a code that is not for that", id="code"
        ),
    ],
)
def test_a_declaration_of_another_form_is_refused(message: pb.DeclareRequest, says: str) -> None:
    with pytest.raises(BadData, match=says) as refused:
        Declaration.from_message(message)
    assert refused.value.code == "MESSAGE_MALFORMED"


def test_what_a_newer_version_may_send_is_carried_as_unknown() -> None:
    """A kind, a reason, a status and a code whose numbers this version has no names for."""
    assert Assignment.from_message(pb.Assignment(study="heart", digest=bytes(32))).kind == UNKNOWN
    assert Assignment.from_message(stop(reason=99)).reason == StopReason.UNSPECIFIED
    assert Declaration.from_message(pb.DeclareRequest(study="heart", status=99)) is None
    declined = Declaration.from_message(pb.DeclareRequest(status=pb.DECLINED, code=9999))
    assert declined is not None
    assert declined.code == "DECLINED_UNKNOWN"
