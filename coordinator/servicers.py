"""The gRPC servicers: each method takes a message, calls the room behind, and sends its answer. None judges.

Every method wears ``permitted``, which authenticates the peer, says whose certificate may call it, and bounds what the
peer can make grow; a test fails for a method without it. Messages are translated in ``coordinator.messages``.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path

from coordinator import messages as translate
from coordinator.authenticator import Authenticator
from coordinator.calls import Call, parsed, permitted
from coordinator.members.authority import Authority
from coordinator.members.certificate_status import Peer
from coordinator.members.enrolment import Enrolment, Issued
from coordinator.members.instances import Instances
from coordinator.models import downloads
from coordinator.models.downloads import Downloads
from coordinator.storage.blobs import Blobs, DamagedModel
from coordinator.storage.database import Store
from coordinator.studies import fits
from coordinator.studies.engine import Engine
from coordinator.studies.events import Expected
from coordinator.studies.state import ENDED
from coordinator.studies.streams import End, Stream
from coordinator.studies.study import Study
from coordinator.summaries import keeping
from coordinator.turns import Turn, Turns
from coordinator.updates.decide import Uploads
from coordinator.updates.receipts import PAGE
from coordinator.updates.receive import Reception
from coordinator.updates.returned import MAX_RETURNED
from wardround import __version__, rpc
from wardround.errors import BadData
from wardround.local import traces
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.assignment import Declaration, SiteStatus
from wardround.records.chunks import chunk_bytes
from wardround.records.enrolment import Enrolled, IssuedCertificate
from wardround.records.event import CertificateFork, Goodbye, event_message
from wardround.records.messages import envelope_from, envelope_message, manifest_message, manifest_most_bytes
from wardround.records.summaries.figures import SiteFigures
from wardround.records.update import LedgerStatement, UploadHeader, upload_id_from
from wardround.signing import canonical
from wardround.tensors.files import TensorFile, ViewFile
from wardround.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2_grpc,
    summaries_pb2,
    summaries_pb2_grpc,
)
from wardround.v1 import federation_pb2 as pb

MAX_SMALL = 4096  # bytes of a signing request
MAX_PAGE = 48 * 1024  # bytes of a page of ledger lines
MAX_SUMMARY = 64 * 1024  # bytes of a site's figures
MAX_OPENING = 128 * 1024  # bytes of an upload's opening beside its manifest
OFFERED_S = 1.0  # how often a download checks that its model is still offered
STRANGE_TENSORS = 1000  # in an opening of a study that does not list the site
log = logging.getLogger(__name__)


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServicer):
    """Certificates: the first one for an invitation, the next ones for a site that has one."""

    def __init__(
        self, authenticator: Authenticator, enrolment: Enrolment, authority: Authority, receipt_key: bytes
    ) -> None:
        self.authenticator = authenticator
        self._enrolment = enrolment
        self._authority = authority
        self._receipt_key = receipt_key
        self._logs = _logs()

    @permitted("invitation", enrolment_pb2.EnrolRequest)
    def Enrol(  # noqa: N802  named by the contract
        self, peer: Peer, request: enrolment_pb2.EnrolRequest, call: Call
    ) -> enrolment_pb2.EnrolReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        if len(request.ledger_key) != 32 or len(request.proof) != 64 or len(request.signing_request) > MAX_SMALL:
            raise BadData("a field of the request is too long, or has a wrong length", code="MESSAGE_MALFORMED")
        enrolled = self._enrolment.enrol(
            peer, request.invitation_id[:64], request.signing_request, request.ledger_key, request.proof
        )
        self.authenticator.calls.cancel_invalid()  # those of the identity that this one replaces
        self._logs[enrolled.site].info("site %s enrolled from %s", enrolled.site, peer.address)
        certificate = self._certificate(enrolled)
        return Enrolled(certificate, enrolled.site, peer.name.federation, self._receipt_key).to_message()

    @permitted(("site", "renewal"), enrolment_pb2.RenewRequest)
    def Renew(  # noqa: N802
        self, peer: Peer, request: enrolment_pb2.RenewRequest, call: Call
    ) -> enrolment_pb2.RenewReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        if len(request.signing_request) > MAX_SMALL:
            raise BadData("a field of the request is too long, or has a wrong length", code="MESSAGE_MALFORMED")
        return self._certificate(self._enrolment.renew(peer, request.signing_request)).to_message()

    def _certificate(self, issued: Issued) -> IssuedCertificate:
        now_s, roots = int(self._enrolment.wall_clock()), self._authority.announced_pem
        return IssuedCertificate(issued.certificate, roots, now_s, issued.renew_after_s, issued.renewal)


class FederationServicer(federation_pb2_grpc.FederationServicer):
    """Studies, assignments, models down and updates up."""

    def __init__(
        self,
        authenticator: Authenticator,
        engine: Engine,
        uploads: Uploads,
        records: Store,
        blobs: Blobs,
        instances: Instances,
    ) -> None:
        self.authenticator = authenticator
        self._status = authenticator.certificate_status
        self._engine = engine
        self._uploads = uploads
        self._records = records
        self._downloads = Downloads(records, blobs)
        self._blobs = blobs
        self._instances = instances
        self._turns = Turns()
        self._logs = _logs()

    @permitted("site", pb.StudiesRequest)
    def Studies(  # noqa: N802
        self, peer: Peer, request: pb.StudiesRequest, call: Call
    ) -> pb.StudiesReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        self._instances.refuse_copy(peer.site, _instance(request))
        listed = [
            study
            for study in self._engine.studies()
            if peer.site in study.rules.sites and study.state.phase not in ENDED
        ]
        offers, more = translate.page_of_offers([study for study in listed if study.name > request.after])
        last = bytes.fromhex(self._uploads.returned.last(peer.site))
        return pb.StudiesReply(studies=offers, coordinator_version=__version__, more=more, last_receipt=last)

    @permitted("site", pb.DeclareRequest)
    def Declare(  # noqa: N802
        self, peer: Peer, request: pb.DeclareRequest, call: Call
    ) -> pb.DeclareReply:
        study = self._study(peer, request.study)
        declared = Declaration.from_message(request)
        if declared is None:
            self._logs[peer.site].info(
                "%s: site %s declares a status that this version does not know", study.name, peer.site
            )
        elif declared.status == SiteStatus.WITHDRAWN:
            self._engine.gone(peer.site, study.name, "DECLINED_WITHDRAWN")
        elif (declared.revision, declared.digest) != (study.revision, study.digest):
            raise BadData(
                f"study `{study.name}` is at revision {study.revision}, digest {study.digest[:12]}… now",
                hint=f"look at it again: `site-agent preview {study.name}`",
                code="REVISION_CHANGED",
            )
        elif declared.status == SiteStatus.READY:
            self._engine.ready(peer.site, study.name)
        elif declared.status in (SiteStatus.FITS, SiteStatus.DOES_NOT_FIT):
            with self._records.write() as session:
                fits.note(session, study, peer.site, declared, int(time.time()))
        elif declared.status == SiteStatus.HELD:
            self._engine.held(peer.site, study.name, declared.round, declared.attempt)
        elif declared.status == SiteStatus.TRAINING:
            if declared.estimate_s and study.rules.threshold:
                raise BadData(
                    "with secure aggregation no site says its time: it follows from its rows", code="COUNT_INVALID"
                )
            expected = Expected(peer.site, declared.round, declared.attempt, declared.estimate_s)
            self._engine.happened(study.name, expected)
        else:
            self._engine.declined(peer.site, study.name, declared.round, declared.attempt, declared.code)
        return pb.DeclareReply()

    @permitted("site", pb.WatchRequest)
    def Watch(  # noqa: N802
        self, peer: Peer, request: pb.WatchRequest, call: Call
    ) -> Iterator[pb.Event]:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        with self._instances.connected(peer.site, _instance(request)):
            yield from self._watch(peer, call)

    def _watch(self, peer: Peer, call: Call) -> Iterator[pb.Event]:
        stream = Stream()
        if not call.context.add_callback(stream.end):
            return  # the peer is gone
        self._engine.watch(peer.site, stream)
        self._logs[peer.site].info("site %s is connected from %s", peer.site, peer.address)
        try:
            if (since := self._status.certificate_fork_since(peer.site)) is not None:
                yield event_message(CertificateFork(since))
            while not isinstance(item := stream.get(), End):
                self._status.check(peer)
                yield event_message(item.offer if isinstance(item, Study) else item)
                if isinstance(item, Goodbye):
                    return
        finally:
            self._engine.unwatch(peer.site, stream)
            self._logs[peer.site].info("site %s is no longer connected from %s", peer.site, peer.address)

    @permitted("site", pb.DownloadRequest)
    def Download(  # noqa: N802
        self, peer: Peer, request: pb.DownloadRequest, call: Call
    ) -> Iterator[pb.DownloadReply | bytes]:
        study = self._study(peer, request.study)
        found, path = self._wanted(peer, study, request)
        yield pb.DownloadReply(manifest=manifest_message(found.manifest))
        looked, current = time.monotonic(), study.state.round
        with (
            traces.span("download", study.name, current.number if current else request.model.round, peer.site),
            TensorFile(path) as file,  # while it is open, its room on the disk is taken
            self._turns.taken(peer.site, found.manifest.bytes - request.offset, call.context.is_active) as turn,
        ):
            for offset, data in ViewFile(file, found.sources).chunks(request.offset):
                self._status.check(peer)
                if time.monotonic() - looked > OFFERED_S:
                    now = self._study(peer, request.study)
                    if now.revision != study.revision or found.kept not in {kept for _, kept in now.offered}:
                        raise _not_offered(request)
                    looked = time.monotonic()
                yield chunk_bytes(offset, data)
                turn.moved(len(data))

    @permitted("site", pb.UploadRequest, stream=True)
    def Upload(  # noqa: N802
        self, peer: Peer, messages: Iterator[bytes], call: Call
    ) -> Iterator[pb.UploadReply]:
        first = parsed(pb.UploadRequest, call.first(messages, self._most_bytes(peer)))
        kind = first.WhichOneof("kind")
        if kind == "inquire":
            answer = self._uploads.inquire(peer.site, upload_id_from(first.inquire.upload_id))
            if isinstance(answer, int):
                yield pb.UploadReply(offset=answer)
            else:
                yield pb.UploadReply(receipt=envelope_message(answer))
            return
        if kind != "open":
            raise BadData("an upload begins with `open` or `inquire`", code="MESSAGE_MALFORMED")
        header = UploadHeader.from_message(first.open, self._most_tensors(peer, first.open.study))
        opened = self._uploads.open(peer.site, header, call.context.is_active)
        if not isinstance(opened, Reception):
            yield pb.UploadReply(receipt=envelope_message(opened))
            return
        try:
            with traces.span("upload", header.study, header.round, peer.site):
                missing = header.manifest.bytes - opened.received
                with self._turns.taken(peer.site, missing, call.context.is_active) as turn:
                    yield pb.UploadReply(offset=opened.received)  # before it knows that, the site sends nothing
                    committed = yield from self._receive(peer, opened, call.further(messages), turn)
                if committed is not None:
                    yield pb.UploadReply(receipt=envelope_message(self._uploads.decide(opened, committed)))
        finally:
            self._uploads.receptions.close(opened)

    @permitted("site", pb.ReceiptsRequest)
    def Receipts(  # noqa: N802
        self, peer: Peer, request: pb.ReceiptsRequest, call: Call
    ) -> Iterator[pb.ReceiptsReply]:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        envelopes = self._uploads.receipts.copy(peer.site)
        while page := list(islice(envelopes, PAGE)):
            self._status.check(peer)
            yield pb.ReceiptsReply(envelopes=[envelope_message(envelope) for envelope in page])

    @permitted("site", pb.ReturnRequest, most=MAX_PAGE)
    def Return(self, peer: Peer, request: pb.ReturnRequest, call: Call) -> pb.ReturnReply:  # noqa: N802
        if len(request.envelopes) > MAX_RETURNED:
            raise BadData("more receipts than a message may have", code="MESSAGE_MALFORMED")
        last = self._uploads.returned.take(peer.site, [envelope_from(message) for message in request.envelopes])
        return pb.ReturnReply(last_receipt=bytes.fromhex(last))

    def _receive(
        self, peer: Peer, reception: Reception, messages: Iterator[bytes], turn: Turn
    ) -> Generator[pb.UploadReply, None, str | None]:
        """Take chunks until the commit, and return the digest of its manifest; None where the stream ends without one.
        The peer's certificate is checked again at each message.
        """
        for data in messages:
            self._status.check(peer)
            message = translate.later_upload_message(data)
            if isinstance(message, tuple):
                turn.moved(len(message[1]))
                durable = reception.take(*message)
                if durable is not None:
                    yield pb.UploadReply(offset=durable)
            elif message.WhichOneof("kind") == "commit":
                return message.commit.manifest_sha256.hex()
            else:
                raise translate.out_of_order()
        return None

    @permitted("site", pb.LedgerPage, most=MAX_PAGE)
    def Ledger(self, peer: Peer, request: pb.LedgerPage, call: Call) -> pb.LedgerKnown:  # noqa: N802
        statement = LedgerStatement.from_message(request.ledger, request.new_line_hashes)
        return pb.LedgerKnown(lines=self._uploads.ledgers.page(peer.site, statement))

    def _most_bytes(self, peer: Peer) -> int:
        """How long an upload's opening of this site may be: by the largest study that lists the site."""
        studies = [study for study in self._engine.studies() if peer.site in study.rules.sites]
        largest = max((manifest_most_bytes(study.uploaded_by(peer.site)) for study in studies), default=0)
        return min(rpc.MAX_STRUCTURED, MAX_OPENING + 2 * largest)

    def _most_tensors(self, peer: Peer, name: str) -> int:
        """How many tensors an opening may name: more than its study has, so that a surplus one is refused by name."""
        study = self._engine.find(name)
        if study is None or peer.site not in study.rules.sites:
            return STRANGE_TENSORS
        return 2 * len(study.shared) + 64

    def _wanted(self, peer: Peer, study: Study, request: pb.DownloadRequest) -> tuple[downloads.Download, Path]:
        """What a site asks to download, and the whole file that holds its tensors.

        Raises:
            BadData: it is not offered (REVISION_CHANGED).
            DamagedModel: it is damaged here; a study that needs it is paused.
        """
        digest = request.model.digest.hex()
        try:
            if request.revision == study.revision:
                found = self._downloads.find(study.aggregator, study.offered, peer.site, digest)
                if found is not None:
                    return found, self._blobs.whole_model(found.kept)
        except DamagedModel as damaged:
            self._engine.cannot_offer(study.name, damaged)
            raise
        raise _not_offered(request)

    def _study(self, peer: Peer, name: str) -> Study:
        study = self._engine.find(name)
        if study is None or peer.site not in study.rules.sites:
            raise BadData(f"no study `{name[:64]}` lists site `{peer.site}`", code="STUDY_UNKNOWN")
        return study


