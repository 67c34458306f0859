"""What the coordinator answers to `Enrol` and `Renew`, as both sides read and write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround import __version__
from wardround.errors import BadData
from wardround.records.enrolment import Enrolled, IssuedCertificate
from wardround.v1 import enrolment_pb2 as pb

TIMES = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
ISSUED = st.builds(IssuedCertificate, st.binary(), st.binary(), TIMES, TIMES)


@given(ISSUED)
def test_a_renewed_certificate_arrives_as_it_was_sent(issued: IssuedCertificate) -> None:
    message = pb.RenewReply.FromString(issued.to_message().SerializeToString())
    assert message.coordinator_version == __version__
    assert IssuedCertificate.from_message(message) == issued


@given(st.builds(Enrolled, ISSUED, TEXTS, TEXTS, st.binary(min_size=32, max_size=32)))
def test_an_enrolment_arrives_as_it_was_sent(enrolled: Enrolled) -> None:
    message = pb.EnrolReply.FromString(enrolled.to_message().SerializeToString())
    assert message.coordinator_version == __version__
    assert Enrolled.from_message(message) == enrolled


def test_a_reply_without_a_receipt_key_is_refused() -> None:
    with pytest.raises(BadData, match="holds no receipt key"):
        Enrolled.from_message(pb.EnrolReply(coordinator_version=__version__, receipt_key=bytes(31)))
