"""What a site downloads: its view of what the coordinator keeps of a study's model. No copy is made.

The view of model r is what a site gets for round r + 1. For most methods it is the kept file itself, for every site.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.models.kept import manifest_of
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from fl_algorithms.server.aggregator import ServerAggregator
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest, view


@dataclass(frozen=True)
class Download:
    """One site's view of one model. ``kept`` is the digest of the file that holds its tensors ``sources``."""

    manifest: Manifest
    kept: str
    sources: tuple[str, ...]


class Downloads:
    """The views of one coordinator's models."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs
        self._last: tuple[str, Manifest] | None = None
        self._passed: Download | None = None  # the last one that is the kept file itself, for every site

    def digest(self, aggregator: ServerAggregator, site: str, number: int, kept: str) -> str:
        """Digest of the site's view of model ``number``, of which ``kept`` is the digest.

        Raises:
            DamagedModel: the kept file is damaged, and so is its second copy.
        """
        return kept if aggregator.passes else self._view(aggregator, site, number, kept).manifest.digest()

    def find(
        self, aggregator: ServerAggregator, offered: Iterable[tuple[int, str]], site: str, digest: str
    ) -> Download | None:
        """The site's view with this digest, of a model that is offered; else None. Raises as above.

        Args:
            offered: number and digest of what is kept of each.
        """
        for number, kept in offered:
            if aggregator.passes and kept != digest:
                continue
            passed = self._passed  # looked at once: a call of another study's site may find another meanwhile
            if aggregator.passes and passed is not None and passed.kept == digest:
                return passed
            download = self._view(aggregator, site, number, kept)
            if download.manifest.digest() == digest:
                if aggregator.passes:
                    self._passed = download
                return download
        return None

    def _view(self, aggregator: ServerAggregator, site: str, number: int, kept: str) -> Download:
        manifest = self._manifest(kept)
        with TensorFile(self._blobs.whole_model(kept)) as file:
            sources = aggregator.sources(file, site, number + 1)
        return Download(view(manifest, sources, aggregator.download_of(site)), kept, sources)

    def _manifest(self, digest: str) -> Manifest:
        """Of a kept file; every site's view is of the same one, so the last is remembered."""
        last = self._last
        if last is None or last[0] != digest:
            with self._store.read() as session:
                last = self._last = (digest, manifest_of(session, digest))
        return last[1]
