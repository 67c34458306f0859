"""The operator's journal: who gave which command, what came of it, and that no line can be changed unseen."""

import json
import os
import pwd
import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from coordinator import journal
from coordinator.acts import READING, about
from coordinator.cli.main import app
from coordinator.requests import Request
from coordinator.storage import tables
from tests.coordinator.conftest import Place
from tests.coordinator.test_requests import REQUESTS
from wardround.errors import BadData, NeedsPerson
from wardround.local import person
from wardround.local.person import Account, Person
from wardround.signing import canonical
from wardround.signing.dsse import fingerprint

ME = pwd.getpwuid(os.geteuid()).pw_name
OPERATOR = Person("operator", 1234, "sudo", Account("wardround", 990))


def kept(place: Place) -> list[dict[str, object]]:
    with place.coordinator.context.store.read() as session:
        return [json.loads(row.line) for row in session.scalars(sa.select(tables.JournalLine))]


def command(place: Place, *words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words), "--state", str(place.state.root)])


def told(entries: list[dict[str, object]]) -> list[tuple[object, object, object]]:
    return [(entry["act"], entry["event"], entry.get("of")) for entry in entries]


def test_each_command_that_changes_something_has_a_line_before_and_after_with_the_person(place: Place) -> None:
    asked = {"name": "operator", "uid": 1234, "source": "sudo", "account": {"name": "wardround", "uid": 990}}
    place.ask("invite", site="alpha", expires_s=60, by=asked)
    place.create()
    place.ask("start", study="trial")
    place.ask("status", study="trial")
    entries = kept(place)
    assert told(entries) == [
        ("invite", "begun", None), ("invite", "done", 1), ("create", "begun", None), ("create", "done", 3),
        ("start", "begun", None), ("start", "done", 5),
    ]  # fmt: skip
    assert (entries[0]["by"], entries[0]["about"]) == (asked, {"site": "alpha", "expires_s": 60})
    assert "invitation" not in json.dumps(entries[1])
    assert entries[3]["about"] == {"revision": 1, "new": True, "study_digest": place.status()["study_digest"]}
    assert entries[5]["about"] == {"state": "waiting", "revision": 1}
    place.restart()
    assert kept(place) == entries


def test_a_command_that_was_refused_says_so_and_why(place: Place) -> None:
    place.create()
    place.ask("stop", study="trial")
    with pytest.raises(NeedsPerson):
        place.ask("start", study="trial")
    begun, refused = kept(place)[-2:]
    assert told([begun, refused]) == [("start", "begun", None), ("start", "refused", begun["number"])]
    assert refused["about"] == {"exit": 78, "why": "study `trial` is stopped: it cannot be started again"}


def test_the_service_writes_down_whom_the_kernel_knows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(person, "login_of", lambda process: 0)
    assert command(place, "invite", "alpha").exit_code == 0
    assert kept(place)[0]["by"] == {
        "name": "root", "uid": 0, "source": "loginuid", "account": {"name": ME, "uid": os.geteuid()}
    }  # fmt: skip


