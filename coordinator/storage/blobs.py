"""Models and spooled updates as safetensors files, all written through ``wardround.local.durable``.

models/DIGEST.safetensors       a model, named by the digest of its manifest
spare/DIGEST.safetensors        a second copy of it: a model is the one file here that nobody can send again
uploads/ID.safetensors          an update on its way in: the header first, then the payload as it comes
public_data/DIGEST.csv or .npz  a study's public data set, where the coordinator distills on it

With an object store, models, accepted updates and public data sets have a copy there: see ``objects``.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.storage.objects import ObjectStore
from wardround.errors import BadData, TryAgain
from wardround.local.durable import SpoolFile, make_folder, move, remove, write_file
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import CHUNK, Manifest, PayloadHasher, TensorSpec
from wardround.tensors.tags import Tag, Tagger, has_tag

SUFFIX = ".safetensors"
FRESH_S = 30.0
log = logging.getLogger(__name__)


class DamagedModel(BadData):
    """A model that is needed is damaged or gone here, and so is its second copy. ``objects``: the object store's
    address, where there is one that was asked for it too."""

    def __init__(self, digest: str, folder: Path, objects: str = "") -> None:
        name = f"{digest[:12]}…"
        there = f", and {objects} has none that is whole" if objects else ""
        look = "check the disk, and the address of the object store" if objects else "check the disk"
        super().__init__(
            f"model {name} is damaged or gone in {folder / 'models'}, and so is its copy in {folder / 'spare'}{there}",
            hint=f"{look}; restore {name}{SUFFIX} from a backup into {folder / 'models'}, then "
            "`coordinator study start`; without a backup: `coordinator study renew`",
        )
        self.digest = digest


@dataclass(frozen=True)
class Known:
    """What this process knows of a file that it wrote: the digest of its manifest, the tag of all its bytes, and of an
    accepted update the norm, where that was computed when it was judged.
    """

    digest: str
    tag: Tag
    norm: float | None = None


class Blobs:
    """The files of one state directory, or of a folder that a standby shares.

    Args:
        objects: where models, accepted updates and public data sets also are, and what is missing here comes from.
    """

    def __init__(self, folder: Path, objects: ObjectStore | None = None) -> None:
        self.folder = folder
        self._objects = objects
        self._models = folder / "models"
        self._spare = folder / "spare"
        self._uploads = folder / "uploads"
        self.public_data = folder / "public_data"
        self._lock = threading.Lock()
        self._seen_whole: dict[str, float] = {}  # when this process last hashed or wrote a model, monotonic
        self._known: dict[Path, Known] = {}
        for place in (self._models, self._spare, self._uploads):
            make_folder(place)

    def model(self, digest: str) -> Path:
        return self._models / f"{digest}{SUFFIX}"

    def spare(self, digest: str) -> Path:
        """The second copy of a model."""
        return self._spare / f"{digest}{SUFFIX}"

    def spool(self, upload_id: str) -> Path:
        return self._uploads / f"{upload_id}{SUFFIX}"

    def whole_model(self, digest: str, *, again: bool = False) -> Path:
        """The file of a model whose bytes are those of its digest. A damaged one is made good from its second copy.

        It is hashed before each use, but for those that follow within ``FRESH_S``: a round's sites download together.

        Args:
            again: hash it also if that was done just now.

        Raises:
            DamagedModel: neither copy is whole.
        """
        path, spare = self.model(digest), self.spare(digest)
        with self._lock:
            seen = self._seen_whole.get(digest)
            if seen is not None and time.monotonic() - seen < FRESH_S and not again and path.exists():
                return path
            if self._is_whole(path, digest):
                if not spare.exists():
                    write_file(spare, _pieces(path))
            elif is_whole(spare, digest):
                log.error("%s was damaged or gone; it was made good from its second copy: check the disk", path)
                write_file(path, _pieces(spare))
            elif self._fetched_whole(path, digest):
                write_file(spare, _pieces(path))
            else:
                raise DamagedModel(digest, self.folder, self._objects.url if self._objects is not None else "")
            self._seen_whole[digest] = time.monotonic()
        return path

    def whole_spool(self, upload_id: str, manifest_sha256: str) -> bool:
        """Whether an update's file is here, or was fetched, and is what was accepted: all of it is read for that."""
        path = self.spool(upload_id)
        return self._is_whole(path, manifest_sha256) or self._fetched_whole(path, manifest_sha256)

    def know(self, path: Path, known: Known) -> None:
        """Remember what was written to ``path``, until it is dropped: its next use need not hash it."""
        self._known[path] = known

    def norm_of(self, upload_id: str, manifest_sha256: str) -> float | None:
        """The norm of an accepted update as it was judged; None where this process did not judge it."""
        known = self._known.get(self.spool(upload_id))
        return known.norm if known is not None and known.digest == manifest_sha256 else None

    def _is_whole(self, path: Path, digest: str) -> bool:
        """As ``is_whole``: by the tag that this process made of it, else by its digest."""
        known = self._known.get(path)
        if known is not None and known.digest == digest:
            try:
                with TensorFile(path) as file:
                    if has_tag(file.everything(), known.tag):
                        return True
            except BadData:
                return False
        return is_whole(path, digest)

    def _fetched_whole(self, path: Path, digest: str) -> bool:
        if self._objects is None or not self._objects.fetch(self._name(path), path) or not is_whole(path, digest):
            return False
        log.warning("%s was damaged or gone here; it was fetched from the object store", path)
        return True

    def share(self, path: Path) -> None:
        """Copy a file of these to where a standby finds it. Raises TryAgain: it did not arrive there."""
        if self._objects is not None and path.exists():
            self._objects.put(path, self._name(path))

    def bring(self, path: Path) -> bool:
        """Whether a file of these is here now; one that another coordinator wrote is fetched."""
        if path.exists():
            return True
        return self._objects is not None and self._objects.fetch(self._name(path), path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def close(self) -> None:
        if self._objects is not None:
            self._objects.close()

    def doubt(self, digest: str) -> None:
        """Somebody found other bytes in a model than those of its digest: it is hashed again before its next use."""
        with self._lock:
            self._seen_whole.pop(digest, None)

    def new_model(self, specs: tuple[TensorSpec, ...], label: str) -> "NewModel":
        """A model to be written; ``label`` says which, to whoever finds it half written."""
        return NewModel(self._models, self._spare, specs, label, self._made)

    def _made(self, known: Known) -> None:
        """A model was written and is durable: it was hashed on its way, so its first use does not hash it again."""
        path = self.model(known.digest)
        with self._lock:
            self._seen_whole[known.digest] = time.monotonic()
            self.know(path, known)
        self.share(path)

    def keep_model(self, source: TensorFile, label: str) -> Manifest:
        """Copy a model in. Returns its manifest."""
        with self.new_model(source.specs, label) as new:
            for _, data in source.chunks():
                new.write(data)
            return new.keep()

    def drop_models(self, digests: Collection[str]) -> None:
        for digest in digests:
            self.doubt(digest)
            self._drop(self.model(digest))
            remove(self.spare(digest), lasting=False)

    def drop_spools(self, upload_ids: Collection[str]) -> None:
        for upload_id in upload_ids:
            self._drop(self.spool(upload_id))

    def _drop(self, path: Path) -> None:
        self._known.pop(path, None)
        remove(path, lasting=False)  # if it is there again after a loss of power, the next start removes it
        if self._objects is not None:
            self._objects.remove([self._name(path)])

    def sweep(self) -> None:
        """Remove what a process that was killed had half written. Only where nobody else writes."""
        for folder in (self._models, self._spare, self._uploads, self.public_data):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.name.startswith("."):
                    remove(path)

    def tidy(self, wanted_spools: Collection[str], wanted_models: Collection[str]) -> None:
        """Remove what a crash left: models that were due, or that no round was closed with, and spools that nobody
        will ask for.
        """
        for folder, wanted in (
            (self._models, wanted_models), (self._spare, wanted_models), (self._uploads, wanted_spools),
        ):  # fmt: skip
            for path in folder.iterdir():
                if path.name.removesuffix(SUFFIX) not in wanted:
                    remove(path)
        if self._objects is not None:
            for folder, wanted in ((self._models, wanted_models), (self._uploads, wanted_spools)):
                self._tidy_shared(self._objects, folder, wanted)

    def _tidy_shared(self, objects: ObjectStore, folder: Path, wanted: Collection[str]) -> None:
        try:
            objects.remove(objects.names(folder.name) - {self._name(folder / f"{name}{SUFFIX}") for name in wanted})
        except TryAgain as error:
            log.warning("%s; what is needless there stays until the next start", error.message)


class NewModel:
    """A model's file and its second copy, filled from their beginning and named when their digest is known."""

    def __init__(
        self, folder: Path, spare: Path, specs: tuple[TensorSpec, ...], label: str, made: Callable[[Known], None]
    ) -> None:
        """``made``: is called when both copies are durable."""
        self._made = made
        self._hasher, self._tagger = PayloadHasher(specs), Tagger()
        header = file_header(specs)
        self._tagger.update(header)
        self._folders = folder, spare
        own = uuid.uuid4().hex[:12]  # a leader that was replaced may still be writing the same one
        self._paths = [place / f".{label}-{own}{SUFFIX}" for place in self._folders]
        self._files: list[SpoolFile] = []
        size = len(header) + sum(spec.bytes for spec in specs)
        try:
            for path in self._paths:  # not lasting: it has its lasting name when it is whole
                self._files.append(SpoolFile(path, lasting=False, size=size))
                self._files[-1].truncate(0)
                self._files[-1].write_at(0, header)
        except BaseException:
            self.__exit__()
            raise
        self._end = len(header)

    def write(self, data: bytes) -> None:
        self._hasher.update(data)
        self._tagger.update(data)
        for file in self._files:
            file.write_at(self._end, data)
        self._end += len(data)

    def keep(self) -> Manifest:
        """Make it durable under its digest. The same model twice is one file."""
        manifest = self._hasher.manifest()
        for file, path, folder in zip(self._files, self._paths, self._folders, strict=True):
            file.sync()
            move(path, folder / f"{manifest.digest()}{SUFFIX}")
        self._made(Known(manifest.digest(), self._tagger.tag()))
        return manifest

    def __enter__(self) -> "NewModel":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.close()
        for path in self._paths:
            if path.exists():
                remove(path)


class Spool:
    """One update's payload on its way in, hashed as it comes."""

    def __init__(self, path: Path, specs: tuple[TensorSpec, ...], received: int) -> None:
        """Go on after ``received`` bytes that are known to be durable; what lies behind them is cut off."""
        header = file_header(specs)
        self.received = received
        self.total = sum(spec.bytes for spec in specs)
        self._data = len(header)
        self._hasher, self._tagger = PayloadHasher(specs), Tagger()
        self._tagger.update(header)
        self._file = SpoolFile(path, size=self._data + self.total)
        try:
            if self._file.size() < self._data + received:
                self.received = 0  # the file is not what was recorded: begin again
            self._file.truncate(self._data + self.received if self.received else 0)
            if self.received:
                self._hash_again(path)
            else:
                self._file.write_at(0, header)
        except BaseException:
            self._file.close()
            raise

    def _hash_again(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._data)
            while data := file.read(CHUNK):
                self._hasher.update(data)
                self._tagger.update(data)

    def take(self, offset: int, data: bytes | memoryview) -> None:
        """Raises BadData: not the next bytes, or more than the manifest says."""
        if offset != self.received:
            raise BadData(f"a chunk begins at byte {offset}, the next one is {self.received}", code="MESSAGE_MALFORMED")
        self._hasher.update(data)
        self._tagger.update(data)
        self._file.write_at(self._data + offset, data)
        self.received += len(data)

    def sync(self) -> int:
        """Make what came durable; how much it is."""
        self._file.sync()
        return self.received

    def manifest(self) -> Manifest:
        """What came. Raises BadData: bytes are missing."""
        return self._hasher.manifest()

    def tag(self) -> Tag:
        """Of all the bytes of its file, which take no more then."""
        return self._tagger.tag()

    def close(self) -> None:
        self._file.close()


def is_whole(path: Path, digest: str) -> bool:
    """Whether a file is there whose payload, hashed now, has this digest of its manifest."""
    try:
        with TensorFile(path) as file:
            return file.manifest().digest() == digest
    except BadData:
        return False


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            yield data
