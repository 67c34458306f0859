"""The coordinator's copy of the receipts, as it is asked for and kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from site_agent.audit import bundle
from site_agent.gateway.exit import receipt_copy
from site_agent.state.directory import Site
from tools.evidence_tamper import Made
from wardround.errors import BadData
from wardround.signing.dsse import Envelope


@pytest.fixture(scope="module")
def made() -> Made:
    return Made(11)


@pytest.fixture
def site(made: Made) -> Site:
    return Site("st-olav", "f", "127.0.0.1:1", made.receipt_key.public_key().public_bytes_raw().hex(), "", 0)


def envelopes(made: Made) -> list[Envelope]:
    return [Envelope.from_document(json.loads(line)) for line in made.copy().splitlines()]


def test_a_copy_is_kept_as_the_coordinators_command_writes_it(tmp_path: Path, made: Made, site: Site) -> None:
    path = tmp_path / "receipts.jsonl"
    assert receipt_copy.keep(envelopes(made), site, path) == 2
    assert path.read_bytes() == made.copy()


def test_a_copy_that_is_not_whole_or_of_another_key_leaves_the_older_one(
    tmp_path: Path, made: Made, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(b"older")
    first, second, closing = envelopes(made)
    cases: list[tuple[list[Envelope], str]] = [
        ([], "cannot be believed: it is empty"),
        ([first, second], "cannot be believed: signed as"),
        ([first, closing], "is not the one that its statement is about"),
        (envelopes(Made(11, seed=9)), "cannot be believed: signed by key"),
        ([replace(first, payload=b"\xff"), second, closing], "cannot be believed: .* payload is no text"),
    ]
    for given, said in cases:
        with pytest.raises(BadData, match=said):
            receipt_copy.keep(given, site, path)
    monkeypatch.setattr(receipt_copy, "LARGEST", 100)
    with pytest.raises(BadData, match="sent more than 100 bytes of receipts; nothing was kept"):
        receipt_copy.keep(envelopes(made), site, path)
    assert path.read_bytes() == b"older"


def test_a_bundle_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LARGEST", 100)
    (tmp_path / "b.tar").write_bytes(bytes(101))
    verdict, code = bundle.verify_bundle(tmp_path / "b.tar")
    assert code == 3
    assert "is larger than 100 bytes: unpack it, and verify the folders in it" in verdict.reason
    assert "cannot be read (No such file" in bundle.verify_bundle(tmp_path / "none")[0].reason
