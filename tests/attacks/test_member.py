"""A member site that wants more than its share, or whoever holds its stolen credentials."""

import itertools
import json
import queue
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import save_file

from coordinator import calls
from coordinator import servicers as service
from coordinator.server import Coordinator
from coordinator.storage import tables
from coordinator.studies import aggregations, conclusion
from coordinator.updates import decide, ledgers, receipts
from fl_algorithms.server.aggregator import Round, Update
from fl_algorithms.server.combining import Combined
from fl_algorithms.server.limits import averaged, combine
from fl_algorithms.server.mean import InMemory
from site_agent.gateway.enrolment.identity import Identity
from tests.attacks import crooked
from tests.attacks.held import NAMES_OUT, served
from tests.attacks.places import Hung, bootstrap_pems, open_channel, own_pems, placed
from tests.coordinator.conftest import Place, refused, study_document
from tests.coordinator.fake_site import FakeSite, delta
from tests.coordinator.test_identity import DAY_S, Holder, renewed, studies
from tests.coordinator.test_rounds import SPECS
from tests.fl_algorithms.test_distillation import SITES, aggregator_of, models, read, study_of
from tests.fl_algorithms.toys import toy_public_data
from tests.site_agent.site_world import SiteWorld
from tools.world import CommandFailed, World, command, wait_until
from wardround import __version__, rpc
from wardround.errors import BadData, NotPermitted, TryAgain
from wardround.local.rate_limit import BURST
from wardround.records.receipts import NOT_RECEIVED
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import Entry, Manifest, TensorSpec
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import federation_pb2_grpc, tensors_pb2


def by_a_member(place: Place) -> tuple[tuple[bytes, bytes, bytes], str]:
    return own_pems(place.join("alpha")), "Federation/Studies"


def by_an_unused_invitation(place: Place) -> tuple[tuple[bytes, bytes, bytes], str]:
    return bootstrap_pems(place.invite("alpha")), "Enrolment/Enrol"


def by_a_revoked_site(place: Place) -> tuple[tuple[bytes, bytes, bytes], str]:
    pems = own_pems(place.join("alpha"))
    place.ask("revoke", site="alpha")
    return pems, "Federation/Declare"


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/admission.py")
def test_an_update_of_a_site_that_only_evaluates(tmp_path: Path) -> None:
    """A site that may only judge models sends an update, which would enter the mean; then rows that it has trained."""
    with placed(tmp_path) as place:
        *_, charlie = place.begin(roles={"charlie": "evaluate"})
        assignment = charlie.next_assignment()
        update = delta("charlie", 1, SPECS)
        receipt = charlie.send(charlie.opening(assignment, update), update.payload)
        assert receipt is not None
        assert (receipt.decision, receipt.code, receipt.tensor) == ("refused", "MANIFEST_NAMES", "layer.bias")
        assert list((place.state.blobs / "uploads").iterdir()) == []
        told = replace(update, tensors=())
        receipt = charlie.send(charlie.opening(assignment, told), b"")
        assert receipt is not None
        assert (receipt.decision, receipt.code) == ("refused", "COUNT_INVALID")


@pytest.mark.chaos
@pytest.mark.attack(promise="P11", refused_by="coordinator/calls.py")
@pytest.mark.parametrize("who", [by_a_member, by_an_unused_invitation, by_a_revoked_site])
def test_hung_first_messages(tmp_path: Path, who: Callable[[Place], tuple[tuple[bytes, bytes, bytes], str]]) -> None:
    """540 unary calls whose message never came held every worker before anyone looked at who called."""
    with placed(tmp_path) as place:
        bravo = place.join("bravo")
        pems, method = who(place)
        hung = Hung(place, pems, method, 540)
        try:
            took = []
            for _ in range(20):
                began = time.monotonic()
                bravo.federation.Studies(pb.StudiesRequest(agent_version=__version__), timeout=5)
                took.append(time.monotonic() - began)
            assert sum(took) / len(took) < 1
            ended = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.CANCELLED}
            assert set(hung.codes()) <= ended  # all of them, the last ones after 5 s
        finally:
            hung.close()


@pytest.mark.attack(promise="P11", refused_by="coordinator/calls.py")
def test_hung_first_messages__revoked_meanwhile(tmp_path: Path) -> None:
    """A revocation left the calls alone that had not said anything yet."""
    with placed(tmp_path) as place:
        place.bound(first_message_s=600)
        alpha = place.join("alpha")
        hung = Hung(place, own_pems(alpha), "Federation/Studies", calls.MAX_CALLS - 1)
        try:
            wait_until(lambda: len(place.coordinator.calls.of("alpha")) == calls.MAX_CALLS, "all have arrived", 20)
            place.ask("revoke", site="alpha")
            assert set(hung.codes()) == {grpc.StatusCode.CANCELLED}
            assert alpha.stream_error() is not None
            wait_until(lambda: not place.coordinator.calls.of("alpha"), "their workers are free", 20)
        finally:
            hung.close()


@pytest.mark.attack(promise="P11", refused_by="coordinator/calls.py")
@pytest.mark.parametrize("size", [0, 1], ids=["nothing comes", "a byte now and then"])
def test_hung_first_messages__then_a_crawl(tmp_path: Path, size: int) -> None:
    """An upload that is open and moves nothing, or next to nothing, held its worker for as long as it liked."""
    with placed(tmp_path) as place:
        place.bound(rate_s=1.0)
        (alpha,) = place.begin(sites=["alpha"])
        assignment = alpha.next_assignment()
        update = delta("alpha", 1, SPECS)
        opening = alpha.opening(assignment, update)
        never, ended = threading.Event(), threading.Event()

        def crawl() -> Iterator[Any]:
            yield pb.UploadRequest(open=opening)
            for offset in range(len(update.payload)):
                if never.wait(0.3) or ended.is_set():
                    return
                if size:
                    chunk = tensors_pb2.Chunk(offset=offset, data=update.payload[offset : offset + size])
                    yield pb.UploadRequest(chunk=chunk)
            never.wait(60)

        call = alpha.federation.Upload(crawl(), timeout=60)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
        ended.set()
        never.set()
        assert refused.value.code() == grpc.StatusCode.CANCELLED  # as a broken line is: it may go on where it was
        place.bound()
        offsets: list[int] = []
        receipt = alpha.send(opening, update.payload, on_offset=offsets.append)
        assert receipt
        assert receipt.decision == "accepted"
        assert bool(offsets[0]) == bool(size)


