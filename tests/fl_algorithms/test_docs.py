"""What docs/researchers.md shows is what is installed."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_fedprox_as_it_is() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "researchers.md").read_text(), re.DOTALL)
    assert (ROOT / "fl_algorithms" / "client" / "fedprox.py").read_text().endswith(shown)
