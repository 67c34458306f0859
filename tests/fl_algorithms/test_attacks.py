"""What bad sites do in the lab: what each sends, that the others stay as they are, and where an attack is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import RoundResult
from fl_algorithms.lab.attacks import Attack, attacked, hidden
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.suite import load
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.toys import study_tables, toy_data, toy_study
from wardround.errors import BadData, UsageProblem
from wardround.records.study import StudyFile
from wardround.tensors.manifests import MODEL

SITES = ("ash", "birch", "cedar", "douglas", "elm")


def study(rule: str = "mean", **more: Any) -> ResolvedStudy:
    tables = study_tables(sites=list(SITES), quorum=4, **more)
    return resolve(StudyFile.model_validate({**tables, "aggregation": {"rule": rule}}), lab=True)


def result(*values: float) -> RoundResult:
    return RoundResult({MODEL: {"w": torch.tensor(values)}}, 10, 3, {}, ())


def sent(attack: Attack, results: dict[str, RoundResult]) -> dict[str, list[float]]:
    return {site: found.uplink[MODEL]["w"].tolist() for site, found in attack.sent(results).items()}


def run(file: ResolvedStudy, attack: Attack | None) -> Outcome:
    data = {site: toy_data(site) for site in SITES}
    return run_federation(file, task_of(file), data, participation=Participation(attack=attack))


@pytest.mark.parametrize(
    ("kind", "strength", "factor"),
    [("sign_flip", None, -1), ("sign_flip", 4.0, -4), ("scaling", None, 10), ("scaling", 2.5, 2.5)],
)
def test_a_bad_site_sends_so_many_times_its_update_and_the_others_their_own(
    kind: Any, strength: float | None, factor: float
) -> None:
    attack = Attack(kind=kind, sites=("birch",), strength=strength)
    found = sent(attack, {"ash": result(1, 2), "birch": result(3, -4)})
    assert found == {"ash": [1, 2], "birch": [3 * factor, -4 * factor]}


def test_bad_sites_together_send_the_mean_less_so_many_standard_deviations() -> None:
    values = {"ash": (1.0, 5.0), "birch": (2.0, 5.0), "cedar": (6.0, 5.0)}
    found = sent(
        Attack(kind="alie", sites=("birch", "cedar"), strength=2.0),
        {site: result(*own) for site, own in values.items()},
    )
    sigma = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 3)
    assert found["ash"] == [1, 5]
    assert found["birch"] == found["cedar"] == pytest.approx([3 - 2 * sigma, 5])


def test_how_far_a_little_is_follows_from_the_counts() -> None:
    """The paper's example: 50 workers of which 24 are corrupted need 2 supporters, and z is 1.43."""
    assert hidden(50, 24) == pytest.approx(1.43, abs=0.01)
    assert hidden(5, 1) == 0
    assert hidden(4, 1) < 0


def test_of_a_round_without_bad_sites_nothing_is_changed() -> None:
    there = {"ash": result(1, 2)}
    assert Attack(kind="alie", sites=("birch",), strength=1.0).sent(there) == there


def test_flipped_labels_are_those_of_bad_sites_training_rows_alone() -> None:
    data = {site: toy_data(site) for site in SITES}
    found = Attack(kind="label_flip", sites=("birch",)).data_of(study(), data)
    assert found["birch"].train.y.tolist() == (1 - data["birch"].train.y).tolist()
    assert found["birch"].validation is data["birch"].validation
    assert found["birch"].test is data["birch"].test
    assert all(found[site] is data[site] for site in SITES if site != "birch")
    results = {"birch": result(1, 2)}
    assert Attack(kind="label_flip", sites=("birch",)).sent(results) == results


@pytest.mark.parametrize("kind", ["sign_flip", "scaling", "label_flip", "alie"])
def test_an_attack_changes_the_model_and_is_the_same_each_time(kind: Any) -> None:
    bad = Attack(kind=kind, sites=("birch", "elm"), strength=None if kind == "label_flip" else 3.0)
    attacked_once = run(study(), bad)
    assert attacked_once.digest == run(study(), bad).digest
    assert attacked_once.digest != run(study(), None).digest


def test_a_median_stands_what_carries_a_mean_away() -> None:
    """One of five sends 30 times the opposite, with nothing but the rule against it."""
    bad = Attack(kind="sign_flip", sites=("birch",), strength=30.0)

    def loss(rule: str) -> float:
        file = study(rule).changed(limits={"norm_multiple": 0.0})
        found = run(file, bad)
        return sum(kinds["latest"].val_loss or 0 for kinds in found.checkpoints.values())

    assert loss("median") < loss("mean") / 3


