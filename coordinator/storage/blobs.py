"""Models and spooled updates as safetensors files, all written through ``wardround.local.durable``.

models/DIGEST.safetensors       a model, named by the digest of its manifest
uploads/ID.safetensors          an update on its way in: the header first, then the payload as it comes
public_data/DIGEST.csv or .npz  a study's public data set, where the coordinator distills on it
"""

from collections.abc import Collection
from pathlib import Path

from wardround.errors import BadData
from wardround.local.durable import SpoolFile, make_folder, move, remove
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import CHUNK, Manifest, PayloadHasher, TensorSpec

SUFFIX = ".safetensors"


class Blobs:
    """The files of one state directory."""

    def __init__(self, folder: Path) -> None:
        self._models = folder / "models"
        self._uploads = folder / "uploads"
        self.public_data = folder / "public_data"
        make_folder(self._models)
        make_folder(self._uploads)

    def model(self, digest: str) -> Path:
        return self._models / f"{digest}{SUFFIX}"

    def spool(self, upload_id: str) -> Path:
        return self._uploads / f"{upload_id}{SUFFIX}"

    def new_model(self, specs: tuple[TensorSpec, ...], label: str) -> "NewModel":
        """A model to be written; ``label`` keeps two that are written at the same time apart."""
        return NewModel(self._models, specs, label)

    def keep_model(self, source: TensorFile, label: str) -> Manifest:
        """Copy a model in. Returns its manifest."""
        with self.new_model(source.specs, label) as new:
            for _, data in source.chunks():
                new.write(data)
            return new.keep()

    def drop_models(self, digests: Collection[str]) -> None:
        for digest in digests:
            remove(self.model(digest))

    def drop_spools(self, upload_ids: Collection[str]) -> None:
        for upload_id in upload_ids:
            remove(self.spool(upload_id))

    def tidy(self, wanted_spools: Collection[str], stale_models: Collection[str]) -> None:
        """Remove what a crash left: half-written models, models that were due, spools that nobody will ask for."""
        for digest in stale_models:
            if self.model(digest).exists():
                self.drop_models([digest])
        for path in self._models.iterdir():
            if path.name.startswith("."):
                remove(path)
        for path in self._uploads.iterdir():
            if path.name.removesuffix(SUFFIX) not in wanted_spools:
                remove(path)


class NewModel:
    """A model's file, filled from its beginning and named when its digest is known."""

    def __init__(self, folder: Path, specs: tuple[TensorSpec, ...], label: str) -> None:
        self._folder = folder
        self._path = folder / f".{label}{SUFFIX}"
        self._hasher = PayloadHasher(specs)
        header = file_header(specs)
        self._file = SpoolFile(self._path)
        self._file.truncate(0)
        self._file.write_at(0, header)
        self._end = len(header)

    def write(self, data: bytes) -> None:
        self._hasher.update(data)
        self._file.write_at(self._end, data)
        self._end += len(data)

    def keep(self) -> Manifest:
        """Make it durable under its digest. The same model twice is one file."""
        manifest = self._hasher.manifest()
        self._file.sync()
        move(self._path, self._folder / f"{manifest.digest()}{SUFFIX}")
        return manifest

    def __enter__(self) -> "NewModel":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._path.exists():
            remove(self._path)


class Spool:
    """One update's payload on its way in, hashed as it comes."""

    def __init__(self, path: Path, specs: tuple[TensorSpec, ...], received: int) -> None:
        """Go on after ``received`` bytes that are known to be durable; what lies behind them is cut off."""
        header = file_header(specs)
        self.received = received
        self.total = sum(spec.bytes for spec in specs)
        self._data = len(header)
        self._hasher = PayloadHasher(specs)
        self._file = SpoolFile(path)
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

    def take(self, offset: int, data: bytes) -> None:
        """Raises BadData: not the next bytes, or more than the manifest says."""
        if offset != self.received:
            raise BadData(f"a chunk begins at byte {offset}, the next one is {self.received}", code="MESSAGE_MALFORMED")
        self._hasher.update(data)
        self._file.write_at(self._data + offset, data)
        self.received += len(data)

    def sync(self) -> int:
        """Make what came durable; how much it is."""
        self._file.sync()
        return self.received

    def manifest(self) -> Manifest:
        """What came. Raises BadData: bytes are missing."""
        return self._hasher.manifest()

    def close(self) -> None:
        self._file.close()