def deleted_files() -> list[str]:
    """The files that this process holds open though they have no name any more."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(str(entry.readlink()))
    return [path for path in found if path.endswith("(deleted)")]


@pytest.mark.attack(promise="P11", refused_by="coordinator/servicers.py")
def test_hung_first_messages__a_download_of_a_model_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that took a piece now and then kept the room of a model on the disk that nobody else could get any
    more, for days; one a round, and the disk was full."""
    monkeypatch.setattr(service, "OFFERED_S", 0.0)
    with placed(tmp_path) as place:
        large = (TensorSpec("w", "F32", (4 * 1024 * 1024,)),)
        place.initial.write_bytes(file_header(large) + bytes(large[0].bytes))
        alpha, mallory = place.begin(sites=["alpha", "mallory"], quorum=1, rounds=3)

        def closes() -> None:
            assignment = alpha.next_assignment()
            update = replace(delta("alpha", assignment.round, large), metrics=(("val_loss", "0.5"),))
            assert alpha.answer(assignment, update).decision == "accepted"

        mallory.decline(mallory.next_assignment(), "DECLINED_RESOURCES")
        closes()
        assignment = mallory.next_assignment()
        model = assignment.base.digest.hex()
        held = mallory.federation.Download(
            pb.DownloadRequest(study="trial", revision=1, model=assignment.base), timeout=60
        )
        assert next(held).HasField("manifest")
        taken = len(next(held).chunk.data)
        mallory.decline(assignment, "DECLINED_RESOURCES")
        closes()
        mallory.decline(mallory.next_assignment(), "DECLINED_RESOURCES")
        taken += len(next(held).chunk.data)  # it is the best model now, and goes on
        closes()
        place.until(lambda status: status["closing"] and status["best"]["round"] == 2)
        assert not place.coordinator.context.blobs.model(model).exists()
        with pytest.raises(grpc.RpcError) as refused:
            taken += sum(len(reply.chunk.data) for reply in held)
        assert refused.value.details() == "REVISION_CHANGED"
        assert taken < large[0].bytes
        wait_until(lambda: not any(model in path for path in deleted_files()), "its room is free", 20)


UNDECODABLE = b"\xff\xff\xff"


def sequences(alphabet: list[bytes], most: int) -> Iterator[tuple[bytes, ...]]:
    for length in range(most + 1):
        yield from itertools.product(alphabet, repeat=length)


def carried_out(channel: grpc.Channel, method: str, messages: tuple[bytes, ...], ending: str) -> None:
    """Send ``messages`` and end: half-close and read what comes, cancel at once, or after the first answer."""
    stay = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from messages
        if ending != "half-close":
            stay.wait(20)

    call = channel.stream_stream(f"/wardround.v1.{method}")(requests(), timeout=20)
    try:
        if ending == "half-close" and method != "Federation/Watch":
            list(call)
        elif ending == "cancel later" and messages:
            next(call)
    except (grpc.RpcError, StopIteration):
        pass  # refused, or over: what is asked here is what is left behind
    finally:
        call.cancel()
        stay.set()


@pytest.mark.attack(promise="P11", refused_by="coordinator/calls.py")
def test_occupied_slots(tmp_path: Path) -> None:
    """After some streams, such as an undecodable message and another, a site's place was taken for good."""
    with placed(tmp_path) as place:
        place.bound(left_s=5.0)
        (alpha,) = place.begin(sites=["alpha"])
        assignment = alpha.next_assignment()
        update = delta("alpha", 1, SPECS)
        alpha.unwatch()
        half = update.payload[: len(update.payload) // 2]
        alphabet = [
            UNDECODABLE,
            pb.UploadRequest(open=alpha.opening(assignment, update)).SerializeToString(),
            pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=0, data=half)).SerializeToString(),
            pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=bytes(32))).SerializeToString(),
            pb.UploadRequest(inquire=pb.UploadInquire(upload_id=bytes(16))).SerializeToString(),
        ]
        small = [UNDECODABLE, b"", pb.StudiesRequest(agent_version=__version__).SerializeToString()]
        ways = [
            *(("Federation/Upload", messages) for messages in sequences(alphabet, 3)),
            *(
                (method, messages)
                for method in ("Federation/Studies", "Federation/Declare", "Federation/Watch", "Federation/Download",
                               "Enrolment/Renew", "Enrolment/Enrol")
                for messages in sequences(small, 2)
            ),
        ]  # fmt: skip
        with open_channel(place, own_pems(alpha)) as channel:
            for (method, messages), ending in itertools.product(ways, ("half-close", "cancel", "cancel later")):
                carried_out(channel, method, messages, ending)
                given_back(place, f"{method}: {[message[:4] for message in messages]}, {ending}")
        wait_until(lambda: not place.coordinator.calls.all(), "gRPC has let go of every call", 30)
        receipt = alpha.send(alpha.opening(assignment, update), update.payload)
        assert receipt


def given_back(place: Place, after: str) -> None:
    """Wait until no call of alpha holds a worker and no upload is under way."""
    never = threading.Event()
    deadline = time.monotonic() + 20
    while place.coordinator.calls.of("alpha") or len(place.coordinator.uploads.receptions) > 0:
        assert time.monotonic() < deadline, f"a place is still taken after {after}"
        never.wait(0.002)


def empty_tensors(count: int) -> bytes:
    """An opening whose manifest has that many tensors of two bytes each."""
    bundle = tensors_pb2.Bundle(name="model").SerializeToString() + b"\x12\x00" * count
    manifest = b"\x0a" + varint(len(bundle)) + bundle
    opening = pb.UploadOpen(upload_id=bytes(16), study="trial").SerializeToString()
    opening += b"\x3a" + varint(len(manifest)) + manifest
    return b"\x0a" + varint(len(opening)) + opening


def varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def doubled_name(count: int) -> bytes:
    """An opening of ``count`` tensors, the last one named as the one before it."""
    entry = tensors_pb2.TensorEntry(name="", dtype="F32", shape=[1], encoding="raw", bytes=4, sha256=bytes(32))
    bundle = tensors_pb2.Bundle(name="model")
    for number in range(count):
        entry.name = f"t{min(number, count - 2)}"
        bundle.tensors.append(entry)
    opening = pb.UploadOpen(
        upload_id=bytes(16), study="trial", digest=bytes(32), manifest=tensors_pb2.Manifest(bundles=[bundle]),
        ledger=pb.LedgerHead(ledger_id="0" * 32, lines=1, head=bytes(32), signature=bytes(64)),
    )  # fmt: skip
    return pb.UploadRequest(open=opening).SerializeToString()


