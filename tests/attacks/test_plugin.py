"""Attacks by code that is not ours: by whoever makes a plug-in, changes one after it was approved, or names one."""

import importlib
import importlib.util
import marshal
import struct
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms.resolving import resolve
from site_agent.gateway.consent.rows import study_rows
from tests.fl_algorithms.toys import study_tables
from tests.plugin_world import FILES, NET, NETWORK, another_process, found, install, on_the_path
from tests.site_agent.fake_trainer import SHARED, write_tensors
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld, document
from tests.site_agent.trainer_world import Hospital
from wardround.errors import BadData, NeedsPerson, NotPermitted, WardroundError
from wardround.records.plugins import Plugin
from wardround.records.study import StudyFile

COORDINATOR = "spiffe://test/coordinator"
MODEL = {"name": "lungnet", "hidden": [4]}
MARKED = "import pathlib\npathlib.Path({marker!r}).touch()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where plug-ins are installed."""
    with on_the_path(tmp_path / "site-packages") as folder:
        yield folder


@pytest.fixture
def hospital(tmp_path: Path, folder: Path) -> Hospital:
    """One that trains a plug-in's network."""
    install(folder)
    made = Hospital.make(tmp_path, "fedavg")
    written = StudyFile.model_validate({**made.document, "model": MODEL})
    return replace(made, study=resolve(written))


@pytest.fixture
def site(tmp_path: Path, folder: Path) -> Iterator[SiteWorld]:
    world = SiteWorld(tmp_path)
    try:
        yield world
    finally:
        world.close()


def refused(hospital: Hospital, request: dict[str, Any]) -> WardroundError:
    with pytest.raises(WardroundError) as refusal:
        hospital.answer(request)
    assert refusal.value.code == "DECLINED_MODEL_MISMATCH"
    return refusal.value


def another_version(folder: Path) -> None:
    install(folder, version="1.3")


def another_wheel(folder: Path) -> None:
    install(folder, files={**FILES, "lungnets/network.py": NETWORK + "# another\n"})


def another_file(folder: Path) -> None:
    (folder / "lungnets" / "network.py").write_text(NETWORK + "# another\n")


CHANGED = {
    another_version: "plug-in lungnets is 1.3 here, the study pins 1.2",
    another_wheel: "plug-in lungnets 1.2 has SHA-256 ",
    another_file: "lungnets 1.2: its file `lungnets/network.py` has SHA-256 ",
}


@pytest.mark.attack(promise="P13", refused_by="fl_algorithms/plugins.py")
@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("restarts", [False, True], ids=["warm", "restarted"])
def test_wheel_changed_after_the_consent(hospital: Hospital, folder: Path, change: Any, restarts: bool) -> None:
    """Between two rounds, an insider installs another version, another wheel of that version, or edits one file."""
    hospital.train(1)
    hospital.commit(1)
    request = hospital.round(2)
    change(folder)
    with another_process() if restarts else nullcontext():
        hospital = hospital.restarted() if restarts else hospital
        assert refused(hospital, request).message.startswith(CHANGED[change])
        install(folder)  # the approved one again
        hospital.answer(request)


@pytest.mark.attack(promise="P13", refused_by="fl_algorithms/pinned_imports.py")
def test_other_study_runs_what_this_process_imported(hospital: Hospital, folder: Path) -> None:
    """A study that pins a newer wheel would run the older code that the warm trainer has in memory, or the reverse."""
    hospital.train(1)
    request = hospital.round(1)
    another_version(folder)
    pinned = hospital.document
    pinned["plugins"]["lungnets"] |= {"version": "1.3", "sha256": found().sha256}
    with pytest.raises(NeedsPerson) as refusal:
        hospital.answer({**request, "study": pinned})
    assert refusal.value.message.startswith("plug-in lungnets is 1.3 now, and this process has imported 1.2 (SHA-256 ")
    assert refusal.value.hint == "start it again, so that it imports the one that is installed"


