"""The documentation as a site: links that lead out of docs/, and requests to other hosts. `make docs` builds it."""

from pathlib import Path

import pytest

from tools import site


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("operators.md", "[deploy](../deploy/README.md#a-gpu)", "[deploy](deploy.md#a-gpu)"),
        ("results/images.md", "[start](../../README.md)", "[start](../readme.md)"),
        ("readme.md", "[methods](docs/methods.md), [why](docs/decisions/README.md)",
         "[methods](methods.md), [why](decisions/README.md)"),
        ("readme.md", "![what left](docs/screenshots/audit.png)", "![what left](screenshots/audit.png)"),
        ("deploy.md", "[operators](../docs/operators.md)", "[operators](operators.md)"),
        ("readme.md", "[deploy/](deploy/README.md), [decisions](docs/decisions)",
         "[deploy/](deploy.md), [decisions](decisions/README.md)"),
        ("tables.md", "[organs](../examples/organs.toml)", "organs (`examples/organs.toml`)"),
        ("tables.md", "[`examples/organs.toml`](../examples/organs.toml)", "`examples/organs.toml`"),
        ("tables.md", "[paper](https://arxiv.org), [below](#below)", "[paper](https://arxiv.org), [below](#below)"),
    ],
)  # fmt: skip
def test_a_link_leads_to_its_page_or_becomes_a_name(page: str, before: str, after: str) -> None:
    assert site.linked(before, page) == after


def test_all_pages_and_pictures_are_brought_together_and_each_link_between_them_holds(tmp_path: Path) -> None:
    site.assemble(tmp_path)
    for page in tmp_path.rglob("*.md"):
        for match in site.LINK.finditer(page.read_text(encoding="utf-8")):
            assert (page.parent / match[3]).exists(), f"{page.name}: {match[0]}"


def test_a_request_to_another_host_is_found_and_a_link_to_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://arxiv.org/abs/1">paper</a><link rel="canonical" href="https://here.example">'
        '<script src="https://cdn.example/x.js"></script><img src="_static/a.png">'
        '<link rel="stylesheet" href="//f.example/a.css">'
    )
    (tmp_path / "a.css").write_text("@import 'https://fonts.example/f.css'; b { background: url(../x.png) }")
    assert list(site.strange_requests(tmp_path)) == [
        "a.css asks https://fonts.example/f.css",
        "a.html asks https://cdn.example/x.js",
        "a.html asks //f.example/a.css",
    ]
