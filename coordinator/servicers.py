"""The gRPC servicers: authenticate the peer on every call, translate, call. No judgement is made here.

Every method wears ``permitted``, which says whose certificate may call it; a test fails for one that does not. What a
peer can make grow is bounded before it reaches the rooms behind.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import grpc

from coordinator.calls import SMALL_MESSAGE, Call, Calls, parsed, permitted
from coordinator.members.certificate_status import Peer, Standing
from coordinator.members.enrolment import Enrolment
from coordinator.models.downloads import Downloads
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.assignments import Assignment, ModelRef
from coordinator.studies.engine import Engine
from coordinator.studies.streams import GOODBYE, Stream, TwoLines
from coordinator.studies.study import Study
from coordinator.updates.decide import Uploads
from coordinator.updates.receipts import PAGE
from coordinator.updates.receive import Reception
from wardround import __version__, refusals, rpc
from wardround.errors import BadData, NotPermitted, WardroundError
from wardround.local.durable import StorageFailed
from wardround.records.update import LedgerStatement, UploadHeader, upload_id_from
from wardround.signing import canonical, certificates
from wardround.tensors.manifests import TensorFile, ViewFile
from wardround.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2_grpc, tensors_pb2
from wardround.v1 import federation_pb2 as pb

MAX_CHUNK = 1024 * 1024
MAX_SMALL = 4096  # bytes of a signing request
MAX_PAGE = 48 * 1024  # bytes of a page of ledger lines
MAX_OFFERS = 1024 * 1024  # bytes of a page of studies, unless it is one study
MAX_OPENING = 128 * 1024  # bytes of an upload's opening beside its manifest
OFFERED_S = 1.0  # how often it is looked whether a model that goes out is still offered
STRANGE_TENSORS = 1000  # in an opening of a study that does not list the site
DECLINES = frozenset(value for name, value in pb.RefusalCode.items() if name.startswith("DECLINED_"))
log = logging.getLogger(__name__)


class Guard:
    """Who is calling, and what becomes of an error: the one place where errors leave for the line."""

    def __init__(
        self, standing: Standing, enrolment: Enrolment, calls: Calls, fatal: Callable[[BaseException], None]
    ) -> None:
        self.standing = standing
        self._noticed = enrolment.noticed
        self.calls = calls
        self.fatal = fatal

    def admit(self, context: grpc.ServicerContext, kind: str) -> Peer:
        """The peer of a call, from its certificate. See ``Standing.admit`` for the steps.

        Raises:
            NotPermitted: not in good standing, or not of the kind that may call this.
        """
        found = [bytes(value) for value in context.auth_context().get("x509_pem_cert", [])]
        if not found:
            raise NotPermitted("the call carries no client certificate", code="CERTIFICATE_PROFILE")
        try:
            certificate = certificates.load_certificate(found[0], "the client's certificate")
        except BadData as error:
            raise NotPermitted(error.message, code="CERTIFICATE_PROFILE") from None
        peer = self.standing.admit(certificate, _address(context))
        if peer.name.kind != kind:
            raise NotPermitted(f"a certificate of kind `{peer.name.kind}` may not call this", code="CALL_NOT_ALLOWED")
        self._noticed(peer)
        return peer

    def end(self, context: grpc.ServicerContext, error: Exception) -> None:
        """End a call with an error. A failed disk ends the process: nothing more may be promised."""
        if isinstance(error, StorageFailed):
            self.fatal(error)
        if not context.is_active():
            return  # the line broke, or the call was cancelled: nobody hears it
        if not isinstance(error, WardroundError):
            log.error("a call failed", exc_info=error)
            error = WardroundError("a fault in the program")
        elif refusals.said_of(error) == refusals.TROUBLE:
            log.error("a call failed: %s; %s", error.message, error.hint)  # the site hears a code and nothing of this
        rpc.abort(context, error)


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServicer):
    """Certificates, for invitations and for sites that have one."""

    def __init__(self, guard: Guard, enrolment: Enrolment, authority_pem: bytes, receipt_key: bytes) -> None:
        self.guard = guard
        self._enrolment = enrolment
        self._authority = authority_pem
        self._receipt_key = receipt_key

    @permitted("invitation", enrolment_pb2.EnrolRequest)
    def Enrol(  # noqa: N802  named by the contract
        self, peer: Peer, request: enrolment_pb2.EnrolRequest, call: Call
    ) -> enrolment_pb2.EnrolReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        if len(request.ledger_key) != 32 or len(request.proof) != 64 or len(request.signing_request) > MAX_SMALL:
            raise BadData("the request's fields have not their form", code="MESSAGE_MALFORMED")
        enrolled = self._enrolment.enrol(
            peer, request.invitation_id[:64], request.signing_request, request.ledger_key, request.proof
        )
        self.guard.calls.end_unfit()  # those of the identity that this one replaces
        log.info("site %s enrolled from %s", enrolled.site, peer.address)
        return enrolment_pb2.EnrolReply(
            site=enrolled.site, federation=peer.name.federation, certificate=enrolled.certificate,
            authority=self._authority, receipt_key=self._receipt_key, server_time_s=int(time.time()),
            renew_after_s=enrolled.renew_after_s, coordinator_version=__version__,
        )  # fmt: skip

    @permitted("site", enrolment_pb2.RenewRequest)
    def Renew(  # noqa: N802
        self, peer: Peer, request: enrolment_pb2.RenewRequest, call: Call
    ) -> enrolment_pb2.RenewReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        if len(request.signing_request) > MAX_SMALL:
            raise BadData("the request's fields have not their form", code="MESSAGE_MALFORMED")
        renewed = self._enrolment.renew(peer, request.signing_request)
        return enrolment_pb2.RenewReply(
            certificate=renewed.certificate, authority=self._authority, server_time_s=int(time.time()),
            renew_after_s=renewed.renew_after_s, coordinator_version=__version__,
        )  # fmt: skip


class FederationServicer(federation_pb2_grpc.FederationServicer):
    """Studies, assignments, models down and updates up."""

    def __init__(self, guard: Guard, engine: Engine, uploads: Uploads, records: Store, blobs: Blobs) -> None:
        self.guard = guard
        self._engine = engine
        self._uploads = uploads
        self._downloads = Downloads(records, blobs)
        self._blobs = blobs

    @permitted("site", pb.StudiesRequest)
    def Studies(  # noqa: N802
        self, peer: Peer, request: pb.StudiesRequest, call: Call
    ) -> pb.StudiesReply:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        listed = [study for study in self._engine.studies() if peer.site in study.rules.sites]
        offers, more = page_of_offers([study for study in listed if study.name > request.after])
        return pb.StudiesReply(studies=offers, coordinator_version=__version__, more=more)

    @permitted("site", pb.DeclareRequest)
    def Declare(  # noqa: N802
        self, peer: Peer, request: pb.DeclareRequest, call: Call
    ) -> pb.DeclareReply:
        study = self._study(peer, request.study)
        same = (request.revision, request.digest.hex()) == (study.revision, study.digest)
        if request.standing == pb.WITHDRAWN:
            self._engine.gone(peer.site, study.name, "DECLINED_WITHDRAWN")
        elif not same:
            raise BadData(
                f"study `{study.name}` is at revision {study.revision}, digest {study.digest[:12]}… now",
                hint=f"look at it again: `site-agent preview {study.name}`",
                code="REVISION_CHANGED",
            )
        elif request.standing == pb.READY:
            self._engine.ready(peer.site, study.name)
        elif request.standing == pb.HELD:
            self._engine.held(peer.site, study.name, request.round, request.attempt)
        elif request.standing == pb.DECLINED and request.code in DECLINES:
            code = pb.RefusalCode.Name(request.code)
            self._engine.declined(peer.site, study.name, request.round, request.attempt, code)
        else:
            raise BadData("the declaration says nothing that is known here", code="MESSAGE_MALFORMED")
        return pb.DeclareReply()

    @permitted("site", pb.WatchRequest)
    def Watch(  # noqa: N802
        self, peer: Peer, request: pb.WatchRequest, call: Call
    ) -> Iterator[pb.Event]:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        stream = Stream()
        if not call.context.add_callback(stream.end):
            return
        self._engine.watch(peer.site, stream)
        log.info("site %s is connected from %s", peer.site, peer.address)
        try:
            if (since := self.guard.standing.two_lines_since(peer.site)) is not None:
                yield event_message(TwoLines(since))
            while isinstance(item := stream.get(), Study | Assignment | TwoLines):
                self.guard.standing.check(peer)
                yield event_message(item)
            if item is GOODBYE:
                yield pb.Event(goodbye=pb.Goodbye(), coordinator_version=__version__)
        finally:
            self._engine.unwatch(peer.site, stream)
            log.info("site %s is no longer connected from %s", peer.site, peer.address)

    @permitted("site", pb.DownloadRequest)
    def Download(  # noqa: N802
        self, peer: Peer, request: pb.DownloadRequest, call: Call
    ) -> Iterator[pb.DownloadReply]:
        study = self._study(peer, request.study)
        found = None
        if request.revision == study.revision:
            found = self._downloads.find(study.aggregator, study.offered, peer.site, request.model.digest.hex())
        if found is None:
            raise _not_offered(request)
        yield pb.DownloadReply(manifest=rpc.manifest_message(found.manifest))
        looked = time.monotonic()
        with TensorFile(self._blobs.model(found.kept)) as file:  # while it is open, its room on the disk is taken
            for offset, data in ViewFile(file, found.sources).chunks(request.offset):
                self.guard.standing.check(peer)
                if time.monotonic() - looked > OFFERED_S:
                    now = self._study(peer, request.study)
                    if now.revision != study.revision or found.kept not in {kept for _, kept in now.offered}:
                        raise _not_offered(request)
                    looked = time.monotonic()
                yield pb.DownloadReply(chunk=tensors_pb2.Chunk(offset=offset, data=data))

    @permitted("site", pb.UploadRequest, stream=True)
    def Upload(  # noqa: N802
        self, peer: Peer, messages: Iterator[bytes], call: Call
    ) -> Iterator[pb.UploadReply]:
        first = parsed(pb.UploadRequest, call.first(messages, self._most_bytes(peer)))
        kind = first.WhichOneof("kind")
        if kind == "inquire":
            answer = self._uploads.receipts.find(peer.site, upload_id_from(first.inquire.upload_id))
            if isinstance(answer, int):
                yield pb.UploadReply(offset=answer)
            else:
                yield pb.UploadReply(receipt=rpc.envelope_message(answer))
            return
        if kind != "open":
            raise BadData("an upload begins with `open` or `inquire`", code="MESSAGE_MALFORMED")
        header = UploadHeader.from_message(first.open, self._most_tensors(peer, first.open.study))
        reception = self._uploads.open(peer.site, header, call.context.is_active)
        if not isinstance(reception, Reception):
            yield pb.UploadReply(receipt=rpc.envelope_message(reception))
            return
        try:
            yield pb.UploadReply(offset=reception.received)
            yield from self._receive(peer, reception, call.further(messages))
        finally:
            self._uploads.receptions.close(reception)

    @permitted("site", pb.ReceiptsRequest)
    def Receipts(  # noqa: N802
        self, peer: Peer, request: pb.ReceiptsRequest, call: Call
    ) -> Iterator[pb.ReceiptsReply]:
        rpc.refuse_other_version(request.agent_version[:40], "agent")
        envelopes = self._uploads.receipts.copy(peer.site)
        while page := list(islice(envelopes, PAGE)):
            self.guard.standing.check(peer)
            yield pb.ReceiptsReply(envelopes=[rpc.envelope_message(envelope) for envelope in page])

    def _receive(self, peer: Peer, reception: Reception, messages: Iterator[bytes]) -> Iterator[pb.UploadReply]:
        """Chunks until the commit, the peer checked again at each."""
        for data in messages:
            self.guard.standing.check(peer)
            message = later_message(data)
            kind = message.WhichOneof("kind")
            if kind == "chunk":
                durable = reception.take(message.chunk.offset, message.chunk.data)
                if durable is not None:
                    yield pb.UploadReply(offset=durable)
            elif kind == "commit":
                receipt = self._uploads.decide(reception, message.commit.manifest_sha256.hex())
                yield pb.UploadReply(receipt=rpc.envelope_message(receipt))
                return
            else:
                raise _out_of_order()

    @permitted("site", pb.LedgerPage, most=MAX_PAGE)
    def Ledger(self, peer: Peer, request: pb.LedgerPage, call: Call) -> pb.LedgerKnown:  # noqa: N802
        statement = LedgerStatement.from_message(request.ledger, request.new_line_hashes)
        return pb.LedgerKnown(lines=self._uploads.ledgers.page(peer.site, statement))

    def _most_bytes(self, peer: Peer) -> int:
        """How long an opening of this site can be, by the largest study that lists it."""
        studies = [study for study in self._engine.studies() if peer.site in study.rules.sites]
        largest = max((rpc.manifest_most_bytes(study.shared) for study in studies), default=0)
        return min(rpc.MAX_STRUCTURED, MAX_OPENING + 2 * largest)

    def _most_tensors(self, peer: Peer, name: str) -> int:
        """How many tensors an opening may name: more than its study has, so that one too many is refused by name."""
        study = self._engine.find(name)
        if study is None or peer.site not in study.rules.sites:
            return STRANGE_TENSORS
        return 2 * len(study.shared) + 64

    def _study(self, peer: Peer, name: str) -> Study:
        study = self._engine.find(name)
        if study is None or peer.site not in study.rules.sites:
            raise BadData(f"no study `{name[:64]}` lists site `{peer.site}`", code="STUDY_UNKNOWN")
        return study


# Messages.


def later_message(data: bytes) -> pb.UploadRequest:
    """A message of an upload after its first.

    A long one must be a chunk and nothing else: so nothing that is long has a structure to be parsed.

    Raises:
        BadData: it is not a chunk of at most 1 MiB, nor something small.
    """
    if len(data) > SMALL_MESSAGE and not rpc.is_one_field(data, pb.UploadRequest.CHUNK_FIELD_NUMBER):
        raise _out_of_order()
    message = parsed(pb.UploadRequest, data)
    if len(message.chunk.data) > MAX_CHUNK:
        raise _out_of_order()
    return message


def _out_of_order() -> BadData:
    return BadData("after `open` come chunks of at most 1 MiB and one commit", code="MESSAGE_MALFORMED")


def offer_message(study: Study) -> pb.StudyOffer:
    return pb.StudyOffer(
        study=study.name, revision=study.revision, digest=bytes.fromhex(study.digest),
        document=canonical.dumps(study.file.document()), initial_model=rpc.manifest_message(study.manifest),
        state=study.state.phase.value,
    )  # fmt: skip


def _not_offered(request: pb.DownloadRequest) -> BadData:
    return BadData(
        f"model {request.model.round} of `{request.study}` is not offered (any more)", code="REVISION_CHANGED"
    )


def page_of_offers(studies: Sequence[Study]) -> tuple[list[pb.StudyOffer], bool]:
    """As many of ``studies`` as one reply may have, the first in any case; and whether some are left."""
    offers: list[pb.StudyOffer] = []
    size = 0
    for study in studies:
        offer = offer_message(study)
        size += offer.ByteSize()
        if offers and size > MAX_OFFERS:
            return offers, True
        offers.append(offer)
    return offers, False


def event_message(item: Study | Assignment | TwoLines) -> pb.Event:
    if isinstance(item, TwoLines):
        return pb.Event(two_lines=pb.TwoLines(since_s=item.since_s), coordinator_version=__version__)
    if isinstance(item, Study):
        return pb.Event(offer=offer_message(item), coordinator_version=__version__)
    message = pb.Assignment(
        study=item.study, revision=item.revision, digest=bytes.fromhex(item.digest), base=_model(item.base),
        round=item.round, attempt=item.attempt,
    )  # fmt: skip
    if item.best is not None:
        message.best.CopyFrom(_model(item.best))
    if item.kind == "stop":
        rounds = [
            pb.Contribution(
                site=site, rounds=numbers, capped=item.capped.get(site, ()), left_out=item.left_out.get(site, ())
            )
            for site, numbers in item.contributed.items()
        ]
        message.stop.CopyFrom(pb.Stop(reason=item.reason, contributions=rounds))
    elif item.kind == "validate":
        message.validate.SetInParent()
    else:
        message.train.SetInParent()
    return pb.Event(assignment=message, coordinator_version=__version__)


def _model(model: ModelRef) -> pb.ModelRef:
    return pb.ModelRef(round=model.round, digest=bytes.fromhex(model.digest))


def _address(context: grpc.ServicerContext) -> str:
    """The host alone: 10.0.0.7 of ``ipv4:10.0.0.7:51234``."""
    kind, _, rest = context.peer().partition(":")
    host = rest.rpartition(":")[0]
    return host.strip("[]").replace("%5B", "").replace("%5D", "") if kind in ("ipv4", "ipv6") else kind
