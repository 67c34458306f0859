"""``coordinator summary``: ask sites about their tables' columns, see what they tell, and draft a study from it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import State
from coordinator.cli.printing import print_table
from wardround.cli import Json, group, print_json, say
from wardround.errors import UsageProblem

if TYPE_CHECKING:
    from coordinator.summary_answers import PooledColumn, SiteTold, SummaryList, SummaryShown
    from fl_algorithms.settings.drafting import DraftColumn
    from wardround.records.summaries.figures import ColumnFigures
    from wardround.records.summaries.request import SummaryColumn

WIDTH = 160  # of a table where nobody looks at a terminal
HEADS = ("column", "site", "values", "missing", "does not fit", "mean", "sd", "nine in ten", "categories")

app = group("Ask sites about the columns of their tables.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The summary request's name.")]


@app.command()
def create(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The request: which columns, which sites.")],
    state: State,
) -> None:
    """Offer a summary request to its sites. A person at each lets its figures leave, or nobody does."""
    from coordinator.requests import CreateSummary
    from coordinator.summary_answers import SummaryCreated
    from wardround.records.summaries.request import load

    refuse_no_coordinator(state)
    request = load(file)
    answer = ask(state, CreateSummary(document=request.document()), SummaryCreated)
    print(f"{answer.name} {answer.digest}", flush=True)
    if not answer.new:
        say(f"Summary request `{answer.name}` is known with exactly this content, and is open")
    if answer.not_enrolled:
        say(f"Not enrolled yet: {', '.join(answer.not_enrolled)}")
    say(f"next: a person at each site runs `site-agent data summary NAME --request {answer.name} --send`")
    say(f"then: `coordinator summary show {answer.name}`")


@app.command("list")
def list_(state: State, as_json: Json = False) -> None:
    """List the summary requests."""
    from coordinator.requests import ListSummaries
    from coordinator.summary_answers import SummaryList

    answer = ask(state, ListSummaries(), SummaryList)
    print_json(answer.document()) if as_json else _print_list(answer)


@app.command()
def show(name: Name, state: State, as_json: Json = False) -> None:
    """Show what each site told for a summary request, and all together."""
    from coordinator.requests import ShowSummary
    from coordinator.summary_answers import SummaryShown

    answer = ask(state, ShowSummary(name=name), SummaryShown)
    print_json(answer.document()) if as_json else _print_summary(answer)


@app.command()
def close(name: Name, state: State) -> None:
    """Offer a summary request no longer. What the sites told stays."""
    from coordinator.requests import CloseSummary
    from coordinator.summary_answers import SummaryList

    ask(state, CloseSummary(name=name), SummaryList)
    say(f"Summary request `{name}` is closed")


@app.command()
def draft(
    name: Name,
    state: State,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="What is to be predicted.")] = "",
) -> None:
    """Draft [task] of a study file from what the sites told. Units and plausible values are left for a person."""
    from coordinator.requests import ShowSummary
    from coordinator.summary_answers import SummaryShown
    from fl_algorithms.settings.drafting import task_text
    from wardround.records.summaries.request import SummaryRequest

    answer = ask(state, ShowSummary(name=name), SummaryShown)
    request = SummaryRequest.from_document(answer.request)
    label = label or request.label
    if label and label not in (column.name for column in request.columns):
        raise UsageProblem(f"--label {label[:80]}: the request has no such column")
    told = sum(site is not None for site in answer.sites.values())
    if not told:
        raise UsageProblem(f"no site has told anything for `{name}` yet", hint=f"`coordinator summary show {name}`")
    columns = [_drafted(asked, column) for asked, column in zip(request.columns, answer.pooled, strict=True)]
    source = f"the summary `{name}` of {told} of {len(answer.sites)} sites"
    print(task_text(columns, source, label=label, tokens=request.missing), end="")
    say("next: edit it, add [study], [model], [algorithm] and [training], then `coordinator study check FILE`")


def _drafted(asked: "SummaryColumn", told: "PooledColumn") -> "DraftColumn":
    from fl_algorithms.settings.drafting import DraftColumn, plausible

    if not told.sites:
        return DraftColumn(asked.name, "", note="no site has it")
    low, high = asked.low, asked.high
    if low is None and high is None and told.low and float(told.low) < float(told.high):
        low, high = plausible(float(told.low), float(told.high))
    notes = ["unit?"] if asked.kind == "numeric" else []
    notes += [f"absent at {told.absent} sites"] if told.absent else []
    rows = max(1, told.values + told.missing + told.unfit)
    notes += [f"about {100 * told.missing / rows:.0f} % missing"] if told.missing else []
    notes += [f"about {100 * told.unfit / rows:.0f} % do not fit: another unit or code?"] if told.unfit else []
    notes += [f"mean {told.mean}, sd {told.std}"] if told.mean else []
    other = "other" if told.other and "other" not in asked.categories else ""
    notes += [f"`other` is for about {100 * told.other / rows:.0f} % of the rows"] if other else []
    return DraftColumn(
        asked.name, asked.kind, (*asked.categories, other) if other else asked.categories, other, low, high,
        until=asked.until, unit=asked.unit or "", has_missing=bool(told.missing), note="; ".join(notes),
    )  # fmt: skip


def _print_list(answer: "SummaryList") -> None:
    rows = [
        (row.name, "open" if row.open else "closed", str(row.columns), f"{row.told} of {row.sites}", row.title)
        for row in answer.requests
    ]
    print_table(("request", "state", "columns", "sites told", "title"), rows)


def _print_summary(answer: "SummaryShown") -> None:
    told = {site: said for site, said in answer.sites.items() if said is not None}
    state = "open" if answer.open else "closed"
    print(f"{answer.name} ({state}): {len(told)} of {len(answer.sites)} sites have told their figures")
    rows = []
    for place, pooled in enumerate(answer.pooled):
        rows += [(pooled.column if not number else "", *_site(site, said, place, pooled.words))
                 for number, (site, said) in enumerate(told.items())]  # fmt: skip
        if len(told) > 1:
            rows.append(("", *_together(pooled)))
    if rows:
        print_table(HEADS, rows, WIDTH)
    for site, said in told.items():
        print(f"{site}: {_counted(said.figures.rows, said.figures.min_count)} rows, told {said.said}; counts are "
              f"multiples of {said.figures.min_count}")  # fmt: skip
    silent = [site for site, said in answer.sites.items() if said is None]
    if silent:
        print(f"not told: {', '.join(silent)}")


def _site(site: str, said: "SiteTold", place: int, words: tuple[str, ...]) -> tuple[str, ...]:
    column, least = said.figures.columns[place], said.figures.min_count
    if column.absent:
        return (site, "no such column", "", "", "", "", "", "")
    counts = (column.values, column.missing, column.unfit)
    return (
        site, *(_counted(count, least) for count in counts), column.mean, column.std, _between(column),
        ", ".join(_categories(column, words, lambda count: _counted(count, least))),
    )  # fmt: skip


def _together(column: "PooledColumn") -> tuple[str, ...]:
    return (
        "all", *map(str, (column.values, column.missing, column.unfit)), column.mean, column.std, _between(column),
        ", ".join(_categories(column, column.words, str)),
    )  # fmt: skip


def _between(column: "ColumnFigures | PooledColumn") -> str:
    return f"{column.low} to {column.high}" if column.low else ""


def _categories(
    column: "ColumnFigures | PooledColumn", words: tuple[str, ...], counted: Callable[[int], str]
) -> list[str]:
    named = [f"{word} {counted(rows)}" for word, rows in zip(words, column.categories, strict=True)]
    return [*named, f"other {counted(column.other)}"] if named and column.other else named


def _counted(count: int, least: int) -> str:
    return str(count) if count else f"<{least}"