def peak_kib(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0])


@pytest.mark.attack(promise="P11", refused_by="coordinator/messages.py")
@pytest.mark.chaos
def test_parse_bomb(world: World) -> None:
    """4 MiB became 228 MiB when parsed, and a doubled name took 8.7 s: from a site that need not be in a study."""
    world.init()
    service = world.serve()
    mallory, honest = (FakeSite(world.ask_coordinator("invite", site)) for site in ("mallory", "honest"))
    bombs = [empty_tensors(2_000_000), empty_tensors(500_000), empty_tensors(60_000), doubled_name(20_000),
             doubled_name(2000), doubled_name(1000)]  # fmt: skip
    request = pb.StudiesRequest(agent_version=__version__)
    for site in (mallory, honest):
        site.federation.Studies(request, timeout=20)
    before = peak_kib(service.process.pid)
    channels = [mallory.open_channel() for _ in range(6)]
    ended: list[float] = []

    def throw(channel: grpc.Channel, bomb: bytes) -> None:
        began = time.monotonic()
        with pytest.raises(grpc.RpcError):
            list(channel.stream_stream("/wardround.v1.Federation/Upload")(iter([bomb]), timeout=60))
        ended.append(time.monotonic() - began)

    for bomb in bombs:  # six of each at once
        threads = [threading.Thread(target=throw, args=(channel, bomb)) for channel in channels]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        honest.federation.Studies(request, timeout=20)
        assert time.monotonic() - began < 2
        for thread in threads:
            thread.join()
    assert len(ended) == 6 * len(bombs)
    assert max(ended) < 4
    assert peak_kib(service.process.pid) - before < 64 * 1024
    for site in (mallory, honest):
        site.close()
    for channel in channels:
        channel.close()


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/tensors/manifests.py")
def test_parse_bomb__a_doubled_name_in_the_largest_manifest() -> None:
    """Each name was counted among all: 20,000 names took 8.7 s."""
    entries = [Entry(TensorSpec(f"t{min(number, 19_998)}", "F32", (1,)), "0" * 64) for number in range(20_000)]
    began = time.process_time()
    with pytest.raises(BadData, match="tensor `t19998` stands twice"):
        Manifest(tuple(entries))
    assert time.process_time() - began < 0.5


def page(site: FakeSite, since: int, lines: int) -> Any:
    return pb.LedgerPage(ledger=site.signed(site.ledger.head(lines)), new_line_hashes=site.ledger.hashes[since:lines])


