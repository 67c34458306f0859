"""A restore that needs a second person: until the second one gives it too, the restored coordinator serves nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from coordinator import restores
from coordinator.cli.asking import Waits
from coordinator.cli.main import app
from coordinator.context import Context, raise_fatal
from coordinator.second_person import SecondPerson
from coordinator.state_directory import State, write_config
from coordinator.storage import database, tables
from tests.coordinator.conftest import Place
from tests.coordinator.second_persons import two
from tests.coordinator.test_restore import backup_of
from wardround.errors import NeedsPerson, UsageProblem, WardroundError
from wardround.local import person


def restore(backup: Path, state: State, uid: int | None) -> Result:
    """The command of a person of this login; None where no login stands behind it."""
    words = ["restore", str(backup), "--state", str(state.root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(person, "login_of", lambda process: uid)
        patch.setattr("sys.argv", ["coordinator", *words])
        return CliRunner().invoke(app, words)


def refused(result: Result, kind: type[WardroundError]) -> WardroundError:
    assert isinstance(result.exception, kind), (result.exception, result.output)
    return result.exception


def serves(state: State) -> None:
    """As the service opens it. Raises what it would."""
    Context(state, wall_clock=lambda: 0.0, monotonic=lambda: 0.0, fatal=raise_fatal).close()


def journal_of(state: State) -> list[dict[str, Any]]:
    store = database.Store(state.place(state.config().storage))
    try:
        with store.read() as session:
            chosen = session.scalars(sa.select(tables.JournalLine).order_by(tables.JournalLine.number))
            return [json.loads(row.line) for row in chosen]
    finally:
        store.close()


@pytest.fixture
def backup(place: Place, tmp_path: Path) -> Path:
    """Of a coordinator whose restore needs two people, with a study that goes on."""
    place.create()
    place.ask("start", study="trial")
    two(place, "restore", "study renew")
    backup_of(place, tmp_path / "backup")
    return tmp_path / "backup"


def test_the_second_person_finishes_what_the_first_has_put_back(backup: Path, tmp_path: Path) -> None:
    new = State(tmp_path / "new")
    first = refused(restore(backup, new, 5001), Waits)
    assert first.message.startswith("`coordinator restore`: proposed by 5001 (loginuid), as root in line ")
    assert first.hint.endswith(f"`coordinator restore {backup} --state {new.root}`")
    with pytest.raises(NeedsPerson) as waits:
        serves(new)
    assert waits.value.message == (
        f"{new.root} was restored from a backup, and that is not finished: it waits for a second person, or was cut off"
    )
    assert "has proposed `coordinator restore` already" in refused(restore(backup, new, 5001), UsageProblem).message
    with pytest.raises(NeedsPerson):
        serves(new)
    done = restore(backup, new, 5002)
    assert done.exit_code == 0, done.exception
    assert "Study `trial`, revision 2: begins from its first model" in done.stderr
    serves(new)
    told = [(line["act"], line["event"], line["by"]["name"]) for line in journal_of(new)[-5:]]
    assert told == [
        ("restore", "proposed", "5001"), ("restore", "begun", "5002"), ("renew", "begun", "5002"),
        ("renew", "done", "5002"), ("restore", "done", "5002"),
    ]  # fmt: skip


def test_one_person_restores_where_nothing_says_otherwise(place: Place, tmp_path: Path) -> None:
    backup_of(place, tmp_path / "backup")
    new = State(tmp_path / "new")
    assert restore(tmp_path / "backup", new, None).exit_code == 0
    serves(new)
    told = [(line["act"], line["event"]) for line in journal_of(new)[-2:]]
    assert told == [("restore", "begun"), ("restore", "done")]


def test_a_restore_that_was_killed_before_its_end_serves_nothing_and_goes_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create()
    place.ask("start", study="trial")
    backup_of(place, tmp_path / "backup")
    new = State(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(restores, "_renewed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        restore(tmp_path / "backup", new, None)
    with pytest.raises(NeedsPerson):
        serves(new)
    again = restore(tmp_path / "backup", new, None)
    assert again.exit_code == 0, again.exception
    assert "Study `trial`, revision 2" in again.stderr
    serves(new)


def test_the_configuration_of_a_restored_coordinator_is_that_of_the_backup(backup: Path, tmp_path: Path) -> None:
    new = State(tmp_path / "new")
    refused(restore(backup, new, 5001), Waits)
    config = new.config()
    assert config.second_person == SecondPerson(acts=("restore", "study renew"), lapse_s=3600)
    write_config(new, config.model_copy(update={"second_person": None}))
    with pytest.raises(NeedsPerson):
        serves(new)
    assert "already" in refused(restore(backup, new, 5001), UsageProblem).message
