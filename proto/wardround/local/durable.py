"""Every write that must survive a crash. The one module that fsyncs and renames.

A file is either as it was or as it was meant to be: written beside its place, fsynced, renamed, and the folder fsynced.
An fsync that fails is never tried again: the kernel may have dropped the pages and report success the second time
(PostgreSQL's rule). It raises ``StorageFailed``, and a service that meets it must end; on its next start it reads what
the disk really has.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from wardround.errors import CannotWrite, TryAgain
from wardround.local.copying import copy
from wardround.local.half_written import ANY, Names, becomes, beside
from wardround.local.writing import Buffer, Room, write_all, write_pieces

Lasting = Literal["all", "content", "nothing"]
OPENED = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # each file that is written here
BROKEN_DISK = (errno.EIO, errno.EUCLEAN)  # not full, not forbidden, not gone, but broken
TAIL = 64 * 1024  # bytes at the end of a file that ``AppendFile`` writes once more when it opens it
AFTER = "check the disk, then start again: what was durable before is still there"


class StorageFailed(CannotWrite):
    """The disk failed where a retry proves nothing. The process must end."""


def make_folder(path: Path, mode: int = 0o700, *, lasting: bool = True) -> None:
    """Make ``path`` and its missing parents, durably; itself if ``lasting``. An existing folder keeps its mode."""
    if path.is_dir():
        return
    make_folder(path.parent, mode)
    with _naming(path):
        path.mkdir(mode=mode, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, mode)  # of the folder that was made, whatever its name leads to by now
        finally:
            os.close(descriptor)
    if lasting:
        sync_folder(path.parent)


def write_file(
    path: Path, data: Buffer | Iterable[Buffer], *, mode: int = 0o600, replace: bool = True, lasting: Lasting = "all"
) -> None:
    """Put ``data`` at ``path``, whole or not at all. An iterable is written piece by piece.

    Args:
        lasting: what is there after a loss of power. "all": this. "content": this, or what was there before, each
            whole; for what can be done again from there. "nothing": anything; for what can be made again, and whose
            digest is looked at before it is used.

    Raises:
        CannotWrite: it does not go there; with ``replace=False`` also because something is there.
        StorageFailed: the disk failed.
    """
    write_files({path: data}, mode=mode, replace=replace, lasting=lasting)


def write_files(
    files: Mapping[Path, Buffer | Iterable[Buffer]], *, mode: int = 0o600, replace: bool = True,
    lasting: Lasting = "all",
) -> None:  # fmt: skip
    """Put files at their places once all of them are written, in their order: where one of them does not go there, none
    is there. After a crash the last is nowhere without the others. As ``write_file``."""
    temporaries = {path: beside(path) for path in files}
    try:
        for path, data in files.items():
            with _naming(path):
                descriptor = _create(temporaries[path], mode)
                try:
                    write_pieces(descriptor, [data] if isinstance(data, bytes | bytearray | memoryview) else data)
                    if lasting != "nothing":
                        _sync(descriptor, path)
                finally:
                    os.close(descriptor)
        for path, temporary in temporaries.items():
            with _naming(path):
                _name(temporary, path, replace)
    except BaseException:
        for temporary in temporaries.values():
            with suppress(OSError):  # it may never have been made, where this user may not even look
                temporary.unlink()
        raise
    if lasting == "all":
        for folder in {path.parent for path in files}:
            sync_folder(folder)


def copy_open(source: int, target: Path, size: int, *, mode: int = 0o600) -> int:
    """Copy the first ``size`` bytes of the open file ``source`` to ``target``, whole or not at all.

    The kernel copies, or shares the blocks where the file system can; memory stays small. Not fsynced: for what can be
    copied again, and whose digest is looked at before it is used.

    Returns:
        How many bytes there were; fewer than ``size`` where the source is shorter.
    """
    temporary = beside(target)
    try:
        with _naming(target):
            descriptor = _create(temporary, mode)
            try:
                copied = copy(source, descriptor, size)
            finally:
                os.close(descriptor)
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return copied


def _name(temporary: Path, path: Path, replace: bool) -> None:
    """Give a finished file its name; without ``replace`` only where the name is free."""
    if not replace:
        try:
            path.hardlink_to(temporary)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS) or os.path.lexists(path):
                raise
        else:
            temporary.unlink()
            return
    temporary.replace(path)


def move(source: Path, target: Path) -> None:
    """Rename a file, or a folder onto a name that is free or an empty folder, durably."""
    with _naming(target):
        source.replace(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def link(source: Path, name: Path) -> None:
    """Give a file a further name on the same disk, durably. One that is there by that name is replaced."""
    temporary = beside(name)
    with _naming(name):
        temporary.hardlink_to(source)
        temporary.replace(name)
        temporary.unlink(missing_ok=True)  # where both were names of one file already
    sync_folder(name.parent)


def remove(path: Path, *, lasting: bool = True) -> None:
    """Remove a file or a folder with all in it, durably unless ``lasting`` is False. A missing one is no error."""
    with _naming(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if lasting and path.parent.is_dir():
        sync_folder(path.parent)


def sweep(folder: Path, names: Names = ANY) -> None:
    """Remove what a killed process had half written of these files in ``folder``. For whoever alone writes them."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if names.fullmatch(becomes(path) or ""):
            remove(path)


def sync_file(path: Path) -> None:
    """Make what another writer put into ``path`` durable."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync(descriptor, path)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` durable."""
    sync_file(path)


