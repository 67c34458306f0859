"""One exit code for a wrong ``--state``, whatever is wrong with it, in every command of both programs."""

import time
from pathlib import Path
from typing import Any

import pytest

from coordinator import state_directory as places
from site_agent.state.directory import Site, SiteState
from tests.wardround.test_outputs import all_commands, run
from wardround.local import directory

ARGUMENTS = {
    "site-agent approve": ["s", "--data", "d"],
    "site-agent audit bundle": ["--out", "OUT"],
    "site-agent audit export": ["--out", "OUT", "--format", "csv"],
    "site-agent audit reconcile": ["--bytes", "1"],
    "site-agent audit report": ["--out", "OUT"],
    "site-agent data add": ["d", "--table", "TABLE", "--label", "x"],
    "site-agent data check": ["d", "--study", "s"],
    "site-agent data public-data": ["d", "TABLE"],
    "site-agent join": ["--invitation", "INVITATION"],
    "coordinator models export": ["s", "--out", "OUT"],
    "site-agent audit pack": ["s", "--out", "OUT"],
    "site-agent models export": ["s", "--checkpoint", "latest", "--out", "OUT"],
    "site-agent models list": ["s"],
    "site-agent page user add": ["dana", "--password-file", "TABLE"],
    "site-agent page user remove": ["dana"],
    "site-agent policy draft": ["s"],
    "site-agent policy apply": ["TABLE", "--yes"],
    "site-agent policy agree": ["--yes"],
    "site-agent policy explain": ["s"],
    "site-agent predict": ["s", "--checkpoint", "latest", "--table", "TABLE", "--out", "OUT"],
    "site-agent preview": ["s"],
    "site-agent audit sum": ["s", "--round", "1"],
    "site-agent peers list": ["s"],
    "site-agent peers know": ["x", "ab" * 32],
    "site-agent peers forget": ["x"],
    "site-agent reject": ["s", "--round", "1"],
    "site-agent release": ["s", "--round", "1"],
    "site-agent withdraw": ["s"],
    "site-agent data fit": ["p", "--study", "s"],
    "site-agent data summary": ["p", "--request", "s"],
    "site-agent data map": ["p", "MAPPING"],
    "coordinator authority export-root": ["--out", "OUT", "--passphrase", "TABLE"],
    "coordinator authority install": ["TABLE"],
    "coordinator authority request": ["--out", "OUT"],
    "coordinator init": ["--federation", "f", "--address", "127.0.0.1:1"],
    "coordinator invite": ["north"],
    "coordinator backup": ["--out", "OUT"],
    "coordinator journal export": ["--out", "OUT"],
    "coordinator dashboard user add": ["dana", "--password-file", "TABLE"],
    "coordinator dashboard user remove": ["dana"],
    "coordinator receipts": ["north", "--out", "OUT"],
    "coordinator restore": ["TABLE"],
    "coordinator rollover": ["north", "--ledger", "00" * 16],
    "coordinator revoke": ["north"],
    "coordinator second-person take-back": ["1"],
    **{f"coordinator study {one}": ["s"] for one in ("archive", "fit", "renew", "report", "start", "status", "stop")},
    "coordinator standby export": ["--out", "OUT", "--passphrase", "TABLE"],
    "coordinator standby import": ["TABLE", "--passphrase", "TABLE"],
    "coordinator study create": ["TABLE"],
    "coordinator study edit": ["s", "--set", "study.rounds=2"],
    "coordinator study metrics": ["s"],
    "coordinator study export": ["s", "--to", "tensorboard", "--out", "OUT"],
    **{f"coordinator summary {one}": ["s"] for one in ("show", "close", "draft")},
    "coordinator summary create": ["TABLE"],
}
MAKES = (
    "site-agent join",
    "site-agent setup",
    "coordinator init",
    "coordinator restore",
    "coordinator standby import",
)  # what a missing or an empty folder is right for
NEEDS_NO_MEMBER = ("site-agent data add", "site-agent data list", "site-agent policy check")  # an empty folder will do
WITH_STATE = [
    words
    for words, one in all_commands().items()
    if any("--state" in param.opts for param in one.params) and not words.startswith("fl-lab")
]


def wrong(folder: Path, program: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    state = folder / "state"
    if kind == "a file":
        state.write_text("")
    elif kind == "empty":
        state.mkdir()
    elif kind == "of the other program":
        if program == "site-agent":
            places.create(places.State(state), "demo", "127.0.0.1:1", time.time())
        else:
            SiteState(state).make_folders()
            SiteState(state).save_site(Site("north", "demo", "127.0.0.1:1", "00", "00", 0))
    elif kind == "unreadable":  # as for a user who may not look into it: root, who runs the tests, always may
        state.mkdir()
        real: Any = Path.stat

        def stat(path: Path, **options: Any) -> Any:
            if state in path.parents:
                raise PermissionError(13, "Permission denied")
            return real(path, **options)

        monkeypatch.setattr(Path, "stat", stat)
    return state


@pytest.mark.parametrize("kind", ["missing", "a file", "empty", "of the other program", "unreadable"])
@pytest.mark.parametrize("command", WITH_STATE)
def test_a_wrong_state_ends_every_command_with_78(
    tmp_path: Path, command: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (kind in ("missing", "empty") and command in MAKES) or (kind == "empty" and command in NEEDS_NO_MEMBER):
        pytest.skip("that is no wrong place for it")
    state = wrong(tmp_path, command.split()[0], kind, monkeypatch)
    table = tmp_path / "table.csv"
    table.write_text("x\n1\n")
    given = {"OUT": str(tmp_path / "out"), "TABLE": str(table), "INVITATION": str(table)}
    words = [given.get(word, word) for word in ARGUMENTS.get(command, [])]
    code, said = run(command, [*command.split()[1:], *words, "--state", str(state)], capsys, monkeypatch)
    assert code == 78, said
    first, second, *_ = said.splitlines()
    assert first.startswith("error: "), said
    assert str(state) in first
    assert second.startswith("hint: ")
    assert "--state" in second


@pytest.mark.parametrize("kind", ["missing", "a file", "of the other program"])
def test_the_trainer_alone_says_it_too(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = wrong(tmp_path, "site-agent", kind, monkeypatch)
    words = ["run", "--only", "trainer", "--state", str(state)]
    code, said = run("site-agent run", words, capsys, monkeypatch)
    assert code == 78, said


def test_without_a_state_each_program_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "SYSTEM", tmp_path / "system")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for program, role in (("site-agent", "site"), ("coordinator", "coordinator")):
        assert directory.default_state(program) == tmp_path / "home" / ".local" / "state" / "wardround" / role
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert directory.default_state("site-agent") == tmp_path / "elsewhere" / "wardround" / "site"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the specification says to leave alone
    assert directory.default_state("site-agent").is_relative_to(tmp_path / "home")
    (tmp_path / "system" / "site").mkdir(parents=True)
    assert directory.default_state("site-agent") == tmp_path / "system" / "site"
    assert directory.default_state("coordinator").is_relative_to(tmp_path / "home")


@pytest.mark.parametrize("command", ["site-agent status", "coordinator sites"])
def test_a_command_without_a_state_looks_there(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SYSTEM", tmp_path)
    monkeypatch.delenv("WARDROUND_STATE", raising=False)
    place = tmp_path / directory.ROLES[command.split()[0]]
    place.mkdir()
    code, said = run(command, command.split()[1:], capsys, monkeypatch)
    assert code == 78
    assert str(place) in said
