"""What the coordinator, a command, or the trainer says to a site, through the code that takes it."""

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import grpc
from cryptography import x509
from google.protobuf.message import DecodeError

from site_agent import audit, handoff
from site_agent.gateway import summaries
from site_agent.gateway.commands import CommandHandler
from site_agent.gateway.connection.client import Connection, offer_from
from site_agent.gateway.connection.interrupt import Interrupted
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.connection.transfers import part_from
from site_agent.gateway.consent import account as accounts
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.consent import facts as sentences
from site_agent.gateway.consent import offers
from site_agent.gateway.consent.changes import differences
from site_agent.gateway.consent.rows import study_row
from site_agent.gateway.downloads import Downloads
from site_agent.gateway.enrolment import join as joining
from site_agent.gateway.enrolment import renewal
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import egress, evidence, receipt_copy, receipts
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.measure import measure
from site_agent.gateway.exit.staging import Staging
from site_agent.gateway.policy import decisions
from site_agent.gateway.policy import policy as policies
from site_agent.gateway.policy import text as policy_text
from site_agent.gateway.policy.policy import StatisticsTable
from site_agent.gateway.round import Rounds
from site_agent.gateway.service import RequestDispatcher
from site_agent.gateway.setup import is_fatal
from site_agent.state import codec
from site_agent.state.directory import Journal, Offer, SiteState
from site_agent.state.person import Person
from tools.evidence_tamper import Made
from tools.fuzz.coordinator_doors import served
from tools.fuzz.engine import Broken, Door, Target
from tools.fuzz.examples import (
    NOW,
    SPECS,
    STUDY,
    SiteFiles,
    described,
    drawn,
    private_key,
    site_figures,
    summary_request,
    tensor_file,
    tensors,
)
from tools.fuzz.mutate import BYTES, JSON_LINES, frames, in_json, of_frames, parts
from tools.fuzz.wire import in_message
from wardround import __version__, rpc
from wardround.errors import NotPermitted, Unavailable, WardroundError
from wardround.local import control
from wardround.records.assignment import TRAIN, Assignment, ModelRef
from wardround.records.event import CertificateFork
from wardround.records.invitation import Invitation, stamp
from wardround.records.ledger.lines import Line
from wardround.records.messages import envelope_message, manifest_from, manifest_message
from wardround.records.receipt_copy import COPY_TYPE
from wardround.records.receipts import (
    ACCEPTED,
    EMPTY_HEAD,
    NOT_RECEIVED,
    RECEIPT_TYPE,
    REFUSED,
    LedgerHead,
    Receipt,
    head_after,
    line_hash,
)
from wardround.records.study import StudyFile
from wardround.records.summaries.request import from_bytes
from wardround.records.trainer import (
    AnyRequest,
    ApprovedData,
    Check,
    Checked,
    Commit,
    DataFiles,
    Describe,
    Described,
    Discard,
    DraftMapping,
    DraftSummaryMapping,
    Examine,
    Export,
    FilesStatus,
    GetStatus,
    HashFiles,
    Inspect,
    ListCheckpoints,
    Predict,
    Request,
    StatFiles,
    Summarize,
    Train,
    Validate,
)
from wardround.signing import canonical, certificates, dsse
from wardround.signing.dsse import Envelope
from wardround.v1 import enrolment_pb2, summaries_pb2, tensors_pb2
from wardround.v1 import federation_pb2 as pb

MOMENT = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
BY = {"name": "dpo", "uid": 1000, "source": "sudo", "account": {"name": "agent", "uid": 990}}


