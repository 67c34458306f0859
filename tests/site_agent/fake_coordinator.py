"""A coordinator for the agent's tests: real gRPC and TLS on loopback, its own authority, misbehaviour to order."""

import datetime
import hashlib
import ipaddress
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from wardround import __version__, rpc
from wardround.errors import BadData, NotPermitted, WardroundError
from wardround.records import receipts
from wardround.records.invitation import Invitation
from wardround.records.messages import envelope_from, envelope_message, manifest_from, manifest_message
from wardround.records.receipt_copy import Statement
from wardround.records.study import StudyFile, study_digest
from wardround.signing import canonical, certificates
from wardround.signing.dsse import Envelope
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest, PayloadHasher
from wardround.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2_grpc,
    summaries_pb2,
    summaries_pb2_grpc,
    tensors_pb2,
)
from wardround.v1 import federation_pb2 as pb

WAIT_S = 60


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Authority:
    """A certificate authority with one key."""

    def __init__(self, name: str = "test authority") -> None:
        self.key = certificates.new_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(certificates.subject(name))
            .issuer_name(certificates.subject(name))
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - datetime.timedelta(minutes=5))
            .not_valid_after(now() + datetime.timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        )
        self.certificate = builder.sign(self.key, hashes.SHA256())
        self.pem = certificates.certificate_pem(self.certificate)

    def issue(
        self,
        key: Any,
        names: list[x509.GeneralName],
        *,
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
        days: float = 7,
        begins: datetime.datetime | None = None,
    ) -> bytes:
        begins = begins or now() - datetime.timedelta(minutes=5)
        builder = (
            x509.CertificateBuilder()
            .subject_name(certificates.subject("leaf"))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + datetime.timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        return certificates.certificate_pem(builder.sign(self.key, hashes.SHA256()))


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


@dataclass
class Taken:
    """An upload as this coordinator got it."""

    opening: pb.UploadOpen
    payload: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)  # where each open was told to go on
    whole: bool = False
    receipt: pb.Envelope | None = None


