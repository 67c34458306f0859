"""`make check`: lint, types and tests of what one changed, in a minute or two: `python -m tools.check [FILE ...]`.

Without a file, of everything that differs from the last commit. A test counts as a test of a module if it imports the
module itself, by any name; system tests and the long ones are left to `make test` and `make chaos`.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("wardround", "coordinator", "site_agent", "fl_algorithms", "tools", "tests")


def module_of(path: Path) -> str | None:
    """The name by which Python imports a file of ours; ``None`` for what is no module of ours."""
    parts = path.with_suffix("").parts
    if parts and parts[0] == "proto":
        parts = parts[1:]
    if path.suffix != ".py" or not parts or parts[0] not in PACKAGES:
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(source: str) -> set[str]:
    """Every module that a program may import, anywhere in it: `from a.b import c` counts as `a.b` and as `a.b.c`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def which_import(changed: Iterable[Path], tests: Iterable[Path], root: Path = ROOT) -> list[Path]:
    """The test files that are changed themselves or import a changed module.

    Args:
        changed: paths relative to ``root``.
        tests: the candidates, relative to ``root``.
    """
    changed = [path for path in changed if (root / path).exists()]
    modules = {module for path in changed if (module := module_of(path))}
    return sorted(path for path in tests if path in changed or modules & imported_by((root / path).read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    files = [path.resolve().relative_to(ROOT) for path in parser.parse_args().files] or _differing()
    if not files:
        print("nothing differs from the last commit; name files: make check FILES='coordinator/calls.py'")
        return 0
    tests = which_import(files, [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")])
    python = [str(path) for path in files if path.suffix == ".py" and (ROOT / path).exists()]
    here = Path(sys.executable).parent
    steps = (
        [[str(here / "ruff"), "check", *python], [str(here / "ruff"), "format", "--check", *python]] if python else []
    )
    steps += [[str(here / "mypy")], [str(here / "lint-imports"), "--no-cache"]]
    if tests:
        names = [str(path) for path in tests]
        steps.append([sys.executable, "-m", "pytest", "-n", "2", "-m", "not chaos and not system", *names])
    failed = [step for step in steps if not _passes(step)]
    print(f"\n{'FAILED: ' + ', '.join(Path(step[0]).name for step in failed) if failed else 'all passed'};"
          f" {len(tests)} of the test files import what changed")  # fmt: skip
    return 1 if failed else 0


def _differing() -> list[Path]:
    listed = ["git", "status", "--porcelain", "--no-renames", "--untracked-files=all"]
    out = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line[3:]) for line in out.splitlines()]


def _passes(step: list[str]) -> bool:
    print(f"\n== {' '.join(step[:8])}{' …' if len(step) > 8 else ''}", flush=True)
    # 5: pytest found only tests that are left to other targets.
    return subprocess.run(step, cwd=ROOT, check=False).returncode in (0, 5)


if __name__ == "__main__":
    sys.exit(main())
