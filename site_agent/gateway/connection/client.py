"""The one connection: the only module of the agent with gRPC, TLS or IP sockets. Outbound, to the coordinator alone.

Every call is mutual TLS 1.3 against the federation's own authority. Messages become plain values here; whoever calls
never sees protobuf or gRPC. A failed call raises what ``wardround.rpc.explain`` makes of it; ``Unavailable`` is a
broken line, to be tried again.
"""

import queue
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.messages import (
    Assignment,
    Enrolled,
    Goodbye,
    ModelRef,
    Opening,
    Tried,
    TwoLines,
    assignment_or_none,
    head_message,
    last_of_page,
    offer_or_none,
    open_message,
    two_lines_or_none,
)
from site_agent.gateway.connection.meter import Meter
from site_agent.state.directory import Offer
from wardround import __version__, rpc
from wardround.errors import BadData, NeedsPerson, Unavailable, WardroundError
from wardround.records.receipts import LedgerHead
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import CHUNK, Manifest, PayloadHasher, TensorFile
from wardround.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2_grpc, tensors_pb2
from wardround.v1 import federation_pb2 as pb

CALL_S = 10  # one unary call
CONNECT_S = 15  # the first call after a line broke: it may wait until the coordinator is back
MAX_PAGES = 64  # of studies; each has at least one, and as many offers that nobody approved are kept
COPY_S = 300  # a copy of all receipts
TRIES_IN_TROUBLE = 8  # some 30 s: a coordinator that fails at one thing must not keep a site from its other studies
SLOWEST = 64 * 1024  # bytes a second under which an upload is given up and tried again

_RANDOM = random.SystemRandom()
_Request = TypeVar("_Request", bound=Message)


class ChangedOnTheWay(BadData):
    """What was read for sending is not what the ledger says; nothing was committed."""


