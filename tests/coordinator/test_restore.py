"""Backups that are made while the coordinator serves, and the way back from one for all sites at once."""

import hashlib
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
import sqlalchemy as sa

from coordinator import backups, restores
from coordinator import state_directory as places
from coordinator.answers import SnapshotMade
from coordinator.state_directory import Config, State, Storage
from coordinator.storage import tables
from coordinator.storage.blobs import Blobs
from coordinator.storage.schema import newest_schema
from tests.coordinator.conftest import SITES, Place, on_both, on_file
from tests.coordinator.fake_site import FakeSite, delta
from tests.coordinator.postgres import Postgres
from tests.coordinator.test_damaged_files import UNREADABLE, damage, flip
from tests.coordinator.test_rounds import SPECS, expected_model, model_bytes
from wardround import __version__
from wardround.errors import BadData, CannotWrite, NeedsPerson, UsageProblem
from wardround.local.durable import make_folder
from wardround.local.half_written import beside
from wardround.records.messages import envelope_message
from wardround.records.receipts import EMPTY_HEAD
from wardround.signing import certificates, dsse
from wardround.v1 import enrolment_pb2, federation_pb2_grpc
from wardround.v1 import federation_pb2 as pb
from wardround.web.passwords import Users


def answer_all(sites: list[FakeSite]) -> None:
    for site in sites:
        assert site.answer(site.next_assignment()).decision == "accepted"


def backup_of(place: Place, out: Path) -> backups.Contents:
    """What `coordinator backup` does beside the running service."""
    return backups.make(place.state, SnapshotMade.model_validate(place.ask("snapshot")), out)


def restored_config(place: Place) -> Config:
    """That of a coordinator, restored to a file wherever its database was."""
    return place.state.config().model_copy(update={"storage": Storage()})


def lost_and_restored(place: Place, backup: Path) -> list[str]:
    """The state directory is gone; a new one is made of the backup, and serves. The studies that went on in it."""
    place.coordinator.stop()
    shutil.rmtree(place.state.root)
    backups.put_back(backup, place.state)
    with restores.opened(place.state) as context:
        studies = restores.going_on(context)
    place.serve()
    return studies


def test_a_backup_made_in_the_middle_of_a_round_has_all_that_its_database_names(place: Place, tmp_path: Path) -> None:
    sites = place.begin(rounds=1)
    first = sites[0].answer(sites[0].next_assignment())
    Users(place.state.users_file, cost=2**10).put("dana", "four words that rhyme", "look")
    out = tmp_path / "backup"
    contents = backup_of(place, out)
    assert contents == backups.Contents.model_validate_json((out / "backup.json").read_bytes())
    assert not list(place.state.root.glob(".backup-*"))
    assert (out / "blobs" / "uploads" / f"{first.upload_id}.safetensors").exists()
    assert {path.relative_to(out).parts[0] for path in out.rglob("*") if path.is_file()} == {
        "backup.json", "config.toml", "coordinator.db", "authority", "keys", "dashboard", "blobs",
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o077 == 0 for path in [out, *out.rglob("*")])
    for site in sites[1:]:
        site.answer(site.next_assignment())
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES])


def test_a_backup_holds_the_whole_copy_of_a_model_of_which_one_is_damaged(place: Place, tmp_path: Path) -> None:
    place.begin()
    digest = place.status()["model_digest"]
    flip(place.state.blobs / "models" / f"{digest}.safetensors")
    backup_of(place, tmp_path / "backup")
    backups.put_back(tmp_path / "backup", State(tmp_path / "new"))
    assert Blobs(tmp_path / "new" / "blobs").whole_model(digest).exists()


def test_a_backup_is_refused_where_something_is_and_inside_the_state(place: Place, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageProblem, match="there is there already"):
        backup_of(place, tmp_path / "there")
    with pytest.raises(UsageProblem, match="is inside the state directory"):
        backup_of(place, place.state.root / "backup")


