"""`fl-lab schema`: a first [task] of a study, from a table's columns. Importing this needs no torch."""

from pathlib import Path
from typing import Annotated

import typer

from wardround.cli import say
from wardround.errors import UsageProblem


def schema(
    table: Annotated[Path, typer.Argument(metavar="TABLE.csv", help="A table whose first line names the columns.")],
    label: Annotated[str, typer.Option(metavar="COLUMN", help="What is to be predicted.")] = "",
    patient: Annotated[str, typer.Option(metavar="COLUMN", help="Who each row is.")] = "",
    least: Annotated[
        int, typer.Option(min=5, max=1000, help="Rows that a category, or an end of a range, needs to be named.")
    ] = 10,
    request: Annotated[
        str, typer.Option(metavar="NAME", help="Draft a summary request of that name instead, for a coordinator.")
    ] = "",
) -> None:
    """Draft what a study says of a table: kinds, categories, ranges, missing values. Units are left for a person."""
    from fl_algorithms.lab.schema import drafted
    from fl_algorithms.settings.drafting import request_text, task_text

    if request and label:
        raise UsageProblem("--request goes without --label", hint="write `label` into the request by hand")
    columns, tokens = drafted(table, least)
    for option, name in (("--label", label), ("--patient", patient)):
        if name and name not in (column.name for column in columns):
            named = ", ".join(column.name for column in columns)
            raise UsageProblem(f"{option} {name[:80]}: the table has no such column", hint=f"it has: {named}")
    if request:
        print(request_text(columns, table.name, request, patient=patient), end="")
        say("next: fill in `sites`, then `coordinator summary create FILE.toml`")
        return
    print(task_text(columns, table.name, label=label, patient=patient, tokens=tokens), end="")
    say("next: edit it, add [study], [model], [algorithm] and [training], then `fl-lab run`")
