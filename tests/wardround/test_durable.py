"""Whole or not at all, and a disk that fails is said."""

import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from wardround.errors import CannotWrite, TryAgain
from wardround.local import copying, durable, outputs


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk: what would make a file longer than ``size`` bytes fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def failing_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_written_with_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    with umask(0o077):
        durable.write_file(tmp_path / "a", b"one", mode=0o640)
        durable.AppendFile(tmp_path / "b", mode=0o640).close()
        durable.SpoolFile(tmp_path / "c", mode=0o660).close()
    assert (tmp_path / "a").read_bytes() == b"one"
    assert [mode_of(tmp_path / name) for name in "abc"] == [0o640, 0o640, 0o660]


def test_pieces_are_written_end_to_end(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "a", (bytes([n]) * n for n in range(4)))
    assert (tmp_path / "a").read_bytes() == b"\1\2\2\3\3\3"


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    durable.write_file(path, b"old")
    with files_of_at_most(1000), pytest.raises(CannotWrite) as caught:
        durable.write_file(path, b"x" * 2000)
    assert caught.value.message == f"{path}: File too large"
    assert caught.value.hint == "check free space, owner and mode of that place"
    assert not isinstance(caught.value, durable.StorageFailed)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["a"]


def test_of_several_files_of_which_one_does_not_fit_none_is_written(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "card", b"old")
    files: dict[Path, bytes | list[bytes]] = {tmp_path / "card": b"new", tmp_path / "weights": [b"x" * 2000]}
    with files_of_at_most(1000), pytest.raises(CannotWrite, match="weights: File too large"):
        durable.write_files(files)
    assert names_in(tmp_path) == ["card"]
    assert (tmp_path / "card").read_bytes() == b"old"
    durable.write_files(files)
    assert names_in(tmp_path) == ["card", "weights"]
    assert (tmp_path / "card").read_bytes() == b"new"


def test_a_folder_whose_files_do_not_all_fit_is_not_made_or_is_as_it_was(tmp_path: Path) -> None:
    files: dict[str, bytes | Iterator[bytes]] = {"card": b"new", "weights": iter([b"x" * 2000])}
    with files_of_at_most(1000), pytest.raises(CannotWrite):
        outputs.fill(tmp_path / "out", files, force=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "card").write_bytes(b"old")
    with files_of_at_most(1000), pytest.raises(CannotWrite):
        outputs.fill(tmp_path / "kept", {"card": b"new", "weights": b"x" * 2000}, force=True)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["card"]
    assert (tmp_path / "kept" / "card").read_bytes() == b"old"


