"""What a site, or a command, sends to the coordinator, through its real servicers on a state directory of its own."""

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.message import Message

from coordinator.storage import tables
from tools.fuzz.engine import Broken, Door, Target, Uncoded
from tools.fuzz.examples import (
    NOW,
    STUDY,
    Aborted,
    CoordinatorWorld,
    FakeContext,
    Refused,
    drawn,
    ledger_key,
    ledger_key_pem,
    private_key,
    site_figures,
    summary_request,
)
from tools.fuzz.formats import in_der, in_pem, in_toml
from tools.fuzz.mutate import frames, in_json, of_frames, parts, several
from tools.fuzz.wire import in_message
from wardround import __version__
from wardround.errors import BY_EXIT_CODE, WardroundError
from wardround.local import control
from wardround.records.messages import envelope_message
from wardround.signing import canonical, certificates
from wardround.v1 import enrolment_pb2, summaries_pb2
from wardround.v1 import federation_pb2 as pb

EVENTS = 20  # of a watch, before its line breaks


def called(world: CoordinatorWorld, call: Callable[[FakeContext], Any], pem: bytes) -> None:
    """Make a call; its refusal is raised as the caller hears it. Then the world is what it was."""
    context = FakeContext(pem)
    try:
        try:
            answer = call(context)
            for item in answer if isinstance(answer, Iterator) else [answer]:
                if item is None:
                    raise Broken("a call that ends without an answer")
                if not isinstance(item, bytes):  # a chunk is made as it goes over the wire
                    item.SerializeToString()
        except Aborted as aborted:
            raise aborted.refused() from aborted.__context__
        finally:
            context.end()
    finally:
        world.restore()


def _called_with(method: str, message: type[Message], seeds: Callable[[CoordinatorWorld], list[Message]], *,
                 invited: bool = False) -> Callable[[Path], Door]:  # fmt: skip
    """A door for the first message of a method, as gRPC hands it over: bytes."""

    def opens(folder: Path) -> Door:
        world = CoordinatorWorld(folder)
        rooms: list[Any] = [world.enrolment, world.summaries, world.federation]
        servicer = next(room for room in rooms if method in vars(type(room)))
        pem = world.unused.certificate.encode() if invited else world.pems["alpha"]

        def take(data: bytes) -> None:
            called(world, lambda context: getattr(servicer, method)(iter([data]), context), pem)

        examples = [one.SerializeToString() for one in seeds(world)]
        return Door(examples, in_message(message.DESCRIPTOR), take, close=world.close)

    return opens


def _enrol(world: CoordinatorWorld) -> list[Message]:
    return [world.enrol_request(world.unused, "bravo")]


def _renew(world: CoordinatorWorld) -> list[Message]:
    with drawn("renewal"):
        request = certificates.signing_request(private_key("another"))
    return [enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=request)]


def _declare(world: CoordinatorWorld) -> list[Message]:
    common: dict[str, Any] = {"study": STUDY, "revision": 1, "digest": bytes.fromhex(world.study.digest)}
    return [
        pb.DeclareRequest(status=pb.READY, **common),
        pb.DeclareRequest(status=pb.WITHDRAWN, **common),
        pb.DeclareRequest(status=pb.DECLINED, round=1, attempt=1, code=pb.DECLINED_POLICY, **common),
        pb.DeclareRequest(status=pb.HELD, round=1, attempt=1, **common),
    ]


def _download(world: CoordinatorWorld) -> list[Message]:
    model = pb.ModelRef(round=0, digest=bytes.fromhex(world.study.initial))
    return [pb.DownloadRequest(study=STUDY, revision=1, model=model, offset=offset) for offset in (0, 8)]


def _pages(world: CoordinatorWorld) -> list[Message]:
    return [world.page("alpha", lines) for lines in (1, 3, 40)]


def _receipts(world: CoordinatorWorld) -> list[Message]:
    refuse_some(world)
    return [pb.ReceiptsRequest(agent_version=__version__)]