class FakeCoordinator(
    enrolment_pb2_grpc.EnrolmentServicer,
    federation_pb2_grpc.FederationServicer,
    summaries_pb2_grpc.SummariesServicer,
):
    """One study, one site. Tests set the public attributes; waits are bounded."""

    def __init__(self, federation: str = "test") -> None:
        self.federation = federation
        self.authority = Authority()
        self.receipt_key = Ed25519PrivateKey.generate()
        self.server_time: Callable[[], datetime.datetime] = now
        self.certificate_days = 7.0
        self.version = __version__
        self.revoked = False
        self.lose_enrol_replies = 0
        self.break_upload_at: int | None = None  # once, after so many payload bytes
        self.lose_receipts = 0  # decide, but break the line instead of answering
        self.break_download_at: int | None = None
        self.refuse_with = ""
        self.forge_receipts = False
        self.hold_uploads = threading.Event()
        self.hold_uploads.set()
        self.offers: dict[str, pb.StudyOffer] = {}
        self.offers_a_page = 1000  # studies in one reply
        self.studies: Callable[[Any], pb.StudiesReply] | None = None  # what it says in their place
        self.models: dict[int, Path] = {}
        self.heard: list[bytes] = []  # every message that came, serialized, and the headers of every call
        self.summary_requests: list[bytes] = []  # each as it is sent
        self.break_summaries = False  # the line breaks instead of the answer
        self.told: list[summaries_pb2.SiteSummary] = []
        self.declared: list[pb.DeclareRequest] = []
        self.uploads: dict[bytes, Taken] = {}
        self.inquired: list[bytes] = []  # the ids of uploads that were asked about
        self.enrolments: list[enrolment_pb2.EnrolRequest] = []
        self.downloads: list[int] = []
        self.pages: list[int] = []  # how many lines each page of the ledger had
        self.witness = receipts.LedgerHead("", 0, receipts.EMPTY_HEAD)
        self.previous = receipts.EMPTY_HEAD
        self.chain: list[Envelope] = []  # every receipt of a decision
        self.says_last_receipt = False
        self.returned: list[int] = []  # how many receipts each page had that came back
        self.site = ""
        self.renewals: list[bytes] = []  # PEM of each renewed certificate
        self.watching_new = False  # a Watch came with the newest of them
        self.changed = threading.Condition()
        self.port = 0
        self._issued: dict[bytes, bytes] = {}
        self._invited: dict[str, str] = {}
        self._streams: list[queue.SimpleQueue[pb.Event | None]] = []
        self.start()

    # running

    def start(self) -> None:
        key = certificates.new_key()
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), uri(f"spiffe://{self.federation}/coordinator")]
        leaf = self.authority.issue(key.public_key(), names, usage=ExtendedKeyUsageOID.SERVER_AUTH)
        credentials = grpc.ssl_server_credentials(
            [(certificates.key_pem(key), leaf)], self.authority.pem, require_client_auth=True
        )
        self.server = grpc.server(ThreadPoolExecutor(16), options=rpc.SERVER_OPTIONS)
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(self, self.server)
        federation_pb2_grpc.add_FederationServicer_to_server(self, self.server)
        summaries_pb2_grpc.add_SummariesServicer_to_server(self, self.server)
        self.port = self.server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        self.server.start()

    def stop(self) -> None:
        with self.changed:
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.put(None)
        self.server.stop(0).wait(WAIT_S)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        with self.changed:
            if not self.changed.wait_for(condition, timeout=WAIT_S):
                raise TimeoutError(f"after {WAIT_S} s still not: {what}")
            return condition()

    # what tests do

    def invite(self, site: str, *, expires: datetime.timedelta = datetime.timedelta(hours=1), address: str = "") -> str:
        invitation = f"inv-{uuid.uuid4().hex[:8]}"
        key = certificates.new_key()
        leaf = self.authority.issue(key.public_key(), [uri(f"spiffe://{self.federation}/invitation/{invitation}")])
        self._invited[invitation] = site
        return Invitation(
            id=invitation,
            federation=self.federation,
            site=site,
            address=address or self.address,
            expires_s=int((now() + expires).timestamp()),
            authority=self.authority.pem.decode(),
            certificate=leaf.decode(),
            key=certificates.key_pem(key).decode(),
        ).encode()

    def offer(self, document: dict[str, Any], model: Path, *, revision: int = 1, state: str = "created") -> str:
        """Offer a study with its initial model; returns its digest."""
        with TensorFile(model) as file:
            manifest = file.manifest()
        digest = study_digest(document, manifest.digest())
        study = StudyFile.from_document(document).study.name
        message = pb.StudyOffer(
            study=study,
            revision=revision,
            digest=bytes.fromhex(digest),
            document=canonical.dumps(document),
            initial_model=manifest_message(manifest),
            state=state,
        )
        self.models[0] = model
        with self.changed:
            self.offers[study] = message
        self.tell(pb.Event(offer=message))
        return digest

    def tell(self, event: pb.Event) -> None:
        with self.changed:
            streams = list(self._streams)
        for stream in streams:
            stream.put(event)

    def assign(self, study: str, round_: int, *, attempt: int = 1, kind: str = "train", base: int = 0) -> None:
        offer = self.offers[study]
        event = pb.Event()
        assignment = event.assignment
        assignment.study, assignment.revision, assignment.digest = study, offer.revision, offer.digest
        assignment.round, assignment.attempt = round_, attempt
        with TensorFile(self.models[base]) as file:
            assignment.base.round, assignment.base.digest = base, bytes.fromhex(file.manifest().digest())
        getattr(assignment, kind).SetInParent()
        self.tell(event)

    def stop_study(self, study: str, reason: str, *, best: int | None = None) -> None:
        offer = self.offers[study]
        event = pb.Event()
        assignment = event.assignment
        assignment.study, assignment.revision, assignment.digest = study, offer.revision, offer.digest
        if best is not None:
            with TensorFile(self.models[best]) as file:
                assignment.best.round, assignment.best.digest = best, bytes.fromhex(file.manifest().digest())
        assignment.stop.reason = reason
        self.tell(event)

    def wait_connected(self) -> None:
        self.wait_for(lambda: self._streams, "a site watches")

    def wait_declared(self, standing: str, code: str = "") -> pb.DeclareRequest:
        def found() -> pb.DeclareRequest | None:
            wanted = (pb.SiteStatus.Value(standing), pb.RefusalCode.Value(code or "REFUSAL_UNSPECIFIED"))
            return next((said for said in self.declared if (said.status, said.code) == wanted), None)

        said = self.wait_for(found, f"{standing} {code} declared")
        assert isinstance(said, pb.DeclareRequest)
        return said

    def wait_receipts(self, count: int) -> list[Taken]:
        self.wait_for(lambda: len(self.decided()) >= count, f"{count} uploads decided")
        return self.decided()

    def forget(self) -> None:
        """As if no upload had ever come."""
        with self.changed:
            self.uploads.clear()
            self.witness, self.previous = receipts.LedgerHead("", 0, receipts.EMPTY_HEAD), receipts.EMPTY_HEAD
            self.chain.clear()

    def wait_whole(self) -> None:
        self.wait_for(lambda: any(taken.whole for taken in self.uploads.values()), "an upload arrived whole")

    def decided(self) -> list[Taken]:
        return [taken for taken in self.uploads.values() if taken.receipt is not None]

    # the two services

    def Enrol(self, request: Any, context: Any) -> enrolment_pb2.EnrolReply:
        self._hear(context, request)
        with self.changed:
            self.enrolments.append(request)
        site = self._invited.get(request.invitation_id)
        if site is None:
            rpc.abort(context, BadData("the invitation is not known here", code="INVITATION_UNKNOWN"))
        key = certificates.requested_key(request.signing_request)
        signed = (
            b"wardround-enrol-v1\0"
            + request.invitation_id.encode()
            + b"\0"
            + hashlib.sha256(request.signing_request).digest()
        )
        Ed25519PublicKey.from_public_bytes(request.ledger_key).verify(request.proof, signed)
        self.site = site
        if request.signing_request not in self._issued:
            if self._issued:
                rpc.abort(context, BadData("this invitation was used already", code="INVITATION_USED"))
            self._issued[request.signing_request] = self.authority.issue(
                key, [uri(f"spiffe://{self.federation}/site/{site}")], days=self.certificate_days
            )
        if self.lose_enrol_replies:
            self.lose_enrol_replies -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost")
        return enrolment_pb2.EnrolReply(
            site=site,
            federation=self.federation,
            certificate=self._issued[request.signing_request],
            authority=self.authority.pem,
            receipt_key=self.receipt_key.public_key().public_bytes_raw(),
            server_time_s=int(self.server_time().timestamp()),
            renew_after_s=int(now().timestamp()) + 3600,
            coordinator_version=self.version,
        )

    def Renew(self, request: Any, context: Any) -> enrolment_pb2.RenewReply:
        self._hear(context, request)
        self._admit(context)
        key = certificates.requested_key(request.signing_request)
        leaf = self.authority.issue(key, [uri(f"spiffe://{self.federation}/site/{self.site}")])
        self.renewals.append(leaf)
        return enrolment_pb2.RenewReply(
            certificate=leaf,
            authority=self.authority.pem,
            server_time_s=int(now().timestamp()),
            renew_after_s=int(now().timestamp()) + 3600,
            coordinator_version=self.version,
        )

    def SummaryRequests(self, request: Any, context: Any) -> summaries_pb2.SummaryRequestsReply:
        self._hear(context, request)
        self._admit(context)
        return summaries_pb2.SummaryRequestsReply(documents=self.summary_requests)

    def TellSummary(self, request: Any, context: Any) -> summaries_pb2.TellSummaryReply:
        self._hear(context, request)
        self._admit(context)
        if self.break_summaries:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the line breaks")
        self.told.append(request)
        return summaries_pb2.TellSummaryReply()

    def Studies(self, request: Any, context: Any) -> pb.StudiesReply:
        self._hear(context, request)
        self._admit(context)
        if self.studies is not None:
            return self.studies(request)
        names = [name for name in sorted(self.offers) if name > request.after]
        page = names[: self.offers_a_page]
        return pb.StudiesReply(
            studies=[self.offers[name] for name in page], coordinator_version=self.version, more=len(names) > len(page),
            last_receipt=bytes.fromhex(self.previous) if self.says_last_receipt else b"",
        )  # fmt: skip

    def Return(self, request: Any, context: Any) -> pb.ReturnReply:
        self._hear(context, request)
        self._admit(context)
        with self.changed:
            self.returned.append(len(request.envelopes))
            for envelope in map(envelope_from, request.envelopes):
                receipt = receipts.Receipt.verified(envelope, self.receipt_key.public_key())
                if receipt.previous != self.previous or receipt.ledger is None:
                    break
                self._take_back(envelope)
            return pb.ReturnReply(last_receipt=bytes.fromhex(self.previous))

    def _take_back(self, envelope: Envelope) -> None:
        receipt = receipts.Receipt.verified(envelope, self.receipt_key.public_key())
        assert receipt.ledger is not None
        self.previous, self.witness = hashlib.sha256(envelope.payload).hexdigest(), receipt.ledger
        self.chain.append(envelope)

    def restore(self, count: int) -> None:
        """As if it was restored from a copy that knew the first ``count`` receipts."""
        known = self.chain[:count]
        self.forget()
        for envelope in known:
            self._take_back(envelope)

    def Declare(self, request: Any, context: Any) -> pb.DeclareReply:
        self._hear(context, request)
        self._admit(context)
        with self.changed:
            self.declared.append(request)
            self.changed.notify_all()
        return pb.DeclareReply()

    def Watch(self, request: Any, context: Any) -> Iterator[pb.Event]:
        self._hear(context, request)
        self._admit(context)
        stream: queue.SimpleQueue[pb.Event | None] = queue.SimpleQueue()
        if not context.add_callback(lambda: stream.put(None)):
            return  # the site is gone already, and nobody would tell of it
        presented = context.auth_context()["x509_pem_cert"][0]
        with self.changed:
            self._streams.append(stream)
            self.watching_new = bool(self.renewals) and presented == self.renewals[-1]
            self.changed.notify_all()
        try:
            while (event := stream.get()) is not None:
                yield event
        finally:  # gRPC also closes this where the site went while an event was on its way
            with self.changed:
                if stream in self._streams:
                    self._streams.remove(stream)

    def Download(self, request: Any, context: Any) -> Iterator[pb.DownloadReply]:
        self._hear(context, request)
        self._admit(context)
        self.downloads.append(request.offset)
        with TensorFile(self.models[request.model.round]) as file:
            yield pb.DownloadReply(manifest=manifest_message(file.manifest()))
            for offset, data in file.chunks(request.offset):
                if self.break_download_at is not None and offset + len(data) > self.break_download_at:
                    keep = self.break_download_at - offset
                    self.break_download_at = None
                    yield pb.DownloadReply(chunk=tensors_pb2.Chunk(offset=offset, data=data[:keep]))
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the line breaks")
                yield pb.DownloadReply(chunk=tensors_pb2.Chunk(offset=offset, data=data))

    def Upload(self, requests: Iterator[pb.UploadRequest], context: Any) -> Iterator[pb.UploadReply]:
        self._admit(context)
        requests = self._hearing(context, requests)
        first = next(requests)
        if first.WhichOneof("kind") == "inquire":
            yield self._inquired(first.inquire.upload_id)
            return
        opening = first.open
        with self.changed:
            taken = self.uploads.setdefault(opening.upload_id, Taken(opening))
            self.changed.notify_all()
        if taken.receipt is not None:
            yield pb.UploadReply(receipt=taken.receipt)
            return
        taken.offsets.append(len(taken.payload))
        yield pb.UploadReply(offset=len(taken.payload))
        for request in requests:
            if request.WhichOneof("kind") == "commit":
                break
            assert request.chunk.offset == len(taken.payload)
            if self.break_upload_at is not None and len(taken.payload) + len(request.chunk.data) > self.break_upload_at:
                taken.payload += request.chunk.data[: self.break_upload_at - len(taken.payload)]
                self.break_upload_at = None
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line breaks")
            taken.payload += request.chunk.data
        else:
            return
        with self.changed:
            taken.whole = True
            self.changed.notify_all()
        if not self.hold_uploads.wait(WAIT_S):
            return
        taken.receipt = self._decide(opening, bytes(taken.payload))
        with self.changed:
            self.changed.notify_all()
        if self.lose_receipts:
            self.lose_receipts -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the receipt is lost")
        yield pb.UploadReply(receipt=taken.receipt)

    def Ledger(self, request: Any, context: Any) -> pb.LedgerKnown:
        self._hear(context, request)
        self._admit(context)
        self.pages.append(len(request.new_line_hashes))
        try:
            self.witness = self._followed(request)
        except BadData:
            pass  # the upload's receipt will say so
        return pb.LedgerKnown(lines=self.witness.lines)

    # what it does inside

    def Receipts(self, request: Any, context: Any) -> Iterator[pb.ReceiptsReply]:
        self._hear(context, request)
        for envelope in self.copy():
            yield pb.ReceiptsReply(envelopes=[envelope_message(envelope)])

    def copy(self) -> list[Envelope]:
        """The copy of the receipts, with the statement about them."""
        with self.changed:
            said = Statement(
                self.federation, self.site, self.enrolments[-1].ledger_key.hex(), len(self.chain), self.previous, 0,
                now().isoformat(),
            )  # fmt: skip
            return [*self.chain, said.sign(self.receipt_key)]

    def _hear(self, context: Any, request: Any) -> None:
        self.heard.append(request.SerializeToString())
        self.heard.append(repr(context.invocation_metadata()).encode())

    def _hearing(self, context: Any, requests: Iterator[pb.UploadRequest]) -> Iterator[pb.UploadRequest]:
        for request in requests:
            self._hear(context, request)
            yield request

    def _admit(self, context: Any) -> None:
        if self.revoked:
            rpc.abort(context, NotPermitted(f"site `{self.site}` was revoked", code="SITE_REVOKED"))

    def _inquired(self, upload_id: bytes) -> pb.UploadReply:
        with self.changed:
            self.inquired.append(upload_id)
            self.changed.notify_all()
        taken = self.uploads.get(upload_id)
        if taken is not None and taken.receipt is not None:
            return pb.UploadReply(receipt=taken.receipt)
        if taken is not None:
            return pb.UploadReply(offset=len(taken.payload))
        unknown = self._receipt(upload_id, None, receipts.NOT_RECEIVED, "NOT_RECEIVED", None)
        return pb.UploadReply(receipt=envelope_message(unknown))

    def _decide(self, opening: pb.UploadOpen, payload: bytes) -> pb.Envelope:
        manifest = manifest_from(opening.manifest)
        code = self.refuse_with
        hasher = PayloadHasher(manifest.specs)
        try:
            hasher.update(payload)
            if hasher.manifest() != manifest:
                code = code or "PAYLOAD_DIGEST"
            head = self._witness(opening)
        except WardroundError as error:
            code, head = error.code, None
        decision = receipts.REFUSED if code else receipts.ACCEPTED
        envelope = self._receipt(opening.upload_id, (opening, manifest), decision, code, head)
        self.previous = hashlib.sha256(envelope.payload).hexdigest()
        self.chain.append(envelope)
        return envelope_message(envelope)

    def _witness(self, opening: pb.UploadOpen) -> receipts.LedgerHead:
        self.witness = self._followed(opening)
        return self.witness

    def _followed(self, opening: Any) -> receipts.LedgerHead:
        """As the real one: the new head must follow from the last one seen and the hashes of the new lines."""
        said = opening.ledger
        head = receipts.LedgerHead(said.ledger_id, said.lines, said.head.hex())
        head.verify(said.signature, Ed25519PublicKey.from_public_bytes(self.enrolments[-1].ledger_key))
        if said.lines - len(opening.new_line_hashes) != self.witness.lines:
            raise BadData("the ledger is shorter than before", code="LEDGER_ROLLBACK")
        if receipts.head_after(self.witness.head, opening.new_line_hashes) != head.head:
            raise BadData("the ledger is another", code="LEDGER_FORK")
        return head

    def _receipt(
        self,
        upload_id: bytes,
        about: tuple[pb.UploadOpen, Manifest] | None,
        decision: str,
        code: str,
        head: receipts.LedgerHead | None,
    ) -> Any:
        opening, manifest = about if about is not None else (pb.UploadOpen(), Manifest(()))
        receipt = receipts.Receipt(
            receipt_id=uuid.uuid4().hex,
            federation=self.federation,
            site=self.site,
            study=opening.study,
            revision=opening.revision,
            round=opening.round,
            attempt=opening.attempt,
            upload_id=upload_id.hex(),
            manifest_sha256=manifest.digest() if about is not None else "",
            payload_bytes=manifest.bytes,
            decision=decision,
            code=code,
            tensor="",
            time=now().isoformat(),
            ledger=head,
            previous=self.previous,
            ledger_key=self.enrolments[-1].ledger_key.hex(),
        )
        return receipt.sign(Ed25519PrivateKey.generate() if self.forge_receipts else self.receipt_key)