class Connection:
    """A channel with one certificate. ``bytes_up`` counts payload bytes given to the line, ``meter`` all the others.

    ``site``: whose certificate it is; "" before it has joined.
    """

    def __init__(
        self,
        address: str,
        authority: bytes,
        key: bytes,
        certificate: bytes,
        meter: Meter | None = None,
        site: str = "",
    ) -> None:
        self.address = address
        self.site = site
        self.meter = meter or Meter()
        self.bytes_up = 0
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        self._channel = grpc.secure_channel(address, credentials, rpc.CHANNEL_OPTIONS)
        self._enrolment = enrolment_pb2_grpc.EnrolmentStub(self._channel)  # type: ignore[no-untyped-call]
        self._federation = federation_pb2_grpc.FederationStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._channel.close()

    def enrol(self, invitation_id: str, signing_request: bytes, ledger_key: bytes, proof: bytes) -> Enrolled:
        request = enrolment_pb2.EnrolRequest(
            invitation_id=invitation_id, agent_version=__version__, signing_request=signing_request,
            ledger_key=ledger_key, proof=proof,
        )  # fmt: skip
        with _explained("joining"):
            self._counted("Enrol", request)
            reply = self._enrolment.Enrol(request, timeout=CALL_S)
        rpc.refuse_other_version(reply.coordinator_version, "coordinator")
        return Enrolled(
            reply.certificate, reply.authority, reply.server_time_s, reply.renew_after_s, reply.coordinator_version,
            reply.site, reply.federation, reply.receipt_key,
        )  # fmt: skip

    def renew(self, signing_request: bytes) -> Enrolled:
        request = enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=signing_request)
        with _explained("renewing the certificate"):
            self._counted("Renew", request)
            reply = self._enrolment.Renew(request, timeout=CALL_S)
        rpc.refuse_other_version(reply.coordinator_version, "coordinator")
        return Enrolled(
            reply.certificate, reply.authority, reply.server_time_s, reply.renew_after_s, reply.coordinator_version
        )

    def studies(self, interrupt: Interrupt, *, patient: bool) -> list[Offer]:
        """The studies that list this site, each checked. ``patient``: give a line that is coming back 15 s.

        Raises:
            BadData: the pages do not go on by name, or are more than ``MAX_PAGES``.
        """
        offers: list[Offer] = []
        after = ""
        for _ in range(MAX_PAGES):
            with _explained("asking for studies"):
                request = self._counted("Studies", pb.StudiesRequest(agent_version=__version__, after=after))
                call = self._federation.Studies.future(request, timeout=CONNECT_S, wait_for_ready=patient)
                with interrupt.ending(call.cancel):
                    reply = call.result()
            rpc.refuse_other_version(reply.coordinator_version, "coordinator")
            found = [offer_or_none(message, self.site) for message in reply.studies]
            offers += [offer for offer in found if offer is not None]
            if not reply.more:
                return offers
            after = last_of_page(reply, after)
        raise BadData(f"the coordinator's list of studies has more than {MAX_PAGES} pages", code="MESSAGE_MALFORMED")

    def declare(
        self,
        study: str,
        revision: int,
        digest: str,
        standing: str,
        *,
        round_: int = 0,
        attempt: int = 0,
        code: str = "",
    ) -> None:
        """``standing``: ready, withdrawn, declined, held; ``code`` is a name of RefusalCode."""
        request = pb.DeclareRequest(
            study=study, revision=revision, digest=bytes.fromhex(digest), standing=standing.upper(),
            round=round_, attempt=attempt, code=code or "REFUSAL_UNSPECIFIED",
        )  # fmt: skip
        with _explained(f"declaring `{study}` {standing}"):
            self._federation.Declare(self._counted("Declare", request), timeout=CALL_S)

    def watch(self, interrupt: Interrupt) -> Iterator[Offer | Assignment | Goodbye | TwoLines]:
        """What the coordinator says, as it says it, until the line breaks."""
        with _explained("waiting for assignments"):
            call = self._federation.Watch(self._counted("Watch", pb.WatchRequest(agent_version=__version__)))
            with interrupt.ending(call.cancel), _cancelled_after(call):
                for event in call:
                    kind = event.WhichOneof("kind")
                    if kind == "offer":
                        offer = offer_or_none(event.offer, self.site)
                        if offer is not None:
                            yield offer
                    elif kind == "assignment":
                        assignment = assignment_or_none(event.assignment)
                        if assignment is not None:
                            yield assignment
                    elif kind == "goodbye":
                        yield Goodbye()
                    elif kind == "two_lines":
                        warning = two_lines_or_none(event.two_lines)
                        if warning is not None:
                            yield warning

    def download(
        self, study: str, revision: int, model: ModelRef, offset: int, interrupt: Interrupt
    ) -> Iterator[Manifest | tuple[int, bytes]]:
        """The model's manifest, then its payload from ``offset`` on as (offset, bytes)."""
        ref = pb.ModelRef(round=model.round, digest=bytes.fromhex(model.digest))
        request = pb.DownloadRequest(study=study, revision=revision, model=ref, offset=offset)
        with _explained(f"downloading model {model.round} of `{study}`"):
            call = self._federation.Download(self._counted("Download", request))
            with interrupt.ending(call.cancel), _cancelled_after(call):
                for reply in call:
                    if reply.WhichOneof("kind") == "manifest":
                        yield rpc.manifest_from(reply.manifest)
                    else:
                        yield reply.chunk.offset, reply.chunk.data

    def upload(self, opening: Opening, payload: Path | None, tried: Tried, interrupt: Interrupt) -> Envelope:
        """Send one update and return its receipt, not yet verified.

        The file is hashed again as it is sent; if it is no longer what ``opening`` says, nothing is committed. The
        coordinator says where to go on, so a second call with the same upload id sends only what is missing. No call
        sends more than the payload's bytes.

        Args:
            tried: says what was let out when this returns, or raises.

        Raises:
            ChangedOnTheWay: the bytes read are not those of the manifest.
        """

        def sent(request: pb.UploadRequest) -> None:
            tried.payload_bytes += len(request.chunk.data)
            self._sent(request)

        sending = _Sending(opening, payload, sent)
        self.meter.call("Upload")
        timeout_s = 60 + opening.manifest.bytes / SLOWEST
        with _explained(f"uploading round {opening.round} of `{opening.study}`"):
            call = self._federation.Upload(sending.requests(), timeout=timeout_s)
            sending.cancel = call.cancel
            try:
                with interrupt.ending(call.cancel):
                    return _receipt(call, sending.start_at, tried)
            except grpc.RpcError:
                if sending.failure is not None:
                    raise sending.failure from None
                raise
            finally:
                sending.start_at(None)
                call.cancel()

    def inquire(self, upload_id: str) -> Envelope | None:
        """What became of an upload: its receipt (perhaps "not received"), or None while it is undecided."""
        request = pb.UploadRequest(inquire=pb.UploadInquire(upload_id=bytes.fromhex(upload_id)))
        with _explained("asking about an upload"):
            for reply in self._federation.Upload(iter([self._counted("Upload", request)]), timeout=CALL_S):
                if reply.WhichOneof("kind") == "receipt":
                    return rpc.envelope_from(reply.receipt)
                return None
        raise Unavailable("asking about an upload: the coordinator ended the call without an answer")

    def show_ledger(self, head: LedgerHead, signature: bytes, new_line_hashes: list[bytes]) -> int:
        """Show a page of the ledger's lines. How many lines of it the coordinator knows then."""
        request = pb.LedgerPage(ledger=head_message(head, signature), new_line_hashes=new_line_hashes)
        with _explained("showing the ledger's lines"):
            reply = self._federation.Ledger(self._counted("Ledger", request), timeout=CALL_S)
        return int(reply.lines)

    def receipts(self, interrupt: Interrupt) -> Iterator[Envelope]:
        """The coordinator's copy of this site's receipts, oldest first; the last envelope is its statement about them.
        Nothing in it is verified here."""
        with _explained("asking for the receipts"):
            request = self._counted("Receipts", pb.ReceiptsRequest(agent_version=__version__))
            call = self._federation.Receipts(request, timeout=COPY_S)
            with interrupt.ending(call.cancel), _cancelled_after(call):
                for reply in call:
                    yield from map(rpc.envelope_from, reply.envelopes)

    def _counted(self, method: str, request: _Request) -> _Request:
        """``request``, which begins a call."""
        self.meter.call(method)
        self.meter.message(method, request)
        return request

    def _sent(self, request: pb.UploadRequest) -> None:
        """One message of an upload is given to the line."""
        payload = len(request.chunk.data)
        self.bytes_up += payload
        self.meter.message("Upload", request, payload)