def _lost_receipts(world: CoordinatorWorld) -> list[Message]:
    """The receipts of ``alpha``, of which the coordinator lost the last two."""
    refuse_some(world)
    envelopes = list(world.uploads.receipts.copy("alpha"))[:-1]
    with world.context.store.write() as session:
        row = session.get(tables.Site, "alpha")
        assert row is not None
        row.last_receipt = hashlib.sha256(envelopes[0].payload).hexdigest()
    world.keep()
    return [
        pb.ReturnRequest(envelopes=[envelope_message(envelope) for envelope in lost])
        for lost in (envelopes[1:], envelopes[1:2], envelopes, [])
    ]


def refuse_some(world: CoordinatorWorld) -> None:
    """So that site ``alpha`` has receipts: of uploads in a round that nobody asked for."""
    for number in range(3):
        opening = world.opening("alpha", bytes([number]) * 16, round=2)
        world.call("Upload", [pb.UploadRequest(open=opening).SerializeToString()], "alpha")
    world.keep()


def _watch(folder: Path) -> Door:
    """The line breaks as soon as what is known has been told, or there would be no end."""
    world = CoordinatorWorld(folder)
    watch = world.context.engine.watch

    def watched(site: str, stream: Any) -> None:
        watch(site, stream)
        stream.end()

    world.context.engine.watch = watched  # type: ignore[method-assign]

    def take(data: bytes) -> None:
        called(world, lambda context: world.federation.Watch(iter([data]), context), world.pems["alpha"])

    seeds = [pb.WatchRequest(agent_version=__version__).SerializeToString()]
    return Door(seeds, in_message(pb.WatchRequest.DESCRIPTOR), take, close=world.close)


def _upload(folder: Path) -> Door:
    """Whole streams of messages."""
    world = CoordinatorWorld(folder)

    def take(data: bytes) -> None:
        messages = iter(parts(data))
        called(world, lambda context: world.federation.Upload(messages, context), world.pems["alpha"])

    def whole(upload: bytes, **fields: Any) -> bytes:
        stream = world.stream("alpha", upload)
        if fields:
            stream[0] = pb.UploadRequest(open=world.opening("alpha", upload, **fields)).SerializeToString()
        return frames(stream)

    inquiry = pb.UploadRequest(inquire=pb.UploadInquire(upload_id=b"i" * 16)).SerializeToString()
    twice = world.stream("alpha", b"b" * 16) + world.stream("alpha", b"b" * 16)
    seeds = [
        whole(b"a" * 16), frames([inquiry]), frames(twice[:3]), whole(b"c" * 16, lines=40),
        whole(b"d" * 16, round=2), whole(b"e" * 16, study="other"), whole(b"f" * 16, num_examples=0),
        frames([world.stream("alpha", b"g" * 16)[0], *world.stream("alpha", b"g" * 16, seed=9)[1:]]),
    ]  # fmt: skip
    mutate = of_frames(in_message(pb.UploadRequest.DESCRIPTOR))
    return Door(seeds, mutate, take, close=world.close)


def _certificate(folder: Path) -> Door:
    """A certificate that a peer shows. TLS lets only the authority's through; here all come."""
    world = CoordinatorWorld(folder)

    def take(data: bytes) -> None:
        called(world, lambda context: world.federation.Studies(iter([request]), context), data)

    request = pb.StudiesRequest(agent_version=__version__).SerializeToString()

    seeds = [world.pems["alpha"], world.unused.certificate.encode(), world.context.authority.pem]
    return Door(seeds, in_pem, take, refusals=frozenset({1, 2}), close=world.close)


def _signing_request(folder: Path) -> Door:
    with drawn("requests"):
        seeds = [certificates.signing_request(private_key("a")), certificates.signing_request(private_key("b"))]
    return Door(seeds, in_der, lambda data: certificates.requested_key(data) and None)