class FakeCall:
    """A call whose answers are at hand."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = iter(answers)

    def __iter__(self) -> Iterator[Any]:
        return self._answers

    def __next__(self) -> Any:
        return next(self._answers)

    def result(self) -> Any:
        return next(self._answers)

    def cancel(self) -> bool:
        return True


class NoWait:
    """An interrupt for work that must not wait: it is called off instead."""

    thrown = False

    def check(self) -> None:
        return

    def wait(self, seconds: float) -> None:
        raise Interrupted

    @contextmanager
    def ending(self, stop: Callable[[], object]) -> Iterator[None]:
        yield


def connection(answers: Sequence[Any]) -> Connection:
    """A connection on which every call is answered with these messages."""
    made = Connection.__new__(Connection)
    made.address, made.site, made.meter, made.bytes_up = "127.0.0.1:9000", "alpha", Meter(), 0

    def stream(*rest: Any, **more: Any) -> FakeCall:
        return FakeCall(answers)

    def unary(*rest: Any, **more: Any) -> Any:
        return answers[0]

    unary.future = stream  # type: ignore[attr-defined]
    made._federation = SimpleNamespace(  # type: ignore[assignment]
        Studies=unary, Declare=unary, Ledger=unary, Watch=stream, Upload=stream, Receipts=stream
    )
    made._transfers = SimpleNamespace(download=stream, upload=stream)  # type: ignore[assignment]
    made._summaries = SimpleNamespace(SummaryRequests=unary, TellSummary=unary)  # type: ignore[assignment]
    made._enrolment = SimpleNamespace(Enrol=unary, Renew=unary)  # type: ignore[assignment]
    made._channel = SimpleNamespace(close=lambda: None)
    return made


class FakeSession:
    """A session with one connection."""

    times_connected = 0

    def __init__(self, used: Connection | None) -> None:
        self.meter = Meter()
        self._used = used

    @contextmanager
    def use(self) -> Iterator[Connection]:
        if self._used is None:
            raise Unavailable("no connection")
        yield self._used

    def replace(self) -> None:
        return

    def pause(self, seconds: float, times_connected: int, interrupt: Any) -> None:
        interrupt.wait(seconds)


def look_at(offer: Offer, site: SiteFiles) -> None:
    """What `studies`, `preview`, `policy` and `approve` make of an offer."""
    offer.to_bytes()
    wanted = consents.study_request(offer, "spiffe://north/coordinator", 5, "")
    policy = policies.parse(site.policy, Path("policy.toml"))
    decisions.decide(policy, wanted)
    policies.parse(policy_text.draft(wanted, "alpha").encode(), Path("draft"))
    own = described(offer.upload)
    shown = accounts.account(offer, own, policy_text.lines(policy, wanted), consents.ATTEMPTS, site.shown, "shown")
    canonical.dumps(shown.document())
    accounts.changes(shown)
    codec.to_document(sentences.facts(offer, own))
    offers.room_for(offer.study, len(offer.to_bytes()), {})
    changes = differences(site.consent, offer)
    study_row(offer, site.consent, site.journal, changes)


def _offer(folder: Path) -> Door:
    """An offer, in an event of the watch. Half of the changed ones have a digest that is right again."""
    site = SiteFiles()
    wire = in_message(pb.Event.DESCRIPTOR)

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.4:
            return wire(random, data)
        event = pb.Event.FromString(data)
        offer = event.offer
        offer.document = in_json(random, offer.document)
        try:
            document = canonical.loads(offer.document)
            offer.digest = bytes.fromhex(canonical.digest({"initial_model": tensors(0)[0].digest(), "study": document}))
            name = document["study"]["name"]
            offer.study = name if isinstance(name, str) and random.random() < 0.5 else offer.study
        except (Exception, RecursionError):
            pass
        return event.SerializeToString()

    def take(data: bytes) -> None:
        for event in connection([pb.Event.FromString(data)]).watch(NoWait()):  # type: ignore[arg-type]
            if isinstance(event, Offer):
                look_at(event, site)
        offer_from(pb.Event.FromString(data).offer, "alpha")  # an offer that is left out says why

    seeds = [pb.Event(offer=site.offer_message, coordinator_version=__version__).SerializeToString()]
    return Door(seeds, mutate, take, (DecodeError,))


def _summary_requests(folder: Path) -> Door:
    """The coordinator's summary requests: half of the changed documents stand in a reply that is whole."""
    wire = in_message(summaries_pb2.SummaryRequestsReply.DESCRIPTOR)

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.4:
            return wire(random, data)
        reply = summaries_pb2.SummaryRequestsReply.FromString(data)
        reply.documents[:] = [in_json(random, document) for document in reply.documents]
        return reply.SerializeToString()

    def take(data: bytes) -> None:
        reply = summaries_pb2.SummaryRequestsReply.FromString(data)
        for request in connection([reply]).summary_requests():
            canonical.dumps([request.digest, *request.read])
        for document in reply.documents:
            from_bytes(document)  # one that is left out says why

    seeds = [summaries_pb2.SummaryRequestsReply(documents=[canonical.dumps(summary_request().document())])]
    return Door([one.SerializeToString() for one in seeds], mutate, take, (DecodeError,))


