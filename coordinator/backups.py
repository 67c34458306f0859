"""A copy of a coordinator's state, made while it serves, and a state directory made of one.

BACKUP/backup.json                          of when and of whom, and the SHA-256 of every other file
BACKUP/config.toml, authority/, keys/       the federation's identity: as secret as the state directory itself
BACKUP/dashboard/                           who may log in to the dashboard: salted hashes
BACKUP/coordinator.db                       what was committed at one moment, from a server too
BACKUP/blobs/{models,uploads,public_data}/  the files that it names

The files are linked at the moment of the database's copy, by the thread that alone removes any, and copied after it.
"""

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from coordinator.answers import SnapshotMade
from coordinator.context import Context
from coordinator.state_directory import Config, State, Storage, keep_password, write_config
from coordinator.storage import database, tables
from coordinator.storage.blobs import SUFFIX, Blobs, DamagedModel, is_whole
from coordinator.storage.schema import newest_schema, refuse_newer
from coordinator.studies.cleanup import accepted_uploads
from wardround import __version__
from wardround.errors import BadData, UsageProblem
from wardround.local import directory
from wardround.local.directory import quoted
from wardround.local.durable import make_folder, move, remove, write_file
from wardround.local.half_written import is_half_written
from wardround.records.schema import Strict, check, read_toml
from wardround.tensors.manifests import CHUNK

LIST = "backup.json"
DATABASE = "coordinator.db"
SETTINGS = "config.toml"
UNFINISHED = ".restoring"
log = logging.getLogger(__name__)


class Contents(Strict):
    """``backup.json``.

    Attributes:
        schema_version: of its database.
        made_s: Unix time of the copy.
        files: path below the backup -> SHA-256.
    """

    federation: str
    wardround: str
    schema_version: str
    made_s: int
    files: dict[str, str]


def snapshot(context: Context) -> SnapshotMade:
    """Put a copy of the database, and links to the files that it names, into a new folder of the state directory.

    It takes a moment, in the thread that alone removes such files. Whoever asked copies them and removes the folder; so
    the service, which may write nowhere else, need not.

    Raises:
        DamagedModel: a model that a study needs is gone, and so is its second copy.
    """
    folder = context.state.root / f"{context.state.snapshots}{uuid.uuid4().hex}"
    make_folder(folder)
    try:
        return context.engine.call(lambda: _snapshot(context, folder))
    except BaseException:
        remove(folder)
        raise


def make(state: State, made: SnapshotMade, out: Path) -> Contents:
    """Make the new folder ``out`` of a snapshot, which is removed, and of the keys and settings beside it.

    Raises:
        UsageProblem: ``out`` is there already, or inside the state directory.
        DamagedModel: a model is damaged, and so is its second copy.
        CannotWrite: there is no room; ``out`` is not made.
    """
    folder = Path(made.folder)
    partial = out.with_name(f".{out.name}.partial")
    try:
        refuse_unfit(state, out)
        remove(partial)
        make_folder(partial)
        _copy(folder / DATABASE, partial / DATABASE)
        _copy_named(state, made, partial)
        for source, name in _plain_files(state):
            _copy(source, partial / name)
        files = {str(path.relative_to(partial)): sha256(path) for path in _files_of(partial)}
        contents = Contents(
            federation=made.federation, wardround=__version__, schema_version=newest_schema(), made_s=made.made_s,
            files=files,
        )  # fmt: skip
        write_file(partial / LIST, json.dumps(contents.model_dump(), indent=1, sort_keys=True).encode())
        move(partial, out)
    except BaseException:
        remove(partial)
        raise
    finally:
        remove(folder)
    return contents


def refuse_unfit(state: State, out: Path) -> None:
    """Raises UsageProblem: no backup of ``state`` can be made at ``out``."""
    if out.exists():
        raise UsageProblem(f"{out} is there already", hint="give a folder that is not there yet")
    if out.is_relative_to(state.root.resolve()):
        raise UsageProblem(f"{out} is inside the state directory", hint="give a folder on another disk")


