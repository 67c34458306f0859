"""docs/architecture.md follows an update by names that the code has."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
NAME = re.compile(r"`((?:wardround|coordinator|site_agent|fl_algorithms)(?:\.\w+)*)`")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_there(name: str, root: Path = ROOT) -> bool:
    """Whether a dotted name is a package, a module, or a class, function or method in one."""
    place = root / "proto" if name.startswith("wardround") else root
    parts = name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return (place / "__init__.py").exists()
    module = place / f"{parts.pop(0)}.py"
    if not module.exists():
        return False
    scope: ast.AST = tree_of(module)
    for part in parts:
        named = [
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        ]
        if not named:
            return False
        scope = named[0]
    return True


@pytest.mark.parametrize("name", sorted(set(NAME.findall(PAGE.read_text()))))
def test_a_name_on_the_page_is_in_the_code(name: str) -> None:
    assert is_there(name)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("coordinator.updates", True),
        ("coordinator.updates.decide.Uploads.decide", True),
        ("coordinator.updates.decide.Uploads.undecide", False),
        ("coordinator.upload", False),
        ("wardround.rpc", True),
    ],
)
def test_names_are_looked_up_in_packages_modules_and_classes(name: str, there: bool) -> None:
    assert is_there(name) is there
