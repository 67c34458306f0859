"""What secure aggregation puts on the wire, as both sides read and write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wardround.test_assignment import NAMES
from tests.wardround.test_update import DIGESTS, NUMBERS
from wardround.errors import BadData
from wardround.records import secure_messages
from wardround.records.event import event_from, event_message
from wardround.records.secure_messages import (
    MAX_BLOCKS,
    MAX_STATEMENT,
    AttemptRef,
    BlockDigests,
    BlocksWanted,
    SecureShown,
    SecureTold,
    Shown,
    SumEvidence,
    Told,
    VectorBlock,
    blocks_from,
    blocks_message,
)
from wardround.secure import layout, shares
from wardround.secure.rules import MOST
from wardround.signing.dsse import Envelope
from wardround.v1 import federation_pb2, secure_pb2

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
STATEMENTS = st.builds(Envelope, TEXTS, st.binary(max_size=200), TEXTS, st.binary(min_size=64, max_size=64))
ALL_STATEMENTS = st.lists(STATEMENTS, max_size=4).map(tuple)
SHARES = st.dictionaries(NAMES, st.binary(min_size=shares.CIPHERTEXT, max_size=shares.CIPHERTEXT), max_size=4)
SECRETS = st.dictionaries(NAMES, st.binary(min_size=32, max_size=32), max_size=4)
ATTEMPTS = st.builds(AttemptRef, NAMES, NUMBERS, DIGESTS, NUMBERS, NUMBERS)
TOLD = st.one_of(
    st.builds(SecureTold, ATTEMPTS, st.sampled_from(sorted(set(Told) - {Told.SHARES})), STATEMENTS),
    st.builds(SecureTold, ATTEMPTS, st.just(Told.SHARES), shares=SHARES),
)
SHOWN = st.one_of(
    st.builds(SecureShown, ATTEMPTS, st.sampled_from(sorted(set(Shown) - {Shown.SHARES})), ALL_STATEMENTS),
    st.builds(SecureShown, ATTEMPTS, st.just(Shown.SHARES), shares=SHARES),
)
EVIDENCE = st.builds(
    SumEvidence, ATTEMPTS, ALL_STATEMENTS, ALL_STATEMENTS, ALL_STATEMENTS, SECRETS, SECRETS, DIGESTS,
    DIGESTS | st.just(""),
)  # fmt: skip
BLOCKS = st.one_of(
    st.builds(BlockDigests, st.lists(DIGESTS, min_size=1, max_size=4).map(tuple)),
    st.builds(VectorBlock, NUMBERS, st.binary(max_size=100)),
)


@given(TOLD)
def test_what_a_site_tells_arrives_as_it_was_told(told: SecureTold) -> None:
    message = secure_pb2.SecureTold.FromString(told.to_message().SerializeToString())
    assert SecureTold.from_message(message) == told


@given(SHOWN)
def test_what_is_shown_arrives_on_the_watch_as_it_was_shown(shown: SecureShown) -> None:
    message = federation_pb2.Event.FromString(event_message(shown).SerializeToString())
    assert event_from(message) == shown


@given(EVIDENCE)
def test_the_evidence_of_a_sum_arrives_as_it_was_sent(evidence: SumEvidence) -> None:
    message = secure_pb2.SumEvidence.FromString(evidence.to_message().SerializeToString())
    assert SumEvidence.from_message(message) == evidence


@given(st.builds(BlocksWanted, NAMES, NUMBERS, NUMBERS, NAMES, st.lists(NUMBERS, max_size=9).map(tuple)))
def test_a_request_for_blocks_arrives_as_it_was_sent(wanted: BlocksWanted) -> None:
    message = secure_pb2.BlocksRequest.FromString(wanted.to_message().SerializeToString())
    assert BlocksWanted.from_message(message) == wanted


@given(BLOCKS)
def test_blocks_arrive_as_they_were_sent(part: BlockDigests | VectorBlock) -> None:
    message = secure_pb2.BlocksReply.FromString(blocks_message(part).SerializeToString())
    assert blocks_from(message) == part


def test_the_lengths_on_the_wire_are_those_of_what_is_computed() -> None:
    assert secure_messages.CIPHERTEXT == shares.CIPHERTEXT
    assert secure_messages.MAX_BLOCK == layout.BLOCK


ATTEMPT = AttemptRef("heart", 1, "a" * 64, 1, 1).to_message()
LONG = Envelope("t", b"x" * MAX_STATEMENT, "k", b"s" * 64)
SEALED = secure_pb2.SealedShare(site="alpha", ciphertext=b"c" * shares.CIPHERTEXT)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        pytest.param(secure_pb2.SecureTold(attempt=ATTEMPT), "says nothing", id="nothing"),
        pytest.param(
            SecureTold(AttemptRef("heart", 1, "a" * 64, 1, 1), Told.KEYS, LONG).to_message(), "too long", id="long"
        ),
        pytest.param(
            secure_pb2.SecureTold(attempt=ATTEMPT, shares=secure_pb2.SealedShares(shares=[SEALED, SEALED])),
            "two of one site",
            id="twice",
        ),
        pytest.param(
            secure_pb2.SecureTold(
                attempt=ATTEMPT,
                shares=secure_pb2.SealedShares(shares=[secure_pb2.SealedShare(site="alpha", ciphertext=b"c")]),
            ),
            "another form",
            id="short",
        ),
        pytest.param(
            secure_pb2.SecureTold(
                attempt=secure_pb2.AttemptRef(study="heart"), shares=secure_pb2.SealedShares(shares=[SEALED])
            ),
            "names no attempt",
            id="no digest",
        ),
    ],
)
def test_a_message_of_another_form_is_refused(message: secure_pb2.SecureTold, wrong: str) -> None:
    with pytest.raises(BadData, match=wrong) as refused:
        SecureTold.from_message(message)
    assert refused.value.code == "MESSAGE_MALFORMED"


def test_more_statements_than_sites_and_more_blocks_than_a_call_are_refused() -> None:
    shown = secure_pb2.SecureShown(attempt=ATTEMPT)
    shown.keys.envelopes.extend([federation_pb2.Envelope()] * (MOST + 1))
    with pytest.raises(BadData, match="more statements"):
        SecureShown.from_message(shown)
    with pytest.raises(BadData, match="more than 1024 blocks"):
        BlocksWanted.from_message(secure_pb2.BlocksRequest(study="heart", site="alpha", blocks=range(MAX_BLOCKS + 1)))


@pytest.mark.parametrize("secrets", [b"", b"short"])
def test_an_opened_secret_of_another_length_is_refused(secrets: bytes) -> None:
    message = secure_pb2.SumEvidence(attempt=ATTEMPT, base=b"b" * 32)
    message.self_masks.add(site="alpha", secret=secrets)
    with pytest.raises(BadData, match="opened secrets"):
        SumEvidence.from_message(message)


def test_evidence_without_a_base_and_an_empty_answer_are_refused() -> None:
    with pytest.raises(BadData, match="names no model"):
        SumEvidence.from_message(secure_pb2.SumEvidence(attempt=ATTEMPT))
    with pytest.raises(BadData, match="neither digests nor a block"):
        blocks_from(secure_pb2.BlocksReply())
