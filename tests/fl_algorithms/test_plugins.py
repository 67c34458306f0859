"""Rows that other distributions bring: found by their names, pinned, imported from the files that were installed."""

import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms import registry
from fl_algorithms.lab import plugins as listing
from fl_algorithms.pinned_imports import Admitted
from fl_algorithms.resolving import resolve
from tests.fl_algorithms.toys import study_tables
from tests.plugin_world import FILES, NET, another_process, found, install, link, on_the_path
from wardround.errors import BadData, WardroundError
from wardround.records.study import StudyFile

MODEL = {"name": "lungnet", "hidden": [3]}
TASK = """
from dataclasses import replace
from fl_algorithms.registry import TABULAR

LUNGS = replace(TABULAR, name="lungs", ranges={%s})
"""
METHOD = """
from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MEAN, MethodRow

FEDLUNG = MethodRow(
    "fedlung", "FedLung", "nobody, 2026", "all", "nothing", client="fl_algorithms.methods.fedavg.client:fedavg",
    server=%s, one_global_model=True,
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_the_path(tmp_path / "site-packages") as folder:
        yield folder


def written(model: dict[str, Any] = MODEL, **tables: Any) -> StudyFile:
    return StudyFile.model_validate({**study_tables(model=model), **tables})


def refusal(study: StudyFile, **how: Any) -> tuple[str, str]:
    with pytest.raises(WardroundError) as refused:
        resolve(study, **how)
    return refused.value.message, refused.value.hint


def test_resolving_writes_which_code_of_others_the_study_runs(folder: Path) -> None:
    install(folder)
    study = resolve(written())
    pin = {"version": "1.2", "sha256": found().sha256, "brings": ["model lungnet"]}
    assert study.document()["plugins"] == {"lungnets": pin}
    assert resolve(study.file) == study
    assert resolve(StudyFile.from_document(study.document())).document() == study.document()
    assert study.model.settings.model_dump()["hidden"] == (3,)
    assert "plugins" not in resolve(StudyFile.model_validate(study_tables())).document()


def test_another_wheel_of_the_same_version_is_another_study(folder: Path) -> None:
    install(folder)
    first = resolve(written())
    with another_process():
        install(folder, files={**FILES, "lungnets/network.py": FILES["lungnets/network.py"] + "# changed\n"})
        second = resolve(written())
        assert first.digest("ab") != second.digest("ab")
        message, _ = refusal(first.file)
    assert message.startswith("plug-in lungnets 1.2 has SHA-256 ")
    assert message.endswith(": another build under one version")


def test_a_plugin_brings_tasks_and_methods_too(folder: Path) -> None:
    files = {"kidneys/__init__.py": TASK % "'accuracy': (0.0, 1.0)", "kidneys/method.py": METHOD % "MEAN"}
    points = {"wardround.tasks": {"lungs": "kidneys:LUNGS"}, "wardround.methods": {"fedlung": "kidneys.method:FEDLUNG"}}
    install(folder, "kidneys", "0.1", files, points)
    install(folder)
    tables = study_tables("fedavg")
    tables |= {"task": {**tables["task"], "name": "lungs"}, "algorithm": {"name": "fedlung"}, "model": MODEL}
    pins = resolve(StudyFile.model_validate(tables)).document()["plugins"]
    assert pins["kidneys"]["brings"] == ["method fedlung", "task lungs"]
    assert pins["kidneys"]["method"] == {"aggregates": "mean", "one_global_model": True, "distills": False}
    assert list(pins) == ["kidneys", "lungnets"]
    assert "method" not in pins["lungnets"]


def test_a_metric_of_another_task_is_told_only_if_that_task_says_its_range(folder: Path) -> None:
    points = {"wardround.tasks": {"lungs": "kidneys:LUNGS"}}
    install(folder, "kidneys", "0.1", {"kidneys/__init__.py": TASK % ""}, points)
    tables = study_tables(reported={"metrics": ["val_loss", "accuracy"]})
    tables["task"]["name"] = "lungs"
    said = "study.toml: task `lungs` says no range for its metric `accuracy`, so it cannot be reported"
    hint = "whoever made that task adds it to `ranges` of its TaskRow; until then leave the metric out"
    assert refusal(StudyFile.model_validate(tables)) == (said, hint)


def test_what_a_plugin_brings_is_among_the_names_and_nothing_is_imported_for_that(folder: Path) -> None:
    install(folder, files={"lungnets/__init__.py": "raise SystemExit('imported')\n"})
    message, hint = refusal(written({"name": "lungnat"}))
    assert (message, hint) == ("study.toml: there is no model `lungnat`", "did you mean `lungnet`?")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nosuchthing\n", "ModuleNotFoundError: No module named 'nosuchthing'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def broken(:\n", "SyntaxError: invalid syntax (__init__.py, line 1)"),
        ("", "AttributeError: module 'lungnets' has no attribute 'LUNGNET'"),
        ("from lungnets import missing\n", "ImportError: cannot import name 'missing' from "),
    ],
    ids=["a missing module", "an error", "no Python", "no such attribute", "a module that it did not bring"],
)
def test_a_plugin_that_cannot_be_imported_breaks_the_studies_that_use_it_alone(
    folder: Path, source: str, message: str
) -> None:
    install(folder, files={**FILES, "lungnets/__init__.py": source})
    said, hint = refusal(written())
    assert said.startswith(f"plug-in lungnets 1.2 cannot be imported (lungnets:LUNGNET): {message}")
    assert hint == (
        "install it again with what it needs: `pip install --force-reinstall lungnets==1.2`; other studies are not "
        "affected"
    )
    assert resolve(StudyFile.model_validate(study_tables())).model.name == "mlp"


def test_no_command_imports_a_plugin_for_its_help(folder: Path) -> None:
    install(folder, files={"lungnets/__init__.py": "raise SystemExit('imported')\n"})
    code = (
        "from fl_algorithms.lab import cli, methods; from fl_algorithms import registry; print(registry.MODELS.names())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "'lungnet'" in done.stdout


@pytest.mark.parametrize("value", ["lungnets:NUMBER", "lungnets:OTHER"], ids=["no row", "a row of another name"])
def test_an_entry_point_that_is_no_row_is_named(folder: Path, value: str) -> None:
    more = 'NUMBER = 4711\nOTHER = ModelRow("other", MlpSettings, "lungnets.network:lungnet")\n'
    points = {"wardround.models": {"lungnet": value}}
    install(folder, files={**FILES, "lungnets/__init__.py": NET + more}, entry_points=points)
    assert refusal(written()) == (
        f"plug-in lungnets 1.2: its entry point `lungnet` in wardround.models ({value}) is no ModelRow of that name",
        "tell whoever made it, or `pip uninstall lungnets`; other studies are not affected",
    )


def test_an_implementation_that_cannot_be_imported_names_its_plugin(folder: Path) -> None:
    from fl_algorithms.plugins import load

    install(folder, files={**FILES, "lungnets/network.py": "import nosuchthing\n"})
    resolve(written())
    row = registry.MODELS.find("lungnet")
    assert row is not None
    with pytest.raises(BadData, match=r"plug-in lungnets 1\.2 cannot be imported \(lungnets\.network:lungnet\)"):
        load(row.implementation)


def test_a_plugin_may_have_packages_in_packages_and_folders_without_init(folder: Path) -> None:
    inner = {"lungnets/parts/deep/block.py": "WIDTH = 3\n", "lungnets/more/__init__.py": "", "lungnets/more/x.py": ""}
    uses = "from lungnets.parts.deep.block import WIDTH\nimport lungnets.more.x\nassert WIDTH == 3\n"
    install(folder, files={**FILES, **inner, "lungnets/__init__.py": uses + NET})
    assert resolve(written()).model.name == "lungnet"


def test_two_plugins_that_bring_one_row_are_both_named(folder: Path) -> None:
    install(folder)
    points = {"wardround.models": {"lungnet": "kidneys:LUNGNET"}}
    install(folder, "kidneys", "0.1", {"kidneys/__init__.py": NET}, points)
    assert refusal(written()) == (
        "`kidneys` and `lungnets` both bring a model `lungnet`, and a study could mean either",
        "uninstall one of them: `pip uninstall lungnets`",
    )


def test_a_link_to_sources_runs_in_the_lab_alone_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(folder)
    link(folder)
    with caplog.at_level(logging.WARNING):
        study = resolve(written(), lab=True)
    assert study.document()["plugins"] == {"lungnets": {"version": "1.2", "sha256": "", "brings": ["model lungnet"]}}
    why = "it is installed as a link to its sources (editable), which can change at any time"
    assert [record.getMessage() for record in caplog.records] == [
        f"plug-in lungnets 1.2: {why}; this runs in the lab alone"
    ]
    assert resolve(study.file, lab=True) == study
    for refused in (study.file, written()):
        message, hint = refusal(refused)
        assert message == f"plug-in lungnets 1.2 cannot be pinned: {why}"
        assert hint == "build a wheel of it (`pip wheel --no-deps DIR`) and install that"


def test_a_pin_of_what_the_study_does_not_use_is_refused(folder: Path) -> None:
    install(folder)
    pin = {"lungnets": {"version": "1.2", "sha256": found().sha256}}
    assert refusal(written({"name": "mlp"}, plugins=pin)) == (
        "study.toml: [plugins.lungnets] is pinned, and no task, model or method of the study is its own",
        "take that table away; resolving writes what is needed",
    )


def test_a_study_may_name_the_version_that_it_wants(folder: Path) -> None:
    install(folder)
    pin = {"lungnets": {"version": "1.1", "sha256": found().sha256}}
    message, _ = refusal(written(plugins=pin))
    assert message == "plug-in lungnets is 1.2 here, the study pins 1.1"
    pin["lungnets"]["version"] = "1.2"
    assert resolve(written(plugins=pin)) == resolve(written())


def test_plugins_are_listed_with_their_digests_and_without_importing_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing.print_overview(listing.brought())
    assert capsys.readouterr().out == "no other distribution brings a task, a model or a method\n"
    points = {"wardround.models": {"lungnet": "lungnets:LUNGNET", "mlp": "lungnets:MLP", "both": "lungnets:BOTH"}}
    install(folder, files={"lungnets/__init__.py": "raise SystemExit('imported')\n"}, entry_points=points)
    kidneys = {"wardround.models": {"both": "kidneys:BOTH"}, "wardround.tasks": {"kidneys": "kidneys:TASK"}}
    install(folder, "kidneys", "0.1", {"kidneys/__init__.py": ""}, kidneys)
    link(folder, "kidneys")
    listing.print_overview(listing.brought())
    said, hint = capsys.readouterr()
    why = "in the lab alone: it is installed as a link to its sources (editable), which can change at any time"
    assert said.splitlines() == [
        f"task kidneys: kidneys 0.1; {why}",
        "model both: kidneys 0.1; another plug-in brings one of that name too",
        "model both: lungnets 1.2; another plug-in brings one of that name too",
        "model lungnet: lungnets 1.2",
        "model mlp: lungnets 1.2; Wardround has a model of that name, which every study means",
        f'{{ name = "lungnets", version = "1.2", sha256 = "{found().sha256}" }}',
    ]
    assert hint == "a hospital that trusts one has its line in `allow` of [plugins] in policy.toml\n"
    (row,) = [row for row in listing.overview()["plugins"] if row["name"] == "lungnet"]  # type: ignore[attr-defined]
    assert (row["version"], row["sha256"], row["problem"]) == ("1.2", found().sha256, "")


def test_a_worker_process_imports_a_plugin_from_the_pinned_files_too(folder: Path, tmp_path: Path) -> None:
    """What is given to it is unpickled there: before that, it admits what this process did."""
    marker = tmp_path / "executed"
    install(folder, files={**FILES, "lungnets/network.py": "def lungnet(): ...\n"})
    resolve(written())
    code = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    network = registry.load("lungnets.network:lungnet")

    def another() -> subprocess.CompletedProcess[bytes]:
        given = pickle.dumps((Admitted(), network))
        return subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=False)

    assert another().returncode == 0
    (folder / "lungnets" / "network.py").write_text(f"open({str(marker)!r}, 'w')\n")
    done = another()
    assert done.returncode != 0
    assert b"lungnets 1.2: its file `lungnets/network.py` has SHA-256 " in done.stderr
    assert not marker.exists()
