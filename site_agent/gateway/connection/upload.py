"""The requests of one upload: its header, its payload from where the coordinator wants it, its commit."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wardround.errors import BadData, Unavailable, WardroundError
from wardround.records.chunks import chunk_bytes
from wardround.records.messages import envelope_from
from wardround.records.update import UploadHeader
from wardround.signing.dsse import Envelope
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import CHUNK, PayloadHasher
from wardround.tensors.tags import Tag, Tagger
from wardround.v1 import federation_pb2 as pb


class ChangedOnTheWay(BadData):
    """What was read for sending is not what the ledger says; nothing was committed."""


@dataclass
class UploadTry:
    """What one try to send an upload let out, counted as it is handed to gRPC.

    ``answered``: the coordinator has received the header.
    """

    answered: bool = False
    payload_bytes: int = 0


@dataclass
class UploadStream:
    """Both directions of one upload's call. gRPC takes the requests from a thread of its own; the file is opened and
    closed in it.

    Attributes:
        payload: the update's file; None for a closing validation, which has none.
        on_request: is called with the bytes of each request, and how many of them are payload, before gRPC has it.
        tag: of the payload as it was measured, where this process measured it; without one it is hashed.
        cancel: ends the call; set once there is one.
        failure: why the requests ended early, if they did.
    """

    header: UploadHeader
    payload: Path | None
    on_request: Callable[[int, int], None]
    tag: Tag | None = None
    cancel: Callable[[], object] = lambda: None
    failure: WardroundError | None = None
    _starts: "queue.SimpleQueue[int | None]" = field(default_factory=queue.SimpleQueue)

    def requests(self) -> Iterator[bytes]:
        """What the site sends, as it goes over the wire."""
        for request, payload in self._requests():
            self.on_request(len(request), payload)
            yield request

    def receipt(self, replies: Iterator[pb.UploadReply], sent: UploadTry) -> Envelope:
        """Read what the coordinator sends, up to its receipt.

        Raises:
            Unavailable: it ended the call without one.
        """
        started = False
        for reply in replies:
            sent.answered = True
            if reply.WhichOneof("kind") == "receipt":
                return envelope_from(reply.receipt)
            if not started:
                self._starts.put(reply.offset)
                started = True
        raise Unavailable("the coordinator ended an upload without a receipt")

    def end(self) -> None:
        """The call has ended: no request that still waits to begin is sent."""
        self._starts.put(None)

    def _requests(self) -> Iterator[tuple[bytes, int]]:
        """Each request, and how many of its bytes are payload."""
        yield pb.UploadRequest(open=self.header.to_message()).SerializeToString(), 0
        start = self._starts.get()
        if start is None:
            return
        try:
            yield from self._chunks(start)
        except WardroundError as error:
            self.failure = error
            self.cancel()
            return
        digest = bytes.fromhex(self.header.manifest.digest())
        yield pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=digest)).SerializeToString(), 0

    def _chunks(self, start: int) -> Iterator[tuple[bytes, int]]:
        if self.payload is None:
            return
        seen = _Hashed(self.header) if self.tag is None else _Tagged(self.tag)
        with TensorFile(self.payload) as file:
            for offset, data in file.chunks(size=CHUNK):
                seen.update(data)
                skip = min(max(0, start - offset), len(data))
                if skip < len(data):
                    yield chunk_bytes(offset + skip, data[skip:]), len(data) - skip
        if not seen.is_same():
            raise ChangedOnTheWay(
                f"{self.payload}: changed after the ledger recorded it; the upload was not committed",
                code="DECLINED_MODEL_MISMATCH",
            )


class _Hashed:
    """Whether what passes is the payload of a header, by its digests."""

    def __init__(self, header: UploadHeader) -> None:
        self._wanted = header.manifest
        self._hasher = PayloadHasher(header.manifest.specs)
        self.update = self._hasher.update

    def is_same(self) -> bool:
        return self._hasher.manifest() == self._wanted


class _Tagged:
    """The same by the tag that was made when it was measured."""

    def __init__(self, tag: Tag) -> None:
        self._wanted = tag
        self._tagger = Tagger(tag.key)
        self.update = self._tagger.update

    def is_same(self) -> bool:
        return self._tagger.tag() == self._wanted
