"""A coordinator and code of others: most of it need not be there, and what is needed there must be allowed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import studies
from coordinator.state_directory import State
from coordinator.studies.study import load_studies
from fl_algorithms.resolving import resolve
from fl_algorithms.server.best import BestGlobal
from tests.coordinator.conftest import Place, study_document
from tests.coordinator.test_cli import Commands
from tests.plugin_world import FILES, NET, another_process, found, install, on_the_path
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.records.plugins import PluginTable
from wardround.records.study import StudyFile

METHOD = """
from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.rows import MEAN, MethodRow
from fl_algorithms.server.mean import mean

FEDLUNG = MethodRow(
    "fedlung", "FedLung", "nobody, 2026", "all", "nothing", client="fl_algorithms.methods.fedavg.client:fedavg",
    settings=MethodSettings, server={server}, one_global_model=True,
)

def own(settings, study, upload):
    return mean(settings, study, upload)
"""
POINTS = {"wardround.methods": {"fedlung": "kidneys:FEDLUNG"}}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_the_path(tmp_path / "site-packages") as folder:
        yield folder


def bring(folder: Path, server: str) -> dict[str, Any]:
    """A study of a plug-in's method, resolved where it is installed."""
    install(folder, "kidneys", "0.1", {"kidneys/__init__.py": METHOD.format(server=server)}, POINTS)
    tables = study_document(name="lungs")
    del tables["reported"]
    study = resolve(StudyFile.model_validate({**tables, "algorithm": {"name": "fedlung"}}))
    return study.document()


def gone(folder: Path, name: str = "kidneys") -> None:
    """It is not installed any more."""
    for path in (folder / name).rglob("*.py"):
        path.unlink()
    for path in folder.glob(f"{name}-*.dist-info/*"):
        path.unlink()


def test_code_that_runs_at_the_sites_alone_is_not_needed_here(place: Place, folder: Path) -> None:
    install(folder)
    document = bring(folder, "MEAN")
    document["model"] = {"name": "lungnet"}
    document["plugins"]["lungnets"] = {"version": "1.2", "sha256": found().sha256, "brings": ["model lungnet"]}
    gone(folder)
    gone(folder, "lungnets")
    with another_process():
        created = place.ask("create", document=document, initial=str(place.initial))
        assert created["id"] == "lungs"
        place.restart()
        study = place.coordinator.engine.find("lungs")
        assert study is not None
        assert study.one_global_model
        assert study.best == BestGlobal()
        assert study.aggregator.weighted
        assert place.ask("report", study="lungs")["algorithm"] == "fedlung"


def test_a_method_that_aggregates_by_its_own_code_must_be_allowed_and_installed_here(
    place: Place, folder: Path
) -> None:
    document = bring(folder, "'kidneys:own'")
    assert document["plugins"]["kidneys"]["method"]["aggregates"] == "own"
    digest = found("kidneys").sha256
    line = f'{{ name = "kidneys", version = "0.1", sha256 = "{digest}" }}'
    request = {"document": document, "initial": str(place.initial)}
    with another_process():
        with pytest.raises(NotPermitted) as refusal:
            place.ask("create", **request)
        assert refusal.value.message == (
            "study `lungs` runs code of plug-in kidneys 0.1 at the coordinator: no rule of plugins.allow names it"
        )
        assert refusal.value.hint == (
            f"if you trust it: install it here, write `allow = [{line}]` under [plugins] in config.toml, and start the "
            "service again"
        )
        allow(place.state, line)
        place.restart()
        place.ask("create", **request)
        place.restart()
        study = place.coordinator.engine.find("lungs")
        assert study is not None
        assert study.aggregator.weighted
        gone(folder)
        place.restart()
        study = place.coordinator.engine.find("lungs")
        assert study is not None
        with pytest.raises(BadData, match=r"plug-in kidneys 0\.1 is not installed here"):
            _ = study.aggregator


def allow(state: State, line: str) -> None:
    state.config_file.write_text(state.config_file.read_text() + f"\n[plugins]\nallow = [{line}]\n")
    assert len(state.config().plugins.allow) == 1


def test_a_study_of_one_of_our_methods_needs_no_permission(place: Place) -> None:
    place.create()
    known, _ = load_studies(place.coordinator.context.store, PluginTable())
    assert known["trial"].resolved.coordinators_plugins == ()


def test_a_study_may_be_resolved_where_its_plugins_are(folder: Path, tmp_path: Path) -> None:
    document = bring(folder, "MEAN")
    gone(folder)
    resolved, initial = tmp_path / "lungs.json", tmp_path / "initial.safetensors"
    resolved.write_text(json.dumps(document, indent=2))
    assert studies.resolved_elsewhere(resolved, initial, None).document() == document
    with pytest.raises(UsageProblem) as refusal:
        studies.resolved_elsewhere(resolved, None, None)
    assert refusal.value.message == "lungs.json is a resolved study: it takes `--initial` and no `--set`"
    assert refusal.value.hint == (
        "where its plug-ins are: `fl-lab init STUDY.toml --out initial.safetensors`, and `coordinator study check "
        "STUDY.toml > lungs.json`"
    )
    resolved.write_text("[]")
    with pytest.raises(BadData, match=r"lungs\.json is no resolved study: "):
        studies.resolved_elsewhere(resolved, initial, None)
    with pytest.raises(BadData, match=r"nothing\.json: No such file or directory"):
        studies.resolved_elsewhere(tmp_path / "nothing.json", initial, None)


def test_creating_a_study_of_a_plugin_that_is_not_installed_names_what_is_missing(folder: Path, tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    text = commands.study.read_text().replace('name = "mlp"', 'name = "lungnet"')
    commands.study.write_text(text)
    _, said = commands.run("study", "check", commands.study, code=65)
    assert "error: study.toml: there is no model `lungnet`" in said
    install(folder, files={**FILES, "lungnets/__init__.py": NET + "1 / 0\n"})
    _, said = commands.run("study", "check", commands.study, code=65)
    assert "error: plug-in lungnets 1.2 cannot be imported (lungnets:LUNGNET): ZeroDivisionError: division by z" in said
