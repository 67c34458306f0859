"""What a round costs the gateway, in counts that no machine's speed changes: fsyncs, and passes over the bytes."""

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.gateway.exit import egress, measure
from site_agent.state.directory import Consent
from tests.site_agent.site_world import STUDY, SiteWorld
from tools.world import wait_until
from wardround.records.receipts import HEAD_TYPE
from wardround.signing import dsse
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest


def do_round(world: SiteWorld, number: int) -> None:
    world.coordinator.assign(STUDY, number)
    world.coordinator.wait_receipts(number)

    def is_applied() -> bool:
        journal = world.state.journal(STUDY)
        return (journal.round, journal.phase, journal.applied) == (number, "decided", True)

    wait_until(is_applied, f"the trainer heard of round {number}", 60)


def test_a_round_fsyncs_its_ledger_and_its_journal_and_nothing_else(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    do_round(world, 1)
    counted: dict[int, Counter[str]] = {}  # by thread: a connection that breaks writes lines from another one
    real = os.fsync

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(world.state.root):
            place = path.relative_to(world.state.root)
            name = place.as_posix() if path.suffix != ".tmp" else f"{place.parent}/new"
            counted.setdefault(threading.get_ident(), Counter())[name] += 1
        real(descriptor)

    before = len(world.lines())
    monkeypatch.setattr(os, "fsync", note)
    do_round(world, 2)
    monkeypatch.undo()
    kinds = Counter(line["type"] for line in world.lines()[before:])
    (worker,) = (places for places in counted.values() if "journal/new" in places)
    lines = worker.pop("ledger/000001.jsonl")
    assert worker == {"journal/new": 1}  # that it is to be sent; what was begun, trained and decided can be done again
    assert lines in (2, 3), kinds  # the upload's line before the wire, the receipt's; perhaps one of what else was sent
    assert kinds["upload"] == 1, kinds


def test_neither_a_model_nor_an_update_is_read_once_more_as_a_whole(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is hashed as it comes; an update is measured for the ledger, and known again by its tag as it is sent."""
    world.ready()
    do_round(world, 1)
    read, measured = list[Path](), list[Path]()
    whole, row = TensorFile.manifest, measure.measure

    def note_read(self: TensorFile) -> Manifest:
        read.append(self.path)
        return whole(self)

    def note_measured(file: Path, consent: Consent) -> measure.Measured:
        measured.append(file)
        return row(file, consent)

    monkeypatch.setattr(TensorFile, "manifest", note_read)
    monkeypatch.setattr(egress, "measure", note_measured)
    do_round(world, 2)
    assert {path.parent for path in read} <= {world.state.staging, world.folder}  # by the trainer and the coordinator
    assert measured == [world.state.own_copy(STUDY)]


def test_a_head_is_signed_once_however_often_it_is_shown(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ready()
    signed, real = list[object](), dsse.sign

    def note(payload_type: str, value: Any, key: Ed25519PrivateKey) -> dsse.Envelope:
        if payload_type == HEAD_TYPE:
            signed.append(value["lines"])
        return real(payload_type, value, key)

    monkeypatch.setattr(dsse, "sign", note)
    do_round(world, 1)
    do_round(world, 2)
    assert len(signed) >= 4  # with each upload, and after each receipt
    assert len(signed) == len(set(signed))
