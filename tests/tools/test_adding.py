"""The lists of `tools.adding` name what is there: an example of each kind stands in every file of its list."""

import sys
from pathlib import Path

import pytest

from tools.adding import KINDS, Step, main

ROOT = Path(__file__).resolve().parents[2]
STEPS = [pytest.param(step, id=f"{name}-{step.path}") for name, kind in KINDS.items() for step in kind.steps]


@pytest.mark.parametrize("step", STEPS)
def test_each_place_of_a_list_has_its_example_in_it(step: Step) -> None:
    assert step.example in (ROOT / step.path).read_text()


@pytest.mark.parametrize("name", KINDS)
def test_a_list_is_printed_in_order(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["adding", name])
    assert main() == 0
    out = capsys.readouterr().out
    places = [out.index(f". {step.path}\n") for step in KINDS[name].steps]
    assert places == sorted(places)


def test_an_unknown_kind_names_those_that_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["adding", "everything"])
    assert main() == 64
    assert "refusal|record|ledger|command|method" in capsys.readouterr().err
