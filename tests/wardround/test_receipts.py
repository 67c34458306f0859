"""Signatures (DSSE), the ledger's chain, receipts."""

import base64
import hashlib
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from wardround.errors import BadData
from wardround.records.receipts import (
    EMPTY_HEAD,
    HEAD_TYPE,
    RECEIPT_TYPE,
    LedgerHead,
    Receipt,
    head_after,
    line_hash,
    next_head,
)
from wardround.signing import canonical, dsse

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
HEAD = LedgerHead("5e1f", 3, "ab" * 32)
RECEIPT = Receipt(
    receipt_id="r1",
    federation="heart.example",
    site="st-olav",
    study="heart",
    revision=1,
    round=2,
    attempt=1,
    upload_id="00" * 16,
    manifest_sha256="cd" * 32,
    payload_bytes=608,
    decision="accepted",
    code="",
    tensor="",
    time="2025-03-04T09:00:00.000Z",
    ledger=HEAD,
    previous=EMPTY_HEAD,
)


def test_a_signature_in_base64_with_spare_bits_set_is_no_envelope() -> None:
    """Four bits of the last character decode to nothing; a flip of one must be seen all the same."""
    document = dsse.sign("t", {"a": 1}, KEY).document()
    assert dsse.Envelope.from_document(document).document() == document
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    stem, last = document["signature"][:-3], alphabet.index(document["signature"][-3])
    for bit in range(4):
        changed = f"{stem}{alphabet[last ^ (1 << bit)]}=="
        with pytest.raises(BadData, match="not a signed envelope"):
            dsse.Envelope.from_document({**document, "signature": changed})


def test_the_encoding_that_is_signed_is_that_of_the_dsse_protocol() -> None:
    """The example of https://github.com/secure-systems-lab/dsse/blob/master/protocol.md."""
    assert dsse.encoding("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_a_known_key_and_value_give_a_known_signature() -> None:
    """Ed25519 is deterministic (RFC 8032), so the signature is that of the encoding by the plain primitive."""
    envelope = dsse.sign("t", {"a": 1}, KEY)
    assert envelope.payload == b'{"a":1}'
    assert envelope.signature == KEY.sign(b'DSSEv1 1 t 7 {"a":1}')
    public = bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8")
    assert envelope.keyid == hashlib.sha256(public).hexdigest()


@given(st.dictionaries(st.text(), st.integers(0, 99), max_size=4))
def test_what_was_signed_is_read_back_through_the_ledgers_form(value: dict[str, int]) -> None:
    envelope = dsse.Envelope.from_document(canonical.loads(canonical.dumps(dsse.sign("t", value, KEY).document())))
    assert dsse.verify(envelope, "t", KEY.public_key()) == value


def test_a_signature_of_another_type_key_or_text_is_refused() -> None:
    envelope = dsse.sign("t", {"a": 1}, KEY)
    unverified = f"the signature of key {envelope.keyid[:12]}… does not verify"
    cases = [
        (envelope, "other", KEY, "signed as 't', wanted 'other'"),
        (envelope, "t", OTHER, f"signed by key {envelope.keyid[:12]}…, wanted {dsse.keyid(OTHER.public_key())[:12]}…"),
        (
            replace(envelope, payload=b'{"a":2}'),
            "t",
            KEY,
            unverified,
        ),
        (replace(envelope, signature=b""), "t", KEY, unverified),
        (
            replace(dsse.sign("t", {"a": 1}, OTHER), keyid=envelope.keyid),
            "t",
            KEY,
            unverified,
        ),
    ]
    for bad, kind, key, said in cases:
        with pytest.raises(BadData) as caught:
            dsse.verify(bad, kind, key.public_key())
        assert caught.value.message == said


def test_a_payload_signed_but_not_canonical_is_refused() -> None:
    payload = b'{"a": 1}'
    bad = dsse.Envelope("t", payload, dsse.keyid(KEY.public_key()), KEY.sign(dsse.encoding("t", payload)))
    with pytest.raises(BadData, match="canonical form"):
        dsse.verify(bad, "t", KEY.public_key())


GOOD: dict[str, Any] = dsse.sign("t", {"a": 1}, KEY).document()


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(None, id="null"),
        pytest.param([], id="list"),
        pytest.param({}, id="empty"),
        *[pytest.param({k: v for k, v in GOOD.items() if k != key}, id=f"no {key}") for key in GOOD],
        *[pytest.param({**GOOD, key: 5}, id=f"{key} is a number") for key in GOOD],
        pytest.param({**GOOD, "signature": "!"}, id="no base64"),
        pytest.param({**GOOD, "payload": "\ud800"}, id="half a character"),
    ],
)
def test_a_line_that_holds_no_envelope_is_refused(document: object) -> None:
    with pytest.raises(BadData, match=r"^not a signed envelope$"):
        dsse.Envelope.from_document(document)


