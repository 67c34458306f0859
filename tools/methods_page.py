"""Writes docs/methods.md from the registry; a test compares. ``python -m tools.methods_page``"""

from pathlib import Path

from fl_algorithms.lab.methods import SHOWN, overview

PAGE = Path(__file__).resolve().parents[1] / "docs" / "methods.md"
HEAD = """# Methods

Written by `python -m tools.methods_page` from the registry (`fl_algorithms/registry.py`), which `fl-lab methods`
prints. `fl-lab methods NAME` has a method's settings. Each federated one runs in the lab and across hospitals with the
same code and ends with the same digest.

| `name` | method | what leaves a site | what stays | needs |
|---|---|---|---|---|
"""
TAIL = """
Local (*Client j*) comes from the runs of `silo`, and Central is a row of `kind = "central"` in a suite:
[researchers.md](researchers.md).

"""


def page() -> str:
    rows, exposed = [], []
    for row in overview():
        name = f"`{row['name']}`" + (" (lab only)" if row["lab_only"] else "")
        title, _, link = str(row["paper"]).rpartition(", https://")
        method = f"[{row['title']}](https://{link}), {title}" if title else f"{row['title']}: {row['paper']}"
        needs = "; ".join(row["needs"]) or "–"
        rows.append(f"| {name} | {method} | {row['upload']} | {row['private']} | {needs} |\n")
        if row["exposure"]:
            exposed.append(f"* `{row['name']}`: {SHOWN[row['exposure']].format(row['personalized'])}.\n")
    shown = "Off unless a hospital's policy allows it in `[models]`:\n\n" + "".join(exposed)
    return HEAD + "".join(rows) + TAIL + shown


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
