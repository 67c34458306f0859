"""The notebooks of examples/notebooks run, and run again in the same kernel; they are kept without outputs."""

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def shown(cell: Any) -> str:
    return "".join(output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", []))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.chaos
def test_a_notebook_runs_and_runs_again_and_says_the_same(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "notebooks").mkdir()
    for study in EXAMPLES.glob("*.toml"):
        shutil.copy(study, tmp_path)
    notebook = nbformat.read(path, 4)
    cells = notebook.cells
    assert len(cells) < 10
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)
    again = [nbformat.from_dict({**cell, "id": f"again-{number}"}) for number, cell in enumerate(cells)]
    notebook.cells = [*cells, *again]
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path / "notebooks")}}).execute()
    told = [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert told[: len(told) // 2] == told[len(told) // 2 :]
    assert any("difference" in text for text in told)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["breast_cancer", "own_network"]
