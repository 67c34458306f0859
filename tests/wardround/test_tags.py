"""Tags: any change of any byte is seen, and nothing can be said without the key."""

import os

import pytest

from wardround.tensors.tags import Tag, Tagger, has_tag

DATA = os.urandom(3000)


def tag_of(*pieces: bytes) -> Tag:
    tagger = Tagger()
    for piece in pieces:
        tagger.update(piece)
    return tagger.tag()


def test_it_is_of_the_bytes_whatever_pieces_they_come_in() -> None:
    tag = tag_of(DATA[:1], b"", DATA[1:1000], DATA[1000:])
    assert has_tag([DATA], tag)
    assert has_tag([DATA[:17], DATA[17:2999], DATA[2999:]], tag)
    assert has_tag([], tag_of())


@pytest.mark.parametrize("place", [0, 15, 16, 1500, 2999])
def test_one_changed_bit_is_seen(place: int) -> None:
    changed = bytearray(DATA)
    changed[place] ^= 1
    assert not has_tag([bytes(changed)], tag_of(DATA))


def test_missing_and_further_bytes_are_seen_zeros_too() -> None:
    tag = tag_of(DATA)
    assert not has_tag([DATA[:-1]], tag)
    assert not has_tag([DATA, b"\0"], tag)
    assert not has_tag([], tag)
    assert not has_tag([bytes(16)], tag_of())


def test_each_is_under_a_key_of_its_own_which_no_log_shows() -> None:
    one, other = tag_of(DATA), tag_of(DATA)
    assert one.key != other.key
    assert one.value != other.value
    assert one.key.hex() not in repr(one)
    assert repr(one) == "Tag(size=3000)"
