"""``data summaries`` and ``data summary``: the coordinator's summary requests, and the figures that would leave."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State
from site_agent.cli.service import ask_or_do, joined
from wardround.cli import Json, print_json, say, say_next

if TYPE_CHECKING:
    from pydantic import JsonValue
    from rich.table import Table

    from site_agent.gateway.requests import ShownSummary, TellingColumn
    from site_agent.state.directory import SiteState

WIDTH = 160  # where nobody looks at a terminal


def summaries(state: State, as_json: Json = False) -> None:
    """List the coordinator's summary requests: what an operator would like to know of this hospital's columns."""
    from site_agent.gateway.requests import ListSummaries

    here, _ = joined(state)
    offered = ask_or_do(here, ListSummaries(), lambda handler: handler.summaries.offered())
    if as_json:
        print_json(offered.document())
        return
    if not offered.requests:
        print("the coordinator has no summary request for this site")
        return
    from rich.table import Table

    table = Table("request", "columns", "told", "title", box=None, pad_edge=False)
    for row in offered.requests:
        table.add_row(row.name, str(row.columns), row.told[:10] or "never", row.title)
    _print(table)
    say_next(f"next: `site-agent data summary NAME --request {offered.requests[0].name}` shows what would leave")


def asked_for(here: "SiteState", name: str) -> dict[str, "JsonValue"]:
    """What the coordinator's summary request ``name`` asks, plain JSON.

    Raises:
        UsageProblem: the coordinator has none of that name for this site.
    """
    from site_agent.gateway.requests import ListSummaries, no_summary_request

    offered = ask_or_do(here, ListSummaries(), lambda handler: handler.summaries.offered()).requests
    asked = {row.name: row.request for row in offered}
    if name not in asked:
        raise no_summary_request(name, asked)
    return asked[name]


def summary(
    name: Annotated[str, typer.Argument(help="What `data add` called it.")],
    state: State,
    request: Annotated[str, typer.Option("--request", metavar="ID", help="The coordinator's summary request.")],
    send: Annotated[bool, typer.Option("--send", help="Let exactly this leave. Without it, nothing leaves.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also of columns of which figures have left before; with --send.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Show the figures that would leave for a summary request; with --send, let exactly these leave."""
    from site_agent.gateway.requests import GetSummary, TellSummary
    from site_agent.state.person import who

    here, _ = joined(state)
    shown = ask_or_do(here, GetSummary(request, name), lambda handler: handler.summaries.show(request, name))
    if as_json and not send:
        print_json({**shown.document(), "sent": False})
        return
    if not as_json:
        _print_summary(shown)
    if not send:
        _say_next(shown)
        return
    if not yes and not as_json and sys.stdin.isatty():
        typer.confirm(f"Let these figures leave for `{request}`?", abort=True, err=True)
    person = who()
    told = ask_or_do(
        here, TellSummary(request, name, shown.digest, again, person),
        lambda handler: handler.summaries.tell(request, name, shown.digest, person, again=again),
    )  # fmt: skip
    if as_json:
        print_json({**shown.document(), "sent": True, "numbers": told.numbers})
        return
    say_next(f"{told.numbers} numbers left, and nothing else; the ledger has each: `site-agent audit show`")


def _print_summary(shown: "ShownSummary") -> None:
    from rich.table import Table

    print(f"For `{shown.request}`{f' ({shown.title})' if shown.title else ''}, of data `{shown.data}`:")
    print(f"{_counted(shown.rows, shown.min_count)} rows")
    table = Table(
        "column", "kind", "values", "missing", "does not fit", "mean", "sd", "nine in ten", "categories", box=None,
        pad_edge=False,
    )  # fmt: skip
    for column in shown.columns:
        table.add_row(*_row(column, shown.min_count))
    _print(table)
    print(
        f"<{shown.min_count} is told as fewer than {shown.min_count}, perhaps none; other counts are rounded to "
        f"multiples of {shown.min_count}"
    )
    print("The names here do not leave: figures go in the order of the request")
    for note in shown.notes:
        say(f"note: {note}")


def _row(column: "TellingColumn", least: int) -> tuple[str, ...]:
    name = f"{column.column} (here {column.here})" if column.here not in ("", column.column) else column.column
    name += f" until {column.until}" if column.until else ""
    told = column.figures
    if told.absent:
        return (name, column.kind, "no such column", "", "", "", "", "", "")
    counted = [f"{word} {_counted(rows, least)}" for word, rows in zip(column.words, told.categories, strict=False)]
    if column.kind == "categorical":
        counted.append(f"other {_counted(told.other, least)}")
    return (
        name, column.kind, *(_counted(rows, least) for rows in (told.values, told.missing, told.unfit)),
        told.mean, told.std, f"{told.low} to {told.high}" if told.low else "", ", ".join(counted),
    )  # fmt: skip


def _counted(count: int, least: int) -> str:
    return str(count) if count else f"<{least}"


def _say_next(shown: "ShownSummary") -> None:
    send = f"site-agent data summary {shown.data} --request {shown.request} --send"
    if shown.denied:
        say_next(f"the policy does not let this leave: {shown.denied}")
    elif shown.before:
        say(f"figures of these columns have left already: {', '.join(shown.before)}")
        say_next(f"next: `{send} --again` lets exactly this leave once more")
    else:
        say_next(f"next: `{send}` lets exactly this leave")


def _print(table: "Table") -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, emoji=False).print(table, markup=False)
