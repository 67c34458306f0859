"""The calls of a site, on one channel: mutual TLS 1.3, outbound, to the coordinator alone.

Messages become records here; whoever calls never sees protobuf or gRPC. A failed call raises what
``wardround.rpc.explain`` makes of it; ``Unavailable`` is a connection that broke, and may be tried again.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.connection.proxy import Proxy
from site_agent.gateway.connection.transfers import Part, Transfers, parts
from site_agent.gateway.connection.upload import UploadStream, UploadTry
from site_agent.state.directory import Offer
from wardround import __version__, rpc
from wardround.errors import BadData, TryAgain, Unavailable, WardroundError
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.architectures import own_manifest
from wardround.records.assignment import Assignment, Declaration, ModelRef
from wardround.records.enrolment import Enrolled, IssuedCertificate
from wardround.records.event import CertificateFork, Goodbye, event_from
from wardround.records.messages import envelope_from, envelope_message
from wardround.records.offer import StudyOffer
from wardround.records.secure_messages import (
    BlockDigests,
    BlocksWanted,
    SecureShown,
    SecureTold,
    SumEvidence,
    VectorBlock,
    blocks_from,
)
from wardround.records.study import STUDY_NAME
from wardround.records.summaries.figures import SiteFigures
from wardround.records.summaries.request import MOST_OPEN, SummaryRequest, from_bytes
from wardround.records.update import LedgerStatement, UploadHeader
from wardround.signing.dsse import Envelope
from wardround.tensors.tags import Tag
from wardround.terminal import quoted
from wardround.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2_grpc,
    secure_pb2_grpc,
    summaries_pb2_grpc,
)
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import secure_pb2 as pb_secure
from wardround.v1 import summaries_pb2 as pb_summaries

CALL_S = 10  # one unary call
CONNECT_S = 15  # the first call after a connection broke: it may wait until the coordinator is back
COPY_S = 300  # a copy of all receipts
MAX_PAGES = 64  # of studies; each has at least one, and as many offers that nobody approved are kept
SLOWEST = 64 * 1024  # bytes a second under which an upload is given up and tried again
INSTANCE = os.urandom(16)  # of this process: a coordinator tells a copy of this site by it
LEFT_OUT = {
    "offer": "an offer", "assignment": "an assignment", "certificate_fork": "a warning",
    "secure": "what is shown of a secure aggregation",
}  # fmt: skip
log = RateLimitedLog(logging.getLogger(__name__))

Event = Offer | Assignment | SecureShown | CertificateFork | Goodbye
_Request = TypeVar("_Request", bound=Message)


class Connection:
    """A channel with one certificate.

    ``bytes_up`` counts the payload bytes handed to gRPC, ``meter`` all other bytes.

    Args:
        site: whose certificate it is; "" before it has joined.
        proxy: the HTTP proxy on the way, if there is one.
    """

    def __init__(
        self,
        address: str,
        authority: bytes,
        key: bytes,
        certificate: bytes,
        meter: Meter | None = None,
        site: str = "",
        proxy: Proxy | None = None,
    ) -> None:
        self.address = address
        self.site = site
        self.meter = meter or Meter()
        self.bytes_up = 0
        self.last_receipt = ""  # of this site at the coordinator, as it last listed the studies
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        self._channel = grpc.secure_channel(address, credentials, _options(proxy))
        self._enrolment = enrolment_pb2_grpc.EnrolmentStub(self._channel)  # type: ignore[no-untyped-call]
        self._federation = federation_pb2_grpc.FederationStub(self._channel)  # type: ignore[no-untyped-call]
        self._transfers = Transfers(self._channel)
        self._summaries = summaries_pb2_grpc.SummariesStub(self._channel)  # type: ignore[no-untyped-call]
        self._secure = secure_pb2_grpc.SecureAggregationStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._channel.close()

    def enrol(self, invitation_id: str, signing_request: bytes, ledger_key: bytes, proof: bytes) -> Enrolled:
        """Redeem an invitation.

        Raises:
            RefusedForGood: the coordinator is of a version that cannot work with this one.
            BadData: its reply has not its form.
        """
        request = enrolment_pb2.EnrolRequest(
            invitation_id=invitation_id, agent_version=__version__, signing_request=signing_request,
            ledger_key=ledger_key, proof=proof,
        )  # fmt: skip
        with _explained("joining"):
            self._counted("Enrol", request)
            reply = self._enrolment.Enrol(request, timeout=CALL_S)
        rpc.refuse_other_version(reply.coordinator_version, "coordinator")
        return Enrolled.from_message(reply)

    def renew(self, signing_request: bytes) -> IssuedCertificate:
        """Ask for a certificate over a new key.

        Raises:
            RefusedForGood: the coordinator is of a version that cannot work with this one.
        """
        request = enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=signing_request)
        with _explained("renewing the certificate"):
            self._counted("Renew", request)
            reply = self._enrolment.Renew(request, timeout=CALL_S)
        rpc.refuse_other_version(reply.coordinator_version, "coordinator")
        return IssuedCertificate.from_message(reply)

    def studies(self, interrupt: Interrupt, *, patient: bool) -> list[Offer]:
        """The studies that list this site; one that cannot be believed is left out.

        Args:
            patient: wait up to 15 s for a coordinator that cannot be reached.

        Raises:
            TryAgain: the pages do not go on by name, or are more than ``MAX_PAGES``.
        """
        offers: list[Offer] = []
        after = ""
        for _ in range(MAX_PAGES):
            with _explained("asking for studies"):
                request = self._counted(
                    "Studies", pb.StudiesRequest(agent_version=__version__, after=after, instance=INSTANCE)
                )
                call = self._federation.Studies.future(request, timeout=CONNECT_S, wait_for_ready=patient)
                with interrupt.ending(call.cancel):
                    reply = call.result()
            rpc.refuse_other_version(reply.coordinator_version, "coordinator")
            page = [_event_or_none(pb.Event(offer=message), self.site) for message in reply.studies]
            offers += [offer for offer in page if isinstance(offer, Offer)]
            self.last_receipt = reply.last_receipt.hex()
            if not reply.more:
                return offers
            after = _last_of_page(reply, after)
        raise TryAgain(f"the coordinator's list of studies has more than {MAX_PAGES} pages")

    def declare(self, declaration: Declaration) -> None:
        """Tell the coordinator where this site stands."""
        with _explained(f"declaring `{declaration.study}` {declaration.status}"):
            self._federation.Declare(self._counted("Declare", declaration.to_message()), timeout=CALL_S)

    def summary_requests(self) -> list[SummaryRequest]:
        """The summary requests that list this site; one that cannot be believed is left out.

        Raises:
            BadData: they are more than a coordinator can have open.
        """
        request = pb_summaries.SummaryRequestsRequest(agent_version=__version__)
        with _explained("asking for summary requests"):
            reply = self._summaries.SummaryRequests(self._counted("SummaryRequests", request), timeout=CALL_S)
        if len(reply.documents) > MOST_OPEN:
            raise BadData(f"the coordinator sends more than {MOST_OPEN} summary requests", code="MESSAGE_MALFORMED")
        read = [_summary_request_or_none(data) for data in reply.documents]
        return [one for one in read if one is not None and self.site in one.sites]

    def tell_summary(self, figures: SiteFigures) -> None:
        """Tell the coordinator the figures for one of its requests."""
        with _explained(f"telling the summary for `{figures.request}`"):
            self._summaries.TellSummary(self._counted("TellSummary", figures.to_message()), timeout=CALL_S)

    def tell(self, told: SecureTold) -> None:
        """Tell one message of secure aggregation. Raises TryAgain, ROUND_CLOSED: it comes too late."""
        with _explained(f"telling the {told.kind} of round {told.attempt.round} of `{told.attempt.study}`"):
            self._secure.Tell(self._counted("Tell", told.to_message()), timeout=CALL_S)

    def evidence(self, study: str, revision: int, round_: int) -> SumEvidence:
        """What the sum of a round is checked with."""
        request = pb_secure.EvidenceRequest(study=study, revision=revision, round=round_)
        with _explained(f"asking for the evidence of round {round_} of `{study}`"):
            return SumEvidence.from_message(self._secure.Evidence(self._counted("Evidence", request), timeout=CALL_S))

    def blocks(self, wanted: BlocksWanted) -> Iterator[BlockDigests | VectorBlock]:
        """Blocks of one site's masked vector, after the digests of all of them. Nothing in it is verified here."""
        with _explained(f"asking for blocks of round {wanted.round} of `{wanted.study}`"):
            call = self._secure.Blocks(self._counted("Blocks", wanted.to_message()), timeout=COPY_S)
            with _cancelled_after(call):
                yield from map(blocks_from, call)

    def watch(self, interrupt: Interrupt) -> Iterator[Event]:
        """What the coordinator sends, as it sends it, until the connection breaks.

        What cannot be believed is logged and left out.
        """
        with _explained("waiting for assignments"):
            call = self._federation.Watch(
                self._counted("Watch", pb.WatchRequest(agent_version=__version__, instance=INSTANCE))
            )
            with interrupt.ending(call.cancel), _cancelled_after(call):
                for message in call:
                    event = _event_or_none(message, self.site)
                    if event is not None:
                        yield event

    def download(self, study: str, revision: int, model: ModelRef, offset: int, interrupt: Interrupt) -> Iterator[Part]:
        """The model's manifest, then its payload from ``offset`` on as (offset, bytes)."""
        request = pb.DownloadRequest(study=study, revision=revision, model=model.to_message(), offset=offset)
        with _explained(f"downloading model {model.round} of `{study}`"):
            call = self._transfers.download(self._counted("Download", request))
            with interrupt.ending(call.cancel), _cancelled_after(call):
                yield from parts(call)

    def upload(
        self, header: UploadHeader, payload: Path | None, sent: UploadTry, interrupt: Interrupt, tag: Tag | None = None
    ) -> Envelope:
        """Send one update and return its receipt, not yet verified.

        The file is looked at again as it is sent; if it is no longer what ``header`` says, nothing is committed. The
        coordinator says where to go on, so a second call with the same upload id sends only what is missing. No call
        sends more than the payload's bytes.

        Args:
            payload: None for a closing validation.
            sent: counts what was let out, whether this returns or raises.
            tag: of the payload as it was when ``header`` was made; without one it is hashed.

        Raises:
            ChangedOnTheWay: the bytes read are not those of the manifest.
        """

        def on_request(size: int, payload_bytes: int) -> None:
            sent.payload_bytes += payload_bytes
            self.bytes_up += payload_bytes
            self.meter.sent("Upload", size, payload_bytes)

        stream = UploadStream(header, payload, on_request, tag)
        self.meter.call("Upload")
        timeout_s = 60 + header.manifest.bytes / SLOWEST
        with _explained(f"uploading round {header.round} of `{header.study}`"):
            call = self._transfers.upload(stream.requests(), timeout=timeout_s)
            stream.cancel = call.cancel
            try:
                with interrupt.ending(call.cancel):
                    return stream.receipt(call, sent)
            except grpc.RpcError:
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            finally:
                stream.end()
                call.cancel()

    def inquire(self, upload_id: str) -> Envelope | None:
        """What became of an upload: its receipt (perhaps "not received"), or None while it is undecided."""
        request = pb.UploadRequest(inquire=pb.UploadInquire(upload_id=bytes.fromhex(upload_id)))
        with _explained("asking about an upload"):
            for reply in self._federation.Upload(iter([self._counted("Upload", request)]), timeout=CALL_S):
                if reply.WhichOneof("kind") == "receipt":
                    return envelope_from(reply.receipt)
                return None
        raise Unavailable("asking about an upload: the coordinator ended the call without an answer")

    def show_ledger(self, page: LedgerStatement) -> int:
        """Show a page of the ledger's lines. How many lines of it the coordinator knows then."""
        request = pb.LedgerPage(ledger=page.head_message(), new_line_hashes=page.new_lines)
        with _explained("showing the ledger's lines"):
            reply = self._federation.Ledger(self._counted("Ledger", request), timeout=CALL_S)
        return int(reply.lines)

    def give_back(self, envelopes: Sequence[Envelope]) -> str:
        """Give receipts back that the coordinator lost. SHA-256 of the last one that it knows then."""
        request = pb.ReturnRequest(envelopes=[envelope_message(envelope) for envelope in envelopes])
        with _explained("giving receipts back"):
            reply = self._federation.Return(self._counted("Return", request), timeout=CALL_S)
        return str(reply.last_receipt.hex())

    def receipts(self, interrupt: Interrupt) -> Iterator[Envelope]:
        """The coordinator's copy of this site's receipts, oldest first; the last envelope is its statement about them.

        Nothing in it is verified here.
        """
        with _explained("asking for the receipts"):
            request = self._counted("Receipts", pb.ReceiptsRequest(agent_version=__version__))
            call = self._federation.Receipts(request, timeout=COPY_S)
            with interrupt.ending(call.cancel), _cancelled_after(call):
                for reply in call:
                    yield from map(envelope_from, reply.envelopes)

    def _counted(self, method: str, request: _Request) -> _Request:
        """``request``, which begins a call."""
        self.meter.call(method)
        self.meter.message(method, request)
        return request


