"""Copies of models, accepted updates and public data sets in an object store, named by a URL that fsspec knows.

What is here is a second place for what is on this machine's disk: a standby fetches from it what it lacks. How lasting
it is, the store alone decides: nothing here can fsync it. Each file that is fetched is hashed before it is used, as one
on the disk is.
"""

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wardround.errors import NeedsPerson, TryAgain, UsageProblem, WardroundError
from wardround.local.durable import write_file
from wardround.tensors.manifests import CHUNK

AS_IN = "as in s3://bucket/wardround; keys are in the environment or the machine's role"
CHAIN = "::"
log = logging.getLogger(__name__)


def is_url(place: str) -> bool:
    """Whether a place is an object store, and not a folder."""
    return "://" in place


def refuse_unfit(url: str) -> None:
    """Raises UsageProblem: it has a name and a password in it, or names no place; or it is several, as in
    "simplecache::s3://", in which fsspec would look for names and passwords elsewhere than we do."""
    parts = urlsplit(url)
    if CHAIN in url:
        raise UsageProblem("the object store's address is a chain of several, as fsspec has them", hint=AS_IN)
    if parts.username is not None or parts.password is not None:
        raise UsageProblem("the object store's address has a key in it, which others could read", hint=AS_IN)
    if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
        raise UsageProblem("the object store's address names no bucket or folder", hint=AS_IN)


class ObjectStore:
    """One prefix of an object store, at ``url``. Names in it are those of the files below the blobs' folder."""

    def __init__(self, url: str) -> None:
        """Nothing is connected before it is used.

        Raises:
            UsageProblem: not such an address.
            NeedsPerson: fsspec, or what it needs for this kind of store, is not installed.
        """
        refuse_unfit(url)
        self.url = url
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise NeedsPerson(
                f"{url}: object stores need fsspec, which is not installed", hint="`pip install 'wardround[objects]'`"
            ) from None
        try:
            self._files, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise NeedsPerson(f"{url}: {error}", hint="for s3:// that is `pip install s3fs`") from None
        except ValueError as error:
            raise UsageProblem(f"{url}: {error}", hint=AS_IN) from None
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="objects")

    def put(self, source: Path, name: str) -> None:
        """Copy a file there. What is there has the same length when this returns.

        Raises:
            TryAgain: it did not arrive.
        """
        try:
            with self._explained(name):
                target = f"{self._root}/{name}"
                if "file" in self._files.protocol:  # others have no folders
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(source), target)
                found, wanted = self._files.info(target)["size"], source.stat().st_size
        except FileNotFoundError as error:
            raise TryAgain(
                f"{self.url}/{name} did not arrive: nothing is there by that name",
                hint="does the bucket, or the folder, still exist? what was to be copied stays here",
                code="TOO_BUSY",
            ) from error
        if found != wanted:
            raise TryAgain(f"{self.url}/{name} has {found} bytes there, {wanted} were sent", code="TOO_BUSY")

    def fetch(self, name: str, target: Path) -> bool:
        """Copy a file from there, whole and durable. Whether there is one.

        Raises:
            TryAgain: the store cannot be reached.
        """
        try:
            with self._explained(name), self._files.open(f"{self._root}/{name}", "rb") as file:
                write_file(target, _pieces(file))
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str) -> set[str]:
        """The names in a folder there. Raises TryAgain: the store cannot be reached."""
        try:
            with self._explained(folder):
                found = self._files.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return set()
        return {f"{folder}/{str(path).rpartition('/')[2]}" for path in found}

    def remove(self, names: Collection[str]) -> None:
        """Remove them later, one after the other. What cannot be removed now is, at the next start."""
        for name in names:
            self._remover.submit(self._remove, name)

    def _remove(self, name: str) -> None:
        try:
            with self._explained(name):
                self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return
        except WardroundError as error:
            log.warning("%s; it stays there until the next start", error)

    def close(self) -> None:
        """Remove what is still to be removed, and end."""
        self._remover.shutdown()

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, WardroundError):
            raise
        except Exception as error:  # of the store's own kind, which we need not have installed
            raise TryAgain(
                f"{self.url}/{name}: the object store did not answer as it should ({type(error).__name__})",
                hint="see to the store and to this machine's rights there",
                code="TOO_BUSY",
            ) from error


def _pieces(file: Any) -> Iterator[bytes]:
    while data := file.read(CHUNK):
        yield data