def test_sudo_and_polkit_name_the_person_where_the_kernel_knows_nobody(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(person, "login_of", lambda process: None)
    monkeypatch.setenv("PKEXEC_UID", "0")
    command(place, "invite", "alpha")
    monkeypatch.setenv("SUDO_UID", "3999999999")
    command(place, "invite", "bravo")
    named = [(entry["by"]["name"], entry["by"]["source"]) for entry in kept(place)[::2]]  # type: ignore[index]
    assert named == [("root", "polkit"), ("3999999999", "sudo")]


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_request_either_reads_or_is_in_the_journal(kind: type[Request]) -> None:
    """A new one must say which: it stands in ``READING``, or its acts are written down."""
    values = {"document": {}, "expires_s": 1, "anyway": True, "site": "a", "ledger": "b", "bundle": "", "initial": "x"}
    fields = {name: values.get(name, "trial") for name in kind.model_fields if name not in ("command", "by")}
    fields |= {name: False for name in ("archived",) if name in fields} | {
        name: None for name in ("public_data",) if name in fields
    }
    request = kind.model_construct(**fields)
    assert (about(request) is None) == isinstance(request, READING)


def test_a_changed_removed_or_moved_line_is_found(place: Place) -> None:
    for site in ("alpha", "bravo"):
        place.invite(site)
    lines = list(journal.Journal(place.coordinator.context.store, lambda: 0.0).lines())
    found, head = journal.entries(lines)
    assert [entry.number for entry in found] == [1, 2, 3, 4]
    for changed, said in (
        (lines[1:], "line 1 of the journal says that it is line 2: lines are missing"),
        ([lines[0], lines[2]], "line 2 of the journal says that it is line 3: lines are missing"),
        ([lines[0], lines[1][:-1]], "line 2 of the journal is no entry of one"),
    ):
        with pytest.raises(BadData) as refused:
            journal.entries(changed)
        assert refused.value.message == said
    forged = [lines[0].replace("alpha", "alphx"), *lines[1:]]
    assert journal.entries(forged)[1] != head


def test_the_journal_is_shown_exported_signed_and_checked_elsewhere(place: Place, tmp_path: Path) -> None:
    place.invite("alpha")
    place.create()
    place.ask("start", study="trial")
    shown = command(place, "journal", "show").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    assert lines[0] == "line when (UTC) who command about end"
    assert re.fullmatch(
        rf"1 20\S+ \S+ {ME} invite expires_s 3600, site alpha done expires 20\S+, replaces False", lines[2]
    )
    assert lines[-1].startswith("6 lines, each as it was written; head ")
    only = json.loads(command(place, "journal", "show", "--about", "trial", "--json").stdout)
    assert [entry["act"] for entry in only["entries"]] == ["create", "create", "start", "start"]
    out = tmp_path / "journal.jsonl"
    made = command(place, "journal", "export", "--out", out)
    assert made.exit_code == 0
    assert f"6 lines and the signed head written to {out}" in made.output
    key = fingerprint(place.coordinator.context.receipt_key.public_key().public_bytes_raw())
    checked = CliRunner().invoke(app, ["journal", "verify", str(out), "--receipt-key", key])
    assert checked.stdout == f"6 lines, each as it was written; signed with key {key}\n"
    other = CliRunner().invoke(app, ["journal", "verify", str(out), "--receipt-key", "ab"])
    assert str(other.exception) == f"{out} was signed with key {key}, not with ab"


def test_an_export_whose_lines_were_changed_is_refused(place: Place, tmp_path: Path) -> None:
    for site in ("alpha", "bravo"):
        place.invite(site)
    out = tmp_path / "journal.jsonl"
    command(place, "journal", "export", "--out", out)
    *lines, last = out.read_text().splitlines()
    for changed in ([lines[0].replace("alpha", "zebra"), *lines[1:]], lines[:-2]):
        out.write_text("\n".join([*changed, last]) + "\n")
        refused = CliRunner().invoke(app, ["journal", "verify", str(out)])
        assert str(refused.exception) == "the journal is not the one whose head was signed"
        assert f"its chain has {len(changed)} lines" in getattr(refused.exception, "hint", "")
    out.write_text("\n".join(lines) + "\n")
    refused = CliRunner().invoke(app, ["journal", "verify", str(out)])
    assert str(refused.exception) == f"{out}: its last line is no head that `coordinator journal export` wrote"


def test_a_journal_that_was_changed_in_the_database_is_not_shown_as_whole(place: Place) -> None:
    place.invite("alpha")
    with place.coordinator.context.store.write() as session:
        session.execute(sa.delete(tables.JournalLine).where(tables.JournalLine.number == 1))
    shown = command(place, "journal", "show")
    assert str(shown.exception) == "line 1 of the journal is not the one that was written"


def test_init_is_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["init", "--federation", "north", "--address", "127.0.0.1:8443", "--state", str(tmp_path / "state")]
    assert CliRunner().invoke(app, words).exit_code == 0
    shown = CliRunner().invoke(app, ["journal", "show", "--json", "--state", str(tmp_path / "state")])
    (entry,) = json.loads(shown.stdout)["entries"]
    assert (entry["act"], entry["event"], entry["about"]["federation"]) == ("init", "done", "north")
    assert entry["by"]["account"]["name"] == ME


def test_a_line_is_canonical_json_and_its_person_comes_back(place: Place) -> None:
    place.coordinator.administration._journal.done(OPERATOR, "restore", {"files": 3})
    (line,) = journal.Journal(place.coordinator.context.store, lambda: 0.0).lines()
    assert canonical.loads(line.encode())["by"] == OPERATOR.document()
    (entry,), _ = journal.entries([line])
    assert entry.by == OPERATOR