def test_killed_while_several_files_get_their_names_the_last_is_not_there_alone(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "from wardround.local import durable\n"
        "given = durable._name\n"
        "def name(temporary, path, replace):\n"
        "    if path.name == 'weights':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    given(temporary, path, replace)\n"
        "durable._name = name\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "durable.write_files({folder / 'card': b'card', folder / 'weights': b'weights'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [name for name in names_in(tmp_path) if not name.startswith(".")] == ["card"]
    (tmp_path / "card").unlink()
    outputs.folder(tmp_path, force=False)  # it counts as empty, and the next one leaves none of it
    outputs.fill(tmp_path, {"card": b"card", "weights": b"weights"}, force=False)
    assert names_in(tmp_path) == ["card", "weights"]


def test_a_source_of_pieces_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("the other half")

    path = tmp_path / "a"
    durable.write_file(path, b"old")
    with pytest.raises(ValueError, match="the other half"):
        durable.write_file(path, pieces())
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["a"]


def test_an_fsync_that_fails_is_not_tried_again_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    durable.write_file(path, b"old")
    failing_fsync(monkeypatch)
    with pytest.raises(durable.StorageFailed) as caught:
        durable.write_file(path, b"new")
    assert caught.value.message == f"{path}: the disk failed to keep what was written (Input/output error)"
    assert caught.value.hint == "check the disk, then start again: what was durable before is still there"
    assert caught.value.exit_code == 73
    assert path.read_bytes() == b"old"


def test_nothing_that_lies_under_the_temporary_name_is_written(tmp_path: Path) -> None:
    """A file that another user keeps open there, or a second name of a secret, would get what is written."""
    (tmp_path / "secret").write_bytes(b"secret")
    beside = tmp_path / f".a.{os.getpid()}.{threading.get_ident()}.tmp"
    for plant in (lambda: beside.symlink_to(tmp_path / "secret"), lambda: os.link(tmp_path / "secret", beside)):
        plant()
        durable.write_file(tmp_path / "a", b"new")
        assert (tmp_path / "secret").read_bytes() == b"secret"
        assert (tmp_path / "a").read_bytes() == b"new"
        assert names_in(tmp_path) == ["a", "secret"]


def copied(source: Path, target: Path, size: int) -> int:
    with source.open("rb") as file:
        return durable.copy_open(file.fileno(), target, size)


@pytest.mark.parametrize("by_the_kernel", [True, False])
def test_the_beginning_of_an_open_file_is_copied(
    tmp_path: Path, by_the_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not by_the_kernel:
        monkeypatch.setattr(os, "copy_file_range", refused)
    monkeypatch.setattr(copying, "READ_PIECE", 1000)
    monkeypatch.setattr(copying, "COPY_PIECE", 1000)
    whole = os.urandom(4321)
    (tmp_path / "source").write_bytes(whole)
    (tmp_path / "target").write_bytes(b"old")
    for size in (0, 1, 999, 1000, 3001, 4321):
        assert copied(tmp_path / "source", tmp_path / "target", size) == size
        assert (tmp_path / "target").read_bytes() == whole[:size]
    assert copied(tmp_path / "source", tmp_path / "target", 5000) == 4321  # and no more than there is
    assert (tmp_path / "target").read_bytes() == whole
    assert mode_of(tmp_path / "target") == 0o600
    assert names_in(tmp_path) == ["source", "target"]


def test_a_copy_that_the_disk_does_not_take_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(2000))
    (tmp_path / "target").write_bytes(b"old")
    with files_of_at_most(1000), pytest.raises(CannotWrite, match="target: File too large"):
        copied(tmp_path / "source", tmp_path / "target", 2000)
    assert (tmp_path / "target").read_bytes() == b"old"
    assert names_in(tmp_path) == ["source", "target"]


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_killed_before_the_rename_the_old_file_is_whole(tmp_path: Path, moment: str) -> None:
    """The process ends by SIGKILL in the middle: no handler of ours runs."""
    path = tmp_path / "a"
    durable.write_file(path, b"old")
    program = f"""
import os, pathlib, signal
from wardround.local import durable
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == "fsync": os.fsync = die
else: pathlib.Path.replace = die
durable.write_file(pathlib.Path({str(path)!r}), b"new")
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_two_threads_that_write_one_file_leave_one_of_the_two_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    meeting = threading.Barrier(2)

    def pieces(letter: bytes) -> Iterator[bytes]:
        for _ in range(20):
            meeting.wait(timeout=30)
            yield letter * 1000

    writers = [threading.Thread(target=durable.write_file, args=(path, pieces(letter))) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert path.read_bytes() in (b"a" * 20_000, b"b" * 20_000)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    for kind in (durable.AppendFile, durable.SpoolFile):
        with pytest.raises(CannotWrite, match="Too many levels of symbolic links"):
            kind(tmp_path / "a")
    durable.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_folders_are_made_closed_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with umask(0):
        durable.make_folder(tmp_path / "a" / "b")
        durable.make_folder(tmp_path)
    assert mode_of(tmp_path / "a") == mode_of(tmp_path / "a" / "b") == 0o700
    assert mode_of(tmp_path) == 0o750


def test_a_file_where_a_folder_is_wanted_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(CannotWrite, match="/a: File exists"):
        durable.make_folder(tmp_path / "a")


def test_moving_and_removing(tmp_path: Path) -> None:
    durable.make_folder(tmp_path / "from" / "inner")
    durable.write_file(tmp_path / "from" / "inner" / "x", b"1")
    durable.make_folder(tmp_path / "to")
    durable.move(tmp_path / "from" / "inner", tmp_path / "to" / "inner")
    assert (tmp_path / "to" / "inner" / "x").read_bytes() == b"1"
    durable.remove(tmp_path / "to")
    durable.remove(tmp_path / "to")
    assert names_in(tmp_path) == ["from"]
    with pytest.raises(CannotWrite, match="No such file"):
        durable.move(tmp_path / "nothing", tmp_path / "x")


def test_an_appended_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = durable.AppendFile(tmp_path / "ledger")
    file.append(b"one\n")
    with files_of_at_most(10), pytest.raises(CannotWrite, match="ledger: File too large"):
        file.append(b"a line longer than that\n")
    file.append(b"two\n")
    file.close()
    assert (tmp_path / "ledger").read_bytes() == b"one\ntwo\n"


def test_an_appended_line_is_durable_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = durable.AppendFile(tmp_path / "ledger")
    failing_fsync(monkeypatch)
    with pytest.raises(durable.StorageFailed):
        file.append(b"one\n")
    file.close()


def test_a_spool_is_filled_from_any_offset_and_found_again(tmp_path: Path) -> None:
    with durable.SpoolFile(tmp_path / "upload") as spool:
        spool.write_at(4, b"5678")
        spool.write_at(0, b"1234")
        spool.write_at(8, b"")
        spool.sync()
    with durable.SpoolFile(tmp_path / "upload") as spool:
        assert spool.size() == 8
        spool.truncate(6)
    assert (tmp_path / "upload").read_bytes() == b"123456"


def test_a_spool_on_a_full_disk_names_the_file(tmp_path: Path) -> None:
    spool = durable.SpoolFile(tmp_path / "upload")
    with files_of_at_most(10), pytest.raises(CannotWrite, match="upload: File too large"):
        spool.write_at(0, b"x" * 100)
    spool.close()


def test_a_state_folder_in_use_names_who_uses_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from wardround.local.durable import StateLock;"
            "lock = StateLock(pathlib.Path(sys.argv[1]), 'coordinator serve');"
            "print('held', flush=True); sys.stdin.read()",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TryAgain) as caught:
            durable.StateLock(tmp_path, "coordinator invite")
        assert caught.value.message == f"{tmp_path} is in use by coordinator serve (process {holder.pid})"
        assert caught.value.hint == "stop that process first, or use another --state"
        holder.kill()  # freed by the kernel, however the holder ends
    with durable.StateLock(tmp_path, "coordinator invite"):
        assert (tmp_path / "lock").read_text() == f"coordinator invite (process {os.getpid()})\n"
    durable.StateLock(tmp_path, "coordinator serve").release()


def test_a_state_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="/nothing/lock: No such file or directory"):
        durable.StateLock(tmp_path / "nothing", "coordinator serve")


def test_a_full_disk_frees_the_lock_again(tmp_path: Path) -> None:
    with files_of_at_most(0), pytest.raises(CannotWrite, match="lock: File too large"):
        durable.StateLock(tmp_path, "coordinator serve")
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.parametrize(("lasting", "synced"), [("all", ["file", "folder"]), ("content", ["file"]), ("nothing", [])])
def test_what_is_fsynced_of_a_file_is_what_must_last(
    tmp_path: Path, lasting: durable.Lasting, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        done.append("folder" if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir() else "file")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    durable.write_file(tmp_path / "a", b"new", lasting=lasting)
    assert done == synced
    assert (tmp_path / "a").read_bytes() == b"new"
    done.clear()
    durable.remove(tmp_path / "a", lasting=lasting == "all")
    assert done == (["folder"] if lasting == "all" else [])
    assert names_in(tmp_path) == []
