"""`make check` finds the tests of what was changed."""

from pathlib import Path

import pytest

from tools.check import imported_by, module_of, which_import


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("coordinator/updates/admission.py", "coordinator.updates.admission"),
        ("proto/wardround/signing/dsse.py", "wardround.signing.dsse"),
        ("site_agent/audit/__init__.py", "site_agent.audit"),
        ("docs/operators.md", None),
        ("setup.py", None),
    ],
)
def test_a_file_has_the_name_by_which_it_is_imported(path: str, module: str | None) -> None:
    assert module_of(Path(path)) == module


def test_imports_are_found_wherever_they_stand() -> None:
    assert imported_by("import a.b\ndef f():\n    from c import d as e\n") == {"a.b", "c", "c.d"}


def test_a_test_is_chosen_if_it_imports_a_changed_module_or_is_changed_itself(tmp_path: Path) -> None:
    sources = {
        "coordinator/calls.py": "",
        "coordinator/server.py": "",
        "tests/test_a.py": "from coordinator import calls",
        "tests/test_b.py": "from coordinator.calls import Call",
        "tests/test_c.py": "import coordinator.server",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    tests = [Path(f"tests/test_{name}.py") for name in "abc"]
    assert which_import([Path("coordinator/calls.py")], tests, tmp_path) == tests[:2]
    assert which_import([Path("tests/test_c.py"), Path("coordinator/gone.py")], tests, tmp_path) == tests[2:]