def heads_kept(place: Place) -> list[tuple[int, bool]]:
    with place.coordinator.context.store.read() as session:
        heads = session.scalars(sa.select(tables.LedgerHead).filter_by(site="alpha").order_by(tables.LedgerHead.lines))
        return [(row.lines, row.in_receipt) for row in heads]


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/ledgers.py")
@pytest.mark.chaos
def test_hundred_thousand_new_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One opening with 99,990 hashes cost 17.6 MB of database and seconds of the one engine thread, again and again."""
    with placed(tmp_path) as place:
        alpha, bravo = place.begin(sites=["alpha", "bravo"])
        assignment = alpha.next_assignment()
        update = delta("alpha", 1, SPECS)
        began = alpha.ledger.hashes
        for count, code in ((99_990, "larger than max"), (20_000, "MESSAGE_MALFORMED"), (1001, "MESSAGE_MALFORMED")):
            alpha.ledger.hashes = [*began, *(bytes([n % 256]) * 32 for n in range(count))]
            with pytest.raises(grpc.RpcError, match=code):
                alpha.send(alpha.opening(assignment, update), update.payload)
            assert heads_kept(place) == []

        size = (place.state.root / "coordinator.db").stat().st_size
        turns: queue.SimpleQueue[float] = queue.SimpleQueue()
        stop = threading.Event()

        def ask_for_turns() -> None:
            while not stop.wait(0.01):
                asked = time.monotonic()
                place.coordinator.engine.call(lambda: None)
                turns.put(time.monotonic() - asked)

        asking = threading.Thread(target=ask_for_turns)
        asking.start()
        alpha.ledger.hashes = [*began, *(bytes([n % 256]) * 32 for n in range(99_990))]
        known = 0
        while known < 99_500:  # in pages it is taken, as a real backlog would be
            known = alpha.federation.Ledger(page(alpha, known, known + 1000), timeout=20).lines
        stop.set()
        asking.join()
        assert heads_kept(place) == [(known, False)]
        assert max(turns.get() for _ in range(turns.qsize())) < 1
        assert (place.state.root / "coordinator.db").stat().st_size <= size + 100_000
        monkeypatch.setattr(ledgers, "MAX_PAGES_AN_HOUR", 100)
        with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
            alpha.federation.Ledger(page(alpha, known, known), timeout=20)
        alpha.ledger.witnessed = known
        receipt = alpha.send(alpha.opening(assignment, update), update.payload)
        assert receipt
        assert receipt.decision == "accepted"
        assert heads_kept(place) == [(len(alpha.ledger.hashes) - 1, True)]
        assert bravo.answer(bravo.next_assignment()).decision == "accepted"


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/decide.py")
def test_hundred_thousand_new_lines__opened_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that is opened and given up for another was not counted, as a refused one is."""
    monkeypatch.setattr(decide, "MAX_REFUSED_AN_HOUR", 10)
    with placed(tmp_path) as place:
        (alpha,) = place.begin(sites=["alpha"])
        assignment = alpha.next_assignment()
        update = delta("alpha", 1, SPECS)
        for _ in range(10):
            alpha.send(alpha.opening(assignment, update), update.payload, chunk=8, stop_at=8)
        with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
            alpha.send(alpha.opening(assignment, update), update.payload)
        with place.coordinator.context.store.read() as session:
            assert len(session.scalars(sa.select(tables.Upload)).all()) == 1


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/decide.py")
def test_refusals_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal left a row and a receipt for good: some 200 an hour, and never an end."""
    monkeypatch.setattr(decide, "MAX_REFUSED", 4)
    with placed(tmp_path) as place:
        (mallory,) = place.begin(sites=["mallory"], rounds=2)
        assignment = mallory.next_assignment()
        update = delta("mallory", 1, SPECS)

        def uploads(decision: str) -> int:
            chosen = sa.select(sa.func.count()).where(tables.Upload.decision == decision)
            with place.coordinator.context.store.read() as session:
                return session.scalars(chosen).one()

        for _ in range(4):
            strange = mallory.opening(assignment, update)
            strange.study = "strange"
            receipt = mallory.send(strange, update.payload)
            assert receipt is not None
            assert (receipt.decision, receipt.code) == ("refused", "STUDY_UNKNOWN")
        for _ in range(3):  # by its opening, and by its payload
            strange = mallory.opening(assignment, update)
            strange.study = "strange"
            said = "TOO_BUSY\n4 refused uploads of site `mallory` are kept, and no more are; it may send what counts"
            with refused(said):
                mallory.send(strange, update.payload)
            with refused(said):
                mallory.send(mallory.opening(assignment, update), update.payload, commit=b"\x01" * 32)
            assert (uploads(""), uploads("refused")) == (0, 4)
        assert not list((place.state.root / "blobs" / "uploads").iterdir())
        pages = mallory.federation.Receipts(pb.ReceiptsRequest(agent_version=__version__), timeout=20)
        assert sum(len(page.envelopes) for page in pages) == 4 + 1  # the chain is whole, and the statement
        assert mallory.answer(assignment).decision == "accepted"


@pytest.mark.attack(promise="P4", refused_by="coordinator/updates/admission.py")
def test_older_head_again(tmp_path: Path) -> None:
    """An upload with a head that was known, but not the newest, got a receipt for the shorter ledger."""
    with placed(tmp_path) as place:
        alpha, bravo = place.begin(sites=["alpha", "bravo"], rounds=3)
        for _ in range(2):
            for site in (alpha, bravo):
                assert site.answer(site.next_assignment()).decision == "accepted"
        assignment = alpha.next_assignment()
        update = delta("alpha", 3, SPECS)
        for lines in (alpha.receipts[0].ledger.lines, alpha.receipts[1].ledger.lines - 1):
            opening = alpha.opening_again(assignment, update, uuid.uuid4().bytes)
            opening.ledger.CopyFrom(alpha.signed(alpha.ledger.head(lines)))
            del opening.new_line_hashes[:]
            receipt = alpha.send(opening, update.payload)
            assert (receipt.decision, receipt.code, receipt.ledger) == ("refused", "LEDGER_ROLLBACK", None)


@pytest.mark.attack(promise="P4", refused_by="coordinator/updates/decide.py")
def test_older_head_again__an_honest_resend(tmp_path: Path) -> None:
    """Not an attack: the same upload with the same head, a grown one, and an opening that a newer one overtook."""
    with placed(tmp_path) as place:
        (alpha,) = place.begin(sites=["alpha"])
        assignment = alpha.next_assignment()
        update = delta("alpha", 1, SPECS)
        first = alpha.opening(assignment, update)
        assert alpha.send(first, update.payload, chunk=8, stop_at=8) is None
        assert alpha.send(first, update.payload, chunk=8, stop_at=16) is None
        alpha.ledger.write()
        grown = alpha.opening_again(assignment, update, first.upload_id)
        assert alpha.send(grown, update.payload, chunk=8, stop_at=24) is None
        with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
            alpha.send(first, update.payload)
        receipt = alpha.send(grown, update.payload)
        assert (receipt.decision, receipt.ledger.lines) == ("accepted", grown.ledger.lines)


@pytest.mark.attack(promise="P11", refused_by="coordinator/members/certificate_status.py")
def test_renewals_evict_the_honest(tmp_path: Path) -> None:
    """A thief of the TLS key renewed beside the site without an alarm, and 16 renewals ended the site's certificate."""
    with placed(tmp_path) as place:
        alpha = place.join("alpha")
        with alpha.open_channel(*renewed(alpha.channel)) as honest:
            studies(honest)
            alpha.unwatch()
            with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
                evict(alpha)
            studies(honest)
            studies(alpha.channel)
            warned = next(federation_pb2_grpc.FederationStub(honest).Watch(pb.WatchRequest(agent_version=__version__)))
            assert abs(warned.certificate_fork.since_s - time.time()) < 60
        (row,) = place.ask("sites")["sites"]
        assert row["certificate_fork_since"] is not None


def evict(stolen: FakeSite) -> None:
    """Renew with the stolen key, and use each, so that none of them can be taken for a lost reply."""
    for _ in range(40):
        with stolen.open_channel(*renewed(stolen.channel)) as channel:
            studies(channel)


@pytest.mark.attack(promise="P11", refused_by="coordinator/members/certificate_status.py")
def test_renewals_evict_the_honest__nor_keep_it_from_renewing(tmp_path: Path) -> None:
    """However many the thief has, the site's own line goes on."""
    with placed(tmp_path) as place:
        stolen = Holder(place, place.join("alpha").reply.certificate)
        honest = stolen.renew(place)
        honest.call()
        for _ in range(3):
            with pytest.raises(TryAgain, match="valid certificates"):
                renew_without_end(place, stolen)
            place.ahead_s += 3.2 * DAY_S
            honest = honest.renew(place)
            honest.call()
            stolen = honest  # the thief is there again


def renew_without_end(place: Place, stolen: Holder) -> None:
    for _ in range(40):
        stolen.renew(place).call()


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/agent.py")
def test_renewals_evict_the_honest__and_the_site_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the coordinator sees reaches the hospital's log and its status."""
    with closing(SiteWorld(tmp_path)) as world:
        world.ready()
        assert world.command("status")["certificate_fork_since"] == ""
        world.coordinator.tell(pb.Event(certificate_fork=pb.CertificateFork(since_s=1_790_000_000)))
        wait_until(lambda: world.command("status")["certificate_fork_since"], "the status says it", 20)
        assert world.command("status")["certificate_fork_since"] == "2026-09-21 14:13 UTC"
        assert (
            "the coordinator sees calls with two certificates of this site that were renewed from the same"
            in caplog.text
        )


HUGE = 1e30


def _crooked_update(federation: crooked.Federation, number: int, *, value: float, count: int) -> Any:
    """The crook answers its assignment with ``value`` everywhere and a told count."""
    site = federation.crook
    assignment = site.next_assignment()
    specs = site.specs("trial") if assignment.HasField("train") else ()
    update = crooked.honest_update(site.name, number, specs)
    for place, spec in enumerate(specs):
        update = update.with_tensor(place, np.full(spec.shape, value))
    return site.answer(assignment, type(update)(update.tensors, update.metrics, count, 25))


