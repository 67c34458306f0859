"""One update's way in: resumed, resent, forged, cut short. It counts once, or is refused by name."""

import hashlib
import json
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator import turns
from coordinator.studies.history import uploads_of
from coordinator.updates import decide, receive
from tests.coordinator.conftest import Place, on_both, refused
from tests.coordinator.fake_site import FakeSite, Update, delta
from tests.coordinator.test_rounds import SPECS
from tools.world import wait_until
from wardround.records.messages import manifest_message
from wardround.records.receipts import EMPTY_HEAD
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import tensors_pb2


def begun(place: Place) -> tuple[FakeSite, Any, Update, Any]:
    """One site with an open assignment, an update for it and the opening of its upload."""
    (site,) = place.begin(sites=["alpha"])
    assignment = site.next_assignment()
    update = delta("alpha", assignment.round, SPECS)
    return site, assignment, update, site.opening(assignment, update)


def spool(place: Place, opening: Any) -> bytes:
    path = place.state.blobs / "uploads" / f"{opening.upload_id.hex()}.safetensors"
    return path.read_bytes() if path.exists() else b""


def test_an_upload_that_broke_goes_on_where_it_was(place: Place) -> None:
    site, _, update, opening = begun(place)
    assert site.send(opening, update.payload, chunk=8, stop_at=16) is None
    offsets: list[int] = []
    receipt = site.send(opening, update.payload, on_offset=offsets.append)
    assert offsets == [16]
    assert receipt
    assert receipt.decision == "accepted"


@on_both
def test_an_upload_goes_on_after_the_coordinator_was_restarted(place: Place) -> None:
    site, _, update, opening = begun(place)
    site.send(opening, update.payload, chunk=8, stop_at=24)
    place.restart()
    offsets: list[int] = []
    receipt = site.send(opening, update.payload, on_offset=offsets.append)
    assert offsets == [24]
    assert receipt
    assert receipt.decision == "accepted"


def test_bytes_that_were_not_durable_are_asked_for_again(place: Place) -> None:
    """After a power cut a file may be longer than what was fsynced, with anything in its tail."""
    site, _, update, opening = begun(place)
    site.send(opening, update.payload, chunk=8, stop_at=16)
    path = place.state.blobs / "uploads" / f"{opening.upload_id.hex()}.safetensors"
    with path.open("ab") as file:
        file.write(b"\0" * 12)
    receipt = site.send(opening, update.payload)
    assert receipt
    assert receipt.decision == "accepted"


def test_a_spool_that_lost_bytes_begins_again(place: Place) -> None:
    site, _, update, opening = begun(place)
    site.send(opening, update.payload, chunk=8, stop_at=16)
    path = place.state.blobs / "uploads" / f"{opening.upload_id.hex()}.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    offsets: list[int] = []
    assert site.send(opening, update.payload, on_offset=offsets.append) is not None
    assert offsets == [0]


def test_a_resent_update_gets_the_same_receipt_byte_for_byte_and_counts_once(place: Place) -> None:
    site, _, update, opening = begun(place)
    first = site.send(opening, update.payload)
    replies = [site.inquire(opening.upload_id) for _ in range(3)]
    place.restart()
    replies.append(site.inquire(opening.upload_id))
    assert len({reply.receipt.SerializeToString(deterministic=True) for reply in replies}) == 1
    assert site.send(opening, update.payload) == first
    with place.coordinator.context.store.read() as session:
        assert len(uploads_of(session, "trial", 1)) == 1


def test_many_streams_with_the_same_update_get_one_receipt(place: Place) -> None:
    """Each new stream ends the one before it, so they wait a little longer each time, as a site does."""
    site, _, update, opening = begun(place)
    never = threading.Event()

    def send(seed: int) -> str:
        chance = random.Random(seed)
        for tries in range(60):
            never.wait(chance.uniform(0, 0.01 * tries))
            try:
                receipt = site.send(opening, update.payload, chunk=4)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017  the line's own "busy"
            else:
                if receipt is not None:
                    return receipt.receipt_id
        raise AssertionError("never through")

    with ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(send, range(12)))) == 1
    status = place.until(lambda status: status["round"] == 2)
    assert status["sites"]["alpha"]["rounds_contributed"] == [1]