def served(server_of: Callable[[Any, Any], Any], data: bytes, users: frozenset[int]) -> None:
    """Give the bytes to a control server as one connection, and look at what it answers."""
    server = control.ControlServer.__new__(control.ControlServer)
    server._handler, server._users, server._closing = server_of, users, False
    server._lock, server._served, server._callers = threading.Lock(), 0, set()
    server._answered = threading.Condition(server._lock)
    ended = list[BaseException]()
    server._fatal = ended.append
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)  # the answer, which nobody reads before its end
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        ours.settimeout(5)
        try:
            ours.sendall(data)
        except TimeoutError:
            raise Refused("more than the socket holds") from None
        ours.shutdown(socket.SHUT_WR)
        server._refuse_stranger(theirs)
        server._refuse_crowd()
        server._serve(theirs)
        answer = b""
        while piece := ours.recv(1 << 20):
            answer += piece
    if ended or server._served:
        raise Broken(f"it would have ended the service: {ended}, or {server._served} stay served")
    judge_answer(answer)


def judge_answer(answer: bytes) -> None:
    """Raise what the last line of a control answer says, as a command would.

    Raises:
        Uncoded: a fault of the program, or an error without an exit code.
    """
    if not answer:
        return  # someone looked whether we listen
    if not answer.endswith(b"\n"):
        raise Broken(f"an answer that ends within a line: {answer[-80:]!r}")
    last = json.loads(answer.splitlines()[-1])
    if "result" in last:
        return
    said = last["error"]
    kind = BY_EXIT_CODE.get(said["exit_code"], WardroundError)
    if kind is WardroundError:
        raise Uncoded(f"exit code {said['exit_code']}: {said['message'][:300]}")
    raise kind(said["message"], hint=said["hint"], code=said["code"])


def _control(folder: Path) -> Door:
    """Commands as `coordinator` sends them to the service."""
    import os

    world = CoordinatorWorld(folder)
    refuse_some(world)
    document = world.study.resolved.document()

    def take(data: bytes) -> None:
        try:
            told = data.replace(b"@initial@", str(world.initial).encode())  # the folder is another each time
            served(world.administration.run, told, frozenset({os.geteuid()}))
        finally:
            world.restore()

    commands: list[dict[str, Any]] = [
        {"command": "status", "study": STUDY}, {"command": "sites"}, {"command": "report", "study": STUDY},
        {"command": "invite", "site": "delta", "expires_s": 3600}, {"command": "revoke", "site": "charlie"},
        {"command": "receipts", "site": "alpha"}, {"command": "rollover", "site": "alpha", "ledger": "ab" * 16},
        {"command": "stop", "study": STUDY}, {"command": "start", "study": STUDY},
        {"command": "summary_create", "document": {**summary_request().document(), "name": "others"}},
        {"command": "summary_list"}, {"command": "summary_show", "name": "columns"},
        {"command": "create", "document": {**document, "study": {**document["study"], "name": "second"}},
         "initial": "@initial@"},
    ]  # fmt: skip
    seeds = [json.dumps(one).encode() + b"\n" for one in commands]
    return Door(seeds, in_json, take, close=world.close)


def _state_files(folder: Path) -> Door:
    """The coordinator's own files, damaged."""
    from coordinator import state_directory as places
    from coordinator.members.authority import Authority
    from coordinator.state_directory import State

    with drawn("coordinator files"):
        state = State(folder / "state")
        places.create(state, "north", "127.0.0.1:9000", NOW)
    state.receipt_key_file.write_bytes(ledger_key_pem(ledger_key("receipts")))
    paths = [
        state.config_file,
        state.authority / "key.pem",
        state.authority / "certificate.pem",
        state.receipt_key_file,
    ]
    whole = [path.read_bytes() for path in paths]

    def take(data: bytes) -> None:
        for path, content in zip(paths, [*parts(data), b"", b"", b"", b""], strict=False):
            path.write_bytes(content)
        config = state.config()
        Authority(state.authority, config.federation)
        state.receipt_key()

    mutate = of_frames(in_toml, in_pem, in_pem, in_pem, order=False)
    return Door([frames(whole)], mutate, take)


