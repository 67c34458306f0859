"""Another policy in force by a command: checked, shown, and with the person's name in the ledger."""

import hashlib
import os
import pwd
import tempfile
from pathlib import Path

import pytest
import typer

from site_agent import audit
from site_agent.cli import policy_edits
from site_agent.gateway.exit import enforcement
from site_agent.gateway.exit.ledger import Ledger
from tests.site_agent.shell import Shell
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld
from tools import verify_ledger
from wardround.errors import BadData, CannotWrite, NeedsPerson, UsageProblem
from wardround.local import durable
from wardround.local import person as local_person

ME = pwd.getpwuid(os.geteuid()).pw_name


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def put(world: SiteWorld, text: str, before: bytes) -> str:
    told = world.command("policy", text=text, before=sha256(before) if before else "", by=PERSON)
    return str(told["sha256"])


def drafted(world: SiteWorld) -> bytes:
    """A running site with a policy that somebody wrote with an editor, and that was read once."""
    world.join()
    world.offer()
    world.start()
    world.draft()
    world.approve()
    return world.state.policy.read_bytes()


def test_the_running_service_puts_a_policy_in_force_and_names_the_person(world: SiteWorld) -> None:
    before = drafted(world)
    after = before.replace(b'updates = "none"', b'updates = "every"')
    world.state.policy.chmod(0o600)
    digest = put(world, after.decode(), before)
    assert (digest, world.state.policy.read_bytes()) == (sha256(after), after)
    assert world.state.policy.stat().st_mode & 0o777 == 0o600
    assert world.state.policy_text(digest) == after
    assert world.state.policy_text(sha256(before)) == before
    written, put_there = world.lines("policy")
    assert (written["event"], written["sha256"], written.get("by")) == ("seen", sha256(before), None)
    assert (put_there["event"], put_there["sha256"], put_there["by"]["name"]) == ("changed", digest, "dpo")
    world.command("preview", study=STUDY, data="patients")
    assert len(world.lines("policy")) == 2  # what reads it next finds it known
    world.stop()
    assert audit.verify(world.state.ledger)[1] == verify_ledger.judge(world.state.ledger)[0]
    assert audit.verify(world.state.ledger)[1] not in (audit.TAMPERED, audit.CANNOT_VERIFY)


def test_a_policy_that_was_changed_meanwhile_is_not_written_over(world: SiteWorld) -> None:
    before = drafted(world)
    world.draft(('updates = "none"', 'updates = "first"'))
    meanwhile = world.state.policy.read_bytes()
    with pytest.raises(NeedsPerson, match="is not the policy any more that was to be changed; nothing was changed"):
        put(world, before.decode().replace('"none"', '"every"'), before)
    assert world.state.policy.read_bytes() == meanwhile


