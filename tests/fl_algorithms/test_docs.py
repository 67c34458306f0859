"""What docs/researchers.md shows is what is installed."""

import re
from pathlib import Path

from tools.methods_page import page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_fedprox_as_it_is() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "researchers.md").read_text(), re.DOTALL)
    assert (ROOT / "fl_algorithms" / "methods" / "fedprox" / "client.py").read_text().endswith(shown)


def test_the_list_of_methods_is_the_registry() -> None:
    assert (ROOT / "docs" / "methods.md").read_text() == page(), "write it again: `python -m tools.methods_page`"
