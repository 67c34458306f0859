import hashlib

from fl_algorithms.streams import stream_seed


def test_a_stream_is_the_first_63_bits_of_the_hash_of_its_key() -> None:
    digest = hashlib.sha256(b'[2021,"va",3,"shuffle"]').digest()
    assert stream_seed(2021, "va", 3, "shuffle") == int.from_bytes(digest[:8], "big") // 2


def test_every_part_of_the_key_makes_another_stream() -> None:
    keys = [(1, "a", 1, "noise"), (2, "a", 1, "noise"), (1, "b", 1, "noise"), (1, "a", 2, "noise"), (1, "a", 1, "init")]
    assert len({stream_seed(*key) for key in keys}) == len(keys)