def _event(folder: Path) -> Door:
    """Assignments, warnings and goodbyes."""
    site = SiteFiles()
    common: dict[str, Any] = {
        "study": STUDY,
        "revision": 1,
        "digest": bytes.fromhex(site.offer.digest),
        "round": 1,
        "attempt": 1,
    }
    base = pb.ModelRef(round=0, digest=b"a" * 32)
    told = pb.Contribution(site="alpha", rounds=[1, 2], capped=[2], left_out=[3])
    stop = pb.Stop(reason="FINISHED", contributions=[told])
    events = [
        pb.Event(assignment=pb.Assignment(train=pb.Train(), base=base, **common)),
        pb.Event(assignment=pb.Assignment(validate=pb.Validate(), base=base, best=base, **common)),
        pb.Event(assignment=pb.Assignment(stop=stop, best=base, **common)),
        pb.Event(goodbye=pb.Goodbye()),
        pb.Event(certificate_fork=pb.CertificateFork(since_s=int(NOW))),
    ]

    def take(data: bytes) -> None:
        for event in connection([pb.Event.FromString(data)]).watch(NoWait()):  # type: ignore[arg-type]
            if isinstance(event, Assignment):
                hash(event.key)
                hash(event.contributions)
                with contextlib.suppress(NotPermitted):
                    consents.refuse_beyond(site.consent, event, (0, 0), "")
            elif isinstance(event, CertificateFork):
                stamp(event.since)

    return Door([event.SerializeToString() for event in events], in_message(pb.Event.DESCRIPTOR), take, (DecodeError,))


def _download(folder: Path) -> Door:
    """A model, whole, into a file in staging."""
    site = SiteFiles()
    state = SiteState(folder)
    state.staging.mkdir()
    state.incoming.mkdir()
    manifest, payload = tensors(1)
    replies = [
        pb.DownloadReply(manifest=manifest_message(manifest)),
        pb.DownloadReply(chunk=tensors_pb2.Chunk(offset=0, data=payload[:16])),
        pb.DownloadReply(chunk=tensors_pb2.Chunk(offset=16, data=payload[16:])),
    ]
    model = ModelRef(0, manifest.digest())
    assignment = Assignment(STUDY, 1, site.offer.digest, 1, 1, "train", base=model)

    def take(data: bytes) -> None:
        answers = [part_from(part) for part in parts(data)]
        downloads = Downloads(state, FakeSession(connection(answers)), Staging(state.staging))  # type: ignore[arg-type]
        try:
            downloads.fetch(assignment, model, site.consent, "base", NoWait())  # type: ignore[arg-type]
        finally:
            for path in (*state.staging.iterdir(), *state.incoming.iterdir()):
                path.unlink()

    mutate = of_frames(in_message(pb.DownloadReply.DESCRIPTOR))
    seeds = [frames([reply.SerializeToString() for reply in replies])]
    return Door(seeds, mutate, take, (DecodeError, Interrupted))


def _studies(folder: Path) -> Door:
    site = SiteFiles()
    reply = pb.StudiesReply(studies=[site.offer_message], coordinator_version=__version__)

    def take(data: bytes) -> None:
        found = connection([pb.StudiesReply.FromString(data)]).studies(NoWait(), patient=False)  # type: ignore[arg-type]
        for offer in found[:8]:  # a person looks at one at a time; ``offers.room_for`` bounds how many are kept
            look_at(offer, site)

    return Door([reply.SerializeToString()], in_message(pb.StudiesReply.DESCRIPTOR), take, (DecodeError,))


def _enrol_reply(folder: Path) -> Door:
    """`join`, from an invitation to `site.json`, with that reply."""
    site = SiteFiles()
    with drawn("invitation"):
        bootstrap = site.authority.leaf(
            certificates.Name("north", "invitation", "ab" * 16), private_key("bootstrap").public_key(), NOW, 86400
        )
    invitation = Invitation(
        "ab" * 16, "north", "alpha", "127.0.0.1:9000", int(NOW) + 3600, site.authority.pem.decode(),
        certificates.certificate_pem(bootstrap).decode(), certificates.key_pem(private_key("bootstrap")).decode(),
    )  # fmt: skip
    reply = enrolment_pb2.EnrolReply(
        site="alpha", federation="north", certificate=certificates.certificate_pem(site.certificate),
        authority=site.authority.pem, receipt_key=site.receipt_key.public_key().public_bytes_raw(),
        server_time_s=int(NOW), renew_after_s=int(NOW) + 86400, coordinator_version=__version__,
        renewal_certificate=_renewal_certificate(site, site.certificate, site.key),
    )  # fmt: skip
    text = invitation.encode()

    def take(data: bytes) -> None:
        answer = enrolment_pb2.EnrolReply.FromString(data)
        state = SiteState(folder / "site")
        shutil.rmtree(state.root, ignore_errors=True)
        site.write(state.root)
        state.site_file.unlink()
        with mock.patch.object(joining, "Connection", lambda *rest, **named: connection([answer])):
            joining.join(state, text, now=lambda: MOMENT)
        state.site()

    return Door([reply.SerializeToString()], in_message(enrolment_pb2.EnrolReply.DESCRIPTOR), take, (DecodeError,))


def _renewal_certificate(site: SiteFiles, issued: x509.Certificate, key: certificates.PrivateKey) -> bytes:
    """What renews ``issued`` after its end, over the same key."""
    with drawn("renewal"):
        name = certificates.Name("north", "renewal", f"{issued.serial_number:x}")
        certificate = site.authority.leaf(name, key.public_key(), NOW, 37 * 86400)
    return certificates.certificate_pem(certificate)


