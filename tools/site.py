"""Builds the documentation as a site: ``python -m tools.site [FOLDER]`` (`make docs`). Any warning is an error.

The pages of docs/ and four from outside it are brought into one folder and given to Sphinx with MyST; a link to a file
of the checkout that is no page becomes the file's name. No page of the site asks another host for anything, which is
checked in what was built.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = {
    "readme.md": ROOT / "README.md",
    "deploy.md": ROOT / "deploy" / "README.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
}
PAGE_OF = {path: page for page, path in OUTSIDE.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
SCHEME = re.compile(r"^([a-z]+:)?//", re.IGNORECASE)
STYLE_REQUEST = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


def assemble(folder: Path) -> None:
    """Every page and picture of the site in ``folder``, with links as they are there."""
    shutil.copytree(DOCS, folder, dirs_exist_ok=True)
    for page, path in OUTSIDE.items():
        shutil.copyfile(path, folder / page)
    for file in sorted(folder.rglob("*.md")):
        page = file.relative_to(folder).as_posix()
        file.write_text(linked(file.read_text(encoding="utf-8"), page), encoding="utf-8")


def linked(text: str, page: str) -> str:
    """The text of ``page``, with each link that leads out of docs/ led to its page, or made a name."""
    folder = OUTSIDE.get(page, DOCS / page).parent

    def link(match: re.Match[str]) -> str:
        picture, said, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = (folder / target).resolve()
        if (found := _on_site(path)) is not None:
            return f"{picture}[{said}]({os.path.relpath(found, Path(page).parent)}{anchor})"
        name = path.relative_to(ROOT).as_posix()
        return said if name in said.replace("`", "") else f"{said} (`{name}`)"

    return LINK.sub(link, text)


def _on_site(path: Path) -> str | None:
    """Where a file of the checkout is on the site; a folder's is its README. None: nowhere."""
    if path.is_dir():
        path /= "README.md"
    if path in PAGE_OF:
        return PAGE_OF[path]
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) and path.exists() else None


class _Requests(HTMLParser):
    """What a browser that opens a page asks for, beside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.found += [given[name] for name in ("src", "data", "poster") if name in given]
        if tag == "link" and given.get("rel") not in ("canonical", "author", "license"):
            self.found.append(given.get("href", ""))


def strange_requests(site: Path) -> Iterator[str]:
    """Each request of a page or a style to another host, as "FILE asks ADDRESS"."""
    for file in sorted(site.rglob("*")):
        if file.suffix == ".html":
            parser = _Requests()
            parser.feed(file.read_text(encoding="utf-8"))
            asked = [address for address in parser.found if SCHEME.match(address)]
        elif file.suffix == ".css":
            asked = STYLE_REQUEST.findall(file.read_text(encoding="utf-8"))
        else:
            continue
        yield from (f"{file.relative_to(site)} asks {address}" for address in asked)


def build(site: Path) -> None:
    """Raises SystemExit: Sphinx warned, or a page asks another host."""
    with tempfile.TemporaryDirectory(prefix="wardround-docs-") as folder:
        assemble(Path(folder))
        command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--keep-going", "--quiet"]
        done = subprocess.run([*command, "--jobs", "2", folder, str(site)], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    if faults := list(strange_requests(site)):
        raise SystemExit("\n".join(faults))
    print(f"{sum(1 for _ in site.rglob('*.html'))} pages in {site}: open {site / 'index.html'}")


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve())
