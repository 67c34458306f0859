"""Secure aggregation between four hospitals: real processes over real TLS, from the peers' keys to the checked sums."""

import json
from pathlib import Path

import pytest

from tests.system.conftest import lab_run
from tools.world import World

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "breast_cancer.toml"
STUDY, SITES = "breast-cancer", ("ashford", "birchwood", "calder", "dunmore")
SECURE = "\n[limits]\nnorm_multiple = 0\n\n[secure_aggregation]\nrange = 4.0\n"


@pytest.mark.system
@pytest.mark.chaos
def test_a_study_whose_coordinator_sees_sums_alone_has_the_labs_model_and_every_site_checks_it(
    breast_data: Path, tmp_path: Path
) -> None:
    text = EXAMPLE.read_text().partition("# FedAvg:")[0] + SECURE
    for old, new in (('"exact"', '"uniform"'), ("rounds = 10", "rounds = 2"), ("quorum = 3\n", "")):
        assert old in text
        text = text.replace(old, new)
    study = tmp_path / "study.toml"
    study.write_text(text.replace("local_steps = 50", "local_steps = 2"))
    world = World(tmp_path / "state")
    with world:
        world.start(breast_data, "diagnosis", SITES)
        world.create_study(study)
        for site in SITES:
            for row in world.site_json(site, "peers", "list", STUDY)["members"]:
                if row["site"] != site:
                    world.ask_site(site, "peers", "know", row["site"], row["fingerprint"])
        world.approve(STUDY, SITES)
        world.ask_coordinator("study", "start", STUDY)
        status = world.finish(STUDY)
        world.heard(SITES[0], STUDY)
    assert status["model_digest"] == lab_run(study, breast_data)["digests"][0]
    for site in SITES:
        lines = [
            json.loads(line) for line in (world.state / site / "ledger" / "000001.jsonl").read_bytes().splitlines()
        ]
        kinds = [line["type"] for line in lines]
        assert [kinds.count(kind) for kind in ("keys", "agreed", "opened")] == [3, 3, 3]
        assert [(line["round"], line["result"]) for line in lines if line["type"] == "sum_checked"] == [
            (1, "same"), (2, "same")
        ]  # fmt: skip
        assert all(line["metrics"] == [] and line["num_examples"] == 0 for line in lines if line["type"] == "upload")
