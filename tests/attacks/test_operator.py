"""Whoever may write in the coordinator's database, or give it commands, and would have done nothing afterwards."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from coordinator import administration, backups
from coordinator.cli.asking import Waits
from coordinator.cli.main import app
from coordinator.journal import _after
from coordinator.state_directory import State
from coordinator.storage import tables
from tests.attacks import gone
from tests.attacks.places import placed
from tests.coordinator.conftest import Place, study_document
from tests.coordinator.second_persons import ANNA, BERT, CARL, SERVICE, configure, two, waiting
from tests.coordinator.test_restore import backup_of
from tests.coordinator.test_restore_by_two import refused as restore_refused
from tests.coordinator.test_restore_by_two import restore, serves
from wardround.errors import BadData, NeedsPerson, NotPermitted, UsageProblem
from wardround.local import person
from wardround.records.receipts import EMPTY_HEAD

JOURNAL = "coordinator/journal.py"
COMMAND = "coordinator/cli/journal.py"
PERSONS = "coordinator/second_person.py"


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


@pytest.mark.attack(promise="P10", refused_by=COMMAND)
def test_line_in_a_name(place: Place) -> None:
    """A name is in the journal before anybody looks at it. One with a line break showed a line more to whoever reads
    the journal, or what waits for a second person: one that nobody wrote, of a colleague."""
    name = "alpha\n  7      bert (sudo)   revoke, site charite"
    with pytest.raises(UsageProblem):
        place.invite(name)
    two(place, "study create")
    place.ask("create", document={"study": {"name": name}}, initial=str(place.initial), by=ANNA)
    number = str(waiting(place)[0]["proposal"])
    at = ["--state", str(place.state.root)]
    for words in (["journal", "show"], ["second-person", "list"], ["second-person", "take-back", number]):
        shown = CliRunner().invoke(app, [*words, *at])
        assert "bert" in shown.output
        assert not [line for line in shown.output.splitlines() if line.split()[:2] == ["7", "bert"]]


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
        backups.whole_contents(backup)


def other_tensors(path: Path) -> None:
    save_file({"layer.bias": np.ones(2, "<f4"), "layer.weight": np.ones((2, 3), "<f4")}, path)


def create(place: Place, by: dict[str, Any], **study: Any) -> Any:
    return place.ask("create", document=study_document(**study), initial=str(place.initial), by=by)


def studies(place: Place) -> list[str]:
    return [row["id"] for row in place.ask("studies")["studies"]]


@pytest.mark.attack(promise="P10", refused_by=JOURNAL)
@pytest.mark.parametrize(
    "again",
    [ANNA, {**ANNA, "name": "bert"}, {**ANNA, "source": "loginuid"}, {**ANNA, "source": "polkit", "name": "anna2"}],
    ids=["again", "under another name", "by another way", "by pkexec"],
)
def test_one_person_is_two(place: Place, again: dict[str, Any]) -> None:
    """One operator proposes to revoke a site, and gives the command again: with sudo, as another name, by pkexec."""
    place.invite("alpha")
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    with pytest.raises(UsageProblem) as refused:
        place.ask("revoke", site="alpha", by=again)
    assert refused.value.message.endswith(
        "has proposed `coordinator revoke`, site alpha already; this needs 2 different people"
    )
    assert refused.value.hint == "somebody with another login gives the same command"
    assert [row["site"] for row in place.ask("sites")["sites"]] == ["alpha"]
    assert len(waiting(place)) == 1


@pytest.mark.attack(promise="P10", refused_by=PERSONS)
@pytest.mark.parametrize(
    "other",
    [SERVICE, {"name": "wardround", "uid": 0, "source": "loginuid"}, {"name": "eva", "uid": 5009, "source": "page"}],
    ids=["the account", "a login as the account", "a name that a page would tell"],
)
def test_one_person_is_two__as_the_service_itself(place: Place, other: dict[str, Any]) -> None:
    """The second command comes from the coordinator's own account (a timer, a shell of it), which is nobody's name; or
    it says that a page knows the person, and the coordinator has no page that decides."""
    place.invite("alpha")
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    with pytest.raises(NotPermitted) as refused:
        place.ask("revoke", site="alpha", by=other)
    assert refused.value.message == (
        "`coordinator revoke` needs two people here, and nobody can tell which person gives it: it comes from the "
        f"account `{other['name']}`, behind which no other login stands"
    )
    assert len(waiting(place)) == 1


@pytest.mark.attack(promise="P10", refused_by="proto/wardround/local/person.py")
def test_one_person_is_two__by_the_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command says in its environment that it was another's sudo; the kernel knows whose login it is."""
    two(place, "invite")
    monkeypatch.setattr("sys.argv", ["coordinator", "invite", "alpha"])
    monkeypatch.setattr(person, "login_of", lambda process: 5001)
    words = ["invite", "alpha", "--state", str(place.state.root)]
    assert isinstance(CliRunner().invoke(app, words).exception, Waits)
    monkeypatch.setenv("SUDO_UID", "5002")
    assert isinstance(CliRunner().invoke(app, words).exception, UsageProblem)
    assert not place.ask("sites")["sites"]


