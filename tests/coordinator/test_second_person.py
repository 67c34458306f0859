"""Commands that need a second person: what the first one is told, and what the second one carries out."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from coordinator import journal
from coordinator.acts import READING
from coordinator.cli.asking import Waits
from coordinator.cli.main import app
from coordinator.dashboard.pages import studies_page
from coordinator.journal_records import WaitingList
from coordinator.monitoring import WAITING, families
from coordinator.second_person import COMMANDS, NOT_BY_DEFAULT, SecondPerson, Terms
from coordinator.state_directory import Config
from coordinator.storage import tables
from tests.coordinator.conftest import Place, study_document
from tests.coordinator.second_persons import ANNA, BERT, CARL, configure, two, waiting
from tests.coordinator.test_requests import REQUESTS
from wardround.errors import BadData, UsageProblem
from wardround.local import person
from wardround.records.schema import check


def lines(place: Place) -> list[dict[str, Any]]:
    with place.coordinator.context.store.read() as session:
        chosen = session.scalars(sa.select(tables.JournalLine).order_by(tables.JournalLine.number))
        return [json.loads(row.line) for row in chosen]


def events(place: Place) -> list[tuple[str, str, str]]:
    return [(line["act"], line["event"], line["by"]["name"]) for line in lines(place)]


def command(place: Place, uid: int, *words: str | Path) -> Result:
    """A command as the person of a login gives it, against the running service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(person, "login_of", lambda process: uid)
        patch.setattr("sys.argv", ["/usr/bin/coordinator", *map(str, words)])
        return CliRunner().invoke(app, [*map(str, words), "--state", str(place.state.root)])


def states(place: Place) -> dict[str, str]:
    return {row["site"]: row["state"] for row in place.ask("sites")["sites"]}


def test_the_first_person_is_told_what_the_second_one_types_and_nothing_is_done(place: Place) -> None:
    two(place)
    first = command(place, 5001, "invite", "st-olav", "--expires", "2h")
    assert isinstance(first.exception, Waits)
    assert first.exception.exit_code == 78
    assert first.stdout == ""
    (row,) = waiting(place)
    assert str(first.exception) == (
        "`coordinator invite`, site st-olav: proposed by 5001 (loginuid), as root in line 2 of the journal; nothing is "
        "done before a second person gives it too"
    )
    assert first.exception.hint == (
        f"until {row['until']}, somebody with another login gives the same command: "
        "`coordinator invite st-olav --expires 2h`"
    )
    assert not states(place)
    second = command(place, 5002, "invite", "st-olav", "--expires", "2h")
    assert second.exit_code == 0, second.exception
    assert len(second.stdout.split()) == 1  # the invitation
    assert states(place) == {"st-olav": "invited"}
    assert events(place)[1:] == [
        ("invite", "proposed", "5001"), ("invite", "begun", "5002"), ("invite", "done", "5002"),
    ]  # fmt: skip
    assert lines(place)[2]["about"] == {"site": "st-olav", "expires_s": 7200, "enrolled": False, "proposal": 2}
    assert not waiting(place)


def test_several_invitations_are_a_proposal_each(place: Place) -> None:
    two(place, "invite")
    assert isinstance(command(place, 5001, "invite", "alpha", "bravo").exception, Waits)
    assert [row["about"]["site"] for row in waiting(place)] == ["alpha", "bravo"]
    assert command(place, 5002, "invite", "alpha", "bravo").exit_code == 0
    assert states(place) == {"alpha": "invited", "bravo": "invited"}


def test_a_study_is_bound_by_its_settings_its_tensors_and_what_is_here(place: Place) -> None:
    two(place, "study create", "study stop")
    document = study_document()
    fields = {"document": document, "initial": str(place.initial)}
    assert place.ask("create", **fields, by=ANNA)["proposal"] == 2
    (row,) = waiting(place)
    assert sorted(row["about"]) == ["document_sha256", "initial_digest", "name"]
    assert not place.ask("studies")["studies"]
    assert place.ask("create", **fields, by=BERT)["revision"] == 1
    assert place.ask("stop", study="trial", by=ANNA)["what"] == "`coordinator study stop`, study trial"
    with pytest.raises(BadData, match="there is no study `trail` here"):
        place.ask("stop", study="trail", by=ANNA)
    assert place.ask("stop", study="trial", by=CARL)["state"] == "stopped"


