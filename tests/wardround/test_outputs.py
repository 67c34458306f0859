"""``--out``, in every command that has it: nothing that a person has is overwritten."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import coordinator.cli.main
import fl_algorithms.lab.cli
import site_agent.cli.main
from coordinator import state_directory as places
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Offer, Site, SiteState
from tests.site_agent.trainer_world import NAME, STUDY_DIGEST, Hospital
from wardround import cli
from wardround.errors import CannotWrite, NotPermitted
from wardround.local import outputs
from wardround.tensors.manifests import Manifest

PROGRAMS = {
    "site-agent": site_agent.cli.main.app,
    "coordinator": coordinator.cli.main.app,
    "fl-lab": fl_algorithms.lab.cli.app,
}
FILE, FOLDER = "file", "folder"
WORDS: dict[str, tuple[str, list[str]]] = {  # what each writes, and what else it needs
    "site-agent audit bundle": (FILE, ["--state", "STATE"]),
    "site-agent audit export": (FILE, ["--format", "json", "--state", "STATE"]),
    "site-agent audit report": (FILE, ["--state", "STATE"]),
    "site-agent audit verifier": (FILE, []),
    "site-agent audit pack": (FILE, [NAME, "--state", "STATE"]),
    "site-agent models export": (FOLDER, [NAME, "--checkpoint", "latest", "--state", "STATE"]),
    "site-agent policy draft": (FILE, [NAME, "--state", "STATE"]),
    "site-agent predict": (FILE, [NAME, "--checkpoint", "latest", "--table", "TABLE", "--state", "STATE"]),
    "coordinator authority export-root": (FILE, ["--passphrase", "STUDY", "--state", "COORDINATOR"]),
    "coordinator authority new-root": (FILE, ["--root", "STUDY", "--passphrase", "STUDY"]),
    "coordinator authority request": (FILE, ["--state", "COORDINATOR"]),
    "coordinator authority sign": (FILE, ["--root", "STUDY", "--passphrase", "STUDY", "--request", "STUDY"]),
    "coordinator invite": (FOLDER, ["north", "--state", "COORDINATOR"]),
    "coordinator journal export": (FILE, ["--state", "COORDINATOR"]),
    "coordinator receipts": (FILE, ["north", "--state", "COORDINATOR"]),
    "coordinator study export": (FOLDER, [NAME, "--to", "tensorboard", "--state", "COORDINATOR"]),
    "coordinator standby export": (FILE, ["--passphrase", "STUDY", "--state", "COORDINATOR"]),
    "coordinator study report": (FILE, [NAME, "--state", "COORDINATOR"]),
    "fl-lab init": (FILE, ["STUDY"]),
    "fl-lab compare": (FOLDER, ["STUDY", "--data", "RAW"]),
    "fl-lab partition": (FOLDER, ["TABLE", "--by", "iid"]),
    "fl-lab report": (FOLDER, ["RAW"]),
    "coordinator models export": (FOLDER, [NAME, "--state", "COORDINATOR"]),
    "fl-lab model": (FOLDER, ["RAW", "--site", "north"]),
    "fl-lab export": (FOLDER, ["RAW", "--to", "csv"]),
    "fl-lab tune": (FILE, ["STUDY", "--data", "RAW", "--over", "training.learning_rate=[0.1]"]),
    "fl-lab run": (FOLDER, ["STUDY", "--data", "RAW"]),
    "fl-lab data breast-cancer": (FOLDER, []),
    "fl-lab data survival": (FOLDER, []),
    **{f"fl-lab data {name}": (FOLDER, ["RAW"]) for name in ("heart-disease", "skin", "wbc", "nuclei")},
}


NEVER_REPLACES = {"coordinator backup"}  # what is there; tests/coordinator/test_restore.py
GOES_ON = {"fl-lab tune"}  # with a file that it wrote itself; of any other it says so, and leaves it


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every command below ``command``, with its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(words), command
        return
    for name, one in inner.items():
        yield from commands(one, (*words, name))


def all_commands() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for program, app in PROGRAMS.items():
        found |= dict(commands(typer.main.get_command(app), (program,)))
    return found


def with_out() -> dict[str, Any]:
    return {words: one for words, one in all_commands().items() if any("--out" in param.opts for param in one.params)}


class Place:
    """A hospital, a coordinator and a few files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hospital = Hospital.make(folder)
        self.state = self.hospital.state
        here = SiteState(self.state)
        here.save_offer(Offer(NAME, 1, STUDY_DIGEST, "waiting", self.hospital.document, Manifest(())))
        here.save_site(Site("north", "demo", "127.0.0.1:1", "00", "00", 0))
        here.policy.write_text("# in force\n")
        own = Identity(here.identity)
        own.make_keys()
        ledger = Ledger(here.ledger, own.ledger_key())
        ledger.begin()
        ledger.close()
        self.coordinator = folder / "coordinator"
        places.create(places.State(self.coordinator), "demo", "127.0.0.1:1", time.time())
        (folder / "raw").mkdir()
        (folder / "study.toml").write_text("")

    def words(self, command: str, out: Path) -> list[str]:
        given = {
            "STATE": str(self.state), "COORDINATOR": str(self.coordinator), "STUDY": str(self.folder / "study.toml"),
            "TABLE": str(self.hospital.test), "RAW": str(self.folder / "raw"),
        }  # fmt: skip
        return [*command.split()[1:], *(given.get(word, word) for word in WORDS[command][1]), "--out", str(out)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def run(command: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code, and what was said."""
    monkeypatch.setattr("sys.argv", [command.split()[0], *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.run(PROGRAMS[command.split()[0]])
    return ended.value.code, capsys.readouterr().err


def test_every_command_that_has_an_out_is_in_the_table_and_has_a_force() -> None:
    found = with_out()
    assert set(found) == WORDS.keys() | NEVER_REPLACES
    for words, one in found.items():
        assert any("--force" in param.opts for param in one.params) == (words not in NEVER_REPLACES), words


@pytest.mark.parametrize("command", sorted(WORDS.keys() - GOES_ON))
def test_nothing_that_is_there_is_overwritten(
    place: Place, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place.folder / "there"
    (place.folder / "full").mkdir()
    (place.folder / "full" / "mine").write_text("mine")
    there.write_text("mine")
    if WORDS[command][0] == FILE:
        bad = {there: "exists already", place.folder / "full": "is a folder", there / "x": "is not a folder"}
        bad[place.folder / "no" / "x"] = "does not exist"
    else:
        bad = {there: "is a file", place.folder / "full": "is not empty", there / "x": "is not a folder"}
    if command == "site-agent predict":
        del bad[place.folder / "full"]  # there it is the trainer that says so: masks go into a folder
    for out, why in bad.items():
        code, said = run(command, place.words(command, out), capsys, monkeypatch)
        assert code == 73, (out, said)
        assert why in said.splitlines()[0]
        assert said.splitlines()[1].startswith("hint: ")
        assert ".tmp" not in said
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place.folder)
    code, said = run(command, place.words(command, place.folder / "new"), capsys, monkeypatch)
    assert (code, "may not write in" in said) == (77, True), said
    assert there.read_text() == (place.folder / "full" / "mine").read_text() == "mine"


@pytest.mark.parametrize("command", WORDS)
def test_force_never_overwrites_data_keys_ledgers_consents_or_a_policy(
    place: Place, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, database = place.state / "identity" / "key.pem", place.coordinator / "authority" / "key.pem"
    ledger, policy = place.state / "ledger" / "000001.jsonl", place.state / "policy.toml"
    precious = [key, ledger, policy, database, place.hospital.table]
    before = {path: path.read_bytes() for path in precious}
    link, inner = place.folder / "link", place.folder / "inner"
    link.symlink_to(key)
    inner.symlink_to(place.state / "consents")
    bad = [key, link, policy, place.state / "new", inner / "new", database]
    if "STATE" in WORDS[command][1]:  # else it knows no site, whose data may lie anywhere
        other = place.folder / "other.csv"
        other.hardlink_to(place.hospital.table)
        mine = place.folder / "mine.toml"
        mine.hardlink_to(policy)
        bad += [place.hospital.table, other, mine]
    for out in bad:
        code, said = run(command, [*place.words(command, out), "--force"], capsys, monkeypatch)
        wanted = (77, 73) if WORDS[command][0] == FOLDER else (77,)
        assert code in wanted, (out, said)
        assert "never written over" in said or "lies in the state directory" in said
    assert {path: path.read_bytes() for path in precious} == before


def test_a_file_that_comes_between_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    real = os.fsync

    def somebody_is_quicker(descriptor: int) -> None:
        out.write_text("mine")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", somebody_is_quicker)
    with pytest.raises(CannotWrite, match="File exists"):
        outputs.write(out, b"ours", force=False)
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_with_force_a_file_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    outputs.write(out, b"one", force=False, mode=0o640)
    outputs.write(out, [b"t", b"wo"], force=True)
    assert out.read_bytes() == b"two"


def test_a_link_that_leads_nowhere_is_something_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(CannotWrite, match="exists already"):
        outputs.file(tmp_path / "out", force=False)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CannotWrite, match="exists already"):
        outputs.file(tmp_path / "loop", force=False)


def test_a_folder_goes_on_where_it_was_begun(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "suite.json").write_text("{}")
    with pytest.raises(CannotWrite, match="is not empty"):
        outputs.folder(tmp_path / "runs", force=False)
    assert outputs.folder(tmp_path / "runs", force=False, goes_on="suite.json") == tmp_path / "runs"
    assert outputs.folder(tmp_path / "new" / "er", force=False) == tmp_path / "new" / "er"
    (tmp_path / "file").write_text("")
    with pytest.raises(NotPermitted, match="lies in it"):
        outputs.folder(tmp_path / "data" / "x", force=True, keep=[tmp_path / "data"])


def test_a_folder_that_this_user_may_not_enter_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user writes what is asked for: it ended with 70. As root every folder can be entered."""
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        if tmp_path / "home" in path.parents:
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    out = tmp_path / "home" / "predictions.csv"
    for place in (outputs.file, outputs.folder, outputs.either):
        with pytest.raises(NotPermitted, match="who writes it, may not enter the folder of ") as refused:
            place(out, force=False)
        assert "it is the trainer's user who writes" in refused.value.hint
