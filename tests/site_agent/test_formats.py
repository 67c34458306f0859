"""A state directory of an older version is brought forward with a copy kept; one of a newer version is refused."""

import json
from pathlib import Path

import pytest

from site_agent.gateway.setup import handler_alone
from site_agent.state import formats
from site_agent.state.directory import SiteState
from tests.site_agent.site_world import SiteWorld
from wardround import __version__
from wardround.errors import BadData, NeedsPerson


def written(root: Path, number: int, version: str = "0.9.0") -> None:
    (root / "format.json").write_text(json.dumps({"format": number, "version": version}))


def open_alone(state: SiteState) -> None:
    with handler_alone(state):
        pass


def test_a_directory_says_which_version_wrote_it(world: SiteWorld) -> None:
    world.join()
    open_alone(world.state)
    assert json.loads((world.state.root / "format.json").read_bytes()) == {"format": 1, "version": __version__}


def test_a_directory_of_a_newer_version_is_refused_and_left_as_it_is(world: SiteWorld) -> None:
    world.join()
    written(world.state.root, 2)
    before = {path: path.read_bytes() for path in world.state.root.rglob("*") if path.is_file() and path.name != "lock"}
    for act in (world.state.site, lambda: open_alone(world.state), world.start):
        with pytest.raises(NeedsPerson, match=r"was written by wardround 0\.9\.0 \(format 2\), which this version"):
            act()
    assert {path: path.read_bytes() for path in before} == before


def test_an_older_directory_is_brought_forward_and_its_copy_kept(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a crash in the middle of the step."""
    world.join()
    root, crashes = world.state.root, [True]
    policy = root / "policy.toml"
    policy.write_text("old")
    key = (root / "identity" / "key.pem").read_bytes()
    older = root / f"ledger-{'ab' * 16}" / "000001.jsonl"
    older.parent.mkdir()
    older.write_text("signed before a rollover")

    class Crash(BaseException):
        pass

    def step(place: Path) -> None:
        (place / "policy.toml").write_text("new")
        if crashes.pop() if crashes else False:
            raise Crash

    monkeypatch.setattr(formats, "FORMAT", 2)
    monkeypatch.setattr(formats, "STEPS", {1: step})
    with pytest.raises(Crash):
        open_alone(world.state)
    open_alone(world.state)
    assert policy.read_text() == "new"
    copy = root / "before-format-1"
    assert (copy / older.relative_to(root)).read_text() == "signed before a rollover"
    assert (copy / "policy.toml").read_text() == "old"
    assert (copy / "identity" / "key.pem").read_bytes() == key
    assert (copy / "identity" / "key.pem").stat().st_mode & 0o77 == 0
    assert json.loads((root / "format.json").read_bytes())["format"] == 2
    monkeypatch.undo()
    with pytest.raises(NeedsPerson) as refused:
        open_alone(world.state)
    assert f"put back the copy in {copy}" in refused.value.hint


def test_a_damaged_mark_is_said(world: SiteWorld) -> None:
    world.join()
    (world.state.root / "format.json").write_text("no")
    with pytest.raises(BadData, match=r"format\.json is damaged"):
        world.state.site()
