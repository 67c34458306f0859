"""Bytes to a spool: what came is durable, one stream at a time has the spool, and nothing is judged."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.storage import database, tables
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.terms import UpdateTerms
from coordinator.updates import receive
from coordinator.updates.receive import Reception, Receptions
from tests.coordinator.test_admission import HEADER
from wardround.errors import BadData, TryAgain
from wardround.records.update import UploadHeader
from wardround.tensors.manifests import Manifest, PayloadHasher, TensorSpec

SPECS = (TensorSpec("bias", "F32", (2,)), TensorSpec("weight", "F32", (2, 3)))
PAYLOAD = bytes(range(32))


def announced() -> Manifest:
    hasher = PayloadHasher(SPECS)
    hasher.update(PAYLOAD)
    return hasher.manifest()


OPENED = replace(HEADER, upload_id="ab" * 16, manifest=announced())


def row_of(received: int) -> tables.Upload:
    return tables.Upload(
        id=OPENED.upload_id, site="alpha", study="trial", revision=1, round=2, attempt=1, content="",
        manifest_sha256=OPENED.manifest.digest(), payload_bytes=32, metrics="[]", num_examples=10,
        num_validation=3, received=received, opened_s=0.0,
    )  # fmt: skip


class Receiver:
    """A store and a folder of spools; the row of one upload is written."""

    def __init__(self, folder: Path) -> None:
        database.upgrade(folder / "coordinator.db")
        self.store = Store(folder / "coordinator.db")
        self.blobs = Blobs(folder)
        with self.store.write() as session:
            session.add(row_of(0))

    def reception(self, header: UploadHeader = OPENED, durable: int = 0) -> Reception:
        reception = Reception("alpha", header, self.store, self.blobs, row_of(durable), UpdateTerms())
        reception.prepare()
        return reception

    def noted(self) -> int:
        with self.store.read() as session:
            row = session.get(tables.Upload, OPENED.upload_id)
        assert row is not None
        return row.received


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path)
    yield made
    made.store.close()


def test_what_came_is_one_value_with_its_manifest(receiver: Receiver) -> None:
    reception = receiver.reception()
    reception.take(0, PAYLOAD[:5])
    reception.take(5, PAYLOAD[5:])
    with reception.committed("c0ffee") as received:
        assert (received.site, received.header, received.bytes) == ("alpha", OPENED, 32)
        assert (received.manifest, received.committed) == (OPENED.manifest, "c0ffee")
        assert received.spool == receiver.blobs.spool(OPENED.upload_id)
        assert received.spool.read_bytes().endswith(PAYLOAD)
    reception.close()


def test_a_payload_that_ends_inside_a_tensor_has_no_manifest(receiver: Receiver) -> None:
    reception = receiver.reception()
    reception.take(0, PAYLOAD[:9])
    with reception.committed("") as received:
        assert (received.bytes, received.manifest) == (9, None)
    reception.close()


def test_a_closing_validation_has_no_spool_and_takes_no_byte(receiver: Receiver) -> None:
    reception = receiver.reception(replace(OPENED, manifest=Manifest(())))
    with pytest.raises(BadData, match="more bytes than the manifest says"):
        reception.take(0, b"1")
    with reception.committed("") as received:
        assert (received.spool, received.bytes, received.manifest) == (None, 0, None)
    reception.close()


def test_a_stream_that_ends_notes_what_came_and_the_next_one_goes_on_there(receiver: Receiver) -> None:
    first = receiver.reception()
    assert first.take(0, PAYLOAD[:12]) is None
    assert receiver.noted() == 0
    first.close()
    assert receiver.noted() == 12
    with pytest.raises(TryAgain, match="goes on on another stream"):
        first.take(12, b"1")
    second = receiver.reception(durable=12)
    assert second.received == 12
    second.take(12, PAYLOAD[12:])
    with second.committed("") as received:
        assert received.manifest == OPENED.manifest
    second.close()


def test_much_is_noted_on_the_way(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "ACK_BYTES", 8)
    monkeypatch.setattr(receive, "ACK_S", 0.0)
    reception = receiver.reception()
    assert [reception.take(offset, PAYLOAD[offset : offset + 4]) for offset in (0, 4, 8)] == [None, 8, None]
    assert receiver.noted() == 8
    reception.close()


def test_while_an_update_is_judged_no_other_stream_takes_its_spool(receiver: Receiver) -> None:
    receptions, reception = Receptions(), receiver.reception()
    receptions.add(reception)
    reception.take(0, PAYLOAD)
    with ThreadPoolExecutor(1) as pool:
        with reception.committed(""):
            assert receptions.judging() == {("trial", "alpha")}
            ended = pool.submit(receptions.close_where, lambda other: other.site == "alpha")
            with pytest.raises(TimeoutError):
                ended.result(0.05)
            assert receptions.is_current(reception)
        ended.result(20)
    assert not receptions.is_current(reception)
    assert receptions.judging() == frozenset()
    assert len(receptions) == 0


def test_a_site_has_two_receptions_at_most_and_one_of_an_upload(receiver: Receiver) -> None:
    receptions = Receptions()
    receptions.refuse_crowd("alpha", OPENED.upload_id)
    first = Reception("alpha", OPENED, receiver.store, receiver.blobs, row_of(0), UpdateTerms())
    receptions.add(first)
    with pytest.raises(TryAgain, match="site `alpha` has 1 uploads under way"):
        receptions.refuse_crowd("alpha", OPENED.upload_id)
    receptions.refuse_crowd("alpha", "cd" * 16)
    other = Reception(
        "alpha", replace(OPENED, upload_id="cd" * 16), receiver.store, receiver.blobs, row_of(0), UpdateTerms()
    )
    receptions.add(other)
    with pytest.raises(TryAgain, match="site `alpha` has 2 uploads under way"):
        receptions.refuse_crowd("alpha", "ef" * 16)
    receptions.refuse_crowd("bravo", "ef" * 16)
    receptions.close(first)
    receptions.refuse_crowd("alpha", "ef" * 16)


def test_only_the_reception_on_the_list_can_be_taken_off_it(receiver: Receiver) -> None:
    receptions = Receptions()
    older, newer = (
        receiver.reception(),
        Reception("alpha", OPENED, receiver.store, receiver.blobs, row_of(0), UpdateTerms()),
    )
    receptions.add(older)
    receptions.add(newer)
    receptions.close(older)
    assert receptions.is_current(newer)
    assert not receptions.is_current(older)
