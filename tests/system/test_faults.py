"""What goes wrong in real federations, made to go wrong: nothing is lost, and everyone is told the truth."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import BREAST, lab_run, label_of, sites_of
from tools.world import BIN, CommandFailed, World, command, descendants, wait_until

SITES = sites_of(BREAST)
PAIR = SITES[:2]
LABEL = label_of(BREAST)
pytestmark = pytest.mark.system


def study_file(tmp_path: Path, **replaced: object) -> Path:
    """The shipped study with some keys of [study] replaced, as a person would by hand."""
    lines = BREAST.read_text().splitlines()
    for key, value in replaced.items():
        row = next((index for index, line in enumerate(lines) if line.split("=")[0].strip() == key), None)
        text = f"{key} = {json.dumps(value)}"
        if row is None:
            lines.insert(lines.index("[study]") + 1, text)
        else:
            lines[row] = text
    path = tmp_path / "study.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.chaos
def test_a_coordinator_killed_mid_study_goes_on_to_the_same_model(world: World, breast_data: Path) -> None:
    world.start(breast_data, LABEL, SITES)
    study = world.create_study(BREAST)
    world.approve(study, SITES)
    world.ask_coordinator("study", "start", study)
    for reached in (2, 4):
        wait_until(lambda r=reached: world.study_status(study)["round"] >= r, f"round {reached}", 120)
        assert world.coordinator is not None
        world.coordinator.kill()
        world.serve()
    status = world.finish(study)
    assert status["state"] == "finished"
    assert status["model_digest"] == lab_run(BREAST, breast_data)["digests"][0]


@pytest.mark.chaos
def test_an_agent_killed_mid_study_goes_on_to_the_same_model(world: World, breast_data: Path) -> None:
    world.start(breast_data, LABEL, SITES)
    study = world.create_study(BREAST)
    world.approve(study, SITES)
    world.ask_coordinator("study", "start", study)
    wait_until(lambda: world.study_status(study)["round"] >= 2, "round 2", 120)
    world.agents[SITES[0]].kill()
    world.run_agent(SITES[0])
    status = world.finish(study)
    assert status["state"] == "finished"
    assert status["model_digest"] == lab_run(BREAST, breast_data)["digests"][0]
    world.heard(SITES[0], study)
    assert world.site_json(SITES[0], "audit", "verify", "--ask", ok=(0, 2))["complete"]


@pytest.mark.chaos
def test_a_site_that_goes_away_costs_one_deadline_and_is_named_in_the_report(
    world: World, breast_data: Path, tmp_path: Path
) -> None:
    world.start(breast_data, LABEL, SITES)
    study = world.create_study(study_file(tmp_path, quorum=3, round_deadline_s=8))
    world.approve(study, SITES)
    world.ask_coordinator("study", "start", study)
    wait_until(lambda: world.study_status(study)["round"] >= 2, "round 2", 120)
    world.agents.pop(SITES[1]).kill()
    status = world.finish(study)
    assert status["state"] == "finished"
    assert len(status["sites"][SITES[1]]["rounds_contributed"]) < status["rounds"]
    assert len(status["sites"][SITES[0]]["rounds_contributed"]) == status["rounds"]
    world.heard(SITES[0], study)
    rows = world.site_json(SITES[0], "models", "list", study)["checkpoints"]
    card = json.loads((Path(rows[0]["path"]).parent / "card.json").read_text())
    assert card["contributors"] == {site: row["rounds_contributed"] for site, row in status["sites"].items()}
    with pytest.raises(CommandFailed) as report:
        world.ask_coordinator("study", "report", study)
    assert report.value.code == 3
    assert SITES[1] in report.value.stdout


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, breast_data: Path) -> Iterator[World]:
    """Two hospitals that run; the tests below use it one after the other, each with a study of its own."""
    with World(tmp_path_factory.mktemp("running")) as world:
        world.start(breast_data, LABEL, PAIR)
        yield world


@pytest.fixture
def hospitals(running: World) -> World:
    """Two hospitals that run, without a policy."""
    for site in PAIR:
        (running.state / site / "policy.toml").unlink(missing_ok=True)
    return running


def test_nothing_at_a_site_listens_on_a_network_port(hospitals: World) -> None:
    root = hospitals.agents[SITES[0]].process.pid
    family = [root, *descendants(root)]
    assert len(family) > 1
    assert not [pid for pid in family if listening_ports(pid)]
    assert hospitals.coordinator is not None
    assert listening_ports(hospitals.coordinator.process.pid)  # so the look itself can fail


def listening_ports(pid: int) -> set[str]:
    """The TCP sockets in state LISTEN that a process holds, as the kernel lists them in its network namespace."""
    links = (str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())
    own = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in own}


def test_the_trainer_is_isolated_and_status_says_how(hospitals: World) -> None:
    status = hospitals.site_json(SITES[0], "status")
    assert status["isolation"] in ("network-namespace", "seccomp")
    assert set(status["users"]) >= {"gateway", "trainer"}
    assert status["connected"] is True


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.chaos
def test_an_update_waits_for_a_person_and_a_denied_one_never_leaves(hospitals: World, tmp_path: Path) -> None:
    """One site releases its first update; the other's policy denies a tensor after it approved."""
    free, strict = PAIR
    study = hospitals.create_study(study_file(tmp_path, name="held", sites=PAIR, quorum=1, rounds=1))
    with pytest.raises(CommandFailed, match="there is no policy at") as refused:
        hospitals.ask_site(free, "approve", study, "--data", "patients")
    assert refused.value.code == 78
    for site in PAIR:
        hospitals.ask_site(site, "policy", "draft", study)
    edit(hospitals.state / free / "policy.toml", 'updates = "none"', 'updates = "first"')
    hospitals.approve(study, PAIR)
    edit(hospitals.state / strict / "policy.toml", "deny = []", 'deny = [{ match = "*bias" }]')
    hospitals.ask_coordinator("study", "start", study)

    def held() -> bool:
        return bool(hospitals.study_status(study)["sites"][free]["state"] == "held")

    wait_until(held, f"{free} holds its update", 60)
    assert hospitals.study_status(study)["sites"][strict]["code"] == "DECLINED_POLICY"
    shown = hospitals.site_json(free, "release", study, "--round", "1", "--show")
    assert shown["tensors"]
    hospitals.ask_site(free, "release", study, "--round", "1")
    status = hospitals.finish(study)
    assert status["state"] == "finished"
    assert status["sites"][free]["rounds_contributed"] == [1]
    assert status["sites"][strict]["rounds_contributed"] == []
    ledger = (hospitals.state / strict / "ledger" / "000001.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, ledger) if line.get("study") == study]
    assert next(line["type"] for line in lines if line["type"] in ("upload", "blocked")) == "blocked"
    assert not [line for line in lines if line["type"] == "upload" and line["payload_bytes"]]

    out = tmp_path / "receipts.jsonl"
    hospitals.ask_coordinator("receipts", free, "--out", out)
    *receipts, statement = [json.loads(json.loads(line)["payload"]) for line in out.read_text().splitlines()]
    assert "round" not in statement  # of how many there are
    found = [(one["round"], one["decision"]) for one in receipts if one["study"] == study]
    assert found == [(1, "accepted"), (2, "accepted")]


@pytest.mark.chaos
def test_a_withdrawn_site_stops_at_once_and_the_other_finishes(hospitals: World, tmp_path: Path) -> None:
    study = hospitals.create_study(study_file(tmp_path, name="withdrawn", sites=PAIR, quorum=1, rounds=60))
    hospitals.approve(study, PAIR)
    hospitals.ask_coordinator("study", "start", study)
    wait_until(lambda: hospitals.study_status(study)["round"] >= 2, "round 2", 120)
    hospitals.ask_site(PAIR[1], "withdraw", study)
    status = hospitals.finish(study)
    assert status["state"] == "finished"
    assert len(status["sites"][PAIR[0]]["rounds_contributed"]) == status["rounds"]
    assert len(status["sites"][PAIR[1]]["rounds_contributed"]) < status["rounds"]


@pytest.mark.chaos
def test_a_table_changed_since_approval_is_not_trained_on(hospitals: World, breast_data: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("train.csv", "test.csv"):
        (own / name).write_bytes((breast_data / SITES[1] / name).read_bytes())
    hospitals.add_data(SITES[1], own, LABEL, "own")
    study = hospitals.create_study(study_file(tmp_path, name="changed", sites=[SITES[1]], quorum=1))
    hospitals.approve(study, SITES[1:2], "own")
    with (own / "train.csv").open("a") as table:
        table.write((own / "train.csv").read_text().splitlines()[1] + "\n")
    hospitals.ask_coordinator("study", "start", study)
    status = hospitals.finish(study)
    assert status["state"] == "paused"
    assert status["sites"][SITES[1]]["state"] == "declined"
    assert "DATA_CHANGED" in hospitals.ask_coordinator("study", "status", study, ok=(0, 3))
    for shown in ("status", "studies"):
        (row,) = (row for row in hospitals.site_json(SITES[1], shown)["studies"] if row["id"] == study)
        assert row["state"] == "changed"
        assert "is not what was approved" in row["changes"][0]


def test_a_revoked_site_is_refused_on_its_next_call_and_keeps_everything(hospitals: World) -> None:
    """The last of these: the site does not come back."""
    agent = hospitals.agents[PAIR[1]]
    hospitals.ask_coordinator("revoke", PAIR[1])
    assert agent.process.wait(30) == 78
    assert (hospitals.state / PAIR[1] / "identity" / "key.pem").exists()
    assert hospitals.site_json(PAIR[1], "audit", "verify", ok=(4,))["consistent"]


@pytest.mark.parametrize("program", ["site-agent", "coordinator"])
def test_help_answers_without_torch_or_grpc(program: str) -> None:
    module = {"site-agent": "site_agent.cli.main", "coordinator": "coordinator.cli.main"}[program]
    look = f"import {module}, sys; print([name for name in ('torch', 'grpc', 'numpy') if name in sys.modules])"
    loaded = subprocess.run([BIN / "python", "-c", look], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
    assert "Usage" in command(program, "--help")