def test_the_same_id_for_another_update_is_refused_and_the_first_stands(place: Place) -> None:
    site, assignment, update, opening = begun(place)
    site.send(opening, update.payload)
    other = update.with_tensor(0, np.ones(2))
    again = site.opening_again(assignment, other, opening.upload_id)
    with pytest.raises(grpc.RpcError, match="UPLOAD_ID_CONFLICT"):
        site.send(again, other.payload)
    assert site.inquire(opening.upload_id).HasField("receipt")


def test_another_sites_upload_id_tells_nothing_about_its_upload(place: Place) -> None:
    alpha, bravo = place.begin(sites=["alpha", "bravo"])
    update = delta("alpha", 1, SPECS)
    opening = alpha.opening(alpha.next_assignment(), update)
    alpha.send(opening, update.payload)
    assert bravo.take(bravo.inquire(opening.upload_id).receipt).decision == "not_received"


def test_a_second_update_of_a_site_in_one_round_is_a_duplicate(place: Place) -> None:
    alpha, _ = place.begin(sites=["alpha", "bravo"])
    assignment = alpha.next_assignment()
    update = delta("alpha", 1, SPECS)
    alpha.answer(assignment, update)
    receipt = alpha.send(alpha.opening(assignment, update), update.payload)
    assert receipt
    assert (receipt.decision, receipt.code) == ("refused", "UPLOAD_DUPLICATE")
    assert place.status()["sites"]["alpha"]["state"] == "accepted"


def test_an_unknown_upload_gets_a_signed_not_received_and_that_stands(place: Place) -> None:
    """The site gave its stream up and asked; what came late of it got a receipt, and an honest ledger, which says that
    the upload was not received, was called changed."""
    site, assignment, update, opening = begun(place)
    said = site.take(site.inquire(opening.upload_id).receipt)
    assert (said.decision, said.code) == ("not_received", "NOT_RECEIVED")
    with pytest.raises(grpc.RpcError, match="UPLOAD_ID_CONFLICT"):
        site.send(opening, update.payload)
    assert site.inquire(opening.upload_id).receipt.payload

    receipt = site.send(site.opening(assignment, update), update.payload)
    assert receipt
    assert receipt.decision == "accepted"
    assert receipt.previous == EMPTY_HEAD  # not_received is no link of the chain


def test_an_undecided_upload_is_told_by_its_offset(place: Place) -> None:
    site, _, update, opening = begun(place)
    site.send(opening, update.payload, chunk=8, stop_at=8)
    reply = site.inquire(opening.upload_id)
    assert (reply.HasField("receipt"), reply.offset) == (False, 8)


def test_an_upload_that_its_studys_end_left_undecided_is_answered_and_forgotten(place: Place) -> None:
    """It can never be decided: else its line in the site's ledger would say for good that it may have left."""
    (site,) = place.begin(sites=["alpha"], quorum=1)
    assignment = site.next_assignment()
    update = delta("alpha", 1, SPECS)
    opening = site.opening(assignment, update)
    assert site.send(opening, update.payload, chunk=8, stop_at=8) is None
    assert site.inquire(opening.upload_id).HasField("offset")  # it may go on
    place.ask("stop", study="trial")
    assert site.take(site.inquire(opening.upload_id).receipt).decision == "not_received"
    assert not list((place.state.blobs / "uploads").iterdir())


