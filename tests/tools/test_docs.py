"""What the pages name exists: links, headings, paths, commands with their options, messages, and the terms' page."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.main import get_command

from coordinator.cli.main import app as coordinator
from fl_algorithms.lab.cli import app as lab
from site_agent.cli.main import app as site_agent

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("coordinator", "site_agent", "fl_algorithms", "proto", "tools", "tests", "docs", "deploy", "examples")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(rf"(?<![\w/.-])((?:{'|'.join(ROOMS)})/[\w./-]*\w\.(?:py|md|toml|proto|service|yaml))(?:::(\w+))?")
PROGRAMS: dict[str, Typer] = {"site-agent": site_agent, "coordinator": coordinator, "fl-lab": lab}
COMMAND = re.compile(rf"(?:^|\bsudo -u \S+ |\bexec (?:-T )?\w\S* )((?:{'|'.join(PROGRAMS)}) [a-z-]+(?: .*)?)$")
TOP = 25
"""Lines within which a page links the glossary."""


def pages() -> list[Path]:
    """Every Markdown file that is ours: none below a folder that begins with a dot."""
    found = [path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")]]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.parts[:-1]))


def with_terms() -> list[Path]:
    """The pages for people: docs, the two READMEs that start a reader, and the page for developers."""
    docs = [path for path in pages() if path.parent in (Path("docs"), Path("docs/decisions")) and path.name[0] != "0"]
    return [path for path in docs if path.name != "glossary.md"] + [
        Path("README.md"),
        Path("CONTRIBUTING.md"),
        Path("deploy/README.md"),
    ]


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, no punctuation, a hyphen for each space."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    made: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        same = sum(anchor == slug or anchor.startswith(f"{slug}-") for anchor in made)
        made.append(f"{slug}-{same}" if slug in made else slug)
    return frozenset(made)


@cache
def messages() -> str:
    """Every text of the programs' code, one a line, with an ellipsis where a value goes."""
    texts = []
    for room in ("coordinator", "site_agent", "fl_algorithms", "proto/wardround"):
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    values = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                    texts.append("".join(values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    texts.append(node.value)
    return "\n".join(texts)


def unknown_messages(text: str) -> list[str]:
    """The quoted messages in the first column of the tables of ``text`` that no program says.

    Values (`...`, `…`, words in capitals, numbers) are left out; each piece between them must be in the code.
    """
    quoted = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (.+?) \| ", text, re.MULTILINE)))
    pieces = [(said, re.split(r"\.\.\.|…|\(|\)|\"|\b[A-Z]{1,4}(?::[A-Z]+)?\b|\b\d+\b", said)) for said in quoted]
    return [said for said, parts in pieces if any(part.strip() not in messages() for part in parts)]


def broken_tables(text: str) -> list[str]:
    """The first lines of the tables of ``text`` that have no head, or a row with more or fewer cells than the head."""
    tables = re.findall(r"(?:^\|.*\n?)+", FENCE.sub("", text), re.MULTILINE)
    broken = []
    for table in tables:
        rows = [re.sub(r"`[^`]*`|\\\|", "", row).strip().count("|") for row in table.splitlines()]
        if len(set(rows)) != 1 or not re.match(r".*\n\|(?:[ :-]+\|)+(?:\n|$)", table):
            broken.append(table.splitlines()[0])
    return broken


def commands(text: str) -> list[str]:
    """The commands of our programs that ``text`` shows, in backticks and in blocks, without comments."""
    lines = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    for block in FENCE.findall(text):
        if block.startswith(("```\n", "```sh\n")):
            lines += block.replace("\\\n", " ").splitlines()
    return [found[1] for line in lines if (found := COMMAND.search(re.split(r" [#>|&] ?|  ", f"{line} ")[0].strip()))]


def unknown_of(command: str) -> list[str]:
    """The words and options of ``command`` that its program does not have."""
    program, *words = command.split()
    node: Any = get_command(PROGRAMS[program])
    while hasattr(node, "commands"):
        word = words.pop(0) if words else ""
        if word not in node.commands:
            return [word] if word and not word.startswith("-") else []
        node = node.commands[word]
    options = {option for parameter in node.params for option in parameter.opts}
    return [option for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", command) if option not in options]


def broken_links(page: Path) -> list[str]:
    """The relative links of ``page`` whose file or heading does not exist."""
    broken = []
    for link in LINK.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.resolve())):
            broken.append(link)
    return broken


def missing_paths(text: str) -> list[str]:
    """The paths of this repository that ``text`` names and that do not exist; ``file.py::test`` needs the test too."""
    return [
        f"{path}::{name}" if name else path
        for path, name in NAMED.findall(text)
        if not (ROOT / path).exists() or (name and f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", [page for page in pages() if page.name != "CHANGELOG.md"], ids=str)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert missing_paths((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_table_of_a_page_is_whole(page: Path) -> None:
    assert broken_tables((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_table_that_an_empty_line_breaks_is_found() -> None:
    assert broken_tables("| a | b |\n|---|---|\n| `x|y` | 1 |\n\n| 2 | 3 |\n") == ["| 2 | 3 |"]
    assert broken_tables("| a | b |\n|---|---|\n| 1 |\n") == ["| a | b |"]


@pytest.mark.parametrize("page", with_terms(), ids=str)
def test_every_page_links_the_glossary_near_its_top(page: Path) -> None:
    top = "\n".join((ROOT / page).read_text(encoding="utf-8").splitlines()[:TOP])
    assert re.search(r"\]\([\w./]*glossary\.md", top)


@pytest.mark.parametrize("room", [room for room in ROOMS if any((ROOT / room).rglob("*.py"))])
def test_every_path_that_a_docstring_names_exists(room: str) -> None:
    missing = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                named = missing_paths(ast.get_docstring(node) or "")
                missing += [f"{path.relative_to(ROOT)}: {name}" for name in named]
    assert missing == []


@pytest.mark.parametrize("page", with_terms(), ids=str)
def test_every_command_that_a_page_shows_exists_with_its_options(page: Path) -> None:
    shown = commands((ROOT / page).read_text(encoding="utf-8"))
    assert {command: unknown for command in shown if (unknown := unknown_of(command))} == {}


def test_a_command_or_an_option_that_no_program_has_is_found() -> None:
    page = "`site-agent policy draw STUDY`\n```\numask 077\nsudo -u a coordinator serve --stat DIR   # --no\n```\n"
    assert commands(page) == ["site-agent policy draw STUDY", "coordinator serve --stat DIR"]
    assert [unknown_of(command) for command in commands(page)] == [["draw"], ["--stat"]]


def test_every_message_that_the_page_of_errors_quotes_is_said_by_a_program() -> None:
    assert unknown_messages((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")) == []


def test_a_message_that_no_program_says_is_found() -> None:
    table = (
        "| what you see | what to do |\n|---|---|\n| `is in use by … (process N)` | a |\n| `nobody says this` | b |\n"
    )
    assert unknown_messages(table) == ["nobody says this"]


def test_a_broken_link_a_missing_heading_and_a_missing_path_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading, `code`\n[a](#one-heading-code) [b](#two) [c](none.md) [d](https://e.org/x.md)\n")
    assert broken_links(page) == ["#two", "none.md"]
    assert missing_paths("`tools/none.py`, tools/__init__.py, `tests/tools/test_docs.py::no_such_test`") == [
        "tools/none.py",
        "tests/tools/test_docs.py::no_such_test",
    ]


def test_two_headings_of_one_name_have_two_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n## Terms\n```\n# no heading\n```\n## Terms\n")
    assert anchors(page) == {"a", "terms", "terms-1"}