@pytest.mark.attack(promise="P11", refused_by="fl_algorithms/server/limits.py")
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_one_site_sets_the_model(world: World, algorithm: str) -> None:
    """One site of five sends 1e30, finite. It set the mean's model; with FedAdam it ended the study for good."""
    with crooked.federation(world, crooked.study_of(algorithm)) as federation:
        for number in (1, 2):
            assert _crooked_update(federation, number, value=HUGE, count=100).decision == "accepted"
            federation.honest_round()
        federation.honest_round()  # the closing validation
        federation.crook.decline(federation.crook.next_assignment(), "DECLINED_TRAINING_FAILED")
        status = wait_until(lambda: _ended(federation), "the study has ended", crooked.WAIT_S)
        assert (status["state"], status["incomplete"]) == ("finished", [crooked.CROOK])
        assert np.abs(federation.model()).max() < 2
        told = federation.ask("report", study="trial")
        for row in told["rounds_closed"]:
            assert row["answers"][crooked.CROOK]["code"] == "TENSOR_NORM"
            assert row["left_out"][crooked.CROOK].startswith("norm 2.828e+30, the limit is ")
            assert row["contributors"] == list(crooked.HONEST)
        assert status["sites"][crooked.CROOK]["rounds_left_out"] == [1, 2]


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/admission.py")
def test_one_site_sets_the_model__by_a_count(world: World) -> None:
    """2^40 rows, and then as many as the study takes: the rest of the hospitals would count for nothing."""
    with crooked.federation(world, crooked.study_of(rounds=1)) as federation:
        crook = federation.crook
        assignment = crook.next_assignment()
        update = crooked.honest_update(crook.name, 1, crook.specs("trial"))
        numbers = (update.metrics, 2**40, 25)
        refused = crook.send(crook.opening(assignment, type(update)(update.tensors, *numbers)), update.payload)
        assert refused is not None
        assert (refused.decision, refused.code) == ("refused", "COUNT_INVALID")

        most = type(update)(update.tensors, update.metrics, 10_000_000, 25)
        assert crook.answer(assignment, most).decision == "accepted"
        federation.honest_round()
        report = wait_until(lambda: _closed(federation, 1), "round 1 is closed", crooked.WAIT_S)
        (row,) = report["rounds_closed"]
        assert row["capped"] == [crooked.CROOK]
        assert row["shares"] == {**dict.fromkeys(crooked.HONEST, 0.125), crooked.CROOK: 0.5}
        assert report["sites"][crooked.CROOK]["rounds_capped"] == [1]

        updates = {name: crooked.honest_update(name, 1, crook.specs("trial")) for name in crooked.HONEST}
        theirs = np.mean([np.frombuffer(one.payload, "<f4").astype(float) for one in updates.values()], axis=0)
        wanted = [0, 0, 1, 1, 1, 1, 1, 1] + (theirs + np.frombuffer(update.payload, "<f4")) / 2
        assert np.allclose(federation.model(), wanted, atol=1e-7)


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/admission.py")
def test_one_site_sets_the_model__by_a_count_that_grows(tmp_path: Path) -> None:
    """An honest count in round 1, a thousand times it in round 2."""
    with crooked.place(tmp_path) as place:
        sites = place.begin()
        for site in sites:
            site.answer(site.next_assignment())
        assignment = sites[0].next_assignment()
        update = delta("alpha", 2, sites[0].specs("trial"))
        grown = type(update)(update.tensors, update.metrics, 1000 * update.num_examples, update.num_validation)
        receipt = sites[0].answer(assignment, grown)
        assert (receipt.decision, receipt.code) == ("refused", "COUNT_INVALID")


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/admission.py")
@pytest.mark.parametrize("loss", ["1e+308", "-1e+300", "-1e-05", "1.001e+06"])
def test_val_loss_of_1e308(tmp_path: Path, loss: str) -> None:
    """Two such losses raised inside the engine, at every restart again; a very low one stayed the best for good."""
    with crooked.place(tmp_path) as place:
        alpha, bravo, charlie = place.begin(quorum=1)
        for site in (alpha, bravo, charlie):  # of round 1 the loss judges the initial model, which does not compete
            site.answer(site.next_assignment())
        for site in (alpha, bravo):
            assignment = site.next_assignment()
            update = delta(site.name, 2, site.specs("trial"))
            receipt = site.answer(assignment, type(update)(update.tensors, (("val_loss", loss),)))
            assert (receipt.decision, receipt.code) == ("refused", "METRICS_UNDECLARED")
        charlie.answer(charlie.next_assignment())
        place.until(lambda status: status["closing"])
        best = place.status()["best"]
        assert best["round"] == 1
        assert 0 < best["val_loss"] < 1


def _losses_that_no_float_can_hold(place: Place) -> None:
    with place.coordinator.context.store.write() as session:
        session.execute(sa.update(tables.Upload).values(metrics=json.dumps([["val_loss", "2.2e+307"]])))


def _no_metrics_at_all(place: Place) -> None:
    with place.coordinator.context.store.write() as session:
        session.execute(sa.update(tables.Upload).values(metrics="[["))


def _a_state_of_other_types(place: Place) -> None:
    _change_study(place, lambda row: row.state.replace('"deadline": ', '"deadline": "soon", "x": '))


def _no_state_at_all(place: Place) -> None:
    _change_study(place, lambda row: row.state[:-20])


def _change_study(place: Place, edit: Callable[[Any], str]) -> None:
    with place.coordinator.context.store.write() as session:
        row = session.scalars(sa.select(tables.Study).filter_by(name="trial")).one()
        row.state = edit(row)


