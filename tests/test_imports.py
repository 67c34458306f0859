"""The floors of the house: whoever reads a module can read what it imports first, and comes to an end.

import-linter keeps who may import whom; it takes no notice of two modules that import each other.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {name: ROOT / name for name in ("coordinator", "site_agent", "fl_algorithms")} | {
    "wardround": ROOT / "proto" / "wardround"
}


def modules() -> dict[str, Path]:
    """Every module of the four packages: its dotted name -> its file."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            names = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return found


def imported(tree: ast.AST, known: Mapping[str, Path], *, lazy: bool) -> Iterator[str]:
    """The modules of ``known`` that the code of ``tree`` imports; ``lazy``: also those inside functions.

    What is imported for types alone does not count: it never runs.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else str(node.module)
        else:
            yield from imported(node, known, lazy=lazy)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules of which each leads to each: what is left when ends are taken away again and again."""
    left = {module: set(wanted) for module, wanted in imports.items()}
    while ends := {module for module, wanted in left.items() if not wanted & left.keys() - {module}}:
        left = {module: wanted for module, wanted in left.items() if module not in ends}
    reached = {module: _reached(module, left) for module in left}
    groups = {tuple(sorted(m for m in left if m in reached[module] and module in reached[m])) for module in left}
    return sorted([*group] for group in groups if len(group) > 1)


def _reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in imports.get(waiting.pop(), set()) - found:
            found.add(module)
            waiting.append(module)
    return found


@pytest.mark.parametrize("lazy", [False, True], ids=["at the top of modules", "inside functions too"])
def test_no_two_modules_import_each_other_by_any_way(lazy: bool) -> None:
    known = modules()
    imports = {
        module: set(imported(ast.parse(file.read_text()), known, lazy=lazy)) - {module}
        for module, file in known.items()
    }
    assert circles(imports) == []


def test_circles_are_found_and_what_hangs_on_them_is_not_blamed() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "end"}, "end": set(), "x": {"y"}, "y": {"z"}, "z": {"x", "a"}}
    assert circles(graph) == [["b", "c"], ["x", "y", "z"]]


def test_only_imports_that_run_when_the_module_is_loaded_count_as_its_own() -> None:
    known = {"p.a": Path(), "p.b": Path(), "p.c": Path(), "p.d": Path()}
    tree = ast.parse(
        "from p import a\nimport p.b\nif TYPE_CHECKING:\n    from p.d import D\ndef later():\n    from p.c import C\n"
    )
    assert set(imported(tree, known, lazy=False)) == {"p.a", "p.b"}
    assert set(imported(tree, known, lazy=True)) == {"p.a", "p.b", "p.c"}


def outside(files: Iterable[Path]) -> set[str]:
    """The top-level packages that ``files`` import and that are neither ours nor Python's."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - PACKAGES.keys() - {"tests", "tools", "bench"}


def undeclared(imports: Iterable[str], requirements: Iterable[str]) -> list[str]:
    """Those of ``imports`` that no distribution of ``requirements`` brings."""
    wanted = {re.split(r"[\s<>=!~;\[]", one, maxsplit=1)[0].lower().replace("_", "-") for one in requirements}
    brought = packages_distributions()
    return sorted(
        name for name in imports if not wanted & {one.lower().replace("_", "-") for one in brought.get(name, [])}
    )


NEVER_INSTALLED = {"atheris", "flwr"}  # the guided fuzzing, and a comparison, ask a person for them


def test_whatever_is_imported_is_declared_for_those_who_import_it() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    users = [
        *declared["project"]["dependencies"],
        *(one for extra in declared["project"]["optional-dependencies"].values() for one in extra),
    ]
    developers = [one for group in declared["dependency-groups"].values() for one in group]
    packaged = outside(modules().values())
    assert undeclared(packaged, users) == []
    for folder in ("bench", "tests", "tools", "examples"):
        assert undeclared(outside((ROOT / folder).rglob("*.py")) - NEVER_INSTALLED, [*users, *developers]) == []


def test_a_package_that_only_the_machine_happens_to_have_is_named() -> None:
    assert undeclared(["numpy", "yaml", "no_such_package"], ["NumPy >= 1", "rich"]) == ["no_such_package", "yaml"]