def test_the_chain_is_the_hash_of_the_head_before_and_the_lines_hash() -> None:
    first = hashlib.sha256(bytes(32) + hashlib.sha256(b"one").digest()).hexdigest()
    second = hashlib.sha256(bytes.fromhex(first) + hashlib.sha256(b"two").digest()).hexdigest()
    assert head_after(EMPTY_HEAD, []) == EMPTY_HEAD
    assert head_after(EMPTY_HEAD, [line_hash(b"one"), line_hash(b"two")]) == second
    assert next_head(first, line_hash(b"two")) == second


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=8, unique=True), st.data())
def test_whoever_knows_a_head_and_the_hashes_since_finds_every_other_story(
    lines: list[bytes], data: st.DataObject
) -> None:
    hashes = [line_hash(line) for line in lines]
    split = data.draw(st.integers(0, len(lines)))
    assert head_after(head_after(EMPTY_HEAD, hashes[:split]), hashes[split:]) == head_after(EMPTY_HEAD, hashes)
    place = data.draw(st.integers(0, len(lines) - 1))
    dropped = hashes[:place] + hashes[place + 1 :]
    changed = [*hashes[:place], line_hash(b"another line"), *hashes[place + 1 :]]
    stories = {head_after(EMPTY_HEAD, story) for story in (hashes, dropped, changed)}
    assert len(stories) == 3


def test_a_head_is_verified_by_its_signature_alone() -> None:
    envelope = HEAD.sign(KEY)
    assert envelope.payload_type == HEAD_TYPE
    HEAD.verify(envelope.signature, KEY.public_key())
    for other in (replace(HEAD, lines=4), replace(HEAD, ledger_id="5e20"), replace(HEAD, head="ac" * 32)):
        with pytest.raises(BadData, match="does not verify"):
            other.verify(envelope.signature, KEY.public_key())
    with pytest.raises(BadData, match="does not verify"):
        HEAD.verify(envelope.signature, OTHER.public_key())


@pytest.mark.parametrize("ledger", [HEAD, None])
def test_a_receipt_is_read_back(ledger: LedgerHead | None) -> None:
    receipt = replace(RECEIPT, ledger=ledger)
    envelope = dsse.Envelope.from_document(receipt.sign(KEY).document())
    assert Receipt.verified(envelope, KEY.public_key()) == receipt


def test_a_receipt_that_was_changed_or_is_another_thing_is_refused() -> None:
    envelope = RECEIPT.sign(KEY)
    refused = replace(envelope, payload=envelope.payload.replace(b'"accepted"', b'"refused"'))
    with pytest.raises(BadData, match="does not verify"):
        Receipt.verified(refused, KEY.public_key())
    with pytest.raises(BadData, match=r"^signed as 'application/vnd.wardround.ledger-head"):
        Receipt.verified(HEAD.sign(KEY), KEY.public_key())
    foreign: list[object] = [{}, [], None, 5, {"ledger": None}, {"ledger": {}}, {"ledger": 5}]
    for value in foreign:
        with pytest.raises(BadData, match=r"^signed, but not a receipt$"):
            Receipt.verified(dsse.sign(RECEIPT_TYPE, value, KEY), KEY.public_key())


def test_a_receipt_says_its_decision_in_words_of_the_contract() -> None:
    """The base64 in a ledger line is of the signature alone: the payload can be read by eye."""
    document = RECEIPT.sign(KEY).document()
    assert '"decision":"accepted"' in document["payload"]
    assert len(base64.b64decode(document["signature"])) == 64
