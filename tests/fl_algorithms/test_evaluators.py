"""Sites that only evaluate: in the lab they change no bit of the model, and some studies cannot have them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_algorithms.engine.partition import describe, task_of
from fl_algorithms.lab.central import pooled_study
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.protocol import without
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.selection import to_evaluate
from tests.fl_algorithms.toys import toy_data
from wardround.errors import BadData, UsageProblem
from wardround.records.study import Named, StudyFile


def study_of(method: str = "fedavg", model: dict[str, Any] | None = None, **tables: Any) -> ResolvedStudy:
    plain = {"optimizer": "sgd", "weight_decay": 0.0} if method in ("scaffold", "feddyn") else {}
    section = {"name": "toy", "sites": ["ash", "birch", "elm"], "rounds": 3, "seed": 5, **tables.pop("study", {})}
    written = {
        "study": section,
        "task": {"name": "tabular", "label": "y", "classes": ["a", "b"], "features": ["u", "v", "w"]},
        "model": model or {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": method, **tables.pop("algorithm", {})},
        "training": {"local_steps": 4, "batch_size": 8, "learning_rate": 0.05, **plain},
        **tables,
    }
    return resolve(StudyFile.model_validate(written), lab="secure_aggregation" in written)


def judged(method: str = "fedavg", **tables: Any) -> ResolvedStudy:
    return study_of(method, study={"roles": {"elm": "evaluate"}}, **tables)


def federate(study: ResolvedStudy, curves: Curves | None = None) -> Outcome:
    data = {site: toy_data(site) for site in study.study.sites}
    data |= {site: to_evaluate(data[site]) for site in study.study.evaluators}
    return run_federation(study, task_of(study), data, curves=curves)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
def test_the_model_is_that_of_a_study_without_the_site(method: str) -> None:
    """To the last bit: also where the server divides by the number of sites."""
    curves = Curves()
    outcome = federate(judged(method), curves)
    alone = federate(study_of(method, study={"sites": ["ash", "birch"]}))
    assert outcome.digest == alone.digest
    assert outcome.best_round == alone.best_round
    rows = len(toy_data("elm").train) + len(toy_data("elm").validation)
    assert len(to_evaluate(toy_data("elm")).validation) == rows
    scored = {point.round for point in curves.points if (point.site, point.name) == ("elm", "val_loss")}
    assert scored == {0, 1, 2, 3}
    assert not [step for step in curves.steps if step.site == "elm"]


def test_an_evaluating_site_shares_nothing_and_downloads_all() -> None:
    found = describe(judged(), "elm")
    assert found.upload == ()
    assert {spec.key.partition(".")[0] for spec in found.download} == {"body", "head"}
    assert describe(judged(), "ash").upload == found.download


def test_a_part_that_stays_at_each_site_cannot_be_judged_elsewhere() -> None:
    """Whatever a method says of itself: here one that was not looked at when the study was resolved."""
    study = judged()
    study = replace(study, file=study.file.model_copy(update={"algorithm": Named(name="fedper")}))
    with pytest.raises(BadData, match=r"tensor `head\.weight` of the network stays at each site: there is no whole"):
        describe(study, "elm")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"method": "fenda", "model": {"name": "fenda"}}, "algorithm `fenda` as it is set has no one model"),
        (
            {"networks": {"deep": {"name": "mlp", "hidden": [4, 3]}}, "method": "lgfedavg"},
            "has no one model that every",
        ),
        ({"checkpoints": {"alone": True}}, r"\[checkpoints\] has each site train a model of its own"),
        ({"algorithm": {"fine_tuning": {"steps": 2}}}, r"\[algorithm\.fine_tuning\] trains at each site"),
    ],
)
def test_a_study_that_would_train_there_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData, match=f"site `elm` only evaluates, and .*{said}"):
        judged(**told)


def test_a_site_that_evaluates_hides_its_numbers_among_nobodys() -> None:
    tables: dict[str, Any] = {"secure_aggregation": {"range": 64.0}, "limits": {"max_weight": 1.0}}
    section = {"sites": ["ash", "birch", "elm", "oak"], "roles": {"elm": "evaluate"}}
    with pytest.raises(BadData, match=r"with \[secure_aggregation\] its numbers would have to be hidden"):
        study_of(study=section, **tables)


def test_a_study_of_evaluating_sites_alone_is_none() -> None:
    with pytest.raises(Exception, match="every site of the study only evaluates: at least one trains"):
        study_of(study={"roles": dict.fromkeys(("ash", "birch", "elm"), "evaluate")})
    with pytest.raises(Exception, match="quorum is 3, but the study has 2 sites that train"):
        study_of(study={"roles": {"elm": "evaluate"}, "quorum": 3})


def test_the_digest_of_a_study_without_roles_is_as_it_was() -> None:
    assert "roles" not in study_of().document()["study"]
    assert judged().document()["study"]["roles"] == {"elm": "evaluate"}
    assert study_of(study={"roles": {"elm": "train"}}).document() == study_of().document()


def test_the_lab_asks_no_evaluating_site_to_train() -> None:
    with pytest.raises(UsageProblem, match="a round asks 1 of the 2 sites, and the study needs 2 updates"):
        Participation(sample=0.5).refuse_unfit(judged())
    with pytest.raises(UsageProblem, match="`central` pools all sites' rows to train on them, and site `elm` only"):
        pooled_study(judged())
    assert without(judged(), "elm").study.roles == {}


def test_an_evaluating_site_judges_on_rows_in_their_order() -> None:
    data = toy_data("ash")
    assert isinstance(data.train.x, torch.Tensor)
    assert isinstance(data.validation.x, torch.Tensor)
    joined = to_evaluate(data).validation.x
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined, torch.cat([data.train.x, data.validation.x]))