@dataclass
class _Sending:
    """The requests of one upload. gRPC takes them from a thread of its own; the file is opened and closed in it."""

    opening: Opening
    payload: Path | None
    sent: Callable[[pb.UploadRequest], None]
    failure: WardroundError | None = None
    cancel: Callable[[], object] = lambda: None
    _starts: "queue.SimpleQueue[int | None]" = field(default_factory=queue.SimpleQueue)

    def start_at(self, offset: int | None) -> None:
        """The coordinator's first answer: where to begin. None: the call has ended."""
        self._starts.put(offset)

    def requests(self) -> Iterator[pb.UploadRequest]:
        for request in self._requests():
            self.sent(request)
            yield request

    def _requests(self) -> Iterator[pb.UploadRequest]:
        yield pb.UploadRequest(open=open_message(self.opening))
        start = self._starts.get()
        if start is None:
            return
        try:
            yield from self._chunks(start)
        except WardroundError as error:
            self.failure = error
            self.cancel()
            return
        digest = bytes.fromhex(self.opening.manifest.digest())
        yield pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=digest))

    def _chunks(self, start: int) -> Iterator[pb.UploadRequest]:
        if self.payload is None:
            return
        hasher = PayloadHasher(self.opening.manifest.specs)
        with TensorFile(self.payload) as file:
            for offset, data in file.chunks(size=CHUNK):
                hasher.update(data)
                skip = min(max(0, start - offset), len(data))
                if skip < len(data):
                    chunk = tensors_pb2.Chunk(offset=offset + skip, data=data[skip:])
                    yield pb.UploadRequest(chunk=chunk)
        if hasher.manifest() != self.opening.manifest:
            raise ChangedOnTheWay(
                f"{self.payload}: changed after the ledger recorded it; the upload was not committed",
                code="DECLINED_MODEL_MISMATCH",
            )


def _receipt(replies: Iterator[pb.UploadReply], start_at: Callable[[int | None], None], tried: Tried) -> Envelope:
    started = False
    for reply in replies:
        tried.answered = True
        if reply.WhichOneof("kind") == "receipt":
            return rpc.envelope_from(reply.receipt)
        if not started:
            start_at(reply.offset)
            started = True
    raise Unavailable("the coordinator ended an upload without a receipt")


@contextmanager
def _cancelled_after(call: Any) -> Iterator[None]:
    """Whoever stops listening to a stream ends it."""
    try:
        yield
    finally:
        call.cancel()


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    try:
        yield
    except (grpc.FutureCancelledError, grpc.FutureTimeoutError):
        raise Unavailable(f"{doing}: the call was ended") from None
    except grpc.RpcError as error:
        raise rpc.explain(error, doing) from None


def pauses(shortest_s: float = 0.2, longest_s: float = 10.0) -> Iterator[float]:
    """How long to wait before the next try: doubling, within a quarter, so that sites do not come back in step."""
    pause = shortest_s
    while True:
        yield pause * _RANDOM.uniform(0.75, 1.25)
        pause = min(pause * 2, longest_s)


