"""A file of the coordinator that is damaged or lost: never used, named, and made good where somebody has it."""

import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from coordinator.storage import blobs
from coordinator.storage.blobs import Blobs
from tests.coordinator.conftest import SITES, Place
from tests.coordinator.test_rounds import expected_model, model_bytes
from wardround.errors import BadData
from wardround.v1 import federation_pb2 as pb


def flip(path: Path) -> bytes:
    """Flip a bit in the last byte of a file. Returns what it was."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data


UNREADABLE = Path("/proc/self/mem")  # a regular file whose first byte gives EIO, as a bad sector does


def copies(place: Place, digest: str) -> tuple[Path, Path]:
    """A model and its second copy."""
    name = f"{digest}.safetensors"
    return place.state.blobs / "models" / name, place.state.blobs / "spare" / name


def damage(place: Place, digest: str) -> None:
    """Damage both copies of a model."""
    for path in copies(place, digest):
        path.write_bytes(b"rubbish")


@pytest.mark.parametrize("lost", ["flipped", "gone", "unreadable"])
def test_a_damaged_model_is_made_good_from_its_second_copy_and_the_round_goes_on(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A study ended "failed" for good by one bit."""
    monkeypatch.setattr(blobs, "FRESH_S", 0.0)
    sites = place.begin()
    for site in sites:
        site.answer(site.next_assignment())
    digest = place.until(lambda status: status["round"] == 2)["model_digest"]
    model, spare = copies(place, digest)
    flip(model)
    if lost != "flipped":
        model.unlink()
    if lost == "unreadable":
        model.symlink_to(UNREADABLE)
    for site in sites:  # which download it first
        site.answer(site.next_assignment())
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES, SITES])
    assert f"{model} was damaged or gone; it was made good from its second copy: check the disk" in caplog.text
    assert {path.name for path in model.parent.iterdir()} == {path.name for path in spare.parent.iterdir()}


def test_a_model_that_a_site_finds_damaged_is_hashed_again_before_the_next_attempt(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"])
    first = site.next_assignment()
    site.download(first)
    model, _ = copies(place, first.base.digest.hex())
    whole = flip(model)  # after it was hashed
    site.decline(first, "DECLINED_MODEL_MISMATCH")
    assert site.answer(site.next_assignment()).decision == "accepted"
    place.until(lambda status: status["round"] == 2)
    assert model.read_bytes() == whole


def test_without_a_whole_copy_the_study_pauses_says_so_and_goes_on_with_the_file_from_a_backup(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "FRESH_S", 0.0)
    (site,) = place.begin(sites=["alpha"], rounds=1)
    assignment = site.next_assignment()
    digest = assignment.base.digest.hex()
    model, _ = copies(place, digest)
    backup = model.read_bytes()
    damage(place, digest)
    with pytest.raises(grpc.RpcError, match="COORDINATOR_TROUBLE"):
        site.download(assignment)
    status = place.until(lambda status: status["state"] == "paused")
    folder = place.state.blobs
    said = f"model {digest[:12]}… is damaged or gone in {folder / 'models'}, and so is its copy in {folder / 'spare'}"
    assert status["why"] == said
    assert site.next_assignment().stop.reason == pb.Stop.PAUSED
    with pytest.raises(BadData) as refusal:
        place.ask("start", study="trial")
    assert refusal.value.message == said
    assert refusal.value.hint == (
        f"check the disk; restore {digest[:12]}….safetensors from a backup into {folder / 'models'}, then "
        "`coordinator study start`; without a backup: `coordinator study renew`"
    )
    model.write_bytes(backup)
    place.ask("start", study="trial")
    again = site.next_assignment()
    assert again.attempt == 2
    assert site.answer(again).decision == "accepted"
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([("alpha",)])


@pytest.mark.parametrize("harm", [Path.unlink, flip])
def test_an_accepted_update_that_is_gone_or_damaged_is_asked_for_again_and_counts(
    place: Place, harm: Callable[[Path], object]
) -> None:
    """The receipt stays true: the site sends the same update once more, and the model is the undisturbed one."""
    sites = place.begin(rounds=1)
    assignments = [site.next_assignment() for site in sites]
    receipt = sites[0].answer(assignments[0])
    harm(Blobs(place.state.blobs).spool(receipt.upload_id))
    for site, assignment in zip(sites[1:], assignments[1:], strict=True):
        site.answer(assignment)
    again = sites[0].next_assignment()
    assert (again.round, again.attempt) == (1, 2)
    assert sites[0].answer(again).decision == "accepted"
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES])


def test_an_accepted_update_that_is_gone_at_the_next_start_is_asked_for_again(place: Place) -> None:
    (site,) = place.begin(sites=["alpha", "bravo"], rounds=1, quorum=1)[:1]
    receipt = site.answer(site.next_assignment())
    place.coordinator.stop()
    flip(Blobs(place.state.blobs).spool(receipt.upload_id))
    place.serve()
    bravo = place.sites["bravo"]
    bravo.watch_again()
    site.watch_again()
    bravo.answer(bravo.next_assignment())
    assert site.answer(site.next_assignment()).decision == "accepted"
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([("alpha", "bravo")])


def test_what_a_killed_process_had_half_written_is_swept_at_the_next_start(place: Place) -> None:
    """Of a damaged study's files nothing is swept but what nobody can want."""
    place.coordinator.stop()
    left = [
        place.state.root / ".config.toml.4711.140.tmp", place.state.authority / ".key.pem.4711.140.tmp",
        place.state.blobs / "models" / ".trial-1-1.safetensors", place.state.blobs / "spare" / ".x.safetensors",
    ]  # fmt: skip
    for path in left:
        path.write_bytes(b"half")
    kept = place.state.root / ".profile"
    kept.write_bytes(b"a person's")
    old, new = place.state.root / ".backup-1", place.state.root / ".backup-2"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    place.serve()
    assert not any(path.exists() for path in left)
    assert [path.exists() for path in (kept, old, new)] == [True, False, True]
