"""A site whose download is not what it sends, and whose own model others have: checks, consent, policy, ledger."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from site_agent.state.directory import SiteState
from tests.site_agent.fake_trainer import SHARED, leaf, write_tensors
from tests.site_agent.shell import Shell
from tests.site_agent.site_world import DPO, STUDY, SiteWorld, document
from wardround.errors import BadData, NeedsPerson, NotPermitted
from wardround.records.messages import manifest_from
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import TensorSpec

ROOT = Path(__file__).parents[2]
CONTROL = TensorSpec("shared.bias", "F32", (64,), "control")
COMES = (*SHARED, CONTROL)
KEPT = ("kept_by_coordinator = false", "kept_by_coordinator = true")  # what a person writes
SENT = ("sent_to_other_sites = false", "sent_to_other_sites = true")


def ready(world: SiteWorld, exposure: str = "") -> None:
    """A site that approved a study in which more comes than leaves."""
    world.join()
    assert world.trainer is not None
    world.trainer.comes, world.trainer.exposure = COMES, exposure
    world.offer()
    world.start()
    world.draft(KEPT, SENT)
    world.approve()
    world.coordinator.wait_declared("READY")


def show(world: SiteWorld, specs: tuple[TensorSpec, ...]) -> str:
    """Let the coordinator have these tensors for this site; their digest."""
    world.coordinator.models[0] = write_tensors(world.folder / "view.safetensors", specs, 5)
    with TensorFile(world.coordinator.models[0]) as file:
        return file.manifest().digest()


# What comes and what leaves.


def test_more_may_come_than_leaves_and_only_what_leaves_is_sent(world: SiteWorld) -> None:
    ready(world)
    digest = show(world, COMES)
    world.coordinator.assign(STUDY, 1)
    (taken,) = world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    assert world.trainer.bases == [digest]
    assert manifest_from(taken.opening.manifest).specs == SHARED
    (upload,) = world.lines("upload")
    assert [(row["bundle"], row["name"]) for row in upload["tensors"]] == [(spec.bundle, spec.name) for spec in SHARED]


def test_a_broken_download_of_a_view_goes_on_where_it_broke(world: SiteWorld) -> None:
    ready(world)
    show(world, COMES)
    world.coordinator.break_download_at = SHARED[0].bytes + 100
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.coordinator.downloads == [0, SHARED[0].bytes + 100]


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(SHARED, id="only what leaves"),
        pytest.param((*COMES, TensorSpec("private.weight", "F32", (8, 8))), id="one more"),
        pytest.param((*SHARED, TensorSpec("shared.bias", "F32", (8, 8), "control")), id="another shape"),
        pytest.param((*SHARED, TensorSpec("shared.bias", "I32", (64,), "control")), id="another dtype"),
        pytest.param((*SHARED, TensorSpec("shared.bias", "F32", (64,), "peer")), id="another bundle"),
        pytest.param((CONTROL, *SHARED), id="another order"),
    ],
)
def test_a_view_of_other_tensors_than_the_installed_method_begins_with_is_declined(
    world: SiteWorld, specs: tuple[TensorSpec, ...]
) -> None:
    ready(world)
    show(world, specs)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_MODEL_MISMATCH")
    assert not world.coordinator.uploads
    assert world.trainer is not None
    assert not world.trainer.commands("train")


def test_an_update_that_holds_what_came_is_blocked(world: SiteWorld) -> None:
    ready(world)
    show(world, COMES)
    assert world.trainer is not None
    world.trainer.specs = COMES
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_MODEL_MISMATCH")
    (line,) = world.lines("blocked")
    assert "the trainer's update does not hold the tensors that were approved" in line["rule"]


def test_tensors_in_another_order_than_the_installed_model_has_them_are_not_approved(world: SiteWorld) -> None:
    world.join()
    assert world.trainer is not None
    world.trainer.described = SHARED[::-1]
    world.offer()
    world.start()
    with pytest.raises(NeedsPerson, match="in another order than that of the model installed here") as refused:
        world.approve()
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"


# Consent.


def test_a_consent_keeps_what_comes_and_who_has_the_sites_own_model(world: SiteWorld) -> None:
    ready(world, "sites")
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert consent.download == tuple(COMES)
    assert consent.upload == tuple(SHARED)
    assert consent.exposure == "sites"


def test_a_consent_without_one_of_its_fields_is_named(world: SiteWorld) -> None:
    """What a release before the first one wrote is not filled in: who approved it did not see that field."""
    world.ready()
    path = world.state.root / "consents" / f"{STUDY}.json"
    stored = json.loads(path.read_text())
    for name in ("comes", "exposure", "attempts", "account", "withdrawn_at"):
        path.write_text(json.dumps({key: value for key, value in stored.items() if key != name}))
        with pytest.raises(BadData, match=r"consents/hearts\.json is damaged or of another version"):
            world.state.consent(STUDY)
    path.write_text(json.dumps(stored))
    assert world.state.consents() == [world.state.consent(STUDY)]


@pytest.mark.parametrize("text", ["{}", "[]", "5", '{"leaves": []}'])
def test_a_damaged_consent_is_named_and_not_filled_in(tmp_path: Path, text: str) -> None:
    (tmp_path / "consents").mkdir()
    (tmp_path / "consents" / f"{STUDY}.json").write_text(text)
    with pytest.raises(BadData, match=r"consents/hearts\.json is damaged or of another version"):
        SiteState(tmp_path).consent(STUDY)


def test_approving_again_says_that_others_would_now_have_the_sites_own_model(world: SiteWorld) -> None:
    ready(world)
    assert world.agent is not None
    assert world.trainer is not None
    world.trainer.exposure, world.trainer.apart = "sites", "the site's head"
    model = write_tensors(world.folder / "initial.safetensors", SHARED, 0)
    world.coordinator.offer(document(title="another"), model, revision=2)
    world.command("refresh")
    said: list[str] = []
    world.draft(KEPT, SENT)
    world.agent.commands.approve(STUDY, "patients", world.shown(), DPO, said.append)
    assert said[:2] == [
        "changed since it was approved: revision 2, approved was 1",
        "changed since it was approved: now the coordinator keeps apart the site's head, and sends it to the other "
        "sites; approved was: the coordinator keeps nothing that is this site's alone",
    ]


def test_the_ledger_says_what_was_approved_and_both_verifiers_agree(world: SiteWorld) -> None:
    ready(world, "coordinator")
    assert [line["exposure"] for line in world.lines("consent")] == ["coordinator"]
    world.stop()
    assert world.verdict().ok
    line = [sys.executable, str(ROOT / "tools" / "verify_ledger.py"), str(world.state.ledger)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stdout + done.stderr  # consistent; it was given no receipts


# Policy.


@pytest.mark.parametrize(
    ("exposure", "edits", "rule"),
    [
        ("coordinator", [], "models.kept_by_coordinator = false"),
        ("coordinator", [(KEPT[0], "")], "models.kept_by_coordinator = false"),
        ("sites", [KEPT], "models.sent_to_other_sites = false"),
        ("sites", [SENT], "models.kept_by_coordinator = false"),
    ],
)
def test_a_policy_without_the_line_blocks_the_approval_and_names_it(
    world: SiteWorld, exposure: str, edits: list[tuple[str, str]], rule: str
) -> None:
    world.join()
    assert world.trainer is not None
    world.trainer.exposure = exposure
    world.offer()
    world.start()
    world.draft(*edits)
    with pytest.raises(NotPermitted) as refused:
        world.approve()
    assert f"{rule}; nothing was approved" in refused.value.message
    assert refused.value.code == "DECLINED_POLICY"
    assert world.state.consent(STUDY) is None


def test_a_policy_that_takes_its_word_back_blocks_the_next_round_before_any_training(world: SiteWorld) -> None:
    ready(world, "sites")
    show(world, COMES)
    world.draft(KEPT)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    (line,) = world.lines("blocked")
    assert line["what"] == "this site's own model, sent to the other sites"
    assert line["rule"] == "models.sent_to_other_sites = false"
    assert world.trainer is not None
    assert not world.trainer.commands("train")


# What people read.


def expose(shell: Shell, exposure: str) -> None:
    assert shell.trainer is not None
    shell.trainer.comes, shell.trainer.exposure = COMES, exposure


def test_a_person_reads_that_the_coordinator_keeps_the_sites_own_model(shell: Shell) -> None:
    expose(shell, "coordinator")
    assert shell.trainer is not None
    shell.trainer.apart = "the mixture made for the site"
    sentence = "The coordinator keeps apart the mixture made for the site."
    said = shell.run("preview", STUDY).stdout
    assert sentence[1:-1] in said
    assert "3 tensors, 16.5 KiB, before each round" in said
    shown: dict[str, Any] = shell.json("preview", STUDY)
    assert (shown["exposure"], shown["comes"]) == ("coordinator", [leaf(spec) for spec in COMES])
    shell.run("policy", "draft", STUDY)
    path = shell.state / "policy.toml"
    drafted = path.read_text()
    said = (
        "# in this study the coordinator keeps apart the mixture made for the site; it needs `kept_by_coordinator = "
        "true`\n"
    )
    assert said in drafted
    path.write_text(drafted.replace(*KEPT))
    assert sentence in shell.run("approve", STUDY, "--data", "patients", "--digest", shell.shown()).stdout
    assert "a model that is this site's alone: the coordinator may keep it\n" in shell.run("policy", "check").stdout
    assert "models.kept_by_coordinator = true" in shell.run("policy", "explain", STUDY).stdout


def test_explain_says_which_line_blocks_a_study_that_sends_the_model_on(shell: Shell) -> None:
    expose(shell, "")
    shell.run("policy", "draft", STUDY)
    assert "a model that is this site's alone: stays here\n" in shell.run("policy", "check").stdout
    expose(shell, "sites")
    done = shell.run("policy", "explain", STUDY, code=77)
    assert "this site's own model, kept apart by the coordinator: models.kept_by_coordinator = false" in done.stderr
    assert done.stdout.count("DENIED") == 2


def test_diff_says_that_the_sites_own_model_may_now_be_sent_on(shell: Shell, tmp_path: Path) -> None:
    shell.run("policy", "draft", STUDY)
    expose(shell, "sites")
    new = tmp_path / "new.toml"
    shell.run("policy", "draft", STUDY, "--out", str(new))
    new.write_text(new.read_text().replace(*KEPT).replace(*SENT))
    said = shell.run("policy", "diff", str(shell.state / "policy.toml"), str(tmp_path / "new.toml")).stdout
    assert said.splitlines() == [
        "models.kept_by_coordinator: false before, true now",
        "models.sent_to_other_sites: false before, true now",
    ]