def put_back(backup: Path, state: State, storage: Storage = Storage(), password: str | None = None) -> Contents:
    """Make a new state directory of a backup, each of whose files is hashed first.

    Args:
        storage: where the restored one keeps its database and its files, whatever the lost one did. A database on a
            server is empty. password: of that one.

    Raises:
        UsageProblem: there is something at ``state`` already.
        BadData: it is no backup, or a file of it is damaged or missing; nothing was made.
        NeedsPerson: a newer program made it, or the database on the server is not empty.
    """
    mark = state.root / UNFINISHED
    if directory.exists(state.root) and not mark.exists() and not _is_empty(state.root):
        raise UsageProblem(
            f"{state.root} is there already; nothing was changed",
            hint=f"keep it aside first: `mv {quoted(state.root)} {quoted(state.root)}.old`",
        )
    contents = whole_contents(backup)
    config = settings(backup)
    make_folder(state.root)
    write_file(mark, b"`coordinator restore` was cut off: give the command again\n")
    for path in state.root.iterdir():
        if path != mark:
            remove(path)
    blobs = state.blob_folder(storage)
    make_folder(blobs / "models")
    for name, wanted in contents.files.items():
        if name != SETTINGS:
            inside = Path(name)
            target = blobs / inside.relative_to("blobs") if inside.parts[0] == "blobs" else state.root / inside
            _copy_checked(backup / name, target, wanted)
    _share(state, storage, contents)
    keep_password(state, password)
    _put_back_database(state, storage, contents.made_s)
    write_config(state, config.model_copy(update={"storage": storage}))  # which completes it
    remove(mark)
    return contents


def _is_empty(folder: Path) -> bool:
    """Whether nothing is in it, but perhaps what a restore that was killed at once had half written."""
    return folder.is_dir() and all(map(is_half_written, folder.iterdir()))


def _share(state: State, storage: Storage, contents: Contents) -> None:
    """Copy the restored models and updates to the object store, if there is one."""
    if (store := state.objects(storage)) is not None:
        for name in contents.files:
            if name.startswith("blobs/"):
                inside = name.removeprefix("blobs/")
                store.put(state.blob_folder(storage) / inside, inside)
        store.close()


def _put_back_database(state: State, storage: Storage, backup_s: int) -> None:
    place = state.place(storage)
    store = database.restore(place, state.database)
    try:
        with store.write() as session:
            session.merge(tables.Restore(restored_s=int(time.time()), backup_s=backup_s))
    finally:
        store.close()
    if place != state.database:
        remove(state.database)


def settings(backup: Path) -> Config:
    """The configuration in a backup. Raises BadData: it is none."""
    return check(Config, read_toml(backup / SETTINGS), str(backup / SETTINGS))


def whole_contents(backup: Path) -> Contents:
    """The list of a backup, each of whose files is there and whole.

    Raises:
        BadData: it is none, or not whole. NeedsPerson: a newer program made it.
    """
    path = backup / LIST
    try:
        contents = check(Contents, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError):
        raise BadData(f"{backup} is no backup: it has no {LIST} that can be read") from None
    for name in sorted({DATABASE, SETTINGS, *contents.files}):
        inside = ".." not in Path(name).parts and (backup / name).resolve().is_relative_to(backup.resolve())
        if name not in contents.files or not inside or not (backup / name).is_file():
            raise BadData(f"{backup} is not whole: it has no {name}; nothing was restored", hint="take another backup")
        if sha256(backup / name) != contents.files[name]:
            raise BadData(f"{backup / name} is damaged; nothing was restored", hint="take another backup")
    refuse_newer(backup / DATABASE, contents.schema_version)
    return contents


def _copy_checked(source: Path, target: Path, wanted: str) -> None:
    _copy(source, target)
    if sha256(target) != wanted:
        raise BadData(f"{target} is not what {source} is: the disk changed it", hint="check the disk; restore again")


