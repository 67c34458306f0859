"""Distributions of others, as an installer leaves them in a folder: packages, metadata, and a RECORD of their files."""

import base64
import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_algorithms import pinned_imports, plugins
from wardround.local.distributions import Distribution, find

NET = """
from fl_algorithms.rows import ModelRow
from fl_algorithms.settings.models import MlpSettings

LUNGNET = ModelRow("lungnet", MlpSettings, "lungnets.network:lungnet")
"""
NETWORK = """
from fl_algorithms.models.mlp import mlp

def lungnet(settings, inputs, outputs):
    return mlp(settings, inputs, outputs)
"""
FILES = {"lungnets/__init__.py": NET, "lungnets/network.py": NETWORK}
ENTRY_POINTS = {"wardround.models": {"lungnet": "lungnets:LUNGNET"}}


def install(
    folder: Path, name: str = "lungnets", version: str = "1.2", files: Mapping[str, str] = FILES,
    entry_points: Mapping[str, Mapping[str, str]] = ENTRY_POINTS, more: str = "",
) -> Path:  # fmt: skip
    """Put a distribution into ``folder``, as from a wheel. ``more``: lines of RECORD besides."""
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    points = "".join(
        f"[{group}]\n" + "".join(f"{row} = {value}\n" for row, value in rows.items())
        for group, rows in entry_points.items()
    )
    metadata = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/entry_points.txt": points,
    }
    for old in folder.glob(f"{name.replace('-', '_')}-*.dist-info/*"):
        old.unlink()
    lines = []
    for path, text in {**files, **metadata}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
    lines += [f"{about}/RECORD,,\n", f"{about}/INSTALLER,sha256=YQ,4\n", "lungnets/__pycache__/x.cpython-311.pyc,,\n"]
    (folder / about / "RECORD").write_text("".join(lines) + more)
    for empty in folder.glob("*.dist-info"):
        if not any(empty.iterdir()):
            empty.rmdir()
    return folder


def link(folder: Path, name: str = "lungnets") -> None:
    """Make it one that was installed as a link to its sources."""
    about = next(folder.glob(f"{name.replace('-', '_')}-*.dist-info"))
    (about / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')


def found(name: str = "lungnets") -> Distribution:
    distribution = find(name)
    assert distribution is not None
    return distribution


@contextmanager
def another_process() -> Iterator[None]:
    """What plug-ins were imported is forgotten, before and after."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    admitted = pinned_imports.admitted()
    tops = {top for distribution in admitted for top in distribution.packages} | set(plugins._linked)
    tops |= {"lungnets", "kidneys"}
    for module in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[module]
    pinned_imports._FINDER.admitted.clear()
    plugins._linked.clear()


@contextmanager
def on_the_path(folder: Path) -> Iterator[Path]:
    """A folder in which distributions are found, in this process and its children."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, another_process():
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield folder
