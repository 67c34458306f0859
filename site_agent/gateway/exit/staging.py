"""The staging folder, as the gateway uses it: the trainer's user can write there too, so nothing in it is trusted.

A name in it may at any moment be a link, a pipe, or another file than a moment ago. So each is reached from the
folder's descriptor, no link is followed, nothing is opened for writing or made by path, and no mode is changed there.
What comes out is copied into a folder that only the gateway's user can write, and what goes in is renamed into it
whole.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from site_agent.state.directory import SHARED_MODE
from wardround.errors import BadData, CannotWrite
from wardround.local import durable

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # neither a pipe nor a lease holds us
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Staging:
    """The folder at ``path``, which the gateway's user owns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self, name: str, target: Path, limit: int) -> None:
        """Copy the file called ``name`` to ``target``, opening it once. What is done to it later has no effect.

        A file that changes while it is copied gives some mixture: look at the copy, never at the source.

        Args:
            limit: bytes that it may have.

        Raises:
            BadData: no plain file, one with a second name, or a larger one; DECLINED codes.
            CannotWrite: ``target`` does not take it.
        """
        if not NAME.fullmatch(name):
            raise _refused("the trainer names a file outside the staging folder")
        with self._open() as folder, self._opened(folder, name) as source:
            state = os.fstat(source)
            if not stat.S_ISREG(state.st_mode):
                raise _refused(f"{self._path / name} is no plain file; the trainer hands over plain files")
            if state.st_nlink != 1:
                raise _refused(f"{self._path / name} has {state.st_nlink} names; the trainer hands over plain files")
            if state.st_size > limit:
                raise BadData(
                    f"{self._path / name} has {state.st_size} bytes, the approved tensors at most {limit}",
                    code="DECLINED_MODEL_MISMATCH",
                )
            durable.copy_open(source, target, state.st_size)

    def give(self, source: Path, name: str) -> None:
        """Move a file of the gateway's own into the folder, readable by its group, over whatever has that name.

        Raises:
            CannotWrite: it cannot be put there.
        """
        with self._open() as folder:
            try:
                self._let_group_read(source, folder)
                os.rename(source, name, dst_dir_fd=folder)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    hint = f"{self._path} must be the gateway's, and a folder of that name there must go"
                    raise CannotWrite(f"{self._path / name}: {os.strerror(error.errno or 0)}", hint=hint) from None
                self._copy_in(source, folder, name)

    def remove(self, name: str) -> None:
        """Remove a file, or a link and not what it leads to. A missing one is no error; a folder stays."""
        if not NAME.fullmatch(name):
            return
        with self._open() as folder:
            try:
                os.unlink(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EPERM):
                    raise CannotWrite(f"{self._path / name}: {os.strerror(error.errno or 0)}") from None

    def remove_models(self, study: str) -> None:
        """Remove the models that were handed over for a study."""
        with self._open() as folder, os.scandir(folder) as entries:
            names = [entry.name for entry in entries if is_model(entry.name, study)]
        for name in names:
            self.remove(name)

    @contextmanager
    def _open(self) -> Iterator[int]:
        try:
            folder = os.open(self._path, FOLDER)
        except OSError as error:
            raise CannotWrite(f"{self._path}: {os.strerror(error.errno or 0)}") from None
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _opened(self, folder: int, name: str) -> Iterator[int]:
        try:
            source = os.open(name, READ, dir_fd=folder)
        except OSError as error:
            what = "is a link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0).lower()
            raise _refused(f"{self._path / name}: {what}; the trainer hands over plain files") from None
        try:
            yield source
        finally:
            os.close(source)

    def _copy_in(self, source: Path, folder: int, name: str) -> None:
        """For a staging folder on a file system of its own."""
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            target = Path(f"/proc/self/fd/{folder}") / name
            durable.copy_open(descriptor, target, os.fstat(descriptor).st_size, mode=SHARED_MODE)
        finally:
            os.close(descriptor)
        durable.remove(source)

    def _let_group_read(self, source: Path, folder: int) -> None:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            group = os.fstat(folder).st_gid
            if os.fstat(descriptor).st_gid != group:
                os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, SHARED_MODE)
        finally:
            os.close(descriptor)


def model_name(kind: str, study: str, round_: int) -> str:
    """What a model for the trainer is called. ``kind``: base or best."""
    return f"{kind}-{study}-{round_}.safetensors"


def is_model(name: str, study: str) -> bool:
    """Whether ``model_name`` gives ``name`` for some round of the study."""
    return re.fullmatch(rf"(base|best)-{re.escape(study)}-[0-9]+\.safetensors", name) is not None


def _refused(message: str) -> BadData:
    return BadData(message, code="DECLINED_TRAINING_FAILED")