def _snapshot(context: Context, folder: Path) -> SnapshotMade:
    """Copy the database, and link the files that it names. Where the studies are owned: there alone one is removed."""
    context.store.copy_to(folder / DATABASE)
    blobs = context.blobs
    studies = context.engine.studies()
    accepted = tables.Upload.id.in_(set(accepted_uploads(studies)))
    needed = {digest for study in studies for digest in study.models}
    digests: set[str] = set()
    with context.store.read() as session:
        for row in session.scalars(sa.select(tables.Study)):
            digests |= {row.initial, row.newest, json.loads(row.best)["digest"]} - {""}
        uploads = {row.id: row.manifest_sha256 for row in session.scalars(sa.select(tables.Upload).where(accepted))}
    for digest in sorted(digests):
        blobs.bring(blobs.model(digest))
        linked = [_link(source, folder / place) for place, source in _copies(blobs, digest)]
        if digest in needed and not any(linked):
            raise DamagedModel(digest, blobs.folder)
    kept = {
        upload: sha
        for upload, sha in uploads.items()
        if blobs.bring(blobs.spool(upload)) and _link(blobs.spool(upload), folder / f"{upload}{SUFFIX}")
    }
    return SnapshotMade(
        folder=str(folder), made_s=int(context.wall_clock()), federation=context.config.federation,
        models=tuple(sorted(digests)), uploads=kept,
    )  # fmt: skip


def _copies(blobs: Blobs, digest: str) -> tuple[tuple[str, Path], ...]:
    """A model's file and its second copy, each with its name in a snapshot."""
    return (f"{digest}{SUFFIX}", blobs.model(digest)), (f"{digest}.spare{SUFFIX}", blobs.spare(digest))


def _link(source: Path, target: Path) -> bool:
    """Keep a file's bytes under another name, whatever becomes of it. Whether it is there."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        return False
    except OSError:  # this file system has no links
        _copy(source, target)
    return True


def _copy_named(state: State, made: SnapshotMade, folder: Path) -> None:
    """Copy models and updates, and hash the copies: a damaged one is no backup.

    Raises:
        DamagedModel: no copy of a model is whole. A damaged update is left out: its site is asked for it again.
    """
    source, models, uploads = Path(made.folder), folder / "blobs" / "models", folder / "blobs" / "uploads"
    blobs = state.blob_folder(state.config().storage)
    for digest in made.models:
        names = (f"{digest}{SUFFIX}", f"{digest}.spare{SUFFIX}")
        present = [source / name for name in names if (source / name).exists()]
        if present and not any(_copied_whole(path, models / names[0], digest) for path in present):
            raise DamagedModel(digest, blobs)
    for upload, manifest in made.uploads.items():
        path = uploads / f"{upload}{SUFFIX}"
        if not _copied_whole(source / path.name, path, manifest):
            remove(path)
            log.error("%s is damaged and not in the backup: its site is asked for it again", path.name)


def _copied_whole(source: Path, target: Path, digest: str) -> bool:
    try:
        _copy(source, target)
    except BadData as error:
        log.error("%s; %s", error.message, error.hint)
        return False
    return is_whole(target, digest)


def _plain_files(state: State) -> Iterator[tuple[Path, Path]]:
    """Configuration, keys, the dashboard's users and public data sets, each with its name in a backup."""
    yield state.config_file, Path(SETTINGS)
    blobs = state.blob_folder(state.config().storage)
    folders = (state.authority, state.authority.name), (state.receipt_key_file.parent, "keys")
    dashboard = (state.users_file.parent, "dashboard")
    for folder, name in (*folders, dashboard, (blobs / "public_data", "blobs/public_data")):
        for path in _files_of(folder) if folder.is_dir() else ():
            yield path, Path(name) / path.relative_to(folder)


def _files_of(folder: Path) -> Iterator[Path]:
    """The files below a folder, but for those that are only being written."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield path


def _copy(source: Path, target: Path) -> None:
    make_folder(target.parent)
    write_file(target, _pieces(source))


def _pieces(source: Path) -> Iterator[bytes]:
    """A file's bytes. Raises BadData: it cannot be read."""
    try:
        with source.open("rb") as file:
            while data := file.read(CHUNK):
                yield data
    except OSError as error:
        raise BadData(f"{source} cannot be read: {error.strerror}", hint="check the disk that it is on") from None


def sha256(path: Path) -> str:
    """Of a file's bytes, in hex. Raises BadData: it cannot be read."""
    digest = hashlib.sha256()
    for data in _pieces(path):
        digest.update(data)
    return digest.hexdigest()
