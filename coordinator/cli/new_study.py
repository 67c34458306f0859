"""``coordinator study new``: a study file to begin with, from the names of a table's columns."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wardround.cli import say
from wardround.errors import BadData, UsageProblem

if TYPE_CHECKING:
    from fl_algorithms.settings.drafting import DraftColumn

MOST_BYTES = 1024 * 1024  # of a first line
SEPARATORS = ",;\t"
YES_NO = ("0", "1")


def new(
    table: Annotated[
        Path, typer.Argument(metavar="HEADER.csv", help="A file whose first line names the columns. Only that is read.")
    ],
    name: Annotated[str, typer.Option(metavar="ID", help="The study's name: a-z, 0-9 and -.")],
    label: Annotated[str, typer.Option(metavar="COLUMN", help="What is to be predicted.")] = "",
    classes: Annotated[
        list[str] | None, typer.Option("--class", metavar="WORD", help="How the label is written; again for each.")
    ] = None,
    patient: Annotated[str, typer.Option(metavar="COLUMN", help="Who each row is.")] = "",
    site: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="A site that takes part; again for each.")
    ] = None,
) -> None:
    """Print a study file with a comment on each line, for you to edit. No row of the table is read; needs no torch."""
    from fl_algorithms.settings.new_study import study_text

    columns = header_of(table)
    for option, column in (("--label", label), ("--patient", patient)):
        if column and column not in columns:
            raise UsageProblem(
                f"{option} {column[:80]}: the header has no such column", hint=f"it has: {', '.join(columns)[:300]}"
            )
    if classes and len(classes) < 2:
        raise UsageProblem("a label has at least two classes", hint="--class no --class yes")
    drafted = [_drafted(column, label, classes) for column in columns]
    source = f"the header of {table.name}"
    print(study_text(drafted, source, name=name, sites=sorted(site or ()), label=label, patient=patient), end="")
    say("every column is drafted as a number: edit those that are none (docs/tables.md)")
    say("from the rows of a table: `fl-lab schema TABLE.csv`; from what the sites hold: `coordinator summary draft`")
    say("next: edit it, then `coordinator study check FILE`")


def header_of(path: Path) -> list[str]:
    """The names in the first line of a table, which is all that is read.

    Raises:
        BadData: it cannot be read, is no text, or does not name each column once.
    """
    from fl_algorithms.settings.tabular import check_column

    try:
        with path.open("rb") as file:
            line = file.readline(MOST_BYTES)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    try:
        text = line.decode("utf-8-sig")
        separator = max(SEPARATORS, key=text.count)
        names = [cell.strip() for cell in next(csv.reader([text], delimiter=separator, strict=True), [])]
        for name in names:
            check_column(name, "column")
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        why = (
            str(error) if isinstance(error, ValueError) and not isinstance(error, UnicodeDecodeError) else "no CSV text"
        )
        raise BadData(f"{path}: its first line does not name the columns: {why}") from None
    if len(names) < 2:
        raise BadData(f"{path}: its first line names {len(names)} columns", hint="names with commas between them")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadData(f"{path}: the column {twice[0][:80]!r} stands twice in the first line")
    return names


def _drafted(column: str, label: str, classes: list[str] | None) -> "DraftColumn":
    from fl_algorithms.settings.drafting import DraftColumn

    if column != label:
        return DraftColumn(column)
    return DraftColumn(column, "categorical", tuple(classes or YES_NO))
