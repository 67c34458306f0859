"""A hospital without patients: joins, approves whatever it is offered, and uploads deltas that follow from its name.

It speaks the real protocol over real TLS, and each step can be done wrongly on purpose.
"""

import hashlib
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wardround import __version__, rpc
from wardround.records import receipts
from wardround.records.invitation import Invitation
from wardround.records.messages import envelope_from, manifest_from, manifest_message
from wardround.records.receipts import EMPTY_HEAD, LedgerHead, Receipt
from wardround.signing import certificates
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import Entry, Manifest, PayloadHasher, TensorSpec
from wardround.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2_grpc, tensors_pb2
from wardround.v1 import federation_pb2 as pb

WAIT_S = 60


def enrol_request(invitation: Invitation, key: certificates.PrivateKey, ledger_key: Ed25519PrivateKey) -> Any:
    request = certificates.signing_request(key)
    signed = b"wardround-enrol-v1\0" + invitation.id.encode() + b"\0" + hashlib.sha256(request).digest()
    return enrolment_pb2.EnrolRequest(
        invitation_id=invitation.id, agent_version=__version__, signing_request=request,
        ledger_key=ledger_key.public_key().public_bytes_raw(), proof=ledger_key.sign(signed),
    )  # fmt: skip


def channel_to(address: str, authority: bytes, certificate: bytes, key: bytes) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials, rpc.CHANNEL_OPTIONS)


@dataclass
class Ledger:
    """Hashes of lines that were never written; what the coordinator sees of a ledger."""

    key: Ed25519PrivateKey
    ledger_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    hashes: list[bytes] = field(default_factory=list)
    witnessed: int = 0

    def write(self, text: str = "") -> None:
        self.hashes.append(hashlib.sha256((text or uuid.uuid4().hex).encode()).digest())

    def head(self, lines: int | None = None) -> LedgerHead:
        known = self.hashes[:lines]
        return LedgerHead(self.ledger_id, len(known), receipts.head_after(EMPTY_HEAD, known))


@dataclass(frozen=True)
class Update:
    """Tensors as bytes in order, and the numbers beside them."""

    tensors: tuple[tuple[TensorSpec, bytes], ...]
    metrics: tuple[tuple[str, str], ...] = (("val_loss", "0.5"),)
    num_examples: int = 10
    num_validation: int = 5

    @property
    def payload(self) -> bytes:
        return b"".join(data for _, data in self.tensors)

    @property
    def manifest(self) -> Manifest:
        return Manifest(tuple(Entry(spec, hashlib.sha256(data).hexdigest()) for spec, data in self.tensors))

    def with_tensor(self, index: int, values: np.ndarray[Any, Any]) -> "Update":
        tensors = list(self.tensors)
        tensors[index] = (tensors[index][0], values.astype("<f4").tobytes())
        return replace(self, tensors=tuple(tensors))


def delta(site: str, round_number: int, specs: tuple[TensorSpec, ...]) -> Update:
    """What ``site`` sends in a round: always the same."""
    generator = np.random.default_rng([*site.encode(), round_number])
    tensors = tuple((spec, generator.standard_normal(spec.shape).astype("<f4").tobytes()) for spec in specs)
    loss = f"{generator.uniform(0.3, 0.7):.4g}"
    return Update(tensors, (("val_loss", loss),), 10 + len(site), 3 + len(site))


