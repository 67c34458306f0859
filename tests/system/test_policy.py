"""A person at the door, with real processes: no policy, a held update released, one rejected, one blocked."""

import json
from pathlib import Path

import pytest

from tests.system.conftest import BREAST, label_of, sites_of
from tools.world import CommandFailed, World, wait_until

pytestmark = pytest.mark.system

SITES = sites_of(BREAST)[:2]
LABEL = label_of(BREAST)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_update_waits_for_a_person_and_a_denied_one_never_leaves(
    world: World, breast_data: Path, tmp_path: Path
) -> None:
    """One site releases its first update; the other's policy denies a tensor after it approved."""
    free, strict = SITES
    world.start(breast_data, LABEL, SITES)
    study = world.create_study(
        BREAST, "--set", f"study.sites={json.dumps(SITES)}", "--set", "study.quorum=1", "--set", "study.rounds=1"
    )
    with pytest.raises(CommandFailed, match="there is no policy at") as refused:
        world.ask_site(free, "approve", study, "--data", "patients")
    assert refused.value.code == 78
    for site in SITES:
        world.ask_site(site, "policy", "draft", study)
    edit(world.state / free / "policy.toml", 'updates = "none"', 'updates = "first"')
    world.approve(study, SITES)
    edit(world.state / strict / "policy.toml", "deny = []", 'deny = [{ match = "*bias" }]')
    world.ask_coordinator("study", "start", study)

    def held() -> bool:
        return bool(world.study_status(study)["sites"][free]["state"] == "held")

    wait_until(held, f"{free} holds its update", 60)
    assert world.study_status(study)["sites"][strict]["code"] == "DECLINED_POLICY"
    shown = world.site_json(free, "release", study, "--round", "1", "--show")
    assert shown["tensors"]
    world.ask_site(free, "release", study, "--round", "1")
    status = world.finish(study)
    assert status["state"] == "finished"
    assert status["sites"][free]["rounds_contributed"] == [1]
    assert status["sites"][strict]["rounds_contributed"] == []
    ledger = (world.state / strict / "ledger" / "000001.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in ledger]
    assert next(line["type"] for line in lines if line["type"] in ("upload", "blocked")) == "blocked"
    assert not [line for line in lines if line["type"] == "upload" and line["payload_bytes"]]

    out = tmp_path / "receipts.jsonl"
    world.ask_coordinator("receipts", free, "--out", out)
    *receipts, statement = [json.loads(json.loads(line)["payload"]) for line in out.read_text().splitlines()]
    assert "round" not in statement  # of how many there are
    assert [(one["round"], one["decision"]) for one in receipts] == [(1, "accepted"), (2, "accepted")]