def _renew_reply(folder: Path) -> Door:
    """A renewal, until the new pair is in use."""
    site = SiteFiles()
    fresh = private_key("fresh")
    with drawn("renewed"):
        certificate = site.authority.leaf(
            certificates.Name("north", "site", "alpha"), fresh.public_key(), NOW, 7 * 86400
        )
    reply = enrolment_pb2.RenewReply(
        certificate=certificates.certificate_pem(certificate), authority=site.authority.pem, server_time_s=int(NOW),
        renew_after_s=int(NOW) + 86400, coordinator_version=__version__,
        renewal_certificate=_renewal_certificate(site, certificate, fresh),
    )  # fmt: skip
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda zone: MOMENT), UTC=datetime.UTC)

    def take(data: bytes) -> None:
        answer = enrolment_pb2.RenewReply.FromString(data)
        root = folder / "site"
        shutil.rmtree(root, ignore_errors=True)
        site.write(root)
        ledger = Ledger(root / "ledger", site.ledger_key)
        ledger.begin()
        try:
            with (
                mock.patch.object(certificates, "new_key", lambda: fresh),
                mock.patch.object(renewal, "datetime", clock),
            ):
                renewal.renew(Identity(root / "identity"), site.site, FakeSession(connection([answer])), ledger)  # type: ignore[arg-type]
        finally:
            ledger.close()
        Identity(root / "identity").certificate()

    return Door([reply.SerializeToString()], in_message(enrolment_pb2.RenewReply.DESCRIPTOR), take, (DecodeError,))


class _Uploaded(Made):
    """A ledger whose last line is an upload that waits for its receipt."""

    def __init__(self, site: SiteFiles) -> None:
        self._site = site
        super().__init__(7)  # a round, which ends with its receipt
        while json.loads(self.lines[-1])["type"] != "upload":
            del self.lines[-1]
        del self.heads[1:], self.receipts[:]

    def _begin(self) -> None:
        self.ledger_key, self.receipt_key = self._site.ledger_key, self._site.receipt_key
        super()._begin()


def _receipt(folder: Path) -> Door:
    """A receipt for the one upload that waits, as `inquire` gets it; most of the changed ones are signed again.

    Whatever comes: afterwards the ledger can be opened, and nobody has changed it.
    """
    site = SiteFiles()
    made = _Uploaded(site)
    upload = json.loads(made.lines[-1])
    upload_id = upload["upload_id"]
    genesis = json.loads(made.lines[0])
    head = LedgerHead(genesis["ledger_id"], len(made.lines), head_after(EMPTY_HEAD, map(line_hash, made.lines)))
    facts = {
        name: upload[name] for name in ("study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes")
    }
    receipt = Receipt(
        receipt_id="ab" * 16, federation="f", site="st-olav", upload_id=upload_id, decision=ACCEPTED, code="",
        tensor="", time="2026-06-01T00:00:00.000Z", ledger=head, previous=EMPTY_HEAD,
        ledger_key=site.ledger_key.public_key().public_bytes_raw().hex(), **facts,
    )  # fmt: skip
    unknown = replace(receipt, decision=NOT_RECEIVED, code="NOT_RECEIVED", study="", revision=0, round=0, attempt=0,
                      manifest_sha256="", payload_bytes=0, ledger=None)  # fmt: skip
    refused = replace(receipt, decision=REFUSED, code="TENSOR_NORM")
    wire = in_message(pb.UploadReply.DESCRIPTOR)

    def reply(envelope: Envelope) -> bytes:
        return pb.UploadReply(receipt=envelope_message(envelope)).SerializeToString()

    def mutate(random: Random, data: bytes) -> bytes:
        message = pb.UploadReply.FromString(data)
        if random.random() < 0.3 or not message.HasField("receipt"):
            return wire(random, data)
        payload = in_json(random, message.receipt.payload)
        signature = site.receipt_key.sign(b"DSSEv1 %d %b %d %b" % (
            len(RECEIPT_TYPE), RECEIPT_TYPE.encode(), len(payload), payload))  # fmt: skip
        return reply(Envelope(RECEIPT_TYPE, payload, message.receipt.keyid, signature))

    def take(data: bytes) -> None:
        answer = pb.UploadReply.FromString(data)
        ledger_folder = folder / "ledger"
        shutil.rmtree(ledger_folder, ignore_errors=True)
        made.write(ledger_folder)
        ledger = Ledger(ledger_folder, site.ledger_key)
        try:
            asked = connection([answer])
            envelope = asked.inquire(upload_id)
            if envelope is not None:
                for receipt in receipts.take_all({upload_id: envelope}, asked, ledger).values():
                    receipts.explain_refusal(receipt)
                    receipts.refuse_if_ledger_refused(receipt)
        finally:
            ledger.close()
            still_good(ledger_folder, site)
            evidence.read(ledger_folder)

    seeds = [*(reply(one.sign(site.receipt_key)) for one in (receipt, unknown, refused)),
             pb.UploadReply(offset=7).SerializeToString()]  # fmt: skip
    return Door(seeds, mutate, take, (DecodeError,))


