"""A copy of a coordinator's state, made while it serves, and a state directory made of one.

BACKUP/backup.json                          of when and of whom, and the SHA-256 of every other file
BACKUP/config.toml, authority/, keys/       the federation's identity: as secret as the state directory itself
BACKUP/coordinator.db                       what was committed at one moment
BACKUP/blobs/{models,uploads,public_data}/  the files that it names

The files are opened at the moment of the database's copy, by the thread that alone removes any, and copied after it.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from coordinator.context import Context, raise_fatal
from coordinator.creation import RUNS
from coordinator.state_directory import State
from coordinator.storage import tables
from coordinator.storage.blobs import SUFFIX, DamagedModel, is_whole
from coordinator.storage.database import Store
from coordinator.studies.cleanup import accepted_uploads
from wardround import __version__
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.local import directory
from wardround.local.directory import quoted
from wardround.local.durable import StateLock, make_folder, move, remove, write_file
from wardround.records.schema import Strict, check
from wardround.tensors.manifests import CHUNK

LIST = "backup.json"
log = logging.getLogger(__name__)


class Contents(Strict):
    """``backup.json``. ``made_s``: Unix time of the copy. ``files``: path below the backup -> SHA-256."""

    federation: str
    wardround: str
    made_s: int
    files: dict[str, str]


@dataclass(frozen=True)
class _Named:
    """A file that the database names, open so that its bytes stay: where it goes, and the digest of its manifest."""

    path: str
    digest: str
    descriptors: tuple[int, ...]  # of the file and of its second copy, as far as there are any


def make(context: Context, out: Path) -> Contents:
    """Copy the state of a running coordinator, or of one that no service owns, to the new folder ``out``.

    Raises:
        UsageProblem: ``out`` is there already, or inside the state directory.
        DamagedModel: a model is damaged, and so is its second copy.
        CannotWrite: there is no room; ``out`` is not made.
    """
    out = out.resolve()
    state = context.state.root.resolve()
    if out.exists():
        raise UsageProblem(f"{out} is there already", hint="give a folder that is not there yet")
    if out.is_relative_to(state):
        raise UsageProblem(f"{out} is inside the state directory", hint="give a folder on another disk")
    partial = out.with_name(f".{out.name}.partial")
    remove(partial)
    make_folder(partial)
    try:
        with ExitStack() as opened:
            made_s, named = context.engine.call(lambda: _snapshot(context, partial, opened))
            _copy_named(context, partial, named)
        for source in _plain_files(context.state):
            _copy(source, partial / source.relative_to(context.state.root))
        files = {str(path.relative_to(partial)): sha256(path) for path in _files_of(partial)}
        contents = Contents(federation=context.config.federation, wardround=__version__, made_s=made_s, files=files)
        write_file(partial / LIST, json.dumps(contents.model_dump(), indent=1, sort_keys=True).encode())
        move(partial, out)
    except BaseException:
        remove(partial)
        raise
    return contents


def put_back(backup: Path, state: State) -> Contents:
    """Make a new state directory of a backup, each of whose files is hashed first.

    Raises:
        UsageProblem: there is something at ``state`` already.
        BadData: it is no backup, or a file of it is damaged or missing; nothing was made.
        NeedsPerson: a newer program made it.
    """
    if directory.exists(state.root) and (not state.root.is_dir() or any(state.root.iterdir())):
        raise UsageProblem(
            f"{state.root} is there already; nothing was changed",
            hint=f"keep it aside first: `mv {quoted(state.root)} {quoted(state.root)}.old`",
        )
    contents = _contents(backup)
    partial = state.root.with_name(f".{state.root.name}.partial")
    remove(partial)
    make_folder(partial)
    for name, wanted in contents.files.items():
        path = partial / name
        _copy(backup / name, path)
        if sha256(path) != wanted:
            remove(partial)
            raise BadData(f"{backup / name} is damaged; nothing was restored", hint="take another backup")
    store = Store(partial / "coordinator.db")
    try:
        store.refuse_other_schema()
        with store.write() as session:
            session.merge(tables.Restore(restored_s=int(time.time()), backup_s=contents.made_s))
    except NeedsPerson:
        remove(partial)
        raise
    finally:
        store.close()
    move(partial, state.root)
    return contents


def going_on(state: State) -> list[str]:
    """The studies of a state directory that have begun and not ended."""
    with StateLock(state.root, "coordinator restore"):
        context = Context(state, wall_clock=time.time, monotonic=time.monotonic, fatal=raise_fatal)
        try:
            return [study.name for study in context.engine.studies() if study.state.phase in RUNS]
        finally:
            context.close()


def _contents(backup: Path) -> Contents:
    """The list of a backup. Raises BadData: it is none, or a file that it names is not there."""
    path = backup / LIST
    try:
        contents = check(Contents, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError):
        raise BadData(f"{backup} is no backup: it has no {LIST} that can be read") from None
    for name in contents.files:
        inside = (backup / name).resolve().is_relative_to(backup.resolve())
        if not inside or not (backup / name).is_file():
            raise BadData(f"{backup} is not whole: it has no {name}; nothing was restored", hint="take another backup")
    return contents


def _snapshot(context: Context, folder: Path, opened: ExitStack) -> tuple[int, list[_Named]]:
    """Copy the database, and open the files that it names. Where the studies are owned: there alone one is removed."""
    context.store.copy_to(folder / "coordinator.db")
    blobs = context.blobs
    studies = context.engine.studies()
    accepted = tables.Upload.id.in_(set(accepted_uploads(studies)))
    needed = {digest for study in studies for digest in study.models}
    digests: set[str] = set()
    with context.store.read() as session:
        for row in session.scalars(sa.select(tables.Study)):
            digests |= {row.initial, row.newest, json.loads(row.best)["digest"]} - {""}
        uploads = {row.id: row.manifest_sha256 for row in session.scalars(sa.select(tables.Upload).where(accepted))}
    named = []
    for digest in sorted(digests):
        paths = (blobs.model(digest), blobs.spare(digest))
        found = tuple(_open(path, opened) for path in paths if path.exists())
        if not found and digest in needed:
            raise DamagedModel(digest, blobs.folder)
        if found:
            named.append(_Named(f"blobs/models/{digest}{SUFFIX}", digest, found))
    for upload, manifest in sorted(uploads.items()):
        path = blobs.spool(upload)
        if path.exists():
            named.append(_Named(f"blobs/uploads/{upload}{SUFFIX}", manifest, (_open(path, opened),)))
    return int(context.wall_clock()), named


def _open(path: Path, opened: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def _copy_named(context: Context, folder: Path, named: Iterable[_Named]) -> None:
    """Copy models and updates, and hash the copies: a damaged one is no backup.

    Raises:
        DamagedModel: no copy of a model is whole. A damaged update is left out: its site is asked for it again.
    """
    for file in named:
        target = folder / file.path
        make_folder(target.parent)
        for descriptor in file.descriptors:
            write_file(target, _read(descriptor))
            if is_whole(target, file.digest):
                break
        else:
            remove(target)
            if target.parent.name == "models":
                raise DamagedModel(file.digest, context.blobs.folder)
            log.error("%s is damaged and not in the backup: its site is asked for it again", target.name)


def _plain_files(state: State) -> Iterator[Path]:
    """Configuration, keys and public data sets."""
    yield state.config_file
    for folder in (state.authority, state.receipt_key_file.parent, state.blobs / "public_data"):
        yield from _files_of(folder) if folder.is_dir() else ()


def _files_of(folder: Path) -> Iterator[Path]:
    """The files below a folder, but for those that are only being written."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield path


def _copy(source: Path, target: Path) -> None:
    make_folder(target.parent)
    with source.open("rb") as file:
        write_file(target, iter(lambda: file.read(CHUNK), b""))


def _read(descriptor: int) -> Iterator[bytes]:
    offset = 0
    while data := os.pread(descriptor, CHUNK, offset):
        yield data
        offset += len(data)


def sha256(path: Path) -> str:
    """Of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