class SummariesServicer(summaries_pb2_grpc.SummariesServicer):
    """Summary requests to the sites, and their figures back."""

    def __init__(self, authenticator: Authenticator, records: Store) -> None:
        self.authenticator = authenticator
        self._records = records

    @permitted("site", summaries_pb2.SummaryRequestsRequest)
    def SummaryRequests(  # noqa: N802
        self, peer: Peer, request: summaries_pb2.SummaryRequestsRequest, call: Call
    ) -> summaries_pb2.SummaryRequestsReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        with self._records.read() as session:
            offered = keeping.open_for(session, peer.site)
        return summaries_pb2.SummaryRequestsReply(documents=[canonical.dumps(one.document()) for one in offered])

    @permitted("site", summaries_pb2.SiteSummary, most=MAX_SUMMARY)
    def TellSummary(  # noqa: N802
        self, peer: Peer, request: summaries_pb2.SiteSummary, call: Call
    ) -> summaries_pb2.TellSummaryReply:
        figures = SiteFigures.from_message(request)
        with self._records.write() as session:
            keeping.note(session, peer.site, figures, int(time.time()))
        return summaries_pb2.TellSummaryReply()


def _logs() -> defaultdict[str, RateLimitedLog]:
    """Site -> the log of what it can cause again and again; what one causes keeps no other's out."""
    return defaultdict(lambda: RateLimitedLog(log))


def _instance(request: pb.StudiesRequest | pb.WatchRequest) -> str:
    """The random number of the agent's process, in hex; "" of one that does not name itself.

    Raises:
        BadData: MESSAGE_MALFORMED, another length.
    """
    if len(request.instance) not in (0, 16):
        raise BadData("an agent names itself with 16 bytes", code="MESSAGE_MALFORMED")
    return request.instance.hex()


def _not_offered(request: pb.DownloadRequest) -> BadData:
    return BadData(
        f"model {request.model.round} of `{request.study}` is not offered (any more)", code="REVISION_CHANGED"
    )