def still_good(folder: Path, site: SiteFiles) -> None:
    """Raises Broken: what a peer said has spoilt the site's own ledger."""
    try:
        Ledger(folder, site.ledger_key).close()
    except Exception as error:
        raise Broken(f"the ledger cannot be opened any more: {type(error).__name__}: {error}") from error
    verdict, code = audit.verify(folder)
    if code == audit.TAMPERED:
        raise Broken(f"the site's own ledger now says TAMPERED: {verdict.reason}")


def _refusal(folder: Path) -> Door:
    """The status of a failed call, as it comes from the other side."""
    statuses = list(grpc.StatusCode)

    class Failed(grpc.RpcError):
        def __init__(self, status: grpc.StatusCode, details: str) -> None:
            self._status, self._details = status, details

        def code(self) -> grpc.StatusCode:
            return self._status

        def details(self) -> str:
            return self._details

    def take(data: bytes) -> None:
        status = statuses[data[0] % len(statuses)] if data else grpc.StatusCode.UNKNOWN
        error = rpc.explain(Failed(status, data[1:].decode("utf-8", "replace")), "asking")
        is_fatal(error)
        if consents.reportable_code(error) not in pb.RefusalCode.keys():  # noqa: SIM118
            raise Broken(f"{consents.reportable_code(error)[:80]} would be told to the coordinator")

    said = ["STUDY_UNKNOWN", "REFUSAL_UNSPECIFIED", "SITE_REVOKED", "TOO_BUSY", "COORDINATOR_TROUBLE", "LEDGER_FORK"]
    said += ["STUDY_UNKNOWN\nstudy `x` is not known", "Connection reset", ""]
    return Door([bytes((7,)) + text.encode() for text in said], BYTES, take)