def test_what_was_proposed_of_one_revision_does_not_stop_the_next(place: Place) -> None:
    two(place, "study stop")
    place.create()
    place.ask("stop", study="trial", by=ANNA)
    place.ask("edit", study="trial", document=study_document(round_deadline_s=90))
    again = place.ask("stop", study="trial", by=BERT)
    assert again["beside"] == "the proposal of anna in line 4 says something else of revision"
    assert place.status()["state"] == "created"
    assert place.ask("stop", study="trial", by=ANNA)["state"] == "stopped"


def test_what_is_not_named_needs_one_person(place: Place) -> None:
    two(place, "revoke")
    assert command(place, 5001, "invite", "alpha").exit_code == 0
    assert "invitation" not in json.dumps(lines(place))
    assert isinstance(command(place, 5001, "revoke", "alpha").exception, Waits)


def test_a_proposal_is_taken_back_by_whoever_may_give_commands_and_counts_no_more(place: Place) -> None:
    two(place, "revoke")
    place.invite("alpha")
    place.ask("revoke", site="alpha", by=ANNA)
    number = waiting(place)[0]["proposal"]
    taken = command(place, 5002, "second-person", "take-back", str(number))
    assert taken.stderr == (f"`coordinator revoke`, site alpha, proposed by anna in line {number}, is taken back\n")
    assert not waiting(place)
    assert "proposal" in place.ask("revoke", site="alpha", by=BERT)  # a new one
    with pytest.raises(UsageProblem) as refused:
        place.ask("take-back", number=number, by=BERT)
    assert refused.value.message == f"no proposal {number} waits for a second person"


def test_journal_status_and_list_show_what_waits(place: Place) -> None:
    two(place, "study stop", "revoke")
    place.create()
    place.invite("alpha")
    place.ask("stop", study="trial", by=ANNA)
    place.ask("revoke", site="alpha", by=ANNA)
    place.ask("revoke", site="alpha", by=BERT)
    until = waiting(place)[0]["until"]
    shown = " ".join(command(place, 5001, "journal", "show").stdout.split())
    assert f"stop revision 1, study trial waits for a second person until {until}" in shown
    assert "revoke enrolled False, site alpha second person: line 8" in shown
    assert "revoke enrolled False, proposal 7, site alpha done was_enrolled False" in shown
    stands = command(place, 5001, "study", "status", "trial").stdout
    assert (
        f"waits for a second person: `coordinator study stop`, study trial, proposed by anna, until {until}\n" in stands
    )
    listed = " ".join(command(place, 5001, "second-person", "list").stdout.split())
    assert "need a second person: revoke, study stop" in listed
    assert f"6 anna coordinator study stop, study trial {until} revision 1, study trial" in listed


def test_the_dashboard_shows_what_waits(place: Place) -> None:
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    told = WaitingList.from_document(place.ask("waiting"))
    sites = place.coordinator.administration.sites()
    page = studies_page([], {}, sites, told)
    claims = {claim.name: claim.text for claim in page.blocks[0].claims}  # type: ignore[union-attr]
    assert claims["Second person"] == "1 command waits"
    (grid,) = [block for block in page.blocks if hasattr(block, "rows")]
    assert grid.rows[0][:2] == ("`coordinator revoke`, site alpha", "anna")


