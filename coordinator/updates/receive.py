"""Bytes to a spool: the payload of one upload, hashed as it comes, over as many streams as it takes.

What came is durable when it is said to be. Nothing is judged here: what the bytes are worth is for
``coordinator.updates.admission``, and what becomes of them for ``coordinator.updates.decide``.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from coordinator.storage import tables
from coordinator.storage.blobs import Blobs, Spool
from coordinator.storage.database import Store
from coordinator.studies.terms import UpdateTerms
from wardround.errors import BadData, TryAgain
from wardround.records.update import UploadHeader
from wardround.tensors.manifests import Manifest
from wardround.tensors.tags import Tag

ACK_BYTES = 8 * 1024 * 1024  # at most this much is sent again after the connection broke,
ACK_S = 1.0  # or after the coordinator was killed what came in this time, where that is more
MAX_ARRIVALS = 2  # of one site at a time


@dataclass(frozen=True)
class Received:
    """An upload that its site has committed, durable.

    Attributes:
        spool: the file with the payload; None for a closing validation, which has none.
        bytes: how much of the payload came.
        manifest: of what came; None where the payload is not complete.
        committed: digest of the manifest that the commit named.
        tag: of the spool's bytes, where the payload is complete.
    """

    site: str
    header: UploadHeader
    spool: Path | None
    bytes: int
    manifest: Manifest | None
    committed: str
    tag: Tag | None = None


class Reception:
    """One upload on one stream. A second stream for the same upload closes the first."""

    def __init__(
        self, site: str, header: UploadHeader, store: Store, blobs: Blobs, upload: tables.Upload, terms: UpdateTerms
    ) -> None:
        """``upload``: as it is written down; it says how much of it is here. ``terms``: the study's, at its opening."""
        self.upload = upload
        self.site = site
        self.header = header
        self.terms = terms
        self.complete = False  # all of it is here, and it is not decided yet
        self._store = store
        self._path = blobs.spool(header.upload_id)
        self._noted, self._noted_at = upload.received, time.monotonic()
        self._spool: Spool | None = None  # and stays None for a closing validation, which has no payload
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self) -> None:
        """Open the spool, and hash what is in it."""
        with self._lock:
            self._refuse_closed()
            if self.header.manifest.entries:
                self._spool = Spool(self._path, self.header.manifest.specs, self._noted)
                self._noted = self._spool.received

    @property
    def received(self) -> int:
        return self._spool.received if self._spool else 0

    def take(self, offset: int, data: bytes | memoryview) -> int | None:
        """Write a chunk. Returns how much is durable, when that is worth telling.

        Raises:
            BadData: not the next bytes, or more than the manifest says.
            TryAgain: the upload goes on on another stream.
        """
        with self._lock:
            self._refuse_closed()
            if self._spool is None:
                raise BadData("more bytes than the manifest says", code="PAYLOAD_INCOMPLETE")
            self._spool.take(offset, data)
            new, now = self._spool.received - self._noted, time.monotonic()
            if new < ACK_BYTES or now - self._noted_at < ACK_S:
                return None
            self._noted_at = now
            self._note(self._spool)
            return self._noted

    @contextmanager
    def committed(self, manifest_sha256: str) -> Iterator[Received]:
        """What came, made durable. While the block lasts no other stream takes the spool over."""
        with self._lock:
            self._refuse_closed()
            spool = self._spool
            self.complete = True
            if spool is not None:
                spool.sync()
            manifest = None if spool is None else _manifest(spool)
            yield Received(
                self.site, self.header, None if spool is None else self._path, self.received, manifest,
                manifest_sha256, None if spool is None or manifest is None else spool.tag(),
            )  # fmt: skip

    def settle(self) -> None:
        """It is decided, and that is durable: how much of it came need not be noted."""
        self._noted = self.received

    def close(self) -> None:
        """The stream ended. What came stays, for the next one."""
        with self._lock:
            if self._closed:
                return
            self._closed, self.complete = True, False
            if self._spool is None:
                return
            try:
                if self._spool.received > self._noted:
                    self._note(self._spool)
            finally:
                self._spool.close()

    def _note(self, spool: Spool) -> None:
        """That many bytes are durable; an upload that was dropped meanwhile stays dropped."""
        self._noted = spool.sync()
        table = tables.Upload
        undecided = sa.update(table).where(table.id == self.header.upload_id, table.decision == "")
        with self._store.write() as session:
            session.execute(undecided.values(received=self._noted))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise TryAgain("this upload goes on on another stream", code="TOO_BUSY")


class Receptions:
    """The uploads that are under way, one reception each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[str, Reception] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, reception: Reception) -> None:
        with self._lock:
            self._under_way[reception.header.upload_id] = reception

    def is_current(self, reception: Reception) -> bool:
        """Whether no other stream has taken this upload over, and nobody gave it up."""
        with self._lock:
            return self._under_way.get(reception.header.upload_id) is reception

    def judging(self) -> frozenset[tuple[str, str]]:
        """(study, site) of the updates that are complete and not yet decided."""
        with self._lock:
            return frozenset((one.header.study, one.site) for one in self._under_way.values() if one.complete)

    def arriving(self) -> frozenset[tuple[str, int, int, str]]:
        """(study, round, attempt, site) of the updates whose stream is open."""
        with self._lock:
            open_now = [(one.header, one.site) for one in self._under_way.values()]
        return frozenset((header.study, header.round, header.attempt, site) for header, site in open_now)

    def refuse_crowd(self, site: str, upload_id: str) -> None:
        """Raises TryAgain: the site has enough uploads under way (TOO_BUSY)."""
        with self._lock:
            others = [reception for reception in self._under_way.values() if reception.site == site]
            if len(others) >= MAX_ARRIVALS or upload_id in self._under_way:
                raise TryAgain(f"site `{site}` has {len(others)} uploads under way", code="TOO_BUSY")

    def close(self, reception: Reception) -> None:
        """The stream of an upload ended."""
        try:
            reception.close()
        finally:
            with self._lock:
                if self._under_way.get(reception.header.upload_id) is reception:
                    del self._under_way[reception.header.upload_id]

    def close_where(self, which: Callable[[Reception], bool]) -> None:
        """End the streams of some uploads."""
        with self._lock:
            chosen = [reception for reception in self._under_way.values() if which(reception)]
        for reception in chosen:
            self.close(reception)


def _manifest(spool: Spool) -> Manifest | None:
    try:
        return spool.manifest()
    except BadData:
        return None  # bytes are missing
