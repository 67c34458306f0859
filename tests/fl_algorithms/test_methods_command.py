"""`fl-lab methods`: the registry as people and scripts read it."""

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms import registry
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.methods import card, overview
from wardround.errors import UsageProblem


def lab(*args: str) -> str:
    done = CliRunner().invoke(app, ["methods", *args], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0
    return done.stdout


def setting(name: str, key: str) -> Any:
    (found,) = (one for one in card(name)["settings"] if one["key"] == key)
    return found


def test_every_method_is_listed_with_what_leaves_and_what_stays() -> None:
    listed = json.loads(lab("--json"))
    assert [row["name"] for row in listed] == list(registry.METHODS)
    for row in listed:
        ours = registry.METHODS[row["name"]]
        assert (row["upload"], row["private"], row["exposure"]) == (ours.upload, ours.private, ours.exposure)
    for name in registry.METHODS:
        assert name in lab()


@pytest.mark.parametrize("name", list(registry.METHODS))
def test_every_method_has_a_card_with_its_text_and_its_settings(name: str) -> None:
    found, shown = card(name), lab(name)
    assert found["about"]
    assert found["server"]
    for line in (found["title"], found["about"].split()[0], f"--set algorithm.name={name}"):
        assert line in shown
    for one in found["settings"]:
        assert one["key"] in shown
        assert one["range"]
    assert json.loads(lab(name, "--json")) == json.loads(json.dumps(found))


def test_settings_show_defaults_and_ranges_of_the_model_that_checks_them() -> None:
    assert setting("fedsoup", "soup.moments") == {
        "key": "soup.moments", "default": "keep", "range": "keep, reset", "needed": False, "optional": False,
        "meaning": "of the optimizer, after a patch",
    }  # fmt: skip
    assert setting("fedavg", "soup.moments")["optional"]
    server = setting("fedavg", "server.learning_rate")
    assert (server["default"], server["range"]) == (0.1, "number, above 0, at most 100")
    assert setting("fedavg", "server.optimizer")["needed"]
    assert setting("fedavg", "fine_tuning.steps")["range"] == "whole number, at least 0, at most 1000000"


def test_a_card_says_what_the_method_combines_with() -> None:
    assert card("fedavg")["combines_with"] == [
        "a server optimizer after the mean: [algorithm.server]",
        "a soup of the shared parameters: [algorithm.soup]",
        "fine-tuning at the end: [algorithm.fine_tuning]",
    ]
    assert "its soup of the shared parameters: [algorithm.soup]" in card("fedsoup")["combines_with"]
    assert card("silo")["combines_with"] == ["fine-tuning at the end: [algorithm.fine_tuning]"]


def test_needs_and_single_models_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(row for row in overview() if row["name"] == "fenda")["needs"] == [
        "a network with a shared and a private extractor"
    ]
    from dataclasses import replace

    shown = replace(registry.METHODS["fedavg"], exposure="sites", plain_sgd=True, same_start=True)
    monkeypatch.setitem(registry.METHODS, "fedavg", shown)
    assert card("fedavg")["needs"] == ["plain SGD at the sites", '`init_private = "common"`, its default']
    assert "sends it to other sites" in lab("fedavg")


def test_a_method_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageProblem) as refused:
        card("fedsop")
    assert (refused.value.message, refused.value.hint) == ("there is no method `fedsop`", "did you mean `fedsoup`?")


def test_the_list_is_shown_without_torch() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nsys.argv = ['fl-lab', 'methods', 'fedsoup']\n"
        "from fl_algorithms.lab.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "FedSoup" in done.stdout