def test_a_long_journal_is_read_page_by_page(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PAGE", 2)
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    for site in ("bravo", "charlie", "delta"):
        place.invite(site)
    place.ask("revoke", site="bravo", by=BERT)
    assert [row["about"]["site"] for row in waiting(place)] == ["alpha", "bravo"]
    assert place.ask("waiting")["needed_for"] == ["revoke"]
    configure(place, None)
    assert place.ask("revoke", site="bravo", by=CARL)["was_enrolled"] is False


def test_metrics_count_what_waits(place: Place) -> None:
    two(place, "revoke")
    place.ask("revoke", site="alpha", by=ANNA)
    told = dict(families(place.coordinator.administration, place.coordinator.context))
    assert told[WAITING] == {(): 1}


def test_where_nothing_waits_the_list_says_so_without_a_table(place: Place) -> None:
    told = command(place, 5001, "second-person", "list").stdout
    assert told == "no command waits for a second person\nneed a second person: no commands\n"


def test_the_sites_that_are_not_enrolled_are_invited_before_they_approve(place: Place) -> None:
    study = place.state.root.parent / "study.json"
    study.write_text(json.dumps(study_document()))
    said = command(place, 5001, "study", "create", study, "--initial", place.initial).stderr
    assert (
        "Not enrolled yet: alpha, bravo, charlie\n"
        "next: `coordinator invite alpha bravo charlie`, if they have no invitation\n"
        "then: each site runs `site-agent approve trial --data NAME`\n"
    ) in said


def test_a_waiting_page_hears_of_a_proposal(place: Place) -> None:
    two(place, "revoke")
    changes = place.coordinator.engine.follow("")
    place.ask("revoke", site="alpha", by=ANNA)
    assert changes.wait(timeout_s=10)
    place.coordinator.engine.unfollow(changes)


def test_a_models_export_is_in_the_journal_and_can_need_a_second_person(place: Place) -> None:
    two(place, "models export")
    place.create()
    fields = {"study": "trial", "round": 1, "model_digest": "ab" * 32}
    assert place.ask("model-export", **fields, by=ANNA)["what"] == "`coordinator models export`, study trial"
    assert "proposal" in place.ask("model-export", **{**fields, "model_digest": "cd" * 32}, by=BERT)
    assert place.ask("model-export", **fields, by=BERT) == {"federation": "north"}
    assert lines(place)[-2]["about"]["model_digest"] == "ab" * 32


def test_fewer_commands_need_two_people_and_more_need_none(place: Place) -> None:
    """As with a site's policy: what was agreed to stays until two agree to less, whatever the file says."""
    two(place, "revoke", "invite")
    place.ask("revoke", site="alpha", by=ANNA)
    configure(place, None)
    assert place.ask("waiting")["needed_for"] == ["invite", "revoke"]
    told = command(place, 5001, "second-person", "list")
    assert "config.toml does not name these any more: invite, revoke\n" in told.stderr
    assert "proposal" in place.ask("invite", site="bravo", expires_s=60, by=ANNA)
    assert "proposal" in place.ask("second-person", by=ANNA)
    assert place.ask("waiting")["needed_for"] == ["invite", "revoke"]
    assert place.ask("second-person", by=BERT)["needed_for"] == []
    assert "invitation" in place.ask("invite", site="charlie", expires_s=60, by=ANNA)
    two(place, "study stop")
    place.create()
    assert place.ask("waiting")["needed_for"] == ["study stop"]
    recorded = [line for line in lines(place) if line["act"] == "second-person" and line["event"] == "done"]
    assert [line["about"]["acts"] for line in recorded] == ["invite, revoke", "", "study stop"]


def test_a_longer_time_needs_two_people_and_a_shorter_one_none() -> None:
    long, short = Terms(frozenset({"revoke"}), 900), Terms(frozenset({"revoke", "invite"}), 600)
    assert long.with_all_of(short) == short.with_all_of(long) == short
    assert Terms().with_all_of(long) == long.with_all_of(Terms()) == long
    assert Terms.from_known(short.known()) == short
    assert Terms.from_known(Terms().known()) == Terms()


def test_every_command_that_changes_something_can_be_named_or_is_left_out_for_a_reason() -> None:
    """What is left out has no effect of its own, or is a part of one that is there."""
    left_out = {
        "authority-leave-root": "comes after authority-export-root, from which the key is in the file",
        "authority-request": "a request is no secret, and does nothing before it is installed",
        "take-back": "lets less happen",
        "second-person": "always needs one where any command does",
    }
    changing = {kind.model_fields["command"].default for kind in REQUESTS if kind not in READING}
    assert changing - left_out.keys() == set(COMMANDS.values()) - {"restore"}
    assert set(NOT_BY_DEFAULT) < set(COMMANDS)


def test_a_configuration_names_commands_as_they_are_typed() -> None:
    values = {"federation": "north", "address": "a:1", "second_person": {}}
    assert check(Config, values, "config.toml").second_person == SecondPerson()
    with pytest.raises(BadData) as refused:
        check(Config, {**values, "second_person": {"acts": ["study delete"]}}, "config.toml")
    assert "`study delete` is none of invite, revoke, rollover, study create" in refused.value.message
