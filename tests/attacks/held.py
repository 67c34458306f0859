"""What the tests of attacks that never worked stand on: a served coordinator, and our own sources as trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.conftest import Place

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto/wardround", "coordinator", "site_agent", "fl_algorithms")
NAMES_OUT = (
    "../../etc/passwd",
    "..",
    "/etc/passwd",
    "a/b",
    "a\\b",
    ".hidden",
    "",
    "a\x00b",
    "a" * 300,
    "ａ",
    "a\n",
    "A b",
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Place]:
    """A coordinator on loopback in this process, over real TLS."""
    place = Place(tmp_path)
    try:
        yield place
    finally:
        place.close()


def calls_in_our_code() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, name of what is called, the call) for each call in the programs."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield str(path.relative_to(ROOT)), ast.unparse(node.func), node


def imports_in_our_code() -> Iterator[tuple[str, str]]:
    """(file, module) for each import in the programs."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((str(path.relative_to(ROOT)), alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    yield str(path.relative_to(ROOT)), node.module