@pytest.mark.attack(promise="P13", refused_by="fl_algorithms/pinned_imports.py")
def test_imported_before_it_was_pinned(hospital: Hospital, tmp_path: Path) -> None:
    """Another plug-in imports this one as what it needs, as Python does it: from a folder that is searched before. Then
    a study that pins it comes to the same warm trainer, and its files are right: what ran is what was in memory.
    """
    earlier = tmp_path / "earlier" / "lungnets"
    earlier.mkdir(parents=True)
    for path, text in FILES.items():
        (earlier / Path(path).name).write_text(text + "# looked at by nobody\n")
    with another_process():
        sys.path.insert(0, str(earlier.parent))
        try:
            importlib.import_module("lungnets.network")
        finally:
            sys.path.remove(str(earlier.parent))
        importlib.invalidate_caches()
        hospital = hospital.restarted()
        with pytest.raises(NeedsPerson) as refusal:
            hospital.train(1)
        assert refusal.value.message == (
            "plug-in lungnets 1.2: this process has imported a module `lungnets` before, and not from what lungnets "
            "brought"
        )
    with another_process():
        hospital.restarted().train(1)


@pytest.mark.attack(promise="P13", refused_by="proto/wardround/local/distributions.py")
@pytest.mark.parametrize("place", ["lungnets/more.py", "lungnets/network/__init__.py", "lungnets/network.pyc"])
def test_file_beside_the_pinned_ones(hospital: Hospital, folder: Path, place: str) -> None:
    """An insider leaves RECORD and every file as they are, and adds a module; a package of a module's name is found
    before it.
    """
    request = hospital.round(1)
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("def lungnet(settings, inputs, outputs): ...\n")
    said = refused(hospital, request)
    assert said.message == f"lungnets 1.2: `{place}` lies among its files and did not come with it"


@pytest.mark.attack(promise="P13", refused_by="fl_algorithms/pinned_imports.py")
def test_forged_bytecode(hospital: Hospital, folder: Path, tmp_path: Path) -> None:
    """Bytecode of other code, with the time and size of the source that it stands for: Python would execute it."""
    marker = tmp_path / "executed"
    source = folder / "lungnets" / "network.py"
    status = source.stat()
    code = compile(MARKED.format(marker=str(marker)) + NETWORK, str(source), "exec")
    header = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(status.st_mtime), status.st_size)
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    cached.write_bytes(header + marshal.dumps(code))
    with another_process():
        hospital.restarted().train(1)
    assert not marker.exists()
    with another_process():
        importlib.import_module("lungnets.network")  # as Python itself would have
        assert marker.exists()