def test_a_damaged_backup_is_named_and_nothing_is_made(place: Place, tmp_path: Path) -> None:
    place.begin()
    out, new = tmp_path / "backup", State(tmp_path / "new")
    backup_of(place, out)
    model = next((out / "blobs" / "models").iterdir())
    whole = flip(model)
    with pytest.raises(BadData, match=f"{model} is damaged; nothing was restored"):
        backups.put_back(out, new)
    model.unlink()
    with pytest.raises(BadData, match=f"{out} is not whole: it has no blobs/models/{model.name}"):
        backups.put_back(out, new)
    model.write_bytes(whole)
    with pytest.raises(BadData, match=r"is no backup: it has no backup\.json that can be read"):
        backups.put_back(tmp_path, new)
    with pytest.raises(UsageProblem, match=f"{place.state.root} is there already; nothing was changed"):
        backups.put_back(out, place.state)
    listed = (out / "backup.json").read_bytes()
    (out / "backup.json").write_bytes(listed.replace(f'"{newest_schema()}"'.encode(), b'"0999"'))
    with pytest.raises(NeedsPerson, match="has schema 0999, which this program does not know: a newer one wrote it"):
        backups.put_back(out, new)
    (out / "backup.json").write_bytes(listed)
    assert not new.root.exists()
    new.root.mkdir()
    beside(new.root / backups.UNFINISHED).write_bytes(b"`coordinator rest")  # one that was killed at its first step
    backups.put_back(out, new)
    assert new.config() == restored_config(place)


def test_a_disk_that_cannot_be_read_is_named_and_not_the_one_that_is_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called the backup's own disk, which "failed to keep what was written", or a fault of the program."""
    key, out, new = place.state.receipt_key_file, tmp_path / "backup", State(tmp_path / "new")
    kept = key.read_bytes()
    key.unlink()
    key.symlink_to(UNREADABLE)
    with pytest.raises(BadData, match=f"{key} cannot be read: Input/output error") as refusal:
        backup_of(place, out)
    assert refusal.value.hint == "check the disk that it is on"
    assert not out.exists()
    assert not list(tmp_path.glob(".backup*"))
    assert not list(place.state.root.glob(f"{place.state.snapshots}*"))
    key.unlink()
    key.write_bytes(kept)
    backup_of(place, out)
    copy = out / "keys" / key.name
    copy.unlink()
    copy.symlink_to(UNREADABLE)
    with monkeypatch.context() as here:
        here.setattr(backups.Path, "resolve", lambda path: path)
        with pytest.raises(BadData, match=f"{copy} cannot be read: Input/output error"):
            backups.put_back(out, new)
    assert not new.root.exists()
    copy.unlink()
    copy.write_bytes(kept)
    backups.put_back(out, new)
    assert new.config() == restored_config(place)


