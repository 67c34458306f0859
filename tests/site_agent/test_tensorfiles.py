"""Tensors of torch in files: how an update is written."""

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from site_agent.trainer.rounds.tensorfiles import specs_of, update_name, write_update
from wardround.local import durable
from wardround.tensors.manifests import CHUNK, MODEL


def test_an_update_is_written_in_whole_blocks_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its tensors begin and end: the kernel writes whole blocks for less."""
    tensors = {"a": torch.randn(CHUNK // 4 + 3), "b": torch.randn(CHUNK // 2)}
    ends = [0]
    write = durable.write_file

    def noted(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
            yield piece

    def write_noted(path: Path, data: Iterable[memoryview], **fields: Any) -> None:
        write(path, noted(data), **fields)

    monkeypatch.setattr(durable, "write_file", write_noted)
    crc32 = write_update(tmp_path / "update", {MODEL: tensors}, specs_of(tensors))
    data = (tmp_path / "update").read_bytes()
    assert data.endswith(tensors["a"].numpy().tobytes() + tensors["b"].numpy().tobytes())
    assert crc32 == f"{zlib.crc32(data):08x}"
    assert set(range(CHUNK, len(data), CHUNK)) <= set(ends)


def test_what_a_killed_worker_had_half_written_of_an_update_goes_with_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".update-small-1-3.safetensors.7.8.tmp"
    others = tmp_path / ".base-small-3.safetensors.7.8.tmp"  # the gateway's
    for path in (left, others):
        path.write_bytes(b"half")
    stays = tmp_path / ".update-small-1-4.safetensors.7.8.tmp"  # it cannot be removed so
    stays.mkdir()
    tensors = {"w": torch.ones(2)}
    write_update(tmp_path / "update-other-1-1.safetensors", {MODEL: tensors}, specs_of(tensors))
    names = [others.name, stays.name, "update-other-1-1.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_an_update_whose_round_was_called_off_goes_with_the_studys_next_one(tmp_path: Path) -> None:
    """The worker was ended after it had written it and before it could say so: nobody else knows that it is there."""
    others = [update_name("small-1", 2, 3), update_name("other", 1, 3), f"base-{update_name('small', 1, 3)}"]
    for name in (update_name("small", 1, 3), update_name("small", 2, 1), *others):
        (tmp_path / name).write_bytes(b"whole")
    tensors = {"w": torch.ones(2)}
    written = update_name("small", 2, 4)
    write_update(tmp_path / written, {MODEL: tensors}, specs_of(tensors))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, written])
