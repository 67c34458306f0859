"""Writes docs/commands.md and the man pages from the programs and their codes; a test compares them.

python -m tools.commands_page
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from coordinator.cli.main import app as coordinator
from fl_algorithms.lab.cli import app as lab
from site_agent.cli.main import app as site_agent
from wardround import refusals
from wardround.errors import BY_EXIT_CODE, WardroundError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
PROGRAMS = {"site-agent": site_agent, "coordinator": coordinator, "fl-lab": lab}
HEAD = """# Commands

This page is for whoever types commands or writes scripts. It lists every command with its options, the exit codes, and
the codes that cross between a site and the coordinator. `python -m tools.commands_page` writes it from the programs.
Terms: [glossary](glossary.md).

Results are on stdout, narration and errors on stderr. Each command has `--help`. `--json` gives one JSON object for
scripts, where a command has it. `--install-completion` teaches your shell the commands and options.
"""
EXIT_CODES = """
## Exit codes

0 is success. The others are those of `sysexits.h`, by who must act. `site-agent audit verify` and `audit reconcile`
have verdicts of their own: [auditors.md](auditors.md#exit-codes).

| code | meaning |
|---|---|
| 3 | done, but not by all: a study finished without some of its sites in some rounds |
"""
CODES = """
## Codes that cross

When something fails, a code crosses between a site and the coordinator and nothing else: no sentence, no path, no
value. This is what each refusal of the coordinator means at a site. A site ends for good only at those marked so.

| code | means | what to do | ends the agent |
|---|---|---|---|
"""


def page() -> str:
    return "".join((HEAD, *_programs(), *_exit_codes(), *_codes()))


def _programs() -> Iterator[str]:
    for name, app in PROGRAMS.items():
        yield f"\n## {name}\n\n{_text(app.info.help)}\n"
        yield from _commands(app, name)


def summaries(app: typer.Typer, path: str) -> Iterator[tuple[str, str]]:
    """Each command below ``app`` with the first sentence about it."""
    for words, callback in _callbacks(app, path):
        yield words, re.split(r"(?<=[.])\s", _text(callback.__doc__), maxsplit=1)[0]


def _commands(app: typer.Typer, path: str) -> Iterator[str]:
    for words, callback in _callbacks(app, path):
        yield from _command(callback, words)


def _callbacks(app: typer.Typer, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The commands of a program or group, by name. From what is declared: what Typer makes of it differs by version."""
    parts: dict[str, Callable[..., Any] | typer.Typer] = {}
    for command in app.registered_commands:
        assert command.callback is not None
        parts[command.name or command.callback.__name__.replace("_", "-")] = command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        parts[str(group.name)] = group.typer_instance
    for name, part in sorted(parts.items()):
        if isinstance(part, typer.Typer):
            yield from _callbacks(part, f"{path} {name}")
        else:
            yield f"{path} {name}", part


def _command(callback: Callable[..., Any], path: str) -> Iterator[str]:
    arguments, options = [], []
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, *told = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        needed = parameter.default is inspect.Parameter.empty
        unsaid = ArgumentInfo() if needed else OptionInfo()
        info = next((one for one in told if isinstance(one, ArgumentInfo | OptionInfo)), unsaid)
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or name.upper()
            arguments.append(shown if needed or shown.startswith("[") else f"[{shown}]")
        elif not info.hidden:
            options.append(_option(name, kind, info, _found(info) if needed else _default(parameter.default)))
    yield f"\n### {path}\n\n`{' '.join([path, *arguments])}`\n\n{_text(callback.__doc__)}\n"
    if options:
        yield "\n| option | default | meaning |\n|---|---|---|\n"
        yield from options


def _option(name: str, kind: Any, info: OptionInfo, default: str) -> str:
    declared = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    names = [part for one in declared for part in one.split("/") if part.startswith("-")]
    if not names:
        dashed = name.strip("_").replace("_", "-")
        names = [f"--{dashed}", f"--no-{dashed}"] if kind is bool else [f"--{dashed}"]
    value = "" if kind is bool else f" `{info.metavar or _values(kind)}`"
    variable = f" (`{info.envvar}`)" if info.envvar else ""
    shown = ", ".join(f"`{one}`" for one in names)
    return f"| {shown}{_cell(value)} | {default} | {_cell(_text(info.help))}{variable} |\n"


def _found(info: OptionInfo) -> str:
    """Of an option without a default value: how one is found, or that it must be given."""
    return str(info.show_default) if info.default_factory is not None else "*needed*"


def _default(value: Any) -> str:
    return "–" if value is None or value is False or value in ([], "") else f"`{getattr(value, 'value', value)}`"


def _values(kind: Any) -> str:
    """What may stand there, as help shows it."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    inner = [one for one in get_args(kind) if one is not type(None)]
    if inner:
        return _values(inner[0])
    return {Path: "PATH", int: "INTEGER", float: "NUMBER", str: "TEXT"}[kind]


def _exit_codes() -> Iterator[str]:
    yield EXIT_CODES
    for code, kind in sorted(BY_EXIT_CODE.items()):
        said = "a fault in the program" if kind is WardroundError else _text(kind.__doc__).removesuffix(".")
        yield f"| {code} | {said[0].lower()}{said[1:]} |\n"
    yield "| 130 | interrupted from the keyboard |\n| 141 | the reader of the output went away before its end |\n"


def _codes() -> Iterator[str]:
    yield CODES
    for code, meaning in refusals.MEANINGS.items():
        ends = "yes" if code in refusals.FOR_GOOD else "no"
        sentence = meaning.sentence.replace(f"wardround {refusals.__version__}", "this version of wardround")
        yield f"| `{code}` | {_cell(sentence)} | {_cell(meaning.hint) or '–'} | {ends} |\n"


def _text(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    from tools import man_pages

    PAGE.write_text(page(), encoding="utf-8")
    man_pages.write()