class FakeSite:
    """One enrolled site with its own channel and, after ``watch``, a thread that reads its events."""

    def __init__(self, invitation_text: str, ledger: Ledger | None = None) -> None:
        """``ledger``: of an installation that joined before."""
        self.invitation = Invitation.decode(invitation_text)
        self.name = self.invitation.site
        self.key = certificates.new_key()
        self.ledger = ledger or Ledger(Ed25519PrivateKey.generate())
        for text in ("identity",) if ledger else ("genesis", "identity"):
            self.ledger.write(f"{text} {self.name}")
        self.events: queue.Queue[Any] = queue.Queue()
        self.offers: dict[str, Any] = {}
        self.receipts: list[Receipt] = []
        self.envelopes: list[Envelope] = []  # of its chain of receipts
        self._watch: Any = None
        self._threads: list[threading.Thread] = []
        with self.bootstrap_channel() as channel:
            reply = enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(
                enrol_request(self.invitation, self.key, self.ledger.key),
                timeout=WAIT_S,
                wait_for_ready=True,  # as an agent does: the port may not have recovered from a fault yet
            )
        self.certificate = x509.load_pem_x509_certificate(reply.certificate)
        self.receipt_key = Ed25519PublicKey.from_public_bytes(reply.receipt_key)
        self.reply = reply
        self.channel = self.open_channel()

    def bootstrap_channel(self) -> grpc.Channel:
        invitation = self.invitation
        return channel_to(
            invitation.address, invitation.authority.encode(), invitation.certificate.encode(), invitation.key.encode()
        )

    def open_channel(
        self, certificate: bytes | None = None, key: certificates.PrivateKey | None = None
    ) -> grpc.Channel:
        pem = certificate if certificate is not None else self.reply.certificate
        return channel_to(self.invitation.address, self.reply.authority, pem, certificates.key_pem(key or self.key))

    @property
    def enrolment(self) -> Any:
        return enrolment_pb2_grpc.EnrolmentStub(self.channel)

    @property
    def federation(self) -> Any:
        return federation_pb2_grpc.FederationStub(self.channel)

    # Events.

    def watch(self) -> None:
        """Connect, and read events into a new queue until the stream ends; then comes None."""
        events = self.events = queue.Queue()
        self._watch = self.federation.Watch(pb.WatchRequest(agent_version=__version__))
        call = self._watch

        def read() -> None:
            try:
                for event in call:
                    if event.HasField("offer"):
                        self.offers[event.offer.study] = event.offer
                    events.put(event)
            except grpc.RpcError as error:
                events.put(error)
            events.put(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._threads.append(thread)

    def watch_again(self) -> None:
        """Watch a coordinator that was just started: its port may still be refused for a moment."""
        self.federation.Studies(pb.StudiesRequest(agent_version=__version__), timeout=WAIT_S, wait_for_ready=True)
        self.watch()

    def unwatch(self) -> None:
        """Break the line of the events."""
        self._watch.cancel()
        while self.events.get(timeout=WAIT_S) is not None:
            pass

    def next_event(self, kind: str) -> Any:
        """The next event of a kind; others are passed over."""
        while True:
            event = self.events.get(timeout=WAIT_S)
            if event is None or isinstance(event, grpc.RpcError):
                raise AssertionError(f"the stream ended before any {kind}: {event}")
            if event.HasField(kind):
                return getattr(event, kind)

    def next_assignment(self) -> Any:
        return self.next_event("assignment")

    def stream_error(self) -> grpc.RpcError:
        """The error with which the stream ended."""
        while True:
            event = self.events.get(timeout=WAIT_S)
            if isinstance(event, grpc.RpcError):
                return event
            assert event is not None

    # Declarations.

    def declare(self, study: str, standing: int = pb.READY, **fields: Any) -> None:
        offer = self.offer(study)
        message = pb.DeclareRequest(study=study, revision=offer.revision, digest=offer.digest, status=standing)
        message.MergeFrom(pb.DeclareRequest(**fields))
        self.federation.Declare(message, timeout=WAIT_S)

    def decline(self, assignment: Any, code: str) -> None:
        self.declare(
            assignment.study, pb.DECLINED, round=assignment.round, attempt=assignment.attempt,
            code=pb.RefusalCode.Value(code),
        )  # fmt: skip

    def offer(self, study: str) -> Any:
        return next(offer for page in self.pages() for offer in page if offer.study == study)

    def pages(self) -> Iterator[list[Any]]:
        """The studies that it is offered, page by page."""
        after, more = "", True
        while more:
            request = pb.StudiesRequest(agent_version=__version__, after=after)
            reply = self.federation.Studies(request, timeout=WAIT_S)
            yield list(reply.studies)
            more = reply.more
            after = reply.studies[-1].study if more else ""

    def specs(self, study: str) -> tuple[TensorSpec, ...]:
        return manifest_from(self.offer(study).initial_model).specs

    def specs_for(self, assignment: Any) -> tuple[TensorSpec, ...]:
        """What an assignment's update has: by the offer that came with the events, as an agent does, if it is of it."""
        offer = self.offers.get(assignment.study)
        if offer is None or (offer.revision, offer.digest) != (assignment.revision, assignment.digest):
            return self.specs(assignment.study)
        return manifest_from(offer.initial_model).specs

    # Models and updates.

    def download(self, assignment: Any, offset: int = 0) -> tuple[Manifest, bytes]:
        request = pb.DownloadRequest(
            study=assignment.study, revision=assignment.revision, model=assignment.base, offset=offset
        )
        first, *chunks = self.federation.Download(request, timeout=WAIT_S)
        return manifest_from(first.manifest), b"".join(reply.chunk.data for reply in chunks)

    def opening(self, assignment: Any, update: Update, upload_id: bytes | None = None) -> Any:
        self.ledger.write()
        return self.opening_again(assignment, update, upload_id or uuid.uuid4().bytes)

    def opening_again(self, assignment: Any, update: Update, upload_id: bytes) -> Any:
        head = self.ledger.head()
        return pb.UploadOpen(
            upload_id=upload_id, study=assignment.study, revision=assignment.revision, digest=assignment.digest,
            round=assignment.round, attempt=assignment.attempt, manifest=manifest_message(update.manifest),
            metrics=[pb.Metric(name=name, value=value) for name, value in update.metrics],
            num_examples=update.num_examples, num_validation=update.num_validation,
            ledger=self.signed(head), new_line_hashes=self.ledger.hashes[self.ledger.witnessed :],
        )  # fmt: skip

    def signed(self, head: LedgerHead) -> Any:
        signature = head.sign(self.ledger.key).signature
        return pb.LedgerHead(
            ledger_id=head.ledger_id, lines=head.lines, head=bytes.fromhex(head.head), signature=signature
        )

    def send(
        self, opening: Any, payload: bytes, *, chunk: int = 256 * 1024, commit: bytes | None = None,
        stop_at: int | None = None, over: Any = None, on_offset: Callable[[int], None] = lambda offset: None,
    ) -> Receipt | None:  # fmt: skip
        """Upload from the offset that the coordinator gives. ``stop_at``: end the stream there, without a commit.
        ``over``: a stub on another connection than its own.
        """
        starts: queue.Queue[int] = queue.Queue()

        def requests() -> Iterator[Any]:
            yield pb.UploadRequest(open=opening)
            offset = starts.get(timeout=WAIT_S)
            end = len(payload) if stop_at is None else stop_at
            while 0 <= offset < end:
                data = payload[offset : min(offset + chunk, end)]
                yield pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=offset, data=data))
                offset += len(data)
            if stop_at is None and offset >= 0:
                digest = commit or bytes.fromhex(manifest_from(opening.manifest).digest())
                yield pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=digest))

        begun = False
        try:
            for reply in (over or self.federation).Upload(requests(), timeout=WAIT_S):
                if reply.HasField("receipt"):
                    return self.take(reply.receipt)
                on_offset(reply.offset)
                if not begun:
                    begun = True
                    starts.put(reply.offset)
        finally:
            starts.put(-1)
        return None

    def take(self, message: Any) -> Receipt:
        envelope = envelope_from(message)
        receipt = Receipt.verified(envelope, self.receipt_key)
        self.receipts.append(receipt)
        if receipt.decision != receipts.NOT_RECEIVED:
            self.envelopes.append(envelope)
        if receipt.ledger is not None:
            self.ledger.witnessed = receipt.ledger.lines
        if receipt.decision != receipts.NOT_RECEIVED:
            self.ledger.write()
        return receipt

    def inquire(self, upload_id: bytes) -> Any:
        """The coordinator's one reply about an upload, as it came."""
        request = pb.UploadRequest(inquire=pb.UploadInquire(upload_id=upload_id))
        (reply,) = self.federation.Upload(iter([request]), timeout=WAIT_S)
        return reply

    def answer(self, assignment: Any, update: Update | None = None) -> Receipt:
        """Do an assignment: download, "train", upload."""
        manifest, payload = self.download(assignment)
        hasher = PayloadHasher(manifest.specs)
        hasher.update(payload)
        assert hasher.manifest().digest() == assignment.base.digest.hex()
        specs = self.specs_for(assignment) if assignment.HasField("train") else ()
        chosen = update or delta(self.name, assignment.round, specs)
        receipt = self.send(self.opening(assignment, chosen), chosen.payload)
        assert receipt is not None
        return receipt

    def work(self, study: str) -> threading.Thread:
        """Approve a study and do every assignment, in a thread, until it is told to stop or the line breaks."""
        self.declare(study)

        def loop() -> None:
            while (event := self.events.get(timeout=WAIT_S)) is not None:
                if isinstance(event, grpc.RpcError) or event.HasField("goodbye"):
                    return
                if not event.HasField("assignment"):
                    continue
                if event.assignment.HasField("stop"):
                    return
                try:
                    self.answer(event.assignment)
                except grpc.RpcError:
                    return

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.channel.close()
        for thread in self._threads:
            thread.join(WAIT_S)


def write_initial(path: Path) -> tuple[TensorSpec, ...]:
    """A small initial model of two tensors."""
    from safetensors.numpy import save_file

    save_file({"layer.bias": np.zeros(2, "<f4"), "layer.weight": np.ones((2, 3), "<f4")}, path)
    return (TensorSpec("layer.bias", "F32", (2,)), TensorSpec("layer.weight", "F32", (2, 3)))