@pytest.mark.attack(promise="P11", refused_by="coordinator/studies/engine.py")
@pytest.mark.parametrize(
    "poison", [_losses_that_no_float_can_hold, _no_metrics_at_all, _a_state_of_other_types, _no_state_at_all]
)
def test_val_loss_of_1e308__and_the_other_study_finishes(tmp_path: Path, poison: Callable[[Place], None]) -> None:
    """Whatever stands in one study's rows, and however often the service is started with them, another study ends."""
    with crooked.place(tmp_path) as place:
        sites = place.begin(sites=["alpha", "bravo", "delta"], rounds=3)
        for site in sites:
            site.answer(site.next_assignment())
        pending = [site.next_assignment() for site in sites]
        for place_of in (0, 2):
            sites[place_of].answer(pending[place_of])
        poison(place)
        for _ in range(2):
            place.restart()
        with suppress(grpc.RpcError):  # the last answer of a round that is then judged by the rows as they are
            sites[1].answer(pending[1])
        place.restart()
        assert not place.failures
        place.create(name="other", sites=["charlie", "echo"], rounds=1)
        for name in ("charlie", "echo"):
            place.join(name).work("other")
        place.ask("start", study="other")
        place.until(lambda status: status["state"] == "finished", "other")
        assert not place.failures


@pytest.mark.attack(promise="P11", refused_by="coordinator/studies/engine.py")
@pytest.mark.chaos
def test_val_loss_of_1e308__a_fault_in_one_study_pauses_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any exception while one study's round is judged: that study pauses with a reason, and goes on when mended."""
    from coordinator.studies.study import Study

    honest = Study.judged

    def failing(study: Study, *given: Any) -> Study:
        if study.name == "trial":
            raise OverflowError("intermediate overflow in fsum")
        return honest(study, *given)

    with crooked.place(tmp_path) as place:
        monkeypatch.setattr(Study, "judged", failing)
        sites = place.begin(rounds=1)
        for site in sites:
            site.answer(site.next_assignment())
        status = place.until(lambda status: status["state"] == "paused")
        assert status["why"] == "the coordinator failed at it: OverflowError; its log says more"
        assert {site.next_assignment().stop.reason for site in sites} == {pb.Stop.PAUSED}
        place.create(name="other", rounds=1)
        threads = [site.work("other") for site in sites]
        place.ask("start", study="other")
        place.until(lambda status: status["state"] == "finished", "other")
        for thread in threads:
            thread.join(crooked.WAIT_S)
        place.restart()
        assert not place.failures
        assert place.status()["state"] == "paused"
        monkeypatch.undo()
        place.ask("start", study="trial")  # every update has its receipt: nobody is asked again
        assert place.until(lambda status: status["closing"])["sites"]["alpha"]["rounds_contributed"] == [1]


def _ended(federation: crooked.Federation) -> Any:
    status = federation.ask("status", study="trial")
    return status if status["state"] not in ("waiting", "running") else None


def _closed(federation: crooked.Federation, count: int) -> Any:
    report = federation.ask("report", study="trial")
    return report if len(report["rounds_closed"]) >= count else None


__all__ = ["served"]


def fedfomo_begun(place: Place) -> list[FakeSite]:
    """Three sites in a FedFomo study; each downloads its own model and that of one other."""
    names = ["alpha", "bravo", "charlie"]
    document = study_document(sites=names)
    document["algorithm"] = {"name": "fedfomo", "peers": 1, "explore": 0}
    initial = {"layer.bias": np.zeros(2, "<f4"), "layer.weight": np.ones((2, 3), "<f4")}
    save_file({**initial, "affinity/weights": np.zeros(3, "<f4")}, place.initial)
    sites = [place.join(name) for name in names]
    place.ask("create", document=document, initial=str(place.initial))
    for site in sites:
        site.declare("trial")
    place.ask("start", study="trial")
    return sites


@pytest.mark.attack(promise="P1", refused_by="coordinator/models/downloads.py")
def test_another_sites_view(served: Place) -> None:
    """A site asks for what is another site's own, by its true digest: its view, its model, or the file of them all."""
    sites = fedfomo_begun(served)
    for site in sites:
        site.answer(site.next_assignment())
    second = {site.name: site.next_assignment() for site in sites}
    assert len({assignment.base.digest for assignment in second.values()}) == 3
    digests = {name: [assignment.base.digest] for name, assignment in second.items()}
    everything = served.coordinator.context.blobs.model(served.status()["model_digest"])
    with TensorFile(everything) as kept:
        manifest = kept.manifest()
    assert {"site_0", "site_1", "site_2"} <= {entry.spec.bundle for entry in manifest.entries}
    for place_of, site in enumerate(sites):
        own = [entry for entry in manifest.entries if entry.spec.bundle == f"site_{place_of}"]
        plain = Manifest(tuple(replace(entry, spec=replace(entry.spec, bundle="model")) for entry in own))
        digests[site.name] += [bytes.fromhex(Manifest(tuple(own)).digest()), bytes.fromhex(plain.digest())]
    for site in sites:
        found, payload = site.download(second[site.name])
        assert found.digest() == second[site.name].base.digest.hex()
        assert payload
        others = [digest for name, known in digests.items() if name != site.name for digest in known]
        for digest in [*others, *(digests[site.name][1:]), bytes.fromhex(manifest.digest()), b"\x07" * 32]:
            for number in (0, 1, 2):
                asked = pb.DownloadRequest(study="trial", revision=1, model=pb.ModelRef(round=number, digest=digest))
                with pytest.raises(grpc.RpcError) as refused:
                    list(site.federation.Download(asked, timeout=20))
                assert refused.value.details() == "REVISION_CHANGED"


@pytest.mark.attack(promise="P4", refused_by="coordinator/updates/decide.py")
def test_another_sites_receipt(served: Place) -> None:
    """A site that knows another's upload id asks for its receipt, and opens the id as its own."""
    alpha, bravo = served.begin(sites=["alpha", "bravo"])
    theirs = alpha.next_assignment()
    opening = alpha.opening(theirs, delta("alpha", 1, served.specs))
    assert alpha.send(opening, delta("alpha", 1, served.specs).payload) is not None
    answer = bravo.inquire(opening.upload_id)
    assert json.loads(answer.receipt.payload)["decision"] == NOT_RECEIVED
    assert "alpha" not in answer.receipt.payload.decode()
    mine = bravo.next_assignment()
    with pytest.raises(grpc.RpcError) as refused:
        bravo.send(bravo.opening(mine, delta("bravo", 1, served.specs), opening.upload_id), b"")
    assert (refused.value.details() or "").startswith("UPLOAD_ID_CONFLICT")


def _answer(site: FakeSite, opening: pb.UploadOpen, payload: bytes) -> str:
    """The code with which an upload is refused, by the call or by a receipt."""
    try:
        receipt = site.send(opening, payload)
    except grpc.RpcError as error:
        return (error.details() or "").split("\n")[0]
    return receipt.code if receipt is not None else ""


