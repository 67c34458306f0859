"""What does not fit in a hospital's data, as its own terminal shows it: columns, lines and counts, and no value."""

import sys
from collections.abc import Sequence

from wardround.records.trainer import Finding

WIDTH = 160  # where nobody looks at a terminal


def show(findings: Sequence[Finding]) -> None:
    """A row for each finding; what is to be done about several alike stands once, below."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("file", "column", "what does not fit", "rows", "lines", box=None, pad_edge=False)
    for finding in findings:
        shown.add_row(finding.file, column(finding), finding.what, rows(finding), lines(finding))
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, emoji=False)
    console.print(shown, markup=False)
    for hint, columns in hints(findings).items():
        print(f"{', '.join(columns)}: {hint}" if columns else hint)


def hints(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Each hint once, with the columns that it is for."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        if finding.hint:
            columns = found.setdefault(finding.hint, [])
            if finding.column and finding.column not in columns:
                columns.append(finding.column)
    return found


def column(finding: Finding) -> str:
    """The study's name, and this site's where it differs."""
    return f"{finding.column} (here {finding.here})" if finding.here else finding.column


def rows(finding: Finding) -> str:
    return "" if finding.rows is None else str(finding.rows)


def lines(finding: Finding) -> str:
    """ "2, 7, 9, ..."."""
    shown = ", ".join(map(str, finding.lines))
    return f"{shown}, ..." if finding.rows is not None and finding.rows > len(finding.lines) > 0 else shown
