"""One line that is pasted: whole, or refused with what to do."""

import base64
import datetime
import json
import string
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.errors import BadData
from wardround.records.invitation import Invitation, ago
from wardround.signing import canonical

INVITATION = Invitation(
    id="3f2a",
    federation="heart.example",
    site="st-olav",
    address="fed.example.org:8443",
    expires_s=1741078800,  # 2025-03-04 09:00 UTC
    authority="-----BEGIN CERTIFICATE-----\nauthority\n",
    certificate="-----BEGIN CERTIFICATE-----\nbootstrap\n",
    key="-----BEGIN PRIVATE KEY-----\nsecret\n",
)
TEXT = INVITATION.encode()
CHANGED = "the invitation is cut short or changed: its check digits do not match"
COPY_AGAIN = "copy the whole line again, from `wr1.` to its last character"


def packed(body: object) -> str:
    """An invitation with good check digits around any contents."""
    data = body if isinstance(body, bytes) else canonical.dumps(body)
    middle = base64.urlsafe_b64encode(data).decode().rstrip("=")
    return f"wr1.{middle}.{zlib.crc32(middle.encode()):08x}"


def fields(**changes: Any) -> dict[str, Any]:
    return {**json.loads(base64.urlsafe_b64decode(TEXT.split(".")[1] + "==")), **changes}


def refused(text: str) -> BadData:
    with pytest.raises(BadData) as caught:
        Invitation.decode(text)
    assert "secret" not in caught.value.message
    return caught.value


def test_an_invitation_is_read_back() -> None:
    assert Invitation.decode(TEXT) == INVITATION
    assert TEXT.startswith("wr1.")
    assert TEXT.isascii()


@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.sampled_from([" ", "\n", "\r\n", "\t", "\u00a0"])), max_size=5))
def test_white_space_from_pasting_does_not_matter(spaces: list[tuple[int, str]]) -> None:
    text = TEXT
    for place, space in spaces:
        text = text[:place] + space + text[place:]
    assert Invitation.decode(text) == INVITATION


def test_an_invitation_cut_anywhere_is_refused() -> None:
    for size in range(len(TEXT)):
        error = refused(TEXT[:size])
        assert error.hint == COPY_AGAIN
        assert error.message == ("this is not an invitation: it does not begin with `wr1.`" if size < 4 else CHANGED)


def test_every_change_of_one_character_is_refused() -> None:
    for place, letter in enumerate(TEXT):
        others = {"A", "a", "0", ".", "-", "=", "ø", letter.swapcase(), chr(ord(letter) ^ 1)} - {letter}
        for other in others:
            refused(TEXT[:place] + other + TEXT[place + 1 :])


@given(st.data())
def test_two_characters_that_changed_places_are_refused(data: st.DataObject) -> None:
    places = [n for n in range(len(TEXT) - 1) if TEXT[n] != TEXT[n + 1]]
    n = data.draw(st.sampled_from(places))
    refused(TEXT[:n] + TEXT[n + 1] + TEXT[n] + TEXT[n + 2 :])


@given(st.text(alphabet=string.printable + "\udcff\u0660", max_size=80))
def test_any_text_raises_only_our_error(text: str) -> None:
    refused(text)
    refused("wr1." + text)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param([], id="no object"),
        pytest.param({"id": "x"}, id="fields are missing"),
        pytest.param(fields(more="x"), id="a field of a later version"),
        pytest.param(fields(expires_s="soon"), id="type"),
        pytest.param(fields(expires_s=-1), id="before 1970"),
        pytest.param(fields(expires_s=253402300800), id="after the year 9999"),
        pytest.param(fields(site="st-olav\n\x1b[31m"), id="a name that would write on the terminal"),
        pytest.param(b"{}\n", id="not canonical"),
        pytest.param(b"\x80\x04", id="not JSON"),
    ],
)
def test_good_check_digits_around_other_contents_are_refused(body: object) -> None:
    error = refused(packed(body))
    assert error.message == "the invitation is whole, but its contents are not known to this version"
    assert error.hint == "update this agent, or ask the coordinator's operator for a new invitation"


def test_the_key_is_in_no_representation() -> None:
    assert "secret" not in repr(INVITATION)
    assert "secret" not in f"{INVITATION}"


def test_an_expired_invitation_shows_both_clocks() -> None:
    expires = datetime.datetime(2025, 3, 4, 9, 0, tzinfo=datetime.UTC)
    INVITATION.refuse_expired(expires - datetime.timedelta(seconds=1))
    with pytest.raises(BadData) as caught:
        INVITATION.refuse_expired(expires + datetime.timedelta(hours=2))
    assert caught.value.message == (
        "invitation for site `st-olav` expired 2 h ago (2025-03-04 09:00 UTC; "
        "this machine's clock says 2025-03-04 11:00 UTC)"
    )
    assert caught.value.hint == "ask the coordinator's operator for a new one: `coordinator invite st-olav`"
    assert caught.value.code == "INVITATION_EXPIRED"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (86400 * 2, "2 days")]
)
def test_a_length_of_time_is_said_as_a_person_would(seconds: int, said: str) -> None:
    assert ago(datetime.timedelta(seconds=seconds)) == said
