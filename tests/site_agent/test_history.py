"""History is kept: every consent and withdrawal, every policy's text, and the person who acted."""

import hashlib
import json
import os

import pytest

from site_agent import audit
from tests.site_agent.shell import Shell
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld, document


def test_a_revision_does_not_replace_the_consent_before_it(world: SiteWorld) -> None:
    world.ready()
    first = (world.state.root / "consents" / f"{STUDY}.json").read_bytes()
    world.coordinator.offer(document(title="another"), world.another_model(seed=0), revision=2)
    world.command("refresh")
    world.approve()
    world.command("withdraw", study=STUDY, by={**PERSON, "name": "head"})
    files = sorted((world.state.root / "consents" / STUDY).iterdir())
    assert files[0].read_bytes() == first
    assert [file.name.rpartition("-")[0] for file in files] == [
        "0001-approved-1", "0002-approved-2", "0003-withdrawn-2"
    ]  # fmt: skip
    lines = world.lines("consent")
    assert [line["consent_sha256"] for line in lines] == [
        hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    ]  # fmt: skip
    kept = world.state.consent_history(STUDY)
    assert [(act.state, act.withdrawn_by.name if act.withdrawn_by else "") for act in kept] == [
        ("approved", ""), ("approved", ""), ("withdrawn", "head")
    ]  # fmt: skip
    assert kept[0].account.lines["training.local_steps"] == "1"


def test_the_text_of_each_policy_is_kept_before_its_digest_is_in_the_ledger(world: SiteWorld) -> None:
    world.ready()
    texts = [world.state.policy.read_bytes()]
    world.draft(("digits = 4", "digits = 5"))
    texts.append(world.state.policy.read_bytes())
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.state.policy.write_text("[broken")
    texts.append(b"[broken")
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert [world.state.policy_text(line["sha256"]) for line in world.lines("policy")] == texts


def test_people_can_look_at_the_history(shell: Shell) -> None:
    assert shell.run("studies", "--history").stdout == "no study was ever approved here\n"
    shell.approve()
    shell.run("withdraw", STUDY)
    said = shell.run("studies", "--history").stdout.splitlines()
    assert len(said) == 2
    assert f"  {STUDY}  approved by " in said[0]
    assert said[0].endswith(", 3 rounds, data `patients`")
    assert f"  {STUDY}  withdrawn by " in said[1]
    assert [one["state"] for one in shell.json("studies", "--history")["history"]] == ["approved", "withdrawn"]
    (row,) = shell.json("policy", "show")["policies"]
    assert "  seen     " + row["sha256"] in shell.run("policy", "show").stdout
    text = (shell.state / "policy.toml").read_text()
    assert shell.run("policy", "show", row["sha256"][:12]).stdout == text
    assert shell.json("policy", "show", row["sha256"])["text"] == text
    said_wrong = shell.run("policy", "show", "zz", code=64).stderr
    assert "0 policies of this site have a SHA-256 that begins with 'zz'" in said_wrong
    (shell.state / "policies" / f"{row['sha256']}.toml").write_text("other")
    assert "is another than was in force" in shell.run("policy", "show", row["sha256"], code=65).stderr
    (shell.state / "policies" / f"{row['sha256']}.toml").unlink()
    assert "is not kept here" in shell.run("policy", "show", row["sha256"], code=65).stderr


def test_the_person_behind_sudo_is_named_with_the_account(shell: Shell) -> None:
    shell.run("policy", "draft", STUDY)
    shell.serve("--only", "gateway")
    digest = shell.shown()
    said = shell.run("approve", STUDY, "--data", "patients", "--digest", digest, SUDO_UID="1", SUDO_USER="x").stdout
    lines = [line.document() for line in audit.lines(shell.state / "ledger") if line.type == "consent"]
    (by,) = [line["by"] for line in lines]
    if by["source"] == "loginuid":
        pytest.skip("the kernel knows who logged in here, and that is stronger")
    assert (by["uid"], by["source"], by["account"]["uid"]) == (1, "sudo", os.geteuid())
    assert f"approved by {by['name']} (sudo), as {by['account']['name']} for `patients`" in said
    consent = json.loads((shell.state / "consents" / f"{STUDY}.json").read_text())
    assert consent["approved_by"] == by
    assert f"approved by {by['name']} (sudo), as " in shell.run("audit", "show").stdout
