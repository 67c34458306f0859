"""Who is behind a command: the kernel's word before the environment's, and the account beside the person."""

import os
import pwd
from pathlib import Path

import pytest

from wardround.local import person
from wardround.local.person import Account, Person
from wardround.records.ledger import base

ROOT = Account(pwd.getpwuid(0).pw_name, 0)
SOMEBODY = next(entry for entry in pwd.getpwall() if entry.pw_uid)


@pytest.mark.parametrize(
    ("login", "environment", "source"),
    [
        pytest.param(SOMEBODY.pw_uid, {"SUDO_UID": "0"}, "loginuid", id="the kernel knows who logged in"),
        pytest.param(None, {"SUDO_UID": str(SOMEBODY.pw_uid), "PKEXEC_UID": "0"}, "sudo", id="sudo"),
        pytest.param(None, {"PKEXEC_UID": str(SOMEBODY.pw_uid)}, "polkit", id="polkit"),
    ],
)
def test_the_person_and_not_the_account_is_named(login: int | None, environment: dict[str, str], source: str) -> None:
    by = person.judged(login, environment, 0)
    assert by == Person(SOMEBODY.pw_name, SOMEBODY.pw_uid, source, ROOT)
    assert by.document() == {
        "name": SOMEBODY.pw_name, "uid": SOMEBODY.pw_uid, "source": source, "account": {"name": ROOT.name, "uid": 0}
    }  # fmt: skip
    assert (
        by.text == base.Person.from_document(by.document()).words() == f"{SOMEBODY.pw_name} ({source}), as {ROOT.name}"
    )


@pytest.mark.parametrize("written", ["", "-1", "x", "4294967295", "1 ", "²"])
def test_an_environment_that_holds_no_uid_names_nobody(written: str) -> None:
    by = person.judged(None, {"SUDO_UID": written}, 0)
    assert by == Person(ROOT.name, 0, "account", ROOT)
    assert by.text == ROOT.name


def test_an_unset_login_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for written, uid in (("4294967295", None), ("1000\n", 1000), ("", None)):
        monkeypatch.setattr(Path, "read_text", lambda self, written=written: written)
        assert person.login_of("self") == uid


def test_the_service_believes_the_kernel_rather_than_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = Person(ROOT.name, 0, "sudo", ROOT)
    monkeypatch.setattr(person, "login_of", lambda process: SOMEBODY.pw_uid)
    assert person.behind(claimed, 1, 0) == Person(SOMEBODY.pw_name, SOMEBODY.pw_uid, "loginuid", ROOT)
    monkeypatch.setattr(person, "login_of", lambda process: None)
    assert person.behind(Person("dpo", 5), 1, 0) == Person("dpo", 5, account=ROOT)


def test_a_uid_without_a_name_is_its_own() -> None:
    assert person.user_name(3_999_999_999) == "3999999999"
    assert person.who().account == Account(person.user_name(os.geteuid()), os.geteuid())
