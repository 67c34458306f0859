"""Bytes into an open file: room is asked for in large steps, and nobody holds more of it than the file needs."""

import os
from pathlib import Path

import pytest

from wardround.local import durable, writing
from wardround.local.writing import AHEAD, SMALL

MIB = 1024 * 1024


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The steps in which the system is asked for room: from where on, and how much."""
    steps: list[tuple[int, int]] = []

    def take(descriptor: int, start: int, count: int) -> bool:
        steps.append((start, count))
        return True

    monkeypatch.setattr(writing, "_fallocate", take)
    return steps


def held(path: Path) -> int:
    """Bytes of the disk that a file holds."""
    return path.stat().st_blocks * 512


def test_room_is_asked_for_in_large_steps_up_to_the_size_that_is_known(
    tmp_path: Path, asked: list[tuple[int, int]]
) -> None:
    with durable.SpoolFile(tmp_path / "spool", size=10 * MIB) as spool:
        for start in range(0, 10 * MIB, MIB // 2):
            spool.write_at(start, bytes(MIB // 2))
    until = SMALL
    for start, count in asked:
        assert start == until
        until += count
    assert until == 10 * MIB
    assert len(asked) == 2  # of twenty writes


def test_a_small_file_is_not_worth_a_call(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    durable.write_file(tmp_path / "a", bytes(SMALL))
    with durable.SpoolFile(tmp_path / "spool", size=10 * MIB) as spool:
        spool.write_at(0, bytes(SMALL))
    assert asked == []


def test_who_announces_much_and_sends_little_holds_little(tmp_path: Path) -> None:
    with durable.SpoolFile(tmp_path / "spool", size=1024 * MIB) as spool:
        assert held(tmp_path / "spool") == 0
        spool.write_at(0, bytes(2 * MIB))
        assert spool.size() == 2 * MIB  # room is no bytes
        assert held(tmp_path / "spool") <= 2 * MIB + AHEAD + 64 * 1024


@pytest.mark.parametrize("pieces", [[3 * MIB], [2 * MIB, 5, MIB + 7], [5, 0, 700]])
def test_a_finished_file_holds_what_it_needs(tmp_path: Path, pieces: list[int]) -> None:
    data = [os.urandom(size) for size in pieces]
    durable.write_file(tmp_path / "a", iter(data))
    assert (tmp_path / "a").read_bytes() == b"".join(data)
    assert held(tmp_path / "a") <= sum(pieces) + 64 * 1024
    with (tmp_path / "a").open("rb") as source:
        assert durable.copy_open(source.fileno(), tmp_path / "copy", 64 * MIB) == sum(pieces)
    assert (tmp_path / "copy").read_bytes() == b"".join(data)
    assert held(tmp_path / "copy") <= sum(pieces) + 64 * 1024


def test_where_the_system_takes_no_room_ahead_it_is_asked_once_and_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refused(*of: int) -> bool:
        asked.append(of)
        return False

    monkeypatch.setattr(writing, "_fallocate", refused)
    data = os.urandom(3 * MIB)
    with durable.SpoolFile(tmp_path / "spool", size=64 * MIB) as spool:
        for start in range(0, len(data), MIB):
            spool.write_at(start, data[start : start + MIB])
    assert (tmp_path / "spool").read_bytes() == data
    assert len(asked) == 1
