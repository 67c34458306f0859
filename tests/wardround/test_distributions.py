"""What is installed, by its metadata; tests/attacks/ has those who tamper with it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PathDistribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugin_world import FILES, found, install, link, on_the_path
from wardround.errors import BadData
from wardround.local.distributions import (
    Distribution,
    EntryPoint,
    described,
    entry_points,
    find,
    refuse_changed,
)
from wardround.records.plugins import Plugin, refuse_other

AT_START = "which every Python process executes at its start"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_the_path(tmp_path / "site-packages") as folder:
        yield folder


def test_the_digest_is_of_what_the_wheel_brought_alone(folder: Path) -> None:
    """What installers add differs from one machine to the next."""
    first = found_after(folder)
    again = found_after(
        folder, more="../../bin/lungs,sha256=YQ,1\nlungnets-1.2.dist-info/direct_url.json,sha256=YQ,9\n"
    )
    assert first.sha256 == again.sha256
    assert len(first.sha256) == 64
    assert set(first.files) == {*FILES, "lungnets-1.2.dist-info/METADATA", "lungnets-1.2.dist-info/entry_points.txt"}
    assert first.packages == {"lungnets"}
    assert str(first) == "lungnets 1.2"
    assert found_after(folder, version="1.3").sha256 != first.sha256
    assert found_after(folder, files={**FILES, "lungnets/more.py": "x = 1\n"}).sha256 != first.sha256


def found_after(folder: Path, **change: Any) -> Distribution:
    install(folder, **change)
    return found()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"more": "lungnets/extra.so,,\n"}, "its RECORD has no SHA-256 of `lungnets/extra.so`"),
        ({"more": "lungnets/extra.py,md5=YQ,1\n"}, "its RECORD has no SHA-256 of `lungnets/extra.py`"),
        ({"more": "lungnets/__init__.py,sha256=YQ,1\n"}, "its RECORD names `lungnets/__init__.py` twice"),
        ({"more": "lungnets/x.py\n"}, "its RECORD has a line that is not path, hash and size"),
        ({"more": '"lungnets/x.py,\n'}, "its RECORD is not a table of files"),
        ({"files": {"lungnets.pth": "import os\n"}}, f"it brings `lungnets.pth`, {AT_START}"),
        ({"files": {"sitecustomize.py": ""}}, f"it brings `sitecustomize.py`, {AT_START}"),
        ({"files": {"site_agent/gateway/more.py": ""}}, "it brings `site_agent/gateway/more.py`, a file among our own"),
        ({"files": {"lung/nets.py": ""}}, "its package `lung` has no __init__.py, so that others can add to it"),
        ({"files": {}}, "its RECORD lists no file that could be imported"),
        ({"version": "soon/er"}, "its metadata name no version of the usual form"),
    ],
    ids=["no hash", "other hash", "twice", "short", "no table", "pth", "start", "ours", "shared", "empty", "version"],
)  # fmt: skip
def test_what_cannot_be_pinned_says_why(folder: Path, change: dict[str, Any], fault: str) -> None:
    if "version" in change:
        install(folder)
        about = folder / "lungnets-1.2.dist-info" / "METADATA"
        about.write_text(about.read_text().replace("Version: 1.2", f"Version: {change['version']}"))
    else:
        install(folder, **change)
    distribution = found()
    assert (distribution.fault, distribution.sha256) == (fault, "")


def test_what_was_not_installed_from_a_wheel_cannot_be_pinned(folder: Path) -> None:
    install(folder)
    link(folder)
    assert found().fault == "it is installed as a link to its sources (editable), which can change at any time"
    install(folder)
    (folder / "lungnets-1.2.dist-info" / "RECORD").unlink()
    assert found().fault == "it has no RECORD of its files: it was not installed from a wheel"


def test_a_line_of_record_that_leads_outside_is_never_opened(folder: Path) -> None:
    for outside in ("/etc/passwd", "../../etc/passwd", "lungnets/../../x.py", "lungnets//x.py", "a\\\\..\\\\b"):
        distribution = found_after(folder, more=f"{outside},sha256=YQ,1\n")
        assert not distribution.fault
        assert outside not in distribution.files
        refuse_changed(distribution)


def test_every_file_is_compared_and_none_may_lie_there_besides(folder: Path) -> None:
    install(folder)
    refuse_changed(found())
    (folder / "lungnets" / "__pycache__").mkdir()
    (folder / "lungnets" / "__pycache__" / "network.cpython-311.pyc").write_bytes(b"never executed")
    refuse_changed(found())
    again = "install it again: `pip install --force-reinstall --no-deps lungnets==1.2`"
    (folder / "lungnets" / "extra.py").write_text("")
    with pytest.raises(BadData) as refusal:
        refuse_changed(found())
    assert refusal.value.message == "lungnets 1.2: `lungnets/extra.py` lies among its files and did not come with it"
    assert refusal.value.hint == again
    (folder / "lungnets" / "extra.py").unlink()
    (folder / "lungnets" / "network.py").write_text("")
    with pytest.raises(BadData, match=r"lungnets 1.2: its file `lungnets/network.py` has SHA-256 e3b0c44298fc…, inst"):
        refuse_changed(found())
    (folder / "lungnets" / "network.py").unlink()
    with pytest.raises(BadData, match=r"lungnets 1.2: its file `lungnets/network.py` cannot be read"):
        refuse_changed(found())


def test_entry_points_are_read_without_importing_anything(folder: Path) -> None:
    install(folder, files={"lungnets/__init__.py": "raise SystemExit('imported')\n"})
    (found_point,) = entry_points("wardround.models")
    assert (found_point.name, found_point.value, found_point.distribution) == (
        "lungnet",
        "lungnets:LUNGNET",
        "lungnets",
    )
    assert entry_points("wardround.tasks") == []
    assert find("nobody-made-this") is None


def test_a_folder_that_an_installer_left_half_is_no_distribution(folder: Path) -> None:
    (folder / "half-1.0.dist-info").mkdir()
    (folder / "half-1.0.dist-info" / "entry_points.txt").write_text("[wardround.models]\nhalf = half:HALF\n")
    assert entry_points("wardround.models") == []


def test_another_plugin_than_the_pinned_one_is_named_with_what_to_do(folder: Path) -> None:
    def said(**pin: str) -> tuple[str, str]:
        with pytest.raises(BadData) as refusal:
            refuse_other(Plugin(**{"name": "lungnets", "version": "1.2", "sha256": "ab" * 32, **pin}))
        assert refusal.value.code == "DECLINED_MODEL_MISMATCH"
        return refusal.value.message, refusal.value.hint

    again = "`pip install --no-deps lungnets==1.2`"
    assert said() == ("plug-in lungnets 1.2 is not installed here", f"{again} where the trainer runs")
    install(folder, version="1.3")
    anew = "or the study is created anew with 1.3, and approved again"
    assert said() == ("plug-in lungnets is 1.3 here, the study pins 1.2", f"{again}; {anew}")
    install(folder)
    digest = found().sha256
    assert said() == (
        f"plug-in lungnets 1.2 has SHA-256 {digest[:12]}… here, the study pins abababababab…: another build under one "
        "version",
        "install the wheel with which the study was created; or it is created anew, and approved again",
    )
    assert refuse_other(Plugin(name="lungnets", version="1.2", sha256=digest)) == found()
    link(folder)
    assert said() == (
        "plug-in lungnets 1.2 cannot be pinned: it is installed as a link to its sources (editable), which can change "
        "at any time",
        "build a wheel of it (`pip wheel --no-deps DIR`) and install that",
    )


@pytest.mark.parametrize("file", ["METADATA", "RECORD", "entry_points.txt", "direct_url.json"])
@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[wardround.models]\nno equals sign\n", b"[" * 100_000, b"\0,\0,\0"]
)
def test_a_distribution_whose_metadata_are_damaged_is_in_nobodys_way(folder: Path, file: str, data: bytes) -> None:
    install(folder)
    points = {"wardround.models": {"kidney": "kidneys:KIDNEY"}}
    install(folder, "kidneys", "0.1", {"kidneys/__init__.py": ""}, points)
    (folder / "lungnets-1.2.dist-info" / file).write_bytes(data)
    assert EntryPoint("kidney", "kidneys:KIDNEY", "kidneys") in entry_points("wardround.models")
    distribution = find("lungnets")
    if distribution is not None and not distribution.fault:
        with suppress(BadData):
            refuse_changed(distribution)


@given(st.text(max_size=300))
def test_no_record_raises_anything_but_our_own(text: str) -> None:
    with TemporaryDirectory() as folder:
        about = Path(folder) / "lungnets-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lungnets\nVersion: 1.2\n")
        (about / "RECORD").write_text(f"a.py,sha256={'A' * 43},1\n{text}", encoding="utf-8")
        distribution = described(PathDistribution(about))
        assert bool(distribution.fault) != bool(distribution.sha256)
        if not distribution.fault:
            with pytest.raises(BadData):
                refuse_changed(distribution)


def test_a_pipe_in_a_files_place_is_not_waited_for(folder: Path) -> None:
    install(folder)
    (folder / "lungnets" / "network.py").unlink()
    os.mkfifo(folder / "lungnets" / "network.py")
    with pytest.raises(BadData, match="cannot be read"):
        refuse_changed(found())