@pytest.mark.attack(promise="P10", refused_by=JOURNAL)
def test_study_changed_between_the_two(place: Place) -> None:
    """The second person is handed another file than the first one's, with one setting changed; then other tensors."""
    two(place, "study create")
    first = create(place, ANNA)["proposal"]
    assert create(place, BERT, rounds=200)["beside"] == (
        f"the proposal of anna in line {first} says something else of document_sha256"
    )
    other_tensors(place.initial)
    assert "initial_digest" in create(place, BERT)["beside"]
    assert not studies(place)
    assert len(waiting(place)) == 3


@pytest.mark.attack(promise="P10", refused_by="coordinator/creation.py")
def test_tensors_changed_while_they_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of initial tensors is the agreed one when it is compared, and another when it is read."""
    two(place, "study create")
    create(place, ANNA)
    bound = administration.bound

    def swapped(*args: Any) -> Any:
        agreed = bound(*args)
        other_tensors(place.initial)
        return agreed

    monkeypatch.setattr(administration, "bound", swapped)
    with pytest.raises(BadData) as refused:
        create(place, BERT)
    assert refused.value.message.startswith(f"{place.initial} was changed while it was read: its tensors have digest ")
    assert not studies(place)


@pytest.mark.attack(promise="P10", refused_by=JOURNAL)
def test_proposal_carried_out_twice(place: Place) -> None:
    """What two people agreed to once, either gives again: a site that was let in again is not revoked by that."""
    place.invite("alpha")
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    assert place.ask("revoke", site="alpha", by=BERT)["site"] == "alpha"
    place.invite("alpha")
    for by in (BERT, CARL):
        place.ask("take-back", number=waiting(place)[-1]["proposal"], by=ANNA) if waiting(place) else None
        assert "proposal" in place.ask("revoke", site="alpha", by=by)
    assert [row["state"] for row in place.ask("sites")["sites"]] == ["invited"]


@pytest.mark.attack(promise="P10", refused_by=PERSONS)
def test_old_proposal_carried_out(place: Place) -> None:
    """A proposal of last month, which its author has forgotten, waits for somebody to give the command."""
    place.invite("alpha")
    two(place, "revoke", lapse_s=600)
    first = place.ask("revoke", site="alpha", by=ANNA)["proposal"]
    place.ahead_s = 590.0
    assert len(waiting(place)) == 1
    place.ahead_s = 610.0
    assert not waiting(place)
    late = place.ask("revoke", site="alpha", by=BERT)
    assert late["beside"].startswith(f"the proposal of anna in line {first} lapsed at 20")
    assert [row["state"] for row in place.ask("sites")["sites"]] == ["invited"]
    with pytest.raises(UsageProblem, match=f"no proposal {first} waits for a second person"):
        place.ask("take-back", number=first, by=ANNA)


@pytest.mark.attack(promise="P10", refused_by=JOURNAL)
def test_two_people_at_the_same_moment(place: Place) -> None:
    """Six logins give the same command at once: each pair of them is one act, and none counts for two."""
    two(place, "invite")
    together, answers = threading.Barrier(6), []

    def give(uid: int) -> None:
        together.wait()
        by = {"name": f"p{uid}", "uid": 6000 + uid, "source": "sudo"}
        answers.append(place.ask("invite", site="alpha", expires_s=60, by=by))

    threads = [threading.Thread(target=give, args=(uid,)) for uid in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("proposal" in answer for answer in answers) == [False] * 3 + [True] * 3
    assert len({answer["proposal"] for answer in answers if "proposal" in answer}) == 3
    assert not waiting(place)


@pytest.mark.attack(promise="P10", refused_by=JOURNAL)
def test_two_proposals_of_one_study_wait_beside_each_other(place: Place) -> None:
    """Who agrees to one of them has not agreed to the other, whichever came first."""
    two(place, "study create")
    create(place, ANNA)
    create(place, ANNA, rounds=200)
    assert len(waiting(place)) == 2
    create(place, BERT)
    assert place.status()["rounds"] == 2
    assert [row["by"] for row in waiting(place)] == ["anna"]
    with pytest.raises(UsageProblem):
        create(place, ANNA, rounds=200)
    assert place.status()["rounds"] == 2


@pytest.mark.attack(promise="P4", refused_by=JOURNAL)
def test_killed_between_the_two(place: Place) -> None:
    """Killed after the proposal, it waits; killed as it is carried out, it is not carried out again by one person."""
    place.invite("alpha")
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    place.restart()
    assert len(waiting(place)) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.coordinator.administration, "revoke", _killed)
        with pytest.raises(KeyboardInterrupt):
            place.ask("revoke", site="alpha", by=BERT)
    place.restart()
    assert not waiting(place)
    assert "proposal" in place.ask("revoke", site="alpha", by=BERT)
    assert [row["state"] for row in place.ask("sites")["sites"]] == ["invited"]
    assert place.ask("revoke", site="alpha", by=ANNA)["site"] == "alpha"


@pytest.mark.attack(promise="P10", refused_by=PERSONS)
def test_configuration_without_the_second_person(place: Place) -> None:
    """One operator removes the table from the configuration, restarts the service, and stops the study alone."""
    place.create()
    two(place, "study stop")
    place.ask("stop", study="trial", by=ANNA)
    configure(place, None)
    with pytest.raises(UsageProblem):
        place.ask("stop", study="trial", by=ANNA)
    assert "proposal" in place.ask("second-person", by=ANNA)
    with pytest.raises(UsageProblem):
        place.ask("second-person", by=ANNA)
    assert place.status()["state"] == "created"


@pytest.mark.attack(promise="P10", refused_by="coordinator/restores.py")
def test_another_backup_is_the_second_word(place: Place, tmp_path: Path) -> None:
    """The first person puts back one backup, and the second is handed another, which looks better."""
    two(place, "restore")
    place.create()
    backup_of(place, tmp_path / "backup")
    place.create(name="another")
    backup_of(place, tmp_path / "other")
    new = State(tmp_path / "new")
    restore_refused(restore(tmp_path / "backup", new, 5001), Waits)
    assert restore_refused(restore(tmp_path / "other", new, 5002), UsageProblem).message.startswith(
        f"{new.root} was made of another backup, of 20"
    )
    with pytest.raises(NeedsPerson):
        serves(new)


@pytest.mark.attack(promise="P10", refused_by="coordinator/restores.py")
def test_restore_by_nobody_is_the_first(place: Place, tmp_path: Path) -> None:
    """A timer of the account gives the first command, and one operator the second. The configuration in the backup says
    nothing any more, and its journal still does."""
    two(place, "restore")
    place.invite("alpha")
    backup_of(place, tmp_path / "with")
    first = restore(tmp_path / "with", State(tmp_path / "one"), None)
    assert "nobody can tell" in restore_refused(first, NotPermitted).message
    assert not (tmp_path / "one").exists()
    configure(place, None)
    backup_of(place, tmp_path / "without")
    new = State(tmp_path / "new")
    assert "nobody can tell" in restore_refused(restore(tmp_path / "without", new, None), NotPermitted).message
    with pytest.raises(NeedsPerson):
        serves(new)
    restore_refused(restore(tmp_path / "without", new, 5001), Waits)
    assert restore(tmp_path / "without", new, 5002).exit_code == 0
    serves(new)


def _killed(site: str) -> None:
    raise KeyboardInterrupt
