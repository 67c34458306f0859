"""The header of an upload, as both sides read and write it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.errors import BadData
from wardround.records.receipts import MAX_NEW_LINES, LedgerHead
from wardround.records.update import MAX_METRICS, LedgerStatement, UploadHeader, upload_id_from
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import Entry, Manifest, TensorSpec
from wardround.v1 import federation_pb2 as pb

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
COUNTS = st.integers(0, 2**53 - 1)
NUMBERS = st.integers(0, 2**32 - 1)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.from_regex(r"\A[A-Za-z0-9_.-]{1,12}\Z"),
        st.sampled_from(["F32", "F64", "I64", "U32"]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from(["model", "control"]),
    ),
    max_size=5,
    unique_by=lambda spec: spec.key,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    return Manifest(tuple(Entry(spec, draw(DIGESTS)) for spec in draw(SPECS)))


STATEMENTS = st.builds(
    LedgerStatement,
    st.builds(LedgerHead, st.text(st.characters(codec="utf-8"), min_size=1, max_size=64), COUNTS, DIGESTS),
    st.binary(min_size=64, max_size=64),
    st.lists(st.binary(min_size=32, max_size=32), max_size=4).map(tuple),
)
HEADERS = st.builds(
    UploadHeader,
    upload_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    study=st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,20}[a-z0-9]\Z"),
    revision=NUMBERS,
    digest=DIGESTS,
    round=NUMBERS,
    attempt=NUMBERS,
    manifest=manifests(),
    metrics=st.lists(
        st.tuples(
            st.from_regex(r"\A[a-z0-9_]{1,40}\Z"), st.text(st.characters(codec="utf-8"), min_size=0, max_size=40)
        ),
        max_size=4,
    ).map(tuple),
    num_examples=COUNTS,
    num_validation=COUNTS,
    ledger=STATEMENTS,
    submission=st.none()
    | st.builds(Envelope, st.just("type"), st.binary(max_size=40), st.just("key"), st.binary(max_size=64)),
)
HEADER = UploadHeader(
    upload_id="ab" * 16,
    study="heart",
    revision=2,
    digest="cd" * 32,
    round=3,
    attempt=1,
    manifest=Manifest((Entry(TensorSpec("weight", "F32", (2, 3)), "12" * 32),)),
    metrics=(("val_loss", "0.5"),),
    num_examples=10,
    num_validation=5,
    ledger=LedgerStatement(LedgerHead("5e1f", 7, "ef" * 32), bytes(64), (bytes(32),)),
)


@given(HEADERS)
def test_a_header_comes_back_from_its_message_as_it_was(header: UploadHeader) -> None:
    sent = header.to_message().SerializeToString(deterministic=True)
    assert UploadHeader.from_message(pb.UploadOpen.FromString(sent)) == header


def test_an_upload_id_opened_again_with_another_submission_is_another_upload() -> None:
    one, other = (replace(HEADER, submission=Envelope("type", payload, "key", bytes(64))) for payload in (b"1", b"2"))
    assert len({HEADER.content, one.content, other.content}) == 3


def damaged(**fields: Any) -> pb.UploadOpen:
    message = HEADER.to_message()
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(pb.UploadOpen(**fields))
    return message


def ledger(**fields: Any) -> pb.LedgerHead:
    message = HEADER.ledger.head_message()
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(pb.LedgerHead(**fields))
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param(damaged(study="../etc"), "the upload's header has not its form", id="study"),
        pytest.param(damaged(digest=bytes(31)), "the upload's header has not its form", id="digest"),
        pytest.param(damaged(num_examples=2**53), "the upload's header has not its form", id="examples"),
        pytest.param(damaged(num_validation=2**53), "the upload's header has not its form", id="validation"),
        pytest.param(damaged(metrics=[pb.Metric(name="Loss", value="1")]), "has not its form", id="metric name"),
        pytest.param(damaged(metrics=[pb.Metric(name="loss", value="1" * 41)]), "has not its form", id="metric value"),
        pytest.param(
            damaged(metrics=[pb.Metric(name="loss", value="1")] * (MAX_METRICS + 1)), "has not its form", id="metrics"
        ),
        pytest.param(damaged(upload_id=bytes(15)), "an upload id of 15 bytes, 16 are wanted", id="upload id"),
        pytest.param(damaged(ledger=ledger(head=bytes(31))), "what is said of the ledger", id="head"),
        pytest.param(damaged(ledger=ledger(signature=bytes(63))), "what is said of the ledger", id="signature"),
        pytest.param(damaged(ledger=ledger(ledger_id="")), "what is said of the ledger", id="no ledger id"),
        pytest.param(damaged(ledger=ledger(ledger_id="a" * 65)), "what is said of the ledger", id="long ledger id"),
        pytest.param(damaged(ledger=ledger(lines=2**53)), "what is said of the ledger", id="lines"),
        pytest.param(damaged(new_line_hashes=[bytes(31)]), "what is said of the ledger", id="line hash"),
        pytest.param(
            damaged(new_line_hashes=[bytes(32)] * (MAX_NEW_LINES + 1)), "what is said of the ledger", id="line hashes"
        ),
    ],
)
def test_a_field_of_another_form_is_refused(message: pb.UploadOpen, says: str) -> None:
    with pytest.raises(BadData, match=says) as refused:
        UploadHeader.from_message(message)
    assert refused.value.code == "MESSAGE_MALFORMED"


def test_a_manifest_of_too_many_tensors_is_refused_by_name() -> None:
    with pytest.raises(BadData, match="at most 0 are taken") as refused:
        UploadHeader.from_message(HEADER.to_message(), most_tensors=0)
    assert refused.value.code == "MANIFEST_NAMES"


def test_the_content_changes_with_all_but_the_id_and_the_ledger() -> None:
    assert replace(HEADER, upload_id="00" * 16).content == HEADER.content
    assert (
        replace(HEADER, ledger=LedgerStatement(LedgerHead("x", 9, "ab" * 32), bytes(64), ())).content == HEADER.content
    )
    others = [
        replace(HEADER, study="lung"), replace(HEADER, revision=3), replace(HEADER, digest="ce" * 32),
        replace(HEADER, round=4), replace(HEADER, attempt=2), replace(HEADER, manifest=Manifest(())),
        replace(HEADER, metrics=()), replace(HEADER, num_examples=11), replace(HEADER, num_validation=6),
    ]  # fmt: skip
    assert len({HEADER.content, *(other.content for other in others)}) == 10


def test_an_upload_id_is_sixteen_bytes_in_hex() -> None:
    assert upload_id_from(bytes(range(16))) == "000102030405060708090a0b0c0d0e0f"
