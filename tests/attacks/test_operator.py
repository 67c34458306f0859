"""Whoever may write in the coordinator's database, or give it commands, and would have done nothing afterwards."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from coordinator import backups
from coordinator.cli.main import app
from coordinator.journal import _after
from coordinator.storage import tables
from tests.attacks import gone
from tests.attacks.places import placed
from tests.coordinator.conftest import Place
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.records.receipts import EMPTY_HEAD

JOURNAL = "coordinator/journal.py"
COMMAND = "coordinator/cli/journal.py"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with placed(tmp_path) as place:
        yield place


def journal(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["journal", *map(str, words)])


def exported(place: Place, name: str) -> Path:
    out = place.state.root.parent / name
    assert journal("export", "--out", out, "--state", place.state.root).exit_code == 0
    return out


def rewritten(place: Place, old: str, new: str, *, chain: bool) -> None:
    """One word of the journal is another; with ``chain``, every head after it as well."""
    with place.coordinator.context.store.write() as session:
        head = EMPTY_HEAD
        for row in session.scalars(sa.select(tables.JournalLine).order_by(tables.JournalLine.number)):
            row.line = row.line.replace(old, new)
            head = _after(head, row.line.encode())
            row.head = head if chain else row.head


@pytest.mark.attack(promise="P10", refused_by=JOURNAL)
def test_journal_line_changed_in_the_database(place: Place) -> None:
    """An operator invited a site, and writes another name over it. The journal was shown as "each as it was written",
    and its new head signed."""
    place.invite("alpha")
    rewritten(place, "alpha", "bravo", chain=False)
    for command in (["show"], ["export", "--out", str(place.state.root.parent / "out")]):
        refused = journal(*command, "--state", place.state.root)
        assert isinstance(refused.exception, BadData)
        assert refused.exception.message == "line 1 of the journal is not the one that was written"


@pytest.mark.attack(promise="P10", refused_by=COMMAND)
def test_journal_begun_anew(place: Place) -> None:
    """The whole chain is made anew, and the coordinator signs it: `verify` compared it with no older one."""
    place.invite("alpha")
    before = exported(place, "before.jsonl")
    place.invite("charlie")
    honest = exported(place, "honest.jsonl")
    assert journal("verify", honest, "--earlier", before).exit_code == 0
    rewritten(place, "alpha", "bravo", chain=True)
    forged = exported(place, "forged.jsonl")
    assert journal("verify", forged).exit_code == 0  # alone it is in order
    refused = journal("verify", forged, "--earlier", before)
    assert isinstance(refused.exception, BadData)
    assert refused.exception.message == f"line 1 of {forged} is not line 1 of {before}, which was signed earlier"
    cut = journal("verify", before, "--earlier", honest)
    assert str(cut.exception) == f"{before} has 2 lines, and {honest}, which was signed earlier, has 4"


@pytest.mark.attack(promise="P10", refused_by=COMMAND)
def test_journal_begun_anew__under_another_key(place: Place, tmp_path: Path) -> None:
    """The later export is signed by a key of the insider's own, and has all the older lines."""
    place.invite("alpha")
    before = exported(place, "before.jsonl")
    (tmp_path / "another").mkdir()
    with placed(tmp_path / "another") as another:
        another.invite("alpha")
        other = exported(another, "other.jsonl")
    refused = journal("verify", other, "--earlier", before)
    assert "is signed with another key than" in str(refused.exception)


@pytest.mark.attack(promise="P10", refused_by=COMMAND)
def test_journal_that_no_one_can_verify(place: Place) -> None:
    """One command with a line separator in a name, which is refused, and no later export could be verified any more."""
    for name in ("a\u2028b", "a\x85b", "a\x1cb"):
        with pytest.raises(UsageProblem):
            place.invite(name)
    out = exported(place, "out.jsonl")
    assert len(json.loads(out.read_text().split("\n")[0])["about"]["site"]) == 3
    assert journal("verify", out).exit_code == 0


@pytest.mark.attack(promise="P10", refused_by="proto/wardround/local/person.py")
def test_command_of_a_process_that_is_gone(place: Place) -> None:
    """Whoever gives a command, and ends before its answer, has no login any more that the kernel could tell: the
    journal had the name that the command told of itself."""
    claimed = {"name": "colleague", "uid": 1007, "source": "sudo"}
    answer = gone.asked(place.state.control, {"command": "invite", "site": "alpha", "expires_s": 3600, "by": claimed})
    assert answer["error"]["exit_code"] == NotPermitted.exit_code
    assert answer["error"]["message"] == (
        "the process that gave this command has ended, and whose login it was cannot be known any more"
    )
    assert "colleague" not in journal("show", "--state", place.state.root).output
    assert not place.ask("sites")["sites"]


@pytest.mark.attack(promise="P3", refused_by="coordinator/backups.py")
def test_path_in_a_backups_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup's list names a file by a way out of the folder of models: it was written beside that folder."""
    monkeypatch.setattr(backups, "refuse_newer", lambda *_: None)
    backup = tmp_path / "backup"
    names = (backups.DATABASE, backups.SETTINGS, "blobs/../planted", "planted")
    for name in names:
        (backup / name).parent.mkdir(parents=True, exist_ok=True)
        (backup / "blobs").mkdir(exist_ok=True)
        (backup / name).write_bytes(b"x")
    listed = {name: hashlib.sha256(b"x").hexdigest() for name in names}
    contents = backups.Contents(federation="f", wardround="0", schema_version="", made_s=0, files=listed)
    (backup / backups.LIST).write_text(contents.model_dump_json())
    with pytest.raises(BadData, match=r"is not whole: it has no blobs/\.\./planted; nothing was restored"):
        backups._whole_contents(backup)