class AppendFile:
    """A file that only grows, each append durable before the call returns.

    After a failure that leaves unknown what the disk has, it refuses every further write: the next process that opens
    it reads what is there.
    """

    def __init__(self, path: Path, *, mode: int = 0o600, tail: int = TAIL) -> None:
        """Open or make ``path``, and write its last ``tail`` bytes once more, durably.

        Where an fsync of an earlier process failed, those bytes may stand in memory alone, and nobody would write them
        to the disk again (as the kernel sees it they are clean).
        """
        self.path = path
        self._failed = False
        existed = path.exists()
        with _naming(path):
            self._descriptor = os.open(path, OPENED | os.O_WRONLY | os.O_APPEND, mode)
        if not existed:
            _set_mode(self._descriptor, mode)
            sync_folder(path.parent)
        elif tail:
            _write_again(path, tail)

    def append(self, data: Buffer, *, lasting: bool = True) -> None:
        """Write ``data`` at the end and fsync. A disk that is full leaves the file as it was.

        With ``lasting=False`` the fsync waits for the next one: for what can be made again.

        Raises:
            CannotWrite: full, or forbidden; nothing was written.
            StorageFailed: whether it is written is unknown; from now on every call raises it.
        """
        self._refuse_failed()
        size = os.fstat(self._descriptor).st_size
        try:
            with _naming(self.path):
                write_all(self._descriptor, data)
        except BaseException as error:
            self._cut(size)
            if isinstance(error, StorageFailed):
                self._failed = True
            raise
        if lasting:
            self.sync()

    def sync(self) -> None:
        """Make durable what was appended before. Raises StorageFailed, and then for good."""
        self._refuse_failed()
        try:
            _sync(self._descriptor, self.path)
        except StorageFailed:
            self._failed = True
            raise

    def _cut(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._failed = True
            raise _disk_failed(self.path, error) from error

    def _refuse_failed(self) -> None:
        if self._failed:
            raise StorageFailed(f"{self.path}: the disk failed before; nothing more is written to it", hint=AFTER)

    def close(self) -> None:
        os.close(self._descriptor)


class SpoolFile:
    """A file filled from an offset, for an upload or a download that may break and go on."""

    def __init__(self, path: Path, *, mode: int = 0o600, lasting: bool = True, size: int = 0) -> None:
        """Open or make ``path``. With ``lasting=False`` its name may be gone after a loss of power.

        ``size``: bytes that it will have, as far as that is known.
        """
        self.path = path
        existed = path.exists()
        with _naming(path):
            self._descriptor = os.open(path, OPENED | os.O_RDWR, mode)
        if not existed:
            _set_mode(self._descriptor, mode)  # the other user of a shared folder must read it
            if lasting:
                sync_folder(path.parent)
        self._room = Room(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._room.need(offset + len(view))
        with _naming(self.path):
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def truncate(self, size: int) -> None:
        with _naming(self.path):
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        _sync(self._descriptor, self.path)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "SpoolFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class StateLock:
    """One process owns a state directory. Freed by the kernel when the process ends, however it ends."""

    def __init__(self, state: Path, owner: str, *, patience_s: float = 0.2) -> None:
        """Take ``state/lock`` for ``owner`` ("coordinator serve").

        Args:
            patience_s: how long a holder that is just ending may take over it; ``control.is_held`` holds it too.

        Raises:
            TryAgain: another process holds it; the message says which.
            CannotWrite: no such folder, another user's, or a full disk.
        """
        path = state / "lock"
        with _naming(path):
            self._descriptor = os.open(path, OPENED | os.O_RDWR, 0o600)
        deadline = time.monotonic() + patience_s
        while not (taken := self._try()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not taken:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            raise TryAgain(f"{state} is in use by {holder}", hint="stop that process first, or use another --state")
        try:
            with _naming(path):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{owner} (process {os.getpid()})\n".encode(), 0)
        except CannotWrite:
            os.close(self._descriptor)
            raise

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "StateLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _create(path: Path, mode: int) -> int:
    """A new file that nobody else has open. What a crash, or somebody else, left under its name is unlinked."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, OPENED | os.O_WRONLY | os.O_EXCL, mode)
    _set_mode(descriptor, mode)
    return descriptor


def _set_mode(descriptor: int, mode: int) -> None:
    """Give a new file its mode, whatever the umask. To say again what it has is another change to the disk."""
    if os.fstat(descriptor).st_mode & 0o7777 != mode:
        os.fchmod(descriptor, mode)


def _write_again(path: Path, count: int) -> None:
    """Put the last ``count`` bytes of a file where they are, so that the next fsync is about them, and fsync."""
    with SpoolFile(path) as file:
        start = max(0, file.size() - count)
        with path.open("rb") as found:
            found.seek(start)
            file.write_at(start, found.read())
        file.sync()


def _sync(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise _disk_failed(path, error) from error


def _disk_failed(path: Path, error: OSError) -> StorageFailed:
    return StorageFailed(f"{path}: the disk failed to keep what was written ({error.strerror})", hint=AFTER)


def unread(path: Path, error: OSError) -> StorageFailed:
    """Of a file that the disk does not give back: what it holds is not known, so nothing is wrong with that yet."""
    return StorageFailed(f"{path}: the disk failed to read it ({error.strerror})", hint=AFTER)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn the system's error into ours, naming the file."""
    try:
        yield
    except OSError as error:
        if error.errno in BROKEN_DISK:
            raise _disk_failed(path, error) from error
        raise CannotWrite(f"{path}: {error.strerror}", hint="check free space, owner and mode of that place") from error