def test_an_update_beyond_the_limits_is_left_out_before_the_rule_sees_it() -> None:
    file = study("median").changed(limits={"norm_multiple": 10.0})
    found = run(file, Attack(kind="scaling", sites=("birch",), strength=1e4))
    assert all(set(account.left_out) == {"birch"} for account in found.accounts)


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ({"kind": "sign_flip", "sites": ["fir"]}, "the study has no site `fir` that could be bad"),
        ({"kind": "sign_flip", "sites": list(SITES)}, "all sites of the study are bad"),
        ({"kind": "label_flip", "sites": ["ash"], "strength": 2.0}, "`label_flip` has no strength"),
        (
            {"kind": "alie", "sites": ["ash"]},
            "`alie` with 1 of 5 sites has no room to hide: its z is not above 0",
        ),
    ],
)
def test_an_attack_that_the_study_cannot_have_is_refused(attack: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageProblem) as refusal:
        run(study(), Attack.model_validate(attack))
    assert refusal.value.message == said


def test_a_task_without_classes_has_no_labels_to_flip() -> None:
    features = [{"name": "u", "mean": 0.0, "std": 1.0}]
    task = {"name": "regression", "label": "ill", "features": features}
    file = resolve(StudyFile.model_validate({**study_tables(), "task": task}), lab=True)
    with pytest.raises(UsageProblem, match="reverses the classes of rows, task `regression` has none"):
        Attack(kind="label_flip", sites=("ash",)).refuse_unfit(file)


def test_several_networks_have_no_mean_of_all_updates() -> None:
    file = toy_study("feddf", sites=["ash", "birch", "cedar"])
    several = file.changed()
    object.__setattr__(several, "file", file.file.model_copy(update={"networks": {"deep": file.file.model}}))
    with pytest.raises(UsageProblem, match="`alie` takes the mean of all updates, and this study has several networks"):
        Attack(kind="alie", sites=("ash",), strength=1.0).refuse_unfit(several)


def test_the_command_asks_for_both_halves_of_an_attack() -> None:
    assert attacked(None, None, None) is None
    assert attacked("alie", ["ash"], 1.5) == Attack(kind="alie", sites=("ash",), strength=1.5)
    for kind, sites, strength, said in (
        ("sign_flip", None, None, "--attack and --bad-site go together"),
        (None, ["ash"], None, "--attack and --bad-site go together"),
        ("scaling", ["ash"], -1.0, "--strength is -1, not above 0 and at most 1e\\+30"),
    ):
        with pytest.raises(UsageProblem, match=said):
            attacked(kind, sites, strength)  # type: ignore[arg-type]
    done = CliRunner().invoke(app, ["run", "x.toml", "--data", ".", "--attack", "kindness"])
    assert done.exit_code == 2


def test_no_study_file_can_ask_for_an_attack() -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        StudyFile.model_validate({**study_tables(), "attack": {"kind": "scaling", "sites": ["ash"]}})


SUITE = """
[suite]
name = "small"
study = "study.toml"
[[row]]
name = "bad"
[row.attack]
kind = "{kind}"
sites = ["cleveland"]
"""


def test_a_row_of_a_suite_may_have_an_attack_which_is_part_of_what_it_is(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "heart_disease.toml"
    (tmp_path / "study.toml").write_text(example.read_text())
    path = tmp_path / "suite.toml"
    path.write_text(SUITE.format(kind="sign_flip"))
    suite = load(path)
    (job,) = suite.reported_jobs(suite.rows[0], 0, 1)
    assert job.attack == Attack(kind="sign_flip", sites=("cleveland",))
    assert suite.document()["rows"]["bad"]["attack"] == {"kind": "sign_flip", "sites": ["cleveland"], "strength": None}
    path.write_text(SUITE.format(kind="alie"))
    with pytest.raises(UsageProblem, match=r"suite\.toml: row `bad`: `alie` with 1 of 4 sites has no room to hide"):
        load(path)
    path.write_text(SUITE.format(kind="alie").replace('name = "bad"', 'name = "bad"\nkind = "silo"'))
    with pytest.raises(BadData, match='`attack` belongs to kind = "federated", the kind is "silo"'):
        load(path)