def test_a_full_disk_leaves_neither_a_backup_nor_a_part_of_one(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.begin()
    out = tmp_path / "backup"
    real, left = backups.write_file, [0]

    def fill_up(*given: Any, **more: Any) -> None:
        if not left[0]:
            raise CannotWrite(f"{given[0]}: No space left on device")
        left[0] -= 1
        real(*given, **more)

    monkeypatch.setattr(backups, "write_file", fill_up)
    for room in (0, 4):
        left[0] = room
        with pytest.raises(CannotWrite, match="No space left on device"):
            backup_of(place, out)
        assert left == [0]
        assert not out.exists()
        assert not list(tmp_path.glob(".backup*"))
        assert not list(place.state.root.glob(f"{place.state.snapshots}*"))


def test_a_restore_that_was_cut_off_is_done_again_by_the_same_command(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.begin()
    out, new = tmp_path / "backup", State(tmp_path / "new")
    backup_of(place, out)
    with monkeypatch.context() as cut:
        cut.setattr(backups.database, "restore", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            backups.put_back(out, new)
    with pytest.raises(NeedsPerson, match="holds no coordinator"):
        new.config()
    backups.put_back(out, new)
    assert new.config() == restored_config(place)
    assert not (new.root / ".restoring").exists()


def test_a_disk_that_changes_what_is_restored_is_noticed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "backup"
    backup_of(place, out)
    monkeypatch.setattr(backups, "_copy", lambda source, target: (make_folder(target.parent), target.write_bytes(b"x")))
    with pytest.raises(BadData, match=r"is not what .* is: the disk changed it"):
        backups.put_back(out, State(tmp_path / "new"))


def test_after_a_restore_a_new_revision_goes_on_from_the_newest_model_and_no_site_joins_again(
    place: Place, tmp_path: Path
) -> None:
    """Rounds failed for ever: the sites' ledgers, receipts and private parts were ahead of the coordinator's."""
    sites = place.begin(rounds=3)
    answer_all(sites)
    place.until(lambda status: status["round"] == 2)
    backup_of(place, tmp_path / "backup")
    newest = place.status()["model_digest"]
    answer_all(sites)  # round 2, which the copy does not know
    place.until(lambda status: status["round"] == 3)
    assert lost_and_restored(place, tmp_path / "backup") == ["trial"]
    renewed = place.ask("renew", study="trial")
    assert (renewed["revision"], renewed["model"], renewed["rounds"]) == (2, 1, 2)
    assert place.status() | {"state": "created", "round": 0, "rounds": 2, "model_digest": newest} == place.status()
    for site in sites:
        assert give_back(site) == 1
        assert give_back(site) == 0
        site.watch()
        site.declare("trial")
    place.ask("start", study="trial")
    for number in (1, 2):
        answer_all(sites)
        place.until(lambda status, number=number: status["round"] > number or status["closing"])
    with place.coordinator.context.store.read() as session:
        receipts = session.scalars(sa.select(tables.Upload).where(tables.Upload.site == "alpha")).all()
    assert sorted((row.revision, row.round) for row in receipts) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    copied = list(place.coordinator.uploads.receipts.copy("alpha"))
    assert len(copied) == 5  # one chain, from the first to the last, and the statement about it


@on_both
def test_a_backup_of_a_file_is_restored_on_a_server_and_one_of_a_server_to_a_file(
    place: Place, tmp_path: Path, postgres: Postgres
) -> None:
    """A backup is the same whatever the store was; so it is the way from the one to the other, too."""
    sites = place.begin(rounds=3)
    answer_all(sites)
    place.until(lambda status: status["round"] == 2)
    out, shared = tmp_path / "backup", place.coordinator.context.store.shared
    backup_of(place, out)
    newest = place.status()["model_digest"]
    place.coordinator.stop()
    shutil.rmtree(place.state.root)
    storage = Storage()
    if not shared:
        storage = Storage(database=postgres.new_database(), blobs=str(tmp_path / "elsewhere"))
    backups.put_back(out, place.state, storage)
    assert place.state.config().storage == storage
    assert place.state.database.exists() == shared
    with restores.opened(place.state) as context:
        assert restores.going_on(context) == ["trial"]
    place.serve()
    assert place.coordinator.context.store.shared != shared
    assert place.ask("renew", study="trial")["model"] == 1
    assert place.status()["model_digest"] == newest
    for site in sites:
        assert give_back(site) == 0
        site.watch()
        site.declare("trial")
    place.ask("start", study="trial")
    answer_all(sites)
    place.until(lambda status: status["round"] == 2)


def test_a_server_that_has_a_coordinator_already_takes_no_other(
    place: Place, tmp_path: Path, postgres: Postgres
) -> None:
    backup_of(place, tmp_path / "backup")
    url = postgres.database_with_tables()
    with pytest.raises(NeedsPerson, match="holds a coordinator already; nothing was changed"):
        backups.put_back(tmp_path / "backup", State(tmp_path / "new"), Storage(database=url))
    with pytest.raises(NeedsPerson, match="holds a coordinator already; nothing was changed") as refusal:
        places.create(State(tmp_path / "other"), "north", "h:1", 0.0, Storage(database=url))
    assert "`coordinator standby import`" in refusal.value.hint
    assert not (tmp_path / "other" / "config.toml").exists()


def give_back(site: FakeSite) -> int:
    """As an agent does when it connects: what follows the coordinator's last receipt. How many it took."""
    chain = [EMPTY_HEAD, *(hashlib.sha256(envelope.payload).hexdigest() for envelope in site.envelopes)]
    request = pb.StudiesRequest(agent_version=__version__)
    reply = site.federation.Studies(request, timeout=20, wait_for_ready=True)
    known = chain.index(reply.last_receipt.hex())
    if known == len(chain) - 1:
        return 0
    lost = pb.ReturnRequest(envelopes=[envelope_message(envelope) for envelope in site.envelopes[known:]])
    return chain.index(site.federation.Return(lost, timeout=20).last_receipt.hex()) - known


@on_file
def test_a_coordinator_that_was_put_back_from_an_old_copy_by_hand_is_recognized_and_its_study_pauses(
    place: Place, tmp_path: Path
) -> None:
    """It would have asked for a round that is over, for ever."""
    (site,) = place.begin(sites=["alpha"], rounds=3)
    place.coordinator.stop()
    shutil.copytree(place.state.root, tmp_path / "old")
    place.serve()
    site.watch_again()
    answer_all([site])
    answer_all([site])
    place.until(lambda status: status["round"] == 3)
    place.coordinator.stop()
    shutil.rmtree(place.state.root)
    shutil.move(tmp_path / "old", place.state.root)
    place.serve()
    assert give_back(site) == 2
    status = place.until(lambda status: status["state"] == "paused")
    assert status["why"] == (
        "this coordinator was restored from an older copy: site alpha holds a receipt of round 2, and the newest model "
        "here is of round 0; `coordinator study renew trial` begins a new revision from it"
    )
    renewed = place.ask("renew", study="trial")
    assert (renewed["revision"], renewed["model"], renewed["rounds"]) == (2, 0, 3)
    site.watch()
    site.declare("trial")
    place.ask("start", study="trial")
    answer_all([site])
    place.until(lambda status: status["round"] == 2)


@on_file
def test_an_upload_whose_receipt_is_given_back_while_it_comes_again_gets_no_second_one(
    place: Place, tmp_path: Path
) -> None:
    """Two receipts of one upload that contradict each other would both be this coordinator's."""
    (site,) = place.begin(sites=["alpha"], rounds=1)
    assignment = site.next_assignment()
    place.coordinator.stop()
    shutil.copytree(place.state.root, tmp_path / "old")
    place.serve()
    site.watch_again()
    good = delta("alpha", 1, SPECS)
    opening = site.opening(assignment, good)
    first = site.send(opening, good.payload, commit=bytes(32))
    assert first
    assert first.decision == "refused"
    place.coordinator.stop()
    shutil.rmtree(place.state.root)
    shutil.move(tmp_path / "old", place.state.root)
    place.serve()
    given: list[int] = []
    with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
        site.send(opening, good.payload, on_offset=lambda offset: given.append(give_back(site)))
    assert given == [1]
    assert site.take(site.inquire(opening.upload_id).receipt) == first


def test_nothing_but_the_next_receipt_of_its_own_chain_is_taken_back(place: Place, tmp_path: Path) -> None:
    """What another site holds, what is in another order, and what the coordinator did not sign change nothing."""
    sites = place.begin(rounds=2)
    for _ in range(2):
        answer_all(sites)
    place.until(lambda status: status["closing"])
    alpha, bravo, _ = sites
    chain = alpha.envelopes
    with place.coordinator.context.store.write() as session:
        row = session.get(tables.Site, "alpha")
        assert row is not None
        row.last_receipt = EMPTY_HEAD  # as if both were lost
    forged = dsse.Envelope(chain[0].payload_type, chain[0].payload.replace(b"accepted", b"refused"), *parts(chain[0]))
    for wrong in ([bravo.envelopes[0]], [chain[1]], [forged], [forged, chain[0]]):
        request = pb.ReturnRequest(envelopes=[envelope_message(envelope) for envelope in wrong])
        assert alpha.federation.Return(request, timeout=20).last_receipt == bytes(32)
    crowd = pb.ReturnRequest(envelopes=[envelope_message(chain[0])] * 41)
    with pytest.raises(grpc.RpcError, match="MESSAGE_MALFORMED"):
        alpha.federation.Return(crowd, timeout=20)
    assert give_back(alpha) == 2
    assert place.status()["state"] == "running"  # nothing was lost but the end of the chain
    with place.coordinator.context.store.read() as session:
        rows = session.scalars(sa.select(tables.Upload).where(tables.Upload.site == "alpha")).all()
    assert all(row.num_examples > 0 for row in rows)


def parts(envelope: dsse.Envelope) -> tuple[str, bytes]:
    return envelope.keyid, envelope.signature


def test_a_certificate_that_was_renewed_after_the_copy_is_known_again(place: Place, tmp_path: Path) -> None:
    """Its site would have had to join again, and leave its private parts and ledger behind."""
    alpha = place.join("alpha")
    backup_of(place, tmp_path / "backup")
    key = certificates.new_key()
    signing_request = certificates.signing_request(key)
    request = enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=signing_request)
    renewed = alpha.enrolment.Renew(request, timeout=20)
    late = place.join("late")
    lost_and_restored(place, tmp_path / "backup")
    asked = pb.StudiesRequest(agent_version=__version__)
    with alpha.open_channel(renewed.certificate, key) as channel:
        federation_pb2_grpc.FederationStub(channel).Studies(asked, timeout=20, wait_for_ready=True)
    with pytest.raises(grpc.RpcError, match="CERTIFICATE_UNKNOWN"):  # enrolled after the copy: nobody here knows it
        late.federation.Studies(asked, timeout=20, wait_for_ready=True)


def test_a_study_that_is_finished_is_not_renewed(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"], rounds=1)
    for _ in range(2):
        site.answer(site.next_assignment())
    place.until(lambda status: status["state"] == "finished")
    with pytest.raises(NeedsPerson, match="study `trial` is finished: there is nothing to go on with"):
        place.ask("renew", study="trial")


def test_without_its_newest_model_a_study_is_renewed_from_an_older_one(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"], rounds=3)
    answer_all([site])
    damage(place, place.until(lambda status: status["round"] == 2)["model_digest"])
    renewed = place.ask("renew", study="trial")
    assert (renewed["model"], renewed["rounds"]) == (0, 3)
    assert site.next_assignment().round == 2
    assert site.next_assignment().stop.reason == pb.Stop.STOPPED