def test_no_policy_is_in_force_without_its_line_in_the_ledger(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the line is to be written."""
    before = drafted(world)

    def full(*_: object, **__: object) -> None:
        raise CannotWrite("ledger: No space left on device")

    monkeypatch.setattr(Ledger, "append", full)
    with pytest.raises(CannotWrite):
        put(world, before.decode().replace('"none"', '"every"'), before)
    assert world.state.policy.read_bytes() == before


def test_a_policy_that_did_not_come_into_force_is_taken_back_in_the_ledger(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drafted(world)
    write_file = durable.write_file

    def full(path: Path, *rest: object, **named: object) -> None:
        if path == world.state.policy:
            raise CannotWrite(f"{path}: No space left on device")
        write_file(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(enforcement.durable, "write_file", full)
    with pytest.raises(CannotWrite, match=r"policy\.toml: No space left"):
        put(world, before.decode().replace('"none"', '"every"'), before)
    assert world.state.policy.read_bytes() == before
    assert [line["sha256"] for line in world.lines("policy")][-1] == sha256(before)


def test_what_is_no_policy_is_not_put_in_force(world: SiteWorld) -> None:
    before = drafted(world)
    with pytest.raises(BadData, match=r"policy\.toml"):
        put(world, "[tensors]\nallow = 3\n", before)
    assert world.state.policy.read_bytes() == before
    assert len(world.lines("policy")) == 1


def test_a_draft_and_what_is_applied_after_it_name_the_person(shell: Shell, tmp_path: Path) -> None:
    shell.run("policy", "draft", STUDY)
    draft = (shell.state / "policy.toml").read_bytes()
    copy = tmp_path / "copy.toml"
    copy.write_bytes(draft.replace(b'updates = "none"', b'updates = "every"'))
    refused = shell.run("policy", "apply", str(copy), code=64).stderr
    assert "error: there is no terminal to ask at; nothing was changed" in refused
    done = shell.run("policy", "apply", str(copy), "--yes")
    assert done.stdout.splitlines()[0] == "release.updates: none before, every now"
    assert f"policy {sha256(copy.read_bytes())[:12]}… is in force, put there by {ME}" in done.stdout
    assert f"the one before is kept: `site-agent policy show {sha256(draft)[:12]}" in done.stderr
    assert shell.run("policy", "apply", str(copy), "--yes").stdout == (
        "the policy says exactly this already; nothing was changed\n"
    )
    rows = shell.json("policy", "show")["policies"]
    assert [(row["event"], row["sha256"], row["by"]) for row in rows] == [
        ("seen", sha256(draft), ME), ("changed", sha256(copy.read_bytes()), ME),
    ]  # fmt: skip
    assert f"changed  {sha256(copy.read_bytes())} by {ME}" in shell.run("policy", "show").stdout
    assert shell.run("policy", "show", sha256(draft)[:12]).stdout == draft.decode()
    assert f"seen {sha256(draft)[:12]} by {ME}" in shell.run("audit", "show").stdout
    copy.write_text("nothing of a policy")
    assert "copy.toml" in shell.run("policy", "apply", str(copy), "--yes", code=65).stderr
    said = shell.run("policy", "edit", code=64).stderr
    assert "there is no terminal for an editor" in said


def test_two_people_change_the_policy_at_a_terminal(shell: Shell, tmp_path: Path) -> None:
    """One alone changes nothing, also when asked twice; the second is shown what the first proposed."""
    if local_person.login_of("self") is not None:
        pytest.skip("the kernel knows who logged in, and sudo cannot be played")
    shell.run("policy", "draft", STUDY)
    copy = tmp_path / "copy.toml"
    copy.write_bytes((shell.state / "policy.toml").read_bytes() + b"\n[policy]\npersons = 2\n")
    shell.run("policy", "apply", str(copy), "--yes", SUDO_UID="4001")
    assert "another policy is in force when 2 different people have agreed to it" in shell.run("policy", "check").stdout
    assert shell.run("policy", "proposed").stdout == "no change of the policy waits for a person\n"
    before = copy.read_bytes()
    copy.write_bytes(before.replace(b'updates = "none"', b'updates = "every"'))
    said = shell.run("policy", "apply", str(copy), "--yes", code=78, SUDO_UID="4001").stderr
    assert "agreed to by 4001 (sudo), as" in said
    assert "1 of the 2 people that the policy in force wants; what is in force stays" in said
    assert "hint: another person runs `site-agent policy agree`" in said
    shown = shell.run("policy", "proposed").stdout
    assert shown.splitlines()[0] == "release.updates: none before, every now"
    assert f"policy {sha256(copy.read_bytes())[:12]}…: agreed to by 4001 (sudo), as {ME}; 2 must" in shown
    assert shell.run("policy", "show", sha256(copy.read_bytes())[:12]).stdout == copy.read_text()
    said = shell.run("policy", "agree", "--yes", code=64, SUDO_UID="4001").stderr
    assert "already; the policy wants 2 different people" in said
    assert (shell.state / "policy.toml").read_bytes() == before
    shell.run("policy", "proposed", "--take-back", SUDO_UID="4002")
    assert "no change of the policy waits for a person" in shell.run("policy", "agree", "--yes", code=64).stderr
    shell.run("policy", "apply", str(copy), "--yes", code=78, SUDO_UID="4001")
    done = shell.run("policy", "agree", "--yes", SUDO_UID="4002").stdout
    assert "is in force, put there by 4002 (sudo), as" in done
    assert (shell.state / "policy.toml").read_bytes() == copy.read_bytes()
    assert f"4001 (sudo), as {ME} and 4002 (sudo), as {ME}" in shell.run("policy", "show").stdout
    (shell.state / "policy.toml").write_bytes(before)
    refused = shell.run("approve", STUDY, "--data", "patients", "--digest", "0" * 16, code=78).stderr
    assert "was changed by hand, and the policy in force wants 2 different people to change it" in refused


def test_the_editor_is_asked_again_until_it_is_a_policy(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run("policy", "draft", STUDY)
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\nif grep -q zzz "$1"; then sed -i "/zzz/d;s/\\"none\\"/\\"first\\"/" "$1"; '
        'else echo zzz >> "$1"; fi\n'
    )
    editor.chmod(0o755)
    asked: list[str] = []
    monkeypatch.setenv("VISUAL", str(editor))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", lambda question, **_: asked.append(question))
    policy_edits.edit(shell.state)
    assert asked == ["Edit it again? Otherwise nothing is changed.", "Put this policy in force?"]
    assert 'updates = "first"' in (shell.state / "policy.toml").read_text()
    assert "release.updates: none before, first now" in capsys.readouterr().out


def test_what_a_person_wrote_is_kept_where_it_cannot_be_put_in_force(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run("policy", "draft", STUDY)
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/\\"none\\"/\\"first\\"/" "$1"\n')
    editor.chmod(0o755)

    def full(*_: object) -> str:
        raise CannotWrite("policy.toml: No space left on device")

    monkeypatch.setenv("VISUAL", str(editor))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", lambda question, **_: None)
    monkeypatch.setattr(policy_edits, "put_policy", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CannotWrite):
        policy_edits.edit(shell.state)
    (kept,) = tmp_path.glob("wardround-policy-*/policy.toml")
    assert 'updates = "first"' in kept.read_text()
    assert f"`site-agent policy apply {kept}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("editor", "message"),
    [
        ("/nowhere/editor", "the editor `/nowhere/editor` cannot be started: No such file or directory"),
        ("false", "the editor `false` ended with 1; nothing was changed"),
    ],
)
def test_an_editor_that_does_not_work_changes_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, editor: str, message: str
) -> None:
    monkeypatch.setenv("VISUAL", editor)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(UsageProblem) as refused:
        policy_edits.edit(shell.state)
    assert refused.value.message == message
    assert not (shell.state / "policy.toml").exists()