@pytest.mark.attack(promise="P3", refused_by="proto/wardround/records/update.py")
@pytest.mark.parametrize("name", NAMES_OUT, ids=ascii)
def test_path_in_a_name(served: Place, name: str) -> None:
    """A study, a tensor, a bundle or an upload id is a path: nothing is written outside of the state directory."""
    (site,) = served.begin(sites=["alpha"])
    assignment = site.next_assignment()
    update = delta("alpha", 1, served.specs)
    opening = site.opening(assignment, update)
    changed = [pb.UploadOpen.FromString(opening.SerializeToString()) for _ in range(4)]
    changed[0].study = name
    changed[1].manifest.bundles[0].tensors[0].name = name
    changed[2].manifest.bundles[0].name = name or "../x"  # the empty name is the model's
    changed[3].upload_id = name.encode()[:15]
    before = {path for path in served.state.root.parent.rglob("*") if "blobs" not in path.parts}
    answers = [_answer(site, one, update.payload) for one in changed]
    assert set(answers) <= {"MESSAGE_MALFORMED", "MANIFEST_NAMES", "STUDY_UNKNOWN"}
    assert {path for path in served.state.root.parent.rglob("*") if "blobs" not in path.parts} - before == set()
    assert not list((served.state.blobs / "uploads").iterdir())


@pytest.mark.attack(promise="P4", refused_by="coordinator/updates/admission.py")
def test_replayed_and_stale_rounds(served: Place) -> None:
    """Last round's update again, under a new id: for its own round, for this one's name, for one to come."""
    (site,) = served.begin(sites=["alpha"])
    first = site.next_assignment()
    update = delta("alpha", 1, served.specs)
    assert site.send(site.opening(first, update), update.payload) is not None
    second = site.next_assignment()
    assert second.round == 2
    for round_, attempt, code in ((1, 1, "ROUND_CLOSED"), (3, 1, "ROUND_NOT_ASKED"), (2, 2, "ROUND_NOT_ASKED")):
        asked = pb.Assignment(study=second.study, revision=1, digest=second.digest, round=round_, attempt=attempt)
        receipt = site.send(site.opening(asked, update, uuid.uuid4().bytes), update.payload)
        assert receipt is not None
        assert (receipt.decision, receipt.code) == ("refused", code)
    assert served.status()["round"] == 2


ONE = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'

BOMBS = {
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "a tensor of 2^62 elements": b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}',
    "dimensions whose product wraps": b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
    "seventeen dimensions": b'{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}',
    "two that overlap": b'{"a":%b,"b":%b}' % (ONE, ONE),
    "a hole": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "a name twice": b'{"a":%b,"a":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}' % ONE,
    "brackets without end": b"[" * 500_000,
}


@pytest.mark.attack(promise="P3", refused_by="proto/wardround/tensors/files.py")
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_safetensors_bomb(tmp_path: Path, bomb: bytes) -> None:
    """A file that claims to be larger than it is, or otherwise than it is: refused from its header alone."""
    path = tmp_path / "bomb.safetensors"
    whole = bomb if bomb[8:] == b"{}" else struct.pack("<Q", len(bomb)) + bomb + b"\0\0\0\0"
    path.write_bytes(whole)
    with pytest.raises(BadData):
        TensorFile(path)


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/tensors/manifests.py")
def test_manifest_bomb(served: Place) -> None:
    """An opening whose manifest speaks of a model of exabytes is refused before a byte is kept for it."""
    (site,) = served.begin(sites=["alpha"])
    assignment = site.next_assignment()
    update = delta("alpha", 1, served.specs)
    opening = site.opening(assignment, update)
    entry = opening.manifest.bundles[0].tensors[0]
    for shape in ([2**40, 2**40], [2**63], [1] * 17, [2**32, 2**33]):
        del entry.shape[:]
        entry.shape.extend(shape)
        entry.bytes = 2**64 - 4
        with pytest.raises(grpc.RpcError) as refused:
            site.send(opening, update.payload)
        assert (refused.value.details() or "").startswith("MANIFEST_SHAPE")
    with pytest.raises(BadData):
        replace(TensorSpec("a", "F32", (1,)), shape=(2**41,))
    assert rpc.MAX_MESSAGE < 5 * 1024 * 1024