def _options(proxy: Proxy | None) -> list[tuple[str, Any]]:
    if proxy is None:
        return rpc.CHANNEL_OPTIONS
    others = [option for option in rpc.CHANNEL_OPTIONS if option[0] != "grpc.enable_http_proxy"]
    return [*others, ("grpc.enable_http_proxy", 1), ("grpc.http_proxy", proxy.url)]


def offer_from(message: pb.StudyOffer, site: str) -> Offer:
    """An offer as ``site`` keeps it: of the initial model it has that site's part.

    Raises:
        BadData: it has not its form, or its parts do not agree.
    """
    return _kept(StudyOffer.from_message(message), site)


def _kept(offer: StudyOffer, site: str) -> Offer:
    own = own_manifest(offer.file, site, offer.initial_model)
    return Offer(offer.study, offer.revision, offer.digest, offer.state, offer.file.document(), own)


def _event_or_none(message: pb.Event, site: str) -> Event | None:
    """An event that cannot be believed does not hide the others: it is logged and left out."""
    try:
        event = event_from(message)
        return _kept(event, site) if isinstance(event, StudyOffer) else event
    except WardroundError as error:
        log.error("%s was left out: %s", LEFT_OUT.get(str(message.WhichOneof("kind"))), quoted(error.message))
        return None


def _summary_request_or_none(data: bytes) -> SummaryRequest | None:
    """A summary request that cannot be believed does not hide the others: it is logged and left out."""
    try:
        return from_bytes(data)
    except WardroundError as error:
        log.error("a summary request was left out: %s", quoted(error.message))
        return None


def _last_of_page(reply: pb.StudiesReply, before: str) -> str:
    """The name after which the next page of studies begins. It goes back to the coordinator, so it has a name's form.

    Raises:
        TryAgain: there is none, or it is not after ``before``.
    """
    last = reply.studies[-1].study if reply.studies else ""
    if not STUDY_NAME.fullmatch(last) or last <= before:
        raise TryAgain("the coordinator's pages of studies do not go on by name")
    return last


@contextmanager
def _cancelled_after(call: Any) -> Iterator[None]:
    """End a stream when whoever reads it stops."""
    try:
        yield
    finally:
        call.cancel()


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Raise a failure of gRPC as an error of ours, which says what was being done."""
    try:
        yield
    except (grpc.FutureCancelledError, grpc.FutureTimeoutError):
        raise Unavailable(f"{doing}: the call was ended") from None
    except grpc.RpcError as error:
        raise rpc.explain(error, doing) from None
