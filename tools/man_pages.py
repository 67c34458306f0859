"""The man pages of `site-agent` and `coordinator`, from what they declare; `python -m tools.commands_page` writes them.

A page has the commands with their first sentences, and what holds for all of them; `--help` and docs/commands.md have
the options.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import typer

from tools import commands_page
from wardround.errors import BY_EXIT_CODE
from wardround.local.directory import described_default

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "site-agent": ROOT / "site_agent" / "cli" / "site-agent.1",
    "coordinator": ROOT / "coordinator" / "cli" / "coordinator.1",
}
FIRST = {
    "site-agent": "Begin with site-agent setup. If something does not work: site-agent doctor.",
    "coordinator": "Begin with coordinator init. If something does not work: coordinator doctor.",
}


def page(program: str) -> str:
    """The man page of a program, as roff."""
    return "\n".join(_lines(program, commands_page.PROGRAMS[program])) + "\n"


def _lines(program: str, app: typer.Typer) -> Iterator[str]:
    yield f'.TH {program.upper()} 1 "" "Wardround" "Wardround"'
    yield from (".SH NAME", f"{_roff(program)} \\- {_roff(str(app.info.help))}")
    yield from (".SH SYNOPSIS", f".B {_roff(program)}", ".I COMMAND", "[OPTIONS] [ARGUMENTS]")
    yield from (".SH DESCRIPTION", _roff(FIRST[program]))
    yield "Results are on standard output, narration and errors on standard error."
    yield "Every command has \\-\\-help, which shows its options."
    yield ".SH COMMANDS"
    for path, sentence in commands_page.summaries(app, program):
        yield from (".TP", f".B {_roff(path)}", _roff(sentence))
    yield from (".SH OPTIONS", ".TP", ".B \\-\\-state DIR", "The state directory. Without it:")
    yield _roff(f"{described_default(program)}.")
    yield from (".TP", ".B \\-\\-version", "Show the version.")
    yield from (".SH ENVIRONMENT", ".TP", ".B WARDROUND_STATE", "As \\-\\-state.")
    yield from (".SH EXIT STATUS", ".TP", ".B 0", "Success.")
    for code, kind in sorted(BY_EXIT_CODE.items()):
        meaning = (kind.__doc__ or "").partition("\n")[0]
        if kind.__name__ != "WardroundError":
            yield from (".TP", f".B {code}", _roff(meaning))
    yield from (".TP", ".B 70", "A fault in the program.")


def _roff(text: str) -> str:
    """Plain text on one line as roff has it: no character of it is a request or an escape."""
    safe = re.sub(r"\s+", " ", text).replace("\\", "\\e").replace("-", "\\-").replace("`", "").replace("'", "\\(aq")
    return f"\\&{safe}" if safe.startswith((".", "\\(aq")) else safe


def write() -> None:
    """Write them where the wheel takes them from."""
    for program, path in PAGES.items():
        path.write_text(page(program), encoding="utf-8")
