"""What a site downloads: its view of what the coordinator keeps of a study's model. No copy is made.

The view of model r is what a site gets for round r + 1. For most methods it is the kept file itself, for every site.
"""

import json
from dataclasses import dataclass

from coordinator.storage import database
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.study import Study, manifest_from_document
from wardround.tensors.manifests import Manifest, TensorFile, view


@dataclass(frozen=True)
class Download:
    """One site's view of one model. ``kept`` is the digest of the file that holds its tensors ``sources``."""

    manifest: Manifest
    kept: str
    sources: tuple[str, ...]


class Downloads:
    """The views of one coordinator's models."""

    def __init__(self, records: Store, blobs: Blobs) -> None:
        self._store = records
        self._blobs = blobs
        self._last: tuple[str, Manifest] | None = None

    def digest(self, study: Study, site: str, number: int, kept: str) -> str:
        """Digest of the site's view of model ``number``, of which ``kept`` is the digest.

        Raises:
            BadData: the kept file cannot be read.
        """
        return kept if study.half.passes else self._view(study, site, number, kept).manifest.digest()

    def find(self, study: Study, site: str, digest: str) -> Download | None:
        """The site's view with this digest, of a model that is still offered; else None. Raises as above."""
        for number, kept in study.offered:
            if study.half.passes and kept != digest:
                continue
            found = self._view(study, site, number, kept)
            if found.manifest.digest() == digest:
                return found
        return None

    def _view(self, study: Study, site: str, number: int, kept: str) -> Download:
        manifest = self._manifest(kept)
        with TensorFile(self._blobs.model(kept)) as file:
            sources = study.half.sources(file, site, number + 1)
        return Download(view(manifest, sources, study.half.download_of(site)), kept, sources)

    def _manifest(self, digest: str) -> Manifest:
        """Of a kept file; every site's view is of the same one, so the last is remembered."""
        last = self._last
        if last is None or last[0] != digest:
            with self._store.read() as records:
                row = records.get(database.models, digest=digest)
            assert row is not None
            last = self._last = (digest, manifest_from_document(json.loads(row["manifest"])))
        return last[1]
