"""`status` says `changed` before a round is lost to it; patients are read only where nothing else can tell."""

import os
from pathlib import Path

import pytest

from site_agent.gateway.consent import hindrances
from site_agent.gateway.consent.rows import StudyRow, study_rows
from site_agent.trainer.data import changes
from site_agent.trainer.data.sources import DataSource
from tests.site_agent.site_world import STUDY, SiteWorld
from tests.site_agent.trainer_world import Hospital


def row(world: SiteWorld) -> StudyRow:
    (only,) = study_rows(world.state, "spiffe://test/coordinator")
    return only


def test_data_that_is_another_is_said_before_a_round_is_lost_to_it(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    assert row(world).state == "approved"
    assert not world.trainer.commands("hash_files")  # nobody read a patient for that
    world.trainer.seen = "b6" * 32
    assert (row(world).state, row(world).changes) == ("approved", ())  # read again, and the same
    world.trainer.digest = "cd" * 32
    assert row(world).state == "changed"
    assert row(world).changes == (
        "the data of `patients` are not what was approved; restore it, or `site-agent data check patients --study "
        "hearts`, then `site-agent approve hearts --data patients`",
    )
    world.approve()
    assert row(world).state == "approved"


def test_data_that_is_gone_or_too_large_to_read_for_a_look_is_said(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.missing = ["table"]
    assert row(world).changes[0].startswith("of data `patients`, what data.toml calls table is not there for the ")
    world.trainer.missing, world.trainer.seen = [], "b6" * 32
    monkeypatch.setattr(hindrances, "SOON_READ", 9)
    assert "are not as they lay there at the approval (size, time or inode)" in row(world).changes[0]
    assert not world.trainer.commands("hash_files")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(None, "there is no policy at ", id="missing"),
        pytest.param(("[study]", "[study"), "policy.toml: not TOML: ", id="broken"),
        pytest.param(
            ("deny = []", 'deny = [{ match = "*bias" }]'), "the policy denies shared.bias: tensors.deny 1: '*bias'; ",
            id="denies",
        ),
    ],
)  # fmt: skip
def test_a_policy_that_would_block_the_next_round_is_said(
    world: SiteWorld, edit: tuple[str, str] | None, said: str
) -> None:
    world.ready()
    if edit is None:
        world.state.policy.unlink()
    else:
        world.state.policy.write_text(world.state.policy.read_text().replace(*edit))
    shown = row(world)
    assert shown.state == "changed"
    assert said in shown.changes[0]
    assert "`site-agent policy " in shown.changes[0]


def test_a_study_that_is_over_is_not_looked_at(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.stop_study(STUDY, "STOPPED")
    assert world.trainer is not None
    world.wait_ended()
    world.trainer.missing = ["table"]
    assert (row(world).state, row(world).changes) == ("stopped", ())


def test_a_change_of_any_file_or_of_what_is_named_is_seen(tmp_path: Path) -> None:
    images = tmp_path / "images"
    (images / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.png"):
        (images / name).write_bytes(b"12345")
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"w")
    labels = tmp_path / "labels.csv"
    labels.write_text("x")
    named = DataSource(
        images=str(images), labels=str(labels), weights=str(weights), label="y", patient="p", digest="0" * 64
    )
    seen = [changes.stat(named)]
    assert (seen[0].bytes, seen[0].missing, seen[0].unreadable) == (11, [], [])
    os.utime(images / "deep" / "b.png", ns=(1, 1))
    seen.append(changes.stat(named))
    (images / "a.png").replace(images / "c.png")
    seen.append(changes.stat(named))
    (images / "d.png").write_bytes(b"")
    seen.append(changes.stat(named))
    seen.append(changes.stat(named.model_copy(update={"label": "z"})))
    assert len({files.status.data for files in seen}) == len(seen)
    assert len({files.status.weights for files in seen}) == 1
    weights.write_bytes(b"v2")
    assert changes.stat(named).status.weights != seen[0].status.weights
    assert changes.stat(named).status.data == seen[3].status.data
    labels.unlink()
    assert changes.stat(named).missing == ["labels"]


def test_files_that_this_user_may_not_look_at_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    files = changes.stat(DataSource(table="/data/t.csv", label="y", digest="0" * 64))
    assert (files.missing, files.unreadable) == ([], ["table"])


def test_what_the_trainer_saw_when_it_checked_is_what_a_look_sees(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path)
    checked = hospital.ask("check", study=hospital.document, site="north", data="patients")
    look = hospital.ask("stat_files", data="patients")
    assert checked["status"] == look["status"]
    assert look["status"]["weights"] == ""
    assert hospital.ask("hash_files", data="patients") == {"data": checked["digest"], "weights": ""}
    hospital.table.write_text(hospital.table.read_text() + "\n")
    assert hospital.ask("stat_files", data="patients")["status"] != look["status"]