class Line:
    """The connection in use, replaced when the certificate is: calls under way end on the old one, new ones begin on
    the new one."""

    def __init__(self, open_: Callable[[Meter], Connection]) -> None:
        self.meter = Meter()
        self._open = open_
        self._lock = threading.Lock()
        self._current = open_(self.meter)
        self._users: dict[Connection, int] = {self._current: 0}
        self._bytes_up = 0

    @contextmanager
    def use(self) -> Iterator[Connection]:
        with self._lock:
            connection = self._current
            self._users[connection] += 1
        try:
            yield connection
        finally:
            with self._lock:
                self._users[connection] -= 1
            self._close_unused()

    def replace(self) -> None:
        fresh = self._open(self.meter)
        with self._lock:
            self._users[fresh] = 0
            self._current = fresh
        self._close_unused()

    def is_current(self, connection: Connection) -> bool:
        """Whether new calls would go this way. Once ``replace`` has returned, the old one is not."""
        with self._lock:
            return connection is self._current

    def bytes_up(self) -> int:
        """Payload bytes given to the line since the beginning, over all its connections."""
        with self._lock:
            return self._bytes_up + sum(connection.bytes_up for connection in self._users)

    def close(self) -> None:
        with self._lock:
            for connection in self._users:
                connection.close()

    def _close_unused(self) -> None:
        with self._lock:
            unused = [one for one, users in self._users.items() if users == 0 and one is not self._current]
            for connection in unused:
                self._bytes_up += connection.bytes_up
                del self._users[connection]
        for connection in unused:
            connection.close()


def diagnose(
    address: str, authority: bytes, certificate: Path | None = None, key: Path | None = None
) -> WardroundError:
    """Why the coordinator cannot be reached: gRPC says "unavailable" for everything, so look step by step.

    A plain TLS handshake with the authority's verification on; nothing is sent. With ``certificate`` and ``key`` it
    also hears whether the coordinator takes them.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=authority.decode())
    if certificate is not None and key is not None:
        context.load_cert_chain(certificate, key)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S) as plain:
            welcome = _is_welcome(context, plain, host.strip("[]"))
    except ssl.SSLCertVerificationError as error:
        return _not_verified(address, error)
    except TimeoutError:
        return Unavailable(
            f"{address} does not answer in {CALL_S} s", hint="a firewall between here and there may drop it"
        )
    except socket.gaierror:
        return Unavailable(f"the name {host} is not known here", hint="check the name service of this machine")
    except ConnectionRefusedError:
        return Unavailable(f"nobody listens at {address}", hint="is the coordinator running? ask its operator")
    except ssl.SSLError as error:
        return Unavailable(
            f"what listens at {address} does not speak TLS 1.3 as a coordinator does ({_words(error)})",
            hint="is the address right, and is there a proxy between here and there?",
        )
    except OSError as error:
        return Unavailable(f"{address} cannot be reached ({error.strerror or error})")
    if certificate is not None and not welcome:
        return NeedsPerson(
            f"the coordinator at {address} does not take this site's certificate",
            hint="check this machine's clock, then ask the coordinator's operator for a new invitation",
        )
    return Unavailable(f"the coordinator at {address} is there, but did not answer the call")


def _is_welcome(context: ssl.SSLContext, plain: socket.socket, name: str) -> bool:
    """Shake hands; whether the other side then stays. Under TLS 1.3 it refuses our certificate only after that, with an
    alert or by closing; a coordinator that takes it sends the first frame of HTTP/2."""
    with context.wrap_socket(plain, server_hostname=name) as secure:
        secure.settimeout(1)
        try:
            return secure.recv(1) != b""
        except TimeoutError:
            return True
        except (ConnectionResetError, ssl.SSLError):
            return False


def _not_verified(address: str, error: ssl.SSLCertVerificationError) -> WardroundError:
    if error.verify_code in (62, 64):
        return NeedsPerson(
            f"the coordinator's certificate is not for {address}: {_words(error)}",
            hint="its operator must use the address it was made with (`coordinator init --address`)",
        )
    if error.verify_code in (9, 10):
        return NeedsPerson(
            f"the coordinator's certificate is not valid by this machine's clock ({_words(error)})",
            hint="check the clock here (`timedatectl`) and there",
        )
    return NeedsPerson(
        f"the coordinator at {address} presents another authority than the one this site trusts ({_words(error)}); "
        "nothing was sent",
        hint="do not go on: ask the coordinator's operator to read you the authority's fingerprint",
    )


def _words(error: ssl.SSLError) -> str:
    text: Any = getattr(error, "verify_message", "") or error.reason or "no reason given"
    return str(text).lower().replace("_", " ")
