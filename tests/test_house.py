"""The rules of the house that no linter knows: how long a module is, where a dictionary stands, what a package says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("proto/wardround", "coordinator", "site_agent", "fl_algorithms")
MODULES = sorted(
    path.relative_to(ROOT)
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if "_pb2" not in path.name and "migrations" not in path.parts
)
PACKAGES = [
    path for path in MODULES if path.name == "__init__.py" and path.parent.parent.name != "methods"
]  # these: cards
LINES = 400
CODEC = re.compile(r"\w*(document|_from|from_)\w*")  # a function that makes a record of a dictionary, or back


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_is_short_and_its_first_line_says_what_it_is(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert text.count("\n") <= LINES
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    assert len(first) > 20, f"{path} does not say what it is"


def untyped(tree: ast.AST, inside: str = "") -> Iterator[int]:
    """The lines on which ``dict[str, Any]`` or ``Mapping[str, Any]`` stands outside a codec."""
    for node in ast.iter_child_nodes(tree):
        here = node.name if isinstance(node, ast.FunctionDef) else inside
        if isinstance(node, ast.Subscript) and ast.unparse(node) in ("dict[str, Any]", "Mapping[str, Any]"):
            if not CODEC.fullmatch(here):
                yield node.lineno
        else:
            yield from untyped(node, here)


def test_untyped_dictionaries_stand_in_codecs_alone() -> None:
    outside = [
        f"{path}:{line}"
        for path in MODULES
        if path.parts[0] in ("site_agent", "coordinator")
        for line in untyped(ast.parse((ROOT / path).read_text()))
    ]
    assert outside == []


def test_the_count_of_untyped_dictionaries_sees_them() -> None:
    source = "def f(x: dict[str, Any]): ...\ndef from_document(x: dict[str, Any]): ...\nA = Mapping[str, Any]"
    assert list(untyped(ast.parse(source))) == [1, 3]


@pytest.mark.parametrize("path", PACKAGES, ids=str)
def test_a_package_says_what_it_holds_what_it_imports_and_what_it_refuses(path: Path) -> None:
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    assert len(text.split("\n\n", 1)) == 2, "first what it holds, then what it may import and what it refuses"
    assert re.search(r"(?i)\bimports?\b", text)
