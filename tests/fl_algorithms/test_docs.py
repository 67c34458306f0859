"""The example method of docs/researchers.md, taken from the page and run."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_algorithms import catalog
from fl_algorithms.client.partition import initial_model, task_of
from fl_algorithms.lab.federation import run_federation
from tests.fl_algorithms.toys import toy_data, toy_study

PAGE = Path(__file__).resolve().parents[2] / "docs" / "researchers.md"


@pytest.fixture
def fedprox(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("example_fedprox")
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = catalog.MethodRow(
        "fedprox", "none", "all", "none", "example_fedprox:fedprox", settings=module.__dict__["FedProxSettings"]
    )
    monkeypatch.setitem(catalog.METHODS, "fedprox", row)  # type: ignore[arg-type]


def shared(algorithm: str, **settings: Any) -> dict[str, torch.Tensor]:
    study = toy_study(algorithm, algorithm_settings=settings, rounds=2, optimizer="sgd", weight_decay=0)
    return run_federation(study, task_of(study), {site: toy_data(site) for site in study.study.sites}).shared


@pytest.mark.usefixtures("fedprox")
def test_the_example_method_with_zero_mu_is_fedavg() -> None:
    plain, example = shared("fedavg"), shared("fedprox", mu=0.0)
    assert all(torch.equal(plain[name], example[name]) for name in plain)


@pytest.mark.usefixtures("fedprox")
def test_the_example_method_stays_nearer_to_the_start_with_a_larger_mu() -> None:
    initial = initial_model(toy_study("fedavg"))
    moved = [
        sum((end[name] - initial[name]).norm().item() for name in initial)
        for end in (shared("fedprox", mu=0.0), shared("fedprox", mu=10.0))
    ]
    assert moved[1] < moved[0]
