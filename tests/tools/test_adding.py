"""The lists of `tools.adding` name what is there: an example of each kind is in every file of its list."""

import sys
from pathlib import Path

import pytest

from tools.adding import KINDS, Kind, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_place_of_a_list_has_the_example_in_it(kind: Kind) -> None:
    without = [path for path, _ in kind.steps if kind.example not in (ROOT / path).read_text()]
    assert without == []


def test_a_list_is_printed_in_order(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["adding", "refusal"])
    assert main() == 0
    out = capsys.readouterr().out
    places = [out.index(path) for path, _ in KINDS["refusal"].steps]
    assert places == sorted(places)


def test_an_unknown_kind_names_those_that_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["adding", "everything"])
    assert main() == 64
    assert "refusal|" in capsys.readouterr().err or len(KINDS) == 1
