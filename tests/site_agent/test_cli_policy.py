"""The commands of a person who decides what may leave: policy, release, reject, leave, ledger rollover."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from site_agent.cli.merging import merge_into_policy, proposal, show_proposal, write_proposal
from site_agent.cli.policy import study_request
from site_agent.cli.rollover import rollover
from site_agent.state.directory import SiteState
from tests.site_agent.shell import Shell
from tests.site_agent.site_world import STUDY
from wardround.errors import NeedsPerson


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_approve_without_a_policy_exits_78_and_names_the_command(shell: Shell) -> None:
    said = shell.run("approve", STUDY, "--data", "patients", code=78).stderr
    assert f"error: there is no policy at {shell.state}/policy.toml: nothing may leave" in said
    assert "hint: `site-agent policy draft hearts` writes a proposal" in said


def test_a_policy_goes_from_draft_to_explained(shell: Shell) -> None:
    said = shell.run("policy", "draft", STUDY).stdout
    assert f"Draft for study `{STUDY}` written to {shell.state}/policy.toml; nothing is approved by it" in said
    assert said.splitlines()[-1].startswith("next: read and edit it, then `site-agent policy check`")
    checked = shell.run("policy", "check").stdout
    assert "2 rules allow tensors and 0 deny them; the rest is denied" in checked
    explained = shell.run("policy", "explain", STUDY)
    assert "tensors.allow 1: 'shared.weight'" in explained.stdout
    assert "all of it may leave; a person releases: none" in explained.stdout
    assert "is checked when data is approved" in explained.stderr
    shown = shell.json("policy", "explain", STUDY)
    assert shown["allowed"] is True
    assert {"what": "shared.bias", "allowed": True, "rule": "tensors.allow 2: 'shared.bias'"} in shown["decisions"]


def test_explain_exits_77_when_something_is_denied(shell: Shell) -> None:
    shell.run("policy", "draft", STUDY)
    edit(shell.state / "policy.toml", "deny = []", 'deny = [{ match = "*bias" }]')
    done = shell.run("policy", "explain", STUDY, code=77)
    assert "DENIED" in done.stdout
    assert "error: the policy blocks study `hearts`: shared.bias: tensors.deny 1: '*bias'" in done.stderr
    assert shell.json("policy", "explain", STUDY, code=77)["allowed"] is False
    said = shell.run("approve", STUDY, "--data", "patients", "--digest", shell.shown(), code=77).stderr
    assert "error: the policy does not let study `hearts` take out what it asks: shared.bias: " in said


def test_a_draft_never_replaces_a_policy(shell: Shell, tmp_path: Path) -> None:
    shell.run("policy", "draft", STUDY)
    before = (shell.state / "policy.toml").read_bytes()
    said = shell.run("policy", "draft", STUDY, code=64).stderr
    assert "policy.toml exists, and a draft never replaces a policy" in said
    assert "hint: `site-agent policy draft hearts --merge` shows what the study asks beyond it, and asks you" in said
    assert (shell.state / "policy.toml").read_bytes() == before
    shell.run("policy", "draft", STUDY, "--out", str(tmp_path / "new.toml"))
    assert (tmp_path / "new.toml").read_bytes() == before


def test_check_says_what_is_wrong_and_where(shell: Shell, tmp_path: Path) -> None:
    shell.run("policy", "draft", STUDY)
    edit(shell.state / "policy.toml", "bytes_per_day", "byte_per_day")
    said = shell.run("policy", "check", code=65).stderr
    assert "policy.toml: unknown key `byte_per_day` in [quotas]" in said
    assert "hint: did you mean `bytes_per_day`?" in said
    (tmp_path / "empty.toml").write_text("")
    assert "empty.toml: empty, and a policy says at least" in shell.run(
        "policy", "check", str(tmp_path / "empty.toml"), code=65
    ).stderr  # fmt: skip


def test_diff_says_what_changed(shell: Shell, tmp_path: Path) -> None:
    shell.run("policy", "draft", STUDY)
    old, new = shell.state / "policy.toml", tmp_path / "new.toml"
    new.write_text(old.read_text())
    assert shell.run("policy", "diff", str(old), str(new)).stdout == "the two say the same\n"
    edit(new, 'updates = "none"', 'updates = "first"')
    assert shell.run("policy", "diff", str(old), str(new)).stdout == "release.updates: none before, first now\n"
    assert shell.json("policy", "diff", str(old), str(new)) == {
        "same": False, "changes": ["release.updates: none before, first now"]
    }  # fmt: skip


def hold(shell: Shell) -> None:
    shell.run("policy", "draft", STUDY)
    edit(shell.state / "policy.toml", 'updates = "none"', 'updates = "every"')
    shell.serve("--only", "gateway")
    shell.run("approve", STUDY, "--data", "patients", "--digest", shell.shown())
    shell.coordinator.wait_declared("READY")
    shell.coordinator.assign(STUDY, 1)
    shell.coordinator.wait_declared("HELD")


def test_release_shows_what_waits_and_lets_it_leave(shell: Shell) -> None:
    hold(shell)
    assert shell.json("status")["studies"][0]["state"] == "held"
    assert "hearts: round 1 waits: `site-agent release hearts --round 1`" in shell.run("studies").stdout
    shown = shell.run("release", STUDY, "--round", "1", "--show").stdout
    assert "shared.weight" in shown
    assert "L2 norm" in shown
    assert "2 tensors, 16.2 KiB; val_loss 0.5" in shown
    assert not shell.coordinator.uploads
    said = shell.run("release", STUDY, "--round", "1").stdout
    assert "shared.weight" in said
    assert "Round 1 of `hearts` released by " in said
    shell.coordinator.wait_receipts(1)


def test_reject_tells_the_coordinator_and_nothing_leaves(shell: Shell) -> None:
    hold(shell)
    assert shell.json("reject", STUDY, "--round", "1")["decision"] == "rejected"
    shell.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert not shell.coordinator.uploads
    said = shell.run("release", STUDY, "--round", "1", code=64).stderr
    assert "error: round 1 of `hearts` was already rejected" in said


@pytest.mark.parametrize("running", [True, False], ids=["running", "not running"])
def test_leave_ends_the_membership_and_says_what_stays_where(shell: Shell, running: bool) -> None:
    shell.approve()
    service = shell.serve("--only", "gateway") if running else None
    said = shell.run("leave").stdout
    assert "Site `st-olav` left federation `test`: nothing more leaves, and `site-agent run` refuses" in said
    assert f"{shell.state}/studies: private modules and checkpoints" in said
    assert said.splitlines()[-1] == "next: tell the coordinator's operator: `coordinator revoke st-olav`"
    shell.coordinator.wait_declared("WITHDRAWN")
    if service is not None:
        _, log = service.communicate(timeout=60)
        assert service.returncode == 78, log
    refused = shell.run("run", code=78).stderr
    assert f"error: site `st-olav` in {shell.state} left federation `test`: nothing more is sent" in refused
    assert "left" in shell.run("audit", "show").stdout


def test_leave_says_which_studies_the_coordinator_has_not_heard_of(shell: Shell) -> None:
    shell.approve()
    shell.coordinator.stop()
    assert "the coordinator could not be told of: hearts" in shell.run("leave").stderr


def test_a_rollover_prints_the_id_that_the_operator_confirms(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()
    app.command()(rollover)
    app(["--state", str(shell.state)], standalone_mode=False)
    said = capsys.readouterr().out
    genesis = json.loads((shell.state / "ledger" / "000001.jsonl").read_text().splitlines()[0])
    assert said.startswith(
        f"Ledger {genesis['ledger_id']} begun; its first line cites {genesis['continues']['ledger_id']}"
    )
    assert "Uploads are refused (LEDGER_FORK) until the coordinator's operator confirms the new one" in said
    assert said.splitlines()[-1].endswith(f"`coordinator rollover SITE --ledger {genesis['ledger_id']}`")


def test_merge_shows_what_changes_and_writes_it_only_when_a_person_says_so(
    shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run("policy", "draft", STUDY)
    policy = shell.state / "policy.toml"
    edit(policy, 'studies = ["hearts"]', 'studies = ["lungs"]  # signed by the board')
    before = policy.read_bytes()
    done = shell.run("policy", "draft", STUDY, "--merge", code=64)
    assert "* study.studies: now hearts" in done.stdout
    assert "error: nothing was changed: there is no terminal to ask at" in done.stderr
    assert shell.json("policy", "draft", STUDY, "--merge")["denied"] == []
    assert policy.read_bytes() == before

    here = SiteState(shell.state)
    request = study_request(here, here.site(), STUDY)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", lambda *words, **options: True)
    merge_into_policy(here, request, None, force=False, as_json=False)
    said = capsys.readouterr().out
    digest = hashlib.sha256(before).hexdigest()
    assert f"Written to {policy}; the text before is kept: `site-agent policy show {digest[:12]}`" in said
    assert "# signed by the board" in policy.read_text()
    assert shell.run("policy", "show", digest).stdout == before.decode()
    merge_into_policy(here, request, None, force=False, as_json=False)
    assert "the policy in force has all that a merge may add for study `hearts`" in capsys.readouterr().out
    proposed = proposal(here, request)
    edit(policy, "deny = []", 'deny = [{ match = "*bias" }]')
    with pytest.raises(NeedsPerson, match="is not the policy any more that was to be changed; nothing was changed"):
        write_proposal(here, proposed)
    show_proposal(replace(proposal(here, request), changes=["x: now y"], commented=False), STUDY)
    shown = capsys.readouterr()
    assert "still DENIED, until you write it yourself: shared.bias: tensors.deny 1: '*bias'" in shown.out
    assert "it is written anew, without your comments" in shown.err