@pytest.mark.attack(promise="P11", refused_by="coordinator/studies/lifecycle.py")
def test_late_decline_stalls_the_study(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that let the deadline pass declines while the round is averaged: the model then belonged to no round that
    was known, was thrown away, and the study waited for it until somebody restarted the service.
    """
    began, go_on = threading.Event(), threading.Event()

    def slowly(*given: Any) -> conclusion.Conclusion:
        began.set()
        assert go_on.wait(20)
        return conclusion.conclude(*given)

    monkeypatch.setattr(aggregations, "conclude", slowly)
    alpha, bravo, mallory = served.begin(quorum=2, rounds=1, round_deadline_s=2)
    for site in (alpha, bravo):
        site.answer(site.next_assignment())
    late = mallory.next_assignment()
    assert began.wait(20)
    mallory.decline(late, "DECLINED_RESOURCES")
    go_on.set()
    assert served.until(lambda status: status["closing"])["sites"]["alpha"]["rounds_contributed"] == [1]
    (row,) = served.ask("report", study="trial")["rounds_closed"]
    assert row["unanswered"] == ["charlie"]


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/signing/certificates.py")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
@pytest.mark.parametrize("key", ["authority/key.pem", "keys/receipt.pem"])
def test_readable_key(served: Place, key: str, mode: int) -> None:
    """After a copy or a restore every user of the machine could make sites, or receipts: the service starts no more."""
    served.coordinator.stop()
    path = served.state.root / key
    path.chmod(mode)
    with pytest.raises(NotPermitted) as refused:
        Coordinator(served.state, fatal=served.failures.append)
    assert refused.value.message == f"{path} can be read by others than its owner"
    assert refused.value.hint == f"`chmod 600 {path}`, and ask who did"
    path.chmod(0o600)
    served.serve()


@pytest.mark.attack(promise="P1", refused_by="site_agent/gateway/enrolment/identity.py")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
@pytest.mark.parametrize("key", ["key.pem", "ledger_key.pem"])
def test_readable_key__of_a_site(tmp_path: Path, key: str, mode: int) -> None:
    """A site's TLS key or ledger key that every user of the hospital's machine can read is not used."""
    Identity(tmp_path).make_keys()
    (tmp_path / key).chmod(mode)
    with pytest.raises(NotPermitted, match="can be read by others than its owner"):
        Identity(tmp_path)


@pytest.mark.attack(promise="P11", refused_by="coordinator/state_directory.py")
def test_readable_key__at_the_start(world: World) -> None:
    """The same as an operator meets it: `serve` and every command end with 77 and a sentence."""
    world.init()
    (world.coordinator_state / "authority" / "key.pem").chmod(0o644)
    for arguments in (("serve",), ("invite", "alpha")):
        with pytest.raises(CommandFailed) as refused:
            command("coordinator", *arguments, "--state", world.coordinator_state)
        assert refused.value.code == 77
        assert "authority/key.pem can be read by others than its owner" in " ".join(refused.value.stderr.split())


@pytest.mark.attack(promise="P11", refused_by="coordinator/calls.py")
def test_flood_of_calls(served: Place) -> None:
    """Short calls in good form, one after another and eight at a time, took the processor, the log and the one thread
    that owns the studies from everybody, for as long as a member liked.
    """
    served.bound(burst=40, calls_a_second=0.001)
    alpha, mallory = served.begin(sites=["alpha", "mallory"], quorum=1, rounds=1)
    assignment = alpha.next_assignment()
    answers: list[str] = []

    def flood() -> None:
        for _ in range(25):
            try:
                mallory.declare("trial", pb.HELD, round=1, attempt=1)
                answers.append("")
            except grpc.RpcError as error:
                answers.append(error.details() or "")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(crooked.WAIT_S)
    assert len(answers) == 100
    assert set(answers) == {"", "TOO_BUSY"}
    assert answers.count("") < 40
    assert alpha.answer(assignment).decision == "accepted"


@pytest.mark.attack(promise="P11", refused_by="coordinator/studies/engine.py")
def test_flood_of_calls__held_again_and_again(served: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Each time that a site said that it holds its update a line of the log was written, and every follower woken."""
    (mallory,) = served.begin(sites=["mallory"])
    mallory.next_assignment()
    changes = served.coordinator.engine.follow("trial")
    with caplog.at_level("INFO"):
        mallory.declare("trial", pb.HELD, round=1, attempt=1)
        assert changes.wait(timeout_s=20)
        for _ in range(9):
            mallory.declare("trial", pb.HELD, round=1, attempt=1)
    with pytest.raises(TimeoutError):
        changes.wait(timeout_s=0)
    served.coordinator.engine.unfollow(changes)
    assert sum("holds its update" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.attack(promise="P11", refused_by="coordinator/servicers.py")
def test_flood_of_calls__that_leave_a_line_each(served: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A member connects and goes, and declares what no version knows: each time a line or two stood in the log, as fast
    as it may call. What another site does is logged all the same."""
    (mallory,) = served.begin(sites=["mallory"])
    with caplog.at_level("INFO"):
        for _ in range(3 * BURST):
            mallory.declare("trial", 99)
            call = mallory.federation.Watch(pb.WatchRequest(agent_version=__version__))
            assert next(call).HasField("offer")
            call.cancel()
        served.join("bravo")
        wait_until(lambda: "site bravo is connected" in caplog.text, "another site is logged", 20)
    for what in ("is connected", "is no longer connected", "declares a status"):
        assert BURST // 2 <= caplog.text.count(f"site mallory {what}") < 2 * BURST


@pytest.mark.attack(promise="P11", refused_by="coordinator/updates/decide.py")
def test_flood_of_calls__that_cost_much(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of all receipts, or the opening of an upload of which much came: small to ask for, much work here."""
    monkeypatch.setattr(receipts, "MAX_COPIES_AN_HOUR", 3)
    monkeypatch.setattr(decide, "MAX_AGAIN_AN_HOUR", 3)
    (mallory,) = served.begin(sites=["mallory"])
    request = pb.ReceiptsRequest(agent_version=__version__)
    for _ in range(3):
        assert list(mallory.federation.Receipts(request, timeout=20))
    with pytest.raises(grpc.RpcError) as refused:
        list(mallory.federation.Receipts(request, timeout=20))
    assert refused.value.details() == "TOO_BUSY"

    update = delta("mallory", 1, served.specs)
    opening = mallory.opening(mallory.next_assignment(), update)
    for _ in range(4):
        assert mallory.send(opening, update.payload, stop_at=8) is None
    with pytest.raises(grpc.RpcError) as refused:
        mallory.send(opening, update.payload)
    assert refused.value.details() == "TOO_BUSY"
    served.ahead_s = 3601
    receipt = mallory.send(opening, update.payload)
    assert receipt is not None
    assert receipt.decision == "accepted"


@pytest.mark.attack(promise="P11", refused_by="fl_algorithms/server/limits.py")
@pytest.mark.parametrize("method", ["feddf", "pfeddf"])
def test_blame_of_another(method: str) -> None:
    """Where networks are distilled, a small update with a negative running variance made logits no numbers: the
    largest update was blamed and left out, which was an honest one, and then the next.
    """
    study = study_of(method, model={"name": "mlp", "hidden": [4], "norm": "batch"})
    study = study.changed(study={"quorum": 2})
    half = aggregator_of(study)
    base, *others = models(study, [1, 2, 3])
    deltas = [{key: (model[key] - base[key]).numpy() for key in base} for model in others]
    poison = {key: np.zeros(value.shape, "<f4") for key, value in base.items()}
    poison["body.norms.0.running_var"][0] = -1.1
    updates = [Update(name, 5, InMemory(one)) for name, one in zip(SITES, [*deltas, poison], strict=True)]
    start = bytearray()
    half.start(InMemory({key: tensor.numpy() for key, tensor in base.items()}), start.extend)
    kept = InMemory(read(half, start))

    def make(chosen: Any, combined: Combined) -> bytes:
        out = bytearray()
        half.aggregate(
            Round(1, kept, chosen, out.extend, toy_public_data(), study.limits.max_weight, combined=combined)
        )
        return bytes(out)

    made, account = averaged(study, half, updates, (), make, kept=kept, round_number=1)
    said = "norm 1.1, and `body.norms.0.running_var` of its model, a variance, is negative"
    assert account.left_out == {"cedar": said}
    assert made == make(updates[:2], combine(half, updates[:2], study.limits.max_weight))
    assert account.norms["cedar"] < min(account.norms["ash"], account.norms["birch"])
