"""docs/commands.md is what the three programs declare."""

import re
from typing import Annotated, Literal

import pytest
import typer

from tools import commands_page, man_pages
from wardround.cli import application, group

OPTION = re.compile(r"^\| `(--[a-z-]+)`", re.MULTILINE)


def test_the_page_is_what_the_programs_declare() -> None:
    page = commands_page.page()
    assert commands_page.PAGE.read_text(encoding="utf-8") == page, "run `python -m tools.commands_page`"


def small() -> typer.Typer:
    app = application("program", "It does two things.")
    inner = group("More.")
    app.add_typer(inner, name="more")

    @app.command("do-it")
    def do(
        name: str,
        kind: Annotated[Literal["a", "b"], typer.Option(help="Which | one.")] = "a",
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing.")] = False,
        colors: bool = True,
        format_: Annotated[int | None, typer.Option(envvar="FORM", help="How.")] = None,
        hidden: Annotated[bool, typer.Option("--hidden", hidden=True)] = False,
    ) -> None:
        """Do it."""

    @inner.command()
    def again(places: Annotated[list[str], typer.Argument(metavar="PLACE...")]) -> None:
        """Once more."""

    return app


def test_a_command_is_shown_with_its_arguments_and_options() -> None:
    shown = "".join(commands_page._commands(small(), "program"))
    assert shown == (
        "\n### program do-it\n\n`program do-it NAME`\n\nDo it.\n\n| option | default | meaning |\n|---|---|---|\n"
        "| `--kind` `a\\|b` | `a` | Which \\| one. |\n"
        "| `--quiet`, `-q` | – | Say nothing. |\n| `--colors`, `--no-colors` | `True` |  |\n"
        "| `--format` `INTEGER` | – | How. (`FORM`) |\n"
        "\n### program more again\n\n`program more again PLACE...`\n\nOnce more.\n"
    )


@pytest.mark.parametrize("program", man_pages.PAGES)
def test_the_man_pages_are_what_the_programs_declare(program: str) -> None:
    page = man_pages.page(program)
    assert man_pages.PAGES[program].read_text(encoding="utf-8") == page, "run `python -m tools.commands_page`"
    assert f"{program} doctor".replace("-", "\\-") in page


def test_nothing_in_a_sentence_is_a_request_of_roff() -> None:
    assert man_pages._roff(".SH it's a `--flag` \\ here") == "\\&.SH it\\(aqs a \\-\\-flag \\e here"