def _study_document(folder: Path) -> Door:
    """A resolved study as a document, resolved again."""
    from fl_algorithms.resolving import resolve
    from tools.fuzz.examples import study_document
    from wardround.records.study import StudyFile

    documents = [study_document(), study_document(quorum=1, round_deadline_s=60), _unlike()]

    def take(data: bytes) -> None:
        study = StudyFile.from_document(canonical.loads(data))
        study.digest("ab" * 32)
        resolve(study)

    return Door([canonical.dumps(one) for one in documents], in_json, take)


def _unlike() -> dict[str, Any]:
    from fl_algorithms.resolving import resolve
    from wardround.records.study import StudyFile

    tables = {
        "study": {"name": "unlike", "sites": ["alpha", "bravo"], "rounds": 2},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp"}, "networks": {"small": {"name": "mlp", "hidden": [4]}}, "assigned": {"bravo": "small"},
        "algorithm": {"name": "fedmd"}, "public_data": {"digest": "ab" * 32, "rows": 10},
        "training": {"local_epochs": 1},
    }  # fmt: skip
    try:
        return resolve(StudyFile.model_validate(tables)).document()
    except WardroundError:
        tables.pop("networks"), tables.pop("assigned"), tables.pop("public_data")
        tables["algorithm"] = {"name": "fedprox"}
        return resolve(StudyFile.model_validate(tables)).document()


def _both(random: Random, data: bytes) -> bytes:
    return several((in_json, in_json))(random, data)


TARGETS = [
    Target("coordinator.enrol", "EnrolRequest, with an invitation's certificate",
           _called_with("Enrol", enrolment_pb2.EnrolRequest, _enrol, invited=True), 10),
    Target("coordinator.renew", "RenewRequest", _called_with("Renew", enrolment_pb2.RenewRequest, _renew), 8),
    Target("coordinator.studies", "StudiesRequest", _called_with(
        "Studies", pb.StudiesRequest, lambda world: [pb.StudiesRequest(agent_version=__version__)]), 4),
    Target("coordinator.declare", "DeclareRequest", _called_with("Declare", pb.DeclareRequest, _declare), 20),
    Target("coordinator.watch", "WatchRequest, and the stream it opens", _watch, 4),
    Target("coordinator.download", "DownloadRequest, and the stream it opens",
           _called_with("Download", pb.DownloadRequest, _download), 12),
    Target("coordinator.ledger", "LedgerPage", _called_with("Ledger", pb.LedgerPage, _pages), 20),
    Target("coordinator.receipts", "ReceiptsRequest, and the stream it opens",
           _called_with("Receipts", pb.ReceiptsRequest, _receipts), 4),
    Target("coordinator.summary-requests", "SummaryRequestsRequest", _called_with(
        "SummaryRequests", summaries_pb2.SummaryRequestsRequest,
        lambda world: [summaries_pb2.SummaryRequestsRequest(agent_version=__version__)]), 4),
    Target("coordinator.summary", "SiteSummary, a site's figures", _called_with(
        "TellSummary", summaries_pb2.SiteSummary, lambda world: [site_figures().to_message()]), 20),
    Target("coordinator.return", "ReturnRequest", _called_with("Return", pb.ReturnRequest, _lost_receipts), 12),
    Target("coordinator.upload", "streams of UploadRequest, to the receipt", _upload, 80),
    Target("coordinator.certificate", "the certificate that a peer shows", _certificate, 12),
    Target("coordinator.signing-request", "PKCS#10, DER", _signing_request, 30),
    Target("coordinator.control", "commands on the control socket", _control, 20),
    Target("coordinator.files", "config.toml and the keys of the state directory", _state_files, 15),
    Target("study.document", "a resolved study, as it is offered", _study_document, 30),
]  # fmt: skip
