"""The staging folder as the gateway uses it: copied out once, moved in whole, and no link followed."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from site_agent.gateway.exit.staging import Staging, is_model, model_name
from wardround.errors import BadData, CannotWrite
from wardround.local import durable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


def test_what_is_taken_stays_as_it_was_whatever_becomes_of_the_source(folder: Path, tmp_path: Path) -> None:
    (folder / "update").write_bytes(b"as it was")
    Staging(folder).take("update", tmp_path / "own", 9)
    (folder / "update").write_bytes(b"rewritten")
    assert (tmp_path / "own").read_bytes() == b"as it was"
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


def test_a_larger_file_than_allowed_is_not_copied(folder: Path, tmp_path: Path) -> None:
    (folder / "update").write_bytes(b"0123456789")
    with pytest.raises(BadData, match="update has 10 bytes, the approved tensors at most 9") as refused:
        Staging(folder).take("update", tmp_path / "own", 9)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"
    assert not (tmp_path / "own").exists()


def test_a_file_that_grows_is_copied_as_long_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "update").write_bytes(b"first")
    copy_open = durable.copy_open

    def grown(source: int, target: Path, size: int) -> int:
        with (folder / "update").open("ab") as file:
            file.write(b" and more")
        return copy_open(source, target, size)

    monkeypatch.setattr(durable, "copy_open", grown)
    Staging(folder).take("update", tmp_path / "own", 100)
    assert (tmp_path / "own").read_bytes() == b"first"


def test_what_is_given_is_moved_in_readable_by_the_group(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"model")
    (tmp_path / "model").chmod(0o600)
    (folder / "base").symlink_to(tmp_path / "key")  # what the trainer put there gives way, and is not followed
    Staging(folder).give(tmp_path / "model", "base")
    assert not (folder / "base").is_symlink()
    assert (folder / "base").read_bytes() == b"model"
    assert stat.S_IMODE((folder / "base").stat().st_mode) == 0o640
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "key").exists()


def test_what_is_given_to_another_file_system_is_copied(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "model").write_bytes(b"model")
    monkeypatch.setattr(os, "rename", across)
    Staging(folder).give(tmp_path / "model", "base")
    assert (folder / "base").read_bytes() == b"model"
    assert stat.S_IMODE((folder / "base").stat().st_mode) == 0o640
    assert [path.name for path in folder.iterdir()] == ["base"]
    assert not (tmp_path / "model").exists()


def test_a_folder_in_the_place_of_a_model_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"model")
    (folder / "base").mkdir()
    with pytest.raises(CannotWrite, match="base: Is a directory") as refused:
        Staging(folder).give(tmp_path / "model", "base")
    assert refused.value.hint == f"{folder} must be the gateway's, and a folder of that name there must go"


def test_a_folder_that_is_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CannotWrite, match="link: Not a directory"):
        Staging(tmp_path / "link").take("update", tmp_path / "own", 9)


def test_removing_follows_no_link_and_leaves_folders_and_other_studies_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("key")
    (folder / "base-a-1.safetensors").symlink_to(tmp_path / "key")
    (folder / "best-a-22.safetensors").mkdir()
    for name in ("base-a-b-1.safetensors", "base-a-1.safetensors.txt", "trainer.sock"):
        (folder / name).touch()
    staging = Staging(folder)
    staging.remove_models("a")
    staging.remove("../key")
    staging.remove("never there")
    assert (tmp_path / "key").read_text() == "key"
    left = {path.name for path in folder.iterdir()}
    assert left == {"best-a-22.safetensors", "base-a-b-1.safetensors", "base-a-1.safetensors.txt", "trainer.sock"}
    assert is_model(model_name("base", "a", 3), "a")
    assert not is_model(model_name("base", "a-3", 3), "a")


LARGE = """
import pathlib, resource, sys

import numpy
from site_agent.gateway.exit import egress
from site_agent.gateway.exit.staging import Staging
from site_agent.state.journal import Journal
from wardround.tensors.files import file_header
from wardround.tensors.manifests import TensorSpec

class Consent:
    study, document = "large", {}
    upload = download = (TensorSpec("w", "F32", (8192, 8192)),)

folder, own = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
header = file_header([TensorSpec("w", "F32", (8192, 8192))])
with (folder / "update").open("wb") as file:
    file.write(header)
    file.truncate(len(header) + 4 * 8192 * 8192)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = egress.take(Staging(folder), None, Journal("large", update="update"), Consent, own)
assert found.manifest.bytes == found.rows[0].bytes == 4 * 8192 * 8192
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_update_is_never_held_in_memory(folder: Path, tmp_path: Path) -> None:
    """256 MiB, copied, hashed and measured."""
    line = [sys.executable, "-c", LARGE, folder, tmp_path / "own"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) < 16 * 1024  # KiB
