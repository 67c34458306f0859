"""Writes docs/examples.md from the files of examples/; a test compares. ``python -m tools.gallery_page``"""

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "examples.md"
HEAD = """# Examples

This page is for whoever looks for a study file, a suite or a notebook to begin with. Each runs as it is: a test
resolves or runs every one. `python -m tools.gallery_page` writes this page from the files. Terms:
[glossary](glossary.md). Every key of a study file: [study-file.md](study-file.md). Step by step:
[your first study](tutorial-csv.md).
"""
PLUGIN = """
## A plug-in

[`examples/plugin`](../examples/plugin/pyproject.toml): a network and a data set of one's own, in fewer than 60 lines of
Python. [plugins.md](plugins.md) walks through it; [your first network](tutorial-network.md) begins with less.
"""


def told(path: Path) -> tuple[str, str]:
    """What a file's first comment says: its text, before anything that is indented there, and the whole of it."""
    text: list[str] = []
    code: list[str] = []
    whole = ""
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        said = line.removeprefix("# ").replace(" FILE ", f" {path.relative_to(ROOT)} ")
        if said.startswith("  ") and line.startswith("#"):
            code.append(said.strip())
            continue
        if code:
            whole += f"{' '.join(text)}\n\n```\n" + "\n".join(code) + "\n```\n\n"
            text, code = [], []
        if not line.startswith("#"):
            break
        if said.strip("# "):
            text.append(said.strip())
    whole += " ".join(text)
    return whole.partition("\n\n")[0].partition(" Data: ")[0].removesuffix(" Data:"), whole.strip()


def study(path: Path) -> str:
    """One study file: what it says of itself, and what is in it."""
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    variants = ", ".join(f"`{name}`" for name in tables.get("variants", {}))
    facts = [
        ("task", f"`{tables['task']['name']}`"),
        ("model", f"`{tables['model']['name']}`"),
        ("method", f"`{tables['algorithm']['name']}`"),
        ("sites, rounds", f"{len(tables['study']['sites'])}, {tables['study']['rounds']}"),
        *([("variants", variants)] if variants else []),
    ]
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    title = tables["study"].get("title", "") or tables["study"]["name"]
    name = path.relative_to(ROOT)
    return f"### {title}\n\n[`{name}`](../{name})\n\n{told(path)[1]}\n\n| | |\n|---|---|\n{rows}\n"


def suite(path: Path) -> str:
    name = path.relative_to(ROOT)
    return f"* [`{name}`](../{name}): {told(path)[0]}\n"


def notebook(path: Path) -> str:
    """A notebook by its first cell."""
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    heading, _, text = first.partition("\n")
    name = path.relative_to(ROOT)
    return f"* [`{name}`](../{name}): **{heading.lstrip('# ')}**. {' '.join(text.split())}\n"


def page() -> str:
    """The whole page."""
    studies = "\n".join(map(study, sorted(EXAMPLES.glob("*.toml"))))
    suites = "".join(map(suite, sorted((EXAMPLES / "suites").glob("*.toml"))))
    notebooks = "".join(map(notebook, sorted((EXAMPLES / "notebooks").glob("*.ipynb"))))
    return (
        f"{HEAD}\n## Study files\n\n{studies}\n"
        f"## Suites: methods compared\n\n`fl-lab compare FILE --data DIR --out RUNS`\n\n{suites}\n"
        f"## Notebooks\n\n{notebooks}{PLUGIN}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
