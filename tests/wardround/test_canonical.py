"""The bytes that are hashed and signed."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.errors import BadData
from wardround.signing import canonical

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-canonical.MAX_INTEGER, canonical.MAX_INTEGER) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def test_keys_are_sorted_and_nothing_stands_between() -> None:
    assert canonical.dumps({"b": [1, True, None], "a": "ø"}) == '{"a":"ø","b":[1,true,null]}'.encode()


def test_the_digest_is_the_sha256_of_those_bytes() -> None:
    assert canonical.digest({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()


@given(VALUES)
def test_what_is_written_is_read_back_and_is_json(value: object) -> None:
    data = canonical.dumps(value)
    assert canonical.loads(data) == value
    assert json.loads(data) == value


@given(st.dictionaries(st.text(), st.integers(0, 9), max_size=6))
def test_the_order_in_which_keys_were_put_in_does_not_matter(value: dict[str, int]) -> None:
    assert canonical.dumps(value) == canonical.dumps(dict(reversed(value.items())))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param({"a": [0.5]}, "$.a[0]: float has no canonical form", id="float"),
        pytest.param({"a": [0, {"b": [1, 0.5]}]}, "$.a[1].b[1]: float has no canonical form", id="inner float"),
        pytest.param({1: 2}, "$: key 1 is not a string", id="key"),
        pytest.param([2**53], "$[0]: an integer beyond 2^53 - 1, which JSON readers may round", id="large integer"),
        pytest.param(b"x", "$: bytes has no canonical form", id="bytes"),
        pytest.param("\ud800", "a text holds half a character (a lone surrogate), which has no UTF-8", id="surrogate"),
    ],
)
def test_what_has_no_one_form_is_refused(value: object, said: str) -> None:
    with pytest.raises(BadData) as caught:
        canonical.dumps(value)
    assert caught.value.message == said


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"b":1,"a":2}', id="unsorted"),
        pytest.param(b'{"a": 1}', id="space"),
        pytest.param(b'{"a":1}\n', id="newline"),
        pytest.param(b'"\\u00f8"', id="escaped letter"),
        pytest.param(b"\xef\xbb\xbf1", id="byte order mark"),
        pytest.param("1".encode("utf-16"), id="utf-16"),
        pytest.param(b"-0", id="minus zero"),
    ],
)
def test_json_in_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(BadData, match=r"^JSON, but not in canonical form$"):
        canonical.loads(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"a":1', id="cut"),
        pytest.param(b'{"a":1,"a":1}', id="duplicate key"),
        pytest.param(b"\xff", id="not UTF-8"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"1" * 5000, id="thousands of digits"),
    ],
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadData, match=r"^not JSON: "):
        canonical.loads(data)


@given(st.binary(max_size=60))
def test_foreign_bytes_raise_only_our_error(data: bytes) -> None:
    try:
        value = canonical.loads(data)
    except BadData:
        return
    assert canonical.dumps(value) == data


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_as_text_is_the_same_float_again(number: float) -> None:
    told = canonical.with_text_floats({"a": [number]})["a"][0]
    assert isinstance(told, str)
    assert float(told) == number


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_float_that_is_no_number_has_no_place_in_a_document(number: float) -> None:
    with pytest.raises(BadData, match=r"has no place in a document$"):
        canonical.with_text_floats([number])