@pytest.mark.attack(promise="P13", refused_by="fl_algorithms/pinned_imports.py")
def test_package_earlier_on_the_path(hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is searched before the one of the installed packages has a package of the same name."""
    marker, earlier = tmp_path / "executed", tmp_path / "earlier"
    (earlier / "lungnets").mkdir(parents=True)
    (earlier / "lungnets" / "__init__.py").write_text(MARKED.format(marker=str(marker)) + NET)
    monkeypatch.syspath_prepend(earlier)
    with another_process():
        hospital.restarted().train(1)
    assert not marker.exists()


@pytest.mark.attack(promise="P13", refused_by="fl_algorithms/registry.py")
def test_name_of_one_of_ours(folder: Path, tmp_path: Path) -> None:
    """A plug-in brings `tabular`, `mlp` and `fedavg`: every study that names ours would run its code."""
    marker = tmp_path / "executed"
    brought = {"tasks": "tabular", "models": "mlp", "methods": "fedavg"}
    points = {f"wardround.{kind}": {name: "lungnets:LUNGNET"} for kind, name in brought.items()}
    install(folder, files={"lungnets/__init__.py": MARKED.format(marker=str(marker))}, entry_points=points)
    study = resolve(StudyFile.model_validate(study_tables()))
    assert not marker.exists()
    assert "plugins" not in study.document()


@pytest.mark.attack(promise="P3", refused_by="fl_algorithms/plugins.py")
def test_code_that_no_consent_pins(hospital: Hospital, folder: Path, tmp_path: Path) -> None:
    """A coordinator names a network of a plug-in that is installed here for another study, and pins nothing."""
    marker = tmp_path / "executed"
    install(folder, files={**FILES, "lungnets/__init__.py": MARKED.format(marker=str(marker)) + NET})
    unpinned = {key: table for key, table in hospital.document.items() if key != "plugins"}
    with another_process(), pytest.raises(BadData) as refusal:
        hospital.restarted().ask("describe", study=unpinned, site="north")
    assert refusal.value.message == "the study names model lungnet of plug-in lungnets 1.2, and does not pin it"
    assert not marker.exists()


def offered(site: SiteWorld, revision: int = 1, **pin: str) -> dict[str, Any]:
    """The study of `site_world`, which runs a plug-in."""
    tables = document()
    tables["model"] = {"name": "lungnet"}
    tables["plugins"] = {"lungnets": {"version": "1.2", "sha256": found().sha256, "brings": ["model lungnet"], **pin}}
    model = write_tensors(site.folder / "initial.safetensors", SHARED, 0)
    site.digest = site.coordinator.offer(tables, model, revision=revision)
    return tables


def approved(site: SiteWorld) -> None:
    """A person has allowed the plug-in, and approved the study that was offered."""
    site.join()
    offered(site)
    site.start()
    site.wait_offered(STUDY)
    allow(site)
    site.approve()
    site.coordinator.wait_declared("READY")


def changes(site: SiteWorld) -> str:
    """What `site-agent status` says changed."""
    (row,) = study_rows(site.state, COORDINATOR)
    return "\n".join(row.changes)


def allow(site: SiteWorld) -> None:
    """A person takes the # away before the drafted line."""
    plugin = Plugin(name="lungnets", version="1.2", sha256=found().sha256)
    site.draft((f"# {plugin.line}", plugin.line))


@pytest.mark.attack(promise="P3", refused_by="site_agent/gateway/policy/refusing.py")
def test_plugin_imported_by_the_gateway(site: SiteWorld, folder: Path, tmp_path: Path) -> None:
    """The process with the network would run the code of others: with an offer, a preview, an approval, a round, a
    status. Until the policy allows it, not even the trainer is asked.
    """
    marker = tmp_path / "executed"
    install(folder, files={**FILES, "lungnets/__init__.py": MARKED.format(marker=str(marker)) + NET})
    site.join()
    assert site.trainer is not None
    offered(site)
    site.start()
    site.wait_offered(STUDY)
    with pytest.raises(NeedsPerson, match="there is no policy"):
        site.shown()
    site.draft()
    with pytest.raises(NotPermitted, match="the policy does not let study `hearts` run here: code of plug-in lungnets"):
        site.shown()
    assert site.trainer.asked == []
    allow(site)
    site.approve()
    site.coordinator.wait_declared("READY")
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    (row,) = study_rows(site.state, COORDINATOR)
    assert row.plugins == (f"lungnets 1.2, SHA-256 {found().sha256}",)
    assert "lungnets" not in sys.modules
    assert not marker.exists()


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/policy/decisions.py")
def test_offer_with_another_digest_of_code(site: SiteWorld, folder: Path) -> None:
    """A coordinator offers the approved study again with another wheel of that version; then without a digest."""
    install(folder)
    approved(site)
    for revision, digest in ((2, "ab" * 32), (3, "")):
        offered(site, revision, sha256=digest)
        site.coordinator.assign(STUDY, 1)
        site.coordinator.wait_declared("DECLINED", "DECLINED_NOT_APPROVED")
        site.coordinator.declared.clear()
        assert "plugins.lungnets.sha256" in changes(site)
        with pytest.raises(NotPermitted) as refusal:
            site.command("approve", study=STUDY, data="patients", digest="ab" * 32, by=PERSON)
        said = "plugins.allow has lungnets 1.2 (SHA-256 " if digest else "the study pins no SHA-256 of it"
        assert said in refusal.value.message
    assert site.coordinator.uploads == {}


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/policy/decisions.py")
def test_round_after_the_policy_took_a_plugin_back(site: SiteWorld, folder: Path) -> None:
    """The hospital allowed it once; from the moment that the line is gone, the next round runs nothing of it."""
    install(folder)
    approved(site)
    site.draft()
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert site.trainer is not None
    assert not site.trainer.commands("train")
    assert "the policy denies code of plug-in lungnets 1.2: no rule of plugins.allow names it" in changes(site)