def test_receipts_of_a_site_are_chained_and_countersign_its_ledger(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"])
    for _ in range(3):
        site.answer(site.next_assignment())
    previous = EMPTY_HEAD
    with place.coordinator.context.store.read() as session:
        uploads = uploads_of(session, "trial", 1)
    for receipt, upload in zip(site.receipts, uploads, strict=True):
        assert receipt.previous == previous
        assert receipt.ledger == site.ledger.head(receipt.ledger.lines if receipt.ledger else None)
        assert upload.receipt is not None
        previous = hashlib.sha256(json.loads(upload.receipt)["payload"].encode()).hexdigest()


def broken_digest(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    return site.opening(assignment, update), update.payload[:-1] + b"\x01"


def cut_short(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    return site.opening(assignment, update), update.payload[:-4]


def another_commit(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    opening = site.opening(assignment, update)
    opening.manifest.bundles[0].tensors[0].sha256 = b"\0" * 32
    return opening, update.payload


def private_tensor(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    tensors = (*update.tensors, (TensorSpec("private.weight", "F32", (1,)), b"\0" * 4))
    return site.opening(assignment, Update(tensors)), Update(tensors).payload


def other_round(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    opening = site.opening(assignment, update)
    opening.round = 2
    return opening, update.payload


def undeclared_metric(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    opening = site.opening(assignment, update)
    opening.metrics.add(name="patients", value="7")
    return opening, update.payload


def shorter_ledger(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    site.inquire(uuid.uuid4().bytes)
    opening = site.opening(assignment, update)
    site.send(opening, update.payload, chunk=4, stop_at=4)  # seen once
    site.ledger.hashes = site.ledger.hashes[:1]
    return site.opening(assignment, update), update.payload


def forked_ledger(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    site.send(site.opening(assignment, update), update.payload, chunk=4, stop_at=4)
    site.ledger.hashes[0] = b"\0" * 32
    return site.opening(assignment, update), update.payload


def forged_ledger(site: FakeSite, assignment: Any, update: Update) -> tuple[Any, bytes]:
    opening = site.opening(assignment, update)
    opening.ledger.signature = bytes(64)
    return opening, update.payload


@pytest.mark.parametrize(
    ("wrong", "code", "tensor", "answers"),
    [
        pytest.param(broken_digest, "PAYLOAD_DIGEST", "layer.weight", True, id="a byte changed on the way"),
        pytest.param(cut_short, "PAYLOAD_INCOMPLETE", "", True, id="committed before its end"),
        pytest.param(another_commit, "PAYLOAD_DIGEST", "layer.bias", True, id="other bytes than announced"),
        pytest.param(private_tensor, "MANIFEST_NAMES", "private.weight", True, id="a tensor too many"),
        pytest.param(undeclared_metric, "METRICS_UNDECLARED", "", True, id="a metric too many"),
        pytest.param(other_round, "ROUND_NOT_ASKED", "", False, id="a round that is not open"),
        pytest.param(shorter_ledger, "LEDGER_ROLLBACK", "", True, id="a ledger that shrank"),
        pytest.param(forked_ledger, "LEDGER_FORK", "", True, id="a ledger with another past"),
        pytest.param(forged_ledger, "LEDGER_SIGNATURE", "", True, id="a head that nobody signed"),
    ],
)
def test_a_wrong_update_is_refused_by_name_and_leaves_nothing(
    place: Place, wrong: Callable[[FakeSite, Any, Update], tuple[Any, bytes]], code: str, tensor: str, answers: bool
) -> None:
    alpha, _ = place.begin(sites=["alpha", "bravo"])
    assignment = alpha.next_assignment()
    update = delta("alpha", 1, SPECS)
    opening, payload = wrong(alpha, assignment, update)
    receipt = alpha.send(opening, payload)
    assert receipt
    assert (receipt.decision, receipt.code, receipt.tensor) == ("refused", code, tensor)
    assert (receipt.ledger is None) == code.startswith("LEDGER")
    assert spool(place, opening) == b""
    assert place.status()["sites"]["alpha"]["state"] == ("refused" if answers else "training")


def chunk(offset: int, data: bytes) -> Any:
    return pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=offset, data=data))


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        pytest.param([chunk(4, b"1234")], "MESSAGE_MALFORMED", id="a gap"),
        pytest.param([chunk(0, b"1234"), chunk(0, b"1234")], "MESSAGE_MALFORMED", id="the same chunk twice"),
        pytest.param([chunk(0, bytes(33))], "PAYLOAD_INCOMPLETE", id="more than announced"),
        pytest.param([chunk(0, bytes(1024 * 1024 + 1))], "MESSAGE_MALFORMED", id="a chunk over 1 MiB"),
        pytest.param([pb.UploadRequest()], "MESSAGE_MALFORMED", id="an empty message"),
        pytest.param([pb.UploadRequest(inquire=pb.UploadInquire())], "MESSAGE_MALFORMED", id="an inquiry in between"),
    ],
)
def test_a_stream_that_breaks_the_rules_ends_with_an_error_and_the_upload_can_go_on(
    place: Place, messages: list[Any], code: str
) -> None:
    site, _, update, opening = begun(place)

    def requests() -> Iterator[Any]:
        yield pb.UploadRequest(open=opening)
        yield from messages

    with pytest.raises(grpc.RpcError, match=code):
        list(site.federation.Upload(requests(), timeout=20))
    receipt = site.send(opening, update.payload)
    assert receipt
    if messages[0].chunk.offset == 0 and messages[0].chunk.data == b"1234":
        assert receipt.code == "PAYLOAD_DIGEST"  # those four bytes were taken, and they are not the update's
    else:
        assert receipt.decision == "accepted"


@pytest.mark.parametrize(
    "change",
    [
        {"upload_id": b"short"}, {"study": "No Name"}, {"digest": b""}, {"num_examples": 2**60},
        {"metrics": [pb.Metric(name="val_loss", value="1" * 41)]}, {"new_line_hashes": [b"short"]},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_header_without_its_form_is_refused_before_anything_is_kept(place: Place, change: dict[str, Any]) -> None:
    site, _, update, opening = begun(place)
    for name, value in change.items():
        opening.ClearField(name)
        opening.MergeFrom(pb.UploadOpen(**{name: value}))
    with pytest.raises(grpc.RpcError, match="MESSAGE_MALFORMED"):
        site.send(opening, update.payload)


def test_a_stream_that_does_not_begin_with_an_opening_is_refused(place: Place) -> None:
    site, *_ = begun(place)
    for messages in ([], [chunk(0, b"1234")]):
        with pytest.raises(grpc.RpcError, match="MESSAGE_MALFORMED"):
            list(site.federation.Upload(iter(messages), timeout=20))


def test_a_norm_above_the_studys_limit_is_refused(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"], max_update_norm=1e-3)
    receipt = site.answer(site.next_assignment())
    assert (receipt.decision, receipt.code) == ("refused", "TENSOR_NORM")


def test_a_site_that_is_refused_all_the_time_is_told_to_wait(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_REFUSED_AN_HOUR", 3)
    alpha, _ = place.begin(sites=["alpha", "bravo"])
    assignment = alpha.next_assignment()
    bad = delta("alpha", 1, SPECS).with_tensor(0, np.full(2, np.nan))
    for _ in range(3):
        receipt = alpha.send(alpha.opening(assignment, bad), bad.payload)
        assert receipt
        assert receipt.decision == "refused"
    with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
        alpha.send(alpha.opening(assignment, bad), bad.payload)


def test_a_full_disk_is_told_before_a_payload_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site, _, update, opening = begun(place)
    monkeypatch.setattr(decide, "ROOM_LEFT", 2**62)
    with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
        site.send(opening, update.payload)
    assert f"the disk has no room for an update of {len(update.payload)} bytes to `trial`" in caplog.text
    assert "free some space, the sites try again" in caplog.text
    monkeypatch.undo()
    receipt = site.send(opening, update.payload)
    assert receipt
    assert receipt.decision == "accepted"


def test_an_upload_whose_line_breaks_while_it_waits_for_its_turn_is_given_up_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it counts among its site's calls and uploads, and as one that is arriving."""
    for name, value in (("SMALL", 1), ("JUDGED_S", 60), ("STILL_S", 60)):
        monkeypatch.setattr(turns, name, value)
    alpha, bravo, charlie = sites = place.begin()
    openings = [site.opening(site.next_assignment(), delta(site.name, 1, SPECS)) for site in sites]
    gate, under_way = threading.Event(), place.coordinator.uploads.receptions

    def held(opening: Any) -> Iterator[Any]:
        yield pb.UploadRequest(open=opening)
        gate.wait(20)

    going = [
        alpha.federation.Upload(held(openings[0]), timeout=20),
        bravo.federation.Upload(held(openings[1]), timeout=20),
    ]
    assert [next(iter(call)).offset for call in going] == [0, 0]
    waiting = charlie.federation.Upload(held(openings[2]), timeout=20)
    wait_until(lambda: len(under_way) == 3, "it waits", 20)
    waiting.cancel()
    wait_until(lambda: len(under_way) == 2, "it is given up", turns.PATIENCE_S / 2)
    gate.set()
    for call in going:
        call.cancel()
    again = charlie.send(openings[2], delta("charlie", 1, SPECS).payload)
    assert again
    assert again.decision == "accepted"


def test_an_update_given_up_for_another_is_forgotten(place: Place) -> None:
    """A site that trained again uses a new id; what it had begun to send must not fill the disk."""
    site, assignment, update, first = begun(place)
    site.send(first, update.payload, chunk=8, stop_at=16)
    assert spool(place, first) != b""
    receipt = site.send(site.opening(assignment, update), update.payload)
    assert receipt
    assert receipt.decision == "accepted"
    assert spool(place, first) == b""
    assert site.take(site.inquire(first.upload_id).receipt).decision == "not_received"


def test_large_payloads_are_acknowledged_on_the_way(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "ACK_BYTES", 8)
    monkeypatch.setattr(receive, "ACK_S", 0.0)
    site, _, update, opening = begun(place)
    offsets: list[int] = []
    site.send(opening, update.payload, chunk=4, on_offset=offsets.append)
    assert offsets == [0, 8, 16, 24, 32]


def test_downloads_go_on_from_an_offset_and_only_offered_models_are_given(place: Place) -> None:
    site, assignment, _, _ = begun(place)
    manifest, payload = site.download(assignment)
    assert manifest.digest() == assignment.base.digest.hex()
    assert site.download(assignment, offset=10)[1] == payload[10:]
    assert site.download(assignment, offset=10_000)[1] == b""
    assignment.base.digest = bytes(32)
    with pytest.raises(grpc.RpcError, match="REVISION_CHANGED"):
        site.download(assignment)


def test_a_site_sees_only_studies_that_list_it(place: Place) -> None:
    alpha, _ = place.begin(sites=["alpha", "bravo"])
    assignment = alpha.next_assignment()
    mallory = place.join("mallory")
    assert mallory.federation.Studies(pb.StudiesRequest(agent_version="0.1.0"), timeout=20).studies == []
    with pytest.raises(grpc.RpcError, match="STUDY_UNKNOWN"):
        mallory.download(assignment)
    update = delta("alpha", 1, SPECS)
    receipt = mallory.send(mallory.opening(assignment, update), update.payload)
    assert receipt
    assert (receipt.decision, receipt.code, receipt.site) == ("refused", "STUDY_UNKNOWN", "mallory")


def test_every_message_of_an_upload_is_parsed_within_bounds(place: Place) -> None:
    """Long ones of empty submessages: refused by their length, short ones by their number, without being kept."""
    site, _, update, opening = begun(place)
    manifest = manifest_message(update.manifest)
    for count, code in ((1_000_000, "max"), (400_000, "MESSAGE_MALFORMED"), (50_000, "MANIFEST_NAMES")):
        opening.manifest.CopyFrom(manifest)
        for _ in range(count):
            opening.manifest.bundles[0].tensors.add()
        with pytest.raises(grpc.RpcError, match=code):
            site.send(opening, update.payload)


def test_a_long_message_after_the_opening_is_a_chunk_and_nothing_else(place: Place) -> None:
    site, _, update, opening = begun(place)
    bomb = pb.UploadRequest(open=opening)
    for _ in range(10_000):
        bomb.open.manifest.bundles.add()
    hidden = chunk(0, b"1234").SerializeToString() + bomb.SerializeToString()
    send = site.channel.stream_stream("/wardround.v1.Federation/Upload")
    for data in (bomb.SerializeToString(), hidden):
        messages = iter([pb.UploadRequest(open=opening).SerializeToString(), data])
        with refused("MESSAGE_MALFORMED\nafter `open` come chunks of at most 1 MiB"):
            list(send(messages, timeout=20))
    receipt = site.send(opening, update.payload)
    assert receipt
    assert receipt.decision == "accepted"