def _client(folder: Path) -> Door:
    """What a service answers to a command."""

    def take(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with theirs, ours:
            theirs.setblocking(False)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            try:
                theirs.sendall(data)
            except BlockingIOError:
                raise Unavailable("more than the socket holds") from None
            theirs.shutdown(socket.SHUT_WR)
            with mock.patch.object(control, "connect", lambda path: ours.dup()):
                try:
                    control.call(Path("/nowhere"), {"command": "status"}, lambda item: None, timeout_s=5)
                except WardroundError as error:
                    if type(error) is not WardroundError:  # which is how a service says that it failed
                        raise

    error = {"error": {"message": "no", "hint": "look", "exit_code": 65, "code": ""}}
    answers = [[{"result": {"study": STUDY}}], [{"progress": 1}, {"progress": "checking"}, {"result": None}], [error]]
    seeds = [b"".join(json.dumps(line).encode() + b"\n" for line in answer) for answer in answers]
    return Door(seeds, JSON_LINES, take, refusals=frozenset({2}))


def _commands(folder: Path) -> Door:
    """Commands as `site-agent` sends them to the running service, whose line is down."""
    site = SiteFiles()
    root = folder / "site"
    site.write(root)
    state = SiteState(root)
    own = site.offer.upload
    state.own_copy(STUDY).write_bytes(tensor_file(3, own))
    held = replace(site.journal, phase="held", update_digest=tensors(3, own)[0].digest(), upload_id="")
    update = egress.update_digest(held, certificates.Name("north", "coordinator").uri)
    own_model = described(site.offer.upload)

    def ask(root: Path, request: Request[Any], progress: Any = None) -> Any:
        return own_model if isinstance(request, Describe) else CHECKED

    def take(data: bytes) -> None:
        for name in ("consents", "previews", "policies"):
            shutil.rmtree(root / name, ignore_errors=True)
        for name, content in site.files().items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(content)
        state.left_file.unlink(missing_ok=True)
        state.save_journal(held)
        shutil.rmtree(root / "ledger", ignore_errors=True)
        ledger = Ledger(root / "ledger", site.ledger_key)
        ledger.begin()
        handler = CommandHandler(state, site.site, ledger, FakeSession(None))  # type: ignore[arg-type]

        def withdraw(study: str, person: Any) -> bool:
            handler.record_withdrawal(handler.withdraw(study, person), person)
            return False

        def decide(study: str, round_: int, decision: Any, update: str, person: Any) -> bool:
            handler.releases.decide(study, round_, decision, update, person)
            return False

        def leave(person: Any) -> list[str]:
            unreported = [kept.study for kept in handler.approved() if not withdraw(kept.study, person)]
            handler.leave(person)
            return unreported

        agent: Any = SimpleNamespace(
            connected=False, certificate_fork_since="", commands=handler, refresh=lambda: handler.refresh(NoWait()),
            fetch_receipts=lambda: handler.fetch_receipts(NoWait()), approved=lambda consent: False,
            withdraw=withdraw, decide=decide, leave=leave,
        )  # fmt: skip
        try:
            with mock.patch.object(handoff, "ask", ask):
                digest = handler.preview(STUDY, "patients").account.digest if b"@account@" in data else ""
                told = data.replace(b"@account@", digest.encode())  # the policy and the clock are in it
                served(RequestDispatcher(state, agent).answer_document, told, frozenset({os.geteuid()}))
        finally:
            ledger.close()
            still_good(root / "ledger", site)
            state.offers(), state.consent_histories(), state.journal(STUDY), state.preview(STUDY)

    commands: list[dict[str, Any]] = [
        {"command": "status"}, {"command": "preview", "study": STUDY, "data": "patients"},
        {"command": "approve", "study": STUDY, "data": "patients", "digest": "@account@", "by": BY},
        {"command": "withdraw", "study": STUDY, "by": BY}, {"command": "waiting", "study": STUDY, "round": 1},
        {"command": "decide", "decision": "released", "study": STUDY, "round": 1, "update": update, "by": BY},
        {"command": "decide", "decision": "rejected", "study": STUDY, "round": 1, "update": update, "by": BY},
        {"command": "leave", "by": BY}, {"command": "refresh"}, {"command": "receipts"},
    ]  # fmt: skip
    seeds = [json.dumps(one).encode() + b"\n" for one in commands]
    return Door(seeds, in_json, take, refusals=frozenset({8, 9}))


DATA = ApprovedData(name="patients", digest="ab" * 32)
ROUND: dict[str, Any] = {"study": {}, "revision": 1, "study_digest": "ab" * 32, "site": "alpha", "data": DATA,
                         "round": 1, "base": "base.safetensors", "base_digest": "ab" * 32}  # fmt: skip
ASKED: dict[bytes, AnyRequest] = {
    b"t": Train(**ROUND), b"v": Validate(**ROUND), b"d": Describe(study={}, site="alpha"),
    b"c": Check(study={}, site="alpha", data="patients"), b"i": Inspect(files=DataFiles(table="/x.csv", label="y")),
    b"l": StatFiles(data="patients"), b"g": HashFiles(data="patients"), b"f": ListCheckpoints(study=STUDY),
    b"e": Export(study=STUDY, checkpoint="latest", out="/x"),
    b"p": Predict(study=STUDY, checkpoint="latest", table="/x.csv", out="/x"), b"s": GetStatus(),
    b"n": Commit(study=STUDY, revision=1, round=1), b"x": Examine(study={}, site="alpha", data="patients"),
    b"y": Summarize(request={}, data="patients", min_count=10, digits=3),
    b"m": DraftMapping(study={}, site="alpha", data="patients", out="/x.toml"),
    b"q": DraftSummaryMapping(request={}, data="patients", out="/x.toml"),
}  # fmt: skip
CHECKED = Checked(
    digest="ab" * 32, rows=20, train_rows=15, validation_rows=5, test_rows=None, gives="columns", classes={},
    warnings=[], common="", weights=None, status=FilesStatus(data="ab" * 32, weights=""),
)  # fmt: skip


def _trainer(folder: Path) -> Door:
    """What the trainer answers, at its listener's end (a small letter says to what) and at the gateway's (a capital);
    and what the gateway makes of it."""
    site = SiteFiles()
    state = SiteState(folder)
    for place in (state.staging, folder / "outgoing"):
        place.mkdir()
    own = site.offer.upload
    (state.staging / "update-1.safetensors").write_bytes(tensor_file(3, own))
    told = site.offer.reported
    rounds = Rounds.__new__(Rounds)
    rounds._state, rounds._staging = state, Staging(state.staging)
    rounds._policy = cast(PolicyEnforcement, SimpleNamespace(block=lambda journal, what, why: canonical.dumps(why)))
    leaves = described(site.offer.upload, site.consent.private)

    def asked(kind: bytes, said: bytes) -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            theirs.setblocking(False)
            try:
                theirs.sendall(said)
            except BlockingIOError:
                raise Unavailable("more than the socket holds") from None
            theirs.shutdown(socket.SHUT_WR)
            if kind.isupper():
                with mock.patch.object(control, "connect", lambda path: ours.dup()):
                    return handoff.Trainer(folder).ask(ASKED[kind.lower()], lambda item: None)
            worker = handoff.Worker.__new__(handoff.Worker)
            worker._stream, worker._turn = ours.makefile("rwb"), threading.Lock()
            worker._process = SimpleNamespace(wait=lambda: 1, poll=lambda: 1, pid=os.getpid())  # type: ignore[assignment]
            try:
                return worker.ask(ASKED.get(kind, Discard(study="s", revision=1, round=1)), lambda item: None)
            finally:
                worker._stream.close()

    def agreed(own: Described, checked: Checked) -> None:
        consents.refuse_other_tensors(site.offer, own)
        shown = accounts.account(site.offer, own, {}, consents.ATTEMPTS)
        canonical.dumps({**codec.to_document(sentences.facts(site.offer, own)), **shown.document()})
        data = consents.trained_data("patients", own, checked)
        consent = consents.grant(site.offer, own, data, checked, Person("dpo", 1000), shown.shown())
        if checked.weights is not None:
            sentences.begins_with(checked.weights)
        state.save_consent(consent)
        if state.consent(STUDY) != consent:
            raise Broken("a consent that is read otherwise than it was written")

    def take(data: bytes) -> None:
        kind, said = data[:1], data[1:]
        result = asked(kind, said)
        document = result.to_document()
        canonical.dumps(document) if kind.lower() not in b"f" else json.dumps(document, allow_nan=False)
        if type(result).model_validate(document) != result:
            raise Broken("an answer that does not survive being written")
        if kind in (b"d", b"D"):
            agreed(result, CHECKED)
        elif kind in (b"c", b"C"):
            agreed(leaves, result)
        elif kind in (b"t", b"T", b"v", b"V"):
            journal = Journal(STUDY, 1, site.offer.digest, 1, 1, ASKED[kind.lower()].command, "training")
            rounds._take_result(journal, result, site.consent)
            codec.to_bytes(journal)
            consents.check_numbers(journal.metrics, journal.num_examples, journal.num_validation, site.consent, told)
            if journal.kind == TRAIN:
                measure(state.own_copy(STUDY), site.consent)
        elif kind in (b"y", b"Y"):
            figures = summaries.judged(summary_request(), result, StatisticsTable())
            entry = summaries.entry_of(summary_request(), figures, result.sources, "spiffe://north/coordinator")
            if Line.from_document(canonical.loads(Line(0, "", "0" * 64, entry).encoded())).entry != entry:
                raise Broken("a ledger's line that is read otherwise than it was written")
        shutil.rmtree(folder / "consents", ignore_errors=True)

    def lines(*items: Any) -> bytes:
        return b"".join(json.dumps(item).encode() + b"\n" for item in items)

    numbers = {"num_examples": 15, "num_validation": 5, "metrics": {"val_loss": "0.5"}}
    weights = {"digest": "cd" * 32, "used": 2, "drawn": ["a"], "unused": []}
    checkpoint = {"kind": "best_local", "round": 1, "score": 0.5, "metric": "auc", "split": "validation",
                  "val_loss": None, "path": "/x/model.safetensors", "digest": "ab" * 32}  # fmt: skip
    seen = {"data": "ab" * 32, "weights": ""}
    results: dict[bytes, Any] = {
        b"t": {"update": "update-1.safetensors", **numbers}, b"v": numbers, b"d": leaves.to_document(),
        b"c": {**CHECKED.to_document(), "weights": weights},
        b"i": {"digest": "ab" * 32, "rows": 20, "test_rows": 4, "columns": 3, "patients": None, "weights": ""},
        b"l": {"status": seen, "bytes": 100, "missing": ["table"], "unreadable": []},
        b"g": {"data": "ab" * 32, "weights": ""}, b"f": {"checkpoints": [checkpoint]},
        b"e": {"files": ["/x/model.safetensors"]}, b"p": {"rows": 3, "out": "/x/out.csv"},
        b"s": {"isolation": "seccomp", "missing": ["landlock"], "user": "trainer", "uid": 991, "worker": 12,
               "device": "cpu"},
        b"n": {},
        b"y": {"rows": 110, "columns": [one.model_dump(mode="json") for one in site_figures().columns],
               "sources": ["years", "ward", "died", ""], "notes": ["a note"]},
    }  # fmt: skip
    error = {"error": {"message": "no", "hint": "", "exit_code": 65, "code": "data_changed"}}
    seeds = [b"t" + lines(error), b"T" + lines(error)]
    for kind, result in results.items():
        progress = [{"progress": {"step": 1, "steps": 2}}] if kind == b"t" else []
        seeds += [kind + lines(*progress, {"result": result}), kind.upper() + lines(*progress, {"result": result})]

    def mutate(random: Random, data: bytes) -> bytes:
        return data[:1] + JSON_LINES(random, data[1:])

    return Door(seeds, mutate, take, refusals=frozenset({0, 1}))


def _copy(folder: Path) -> Door:
    """The coordinator's copy of this site's receipts, as it is asked for; half of the changed ones are signed again."""
    made = Made(20)
    keyid = made.receipt_key.public_key().public_bytes_raw().hex()
    site = replace(SiteFiles().site, site="st-olav", federation="f", receipt_key=keyid)
    path = folder / "receipts.jsonl"

    def replies(lines: Sequence[bytes]) -> bytes:
        envelopes = [envelope_message(Envelope.from_document(json.loads(line))) for line in lines]
        return frames([pb.ReceiptsReply(envelopes=envelopes[at : at + 2]).SerializeToString()
                       for at in range(0, len(envelopes), 2)])  # fmt: skip

    def take(data: bytes) -> None:
        answers = [pb.ReceiptsReply.FromString(part) for part in parts(data)]
        receipt_copy.keep(connection(answers).receipts(NoWait()), site, path)  # type: ignore[arg-type]

    wire = of_frames(in_message(pb.ReceiptsReply.DESCRIPTOR))

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.5:
            return wire(random, data)
        lines = made.copy(random.randrange(4)).splitlines()
        statement = json.loads(lines[-1])
        payload = in_json(random, statement["payload"].encode())
        signature = made.receipt_key.sign(dsse.encoding(COPY_TYPE, payload))
        last = Envelope(COPY_TYPE, payload, statement["keyid"], signature)
        closing = pb.ReceiptsReply(envelopes=[envelope_message(last)]).SerializeToString()
        return frames([*parts(replies(lines[:-1])), closing])

    seeds = [replies(made.copy(count).splitlines()) for count in (0, 1, 2)]
    return Door(seeds, mutate, take, (DecodeError,))


def _known(folder: Path) -> Door:
    """How many lines of the ledger the coordinator says it knows, while a backlog is shown."""
    made = Made(620)
    made.write(folder / "ledger")
    ledger = Ledger(folder / "ledger", made.ledger_key)

    def take(data: bytes) -> None:
        answer = pb.LedgerKnown.FromString(data)
        ledger._shown, ledger._state.witnessed = 0, 0
        ledger.catch_up(connection([answer]).show_ledger)
        ledger.statement()

    seeds = [pb.LedgerKnown(lines=lines).SerializeToString() for lines in (0, 7, 620, 2**63)]
    return Door(seeds, in_message(pb.LedgerKnown.DESCRIPTOR), take, (DecodeError,), close=ledger.close)


def _manifest(folder: Path) -> Door:
    """A manifest, as both programs read it."""
    document = StudyFile.from_document(SiteFiles().offer.document)
    from wardround.records.architectures import own_manifest
    from wardround.tensors.files import file_header
    from wardround.tensors.manifests import PayloadHasher

    def take(data: bytes) -> None:
        manifest = manifest_from(tensors_pb2.Manifest.FromString(data))
        manifest.digest()
        own_manifest(document, "alpha", manifest)
        if len(manifest.entries) < 100:
            file_header(manifest.specs)
            PayloadHasher(manifest.specs)
        if manifest_from(manifest_message(manifest)) != manifest:
            raise Broken("a manifest that does not survive being written")

    seeds = [manifest_message(tensors(seed)[0]).SerializeToString() for seed in (0, 1)]
    return Door(seeds, in_message(tensors_pb2.Manifest.DESCRIPTOR), take, (DecodeError,))


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


TARGETS = [
    Target("site.offer", "offers, in events of the watch", _offer, 40),
    Target("site.studies", "StudiesReply", _studies, 15),
    Target("site.summary-requests", "SummaryRequestsReply", _summary_requests, 15),
    Target("site.event", "assignments and goodbyes", _event, 40),
    Target("site.download", "streams of DownloadReply, into staging", _download, 25),
    Target("site.enrol-reply", "EnrolReply, through `join`", _enrol_reply, 6),
    Target("site.renew-reply", "RenewReply, through a renewal", _renew_reply, 6),
    Target("site.receipt", "receipts, most of them signed", _receipt, 40),
    Target("site.receipts", "the coordinator's copy of the receipts", _copy, 20),
    Target("site.ledger-known", "LedgerKnown", _known, 4),
    Target("site.refusal", "the status and details of a failed call", _refusal, 40),
    Target("site.control", "commands on the control socket", _commands, 8),
    Target("control.answer", "what a service answers to a command", _client, 40),
    Target("trainer.answer", "what the trainer answers", _trainer, 40),
    Target("manifest", "Manifest", _manifest, 60),
]  # fmt: skip
__all__ = ["SPECS", "TARGETS"]
