"""What does not fit in a hospital's table, all of it at once, and what a person should know of the rest. No torch.

Nothing here holds a cell: a finding names columns and lines, and says how many.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wardround.errors import BadData

SHOWN_LINES = 3
SHOWN_FINDINGS = 3
SHOWN_NAMES = 6
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing of one column, in all the rows where it is so.

    Attributes:
        column: as the study calls it; "" of a thing that concerns the whole file.
        what: the sentence without its place.
        lines: where; () where it is no single row's.
        count: how many rows; None where it is no number of rows.
        hint: what can be done.
        here: what this site calls the column, where that differs.
    """

    path: Path
    column: str
    what: str
    lines: tuple[int, ...] = ()
    hint: str = ""
    count: int | None = None
    here: str = ""

    @property
    def rows(self) -> int | None:
        """How many rows it is so in."""
        return len(self.lines) if self.lines else self.count

    @property
    def sentence(self) -> str:
        """Place and fault, without the file."""
        called = f"column `{self.column}`" + (f" (here `{self.here}`)" if self.here else "") if self.column else ""
        place = ", ".join(part for part in (where(self.lines) if self.lines else "", called) if part)
        return f"{place}: {self.what}" if place else self.what


class DoesNotFit(BadData):
    """A table that a study cannot take; ``findings`` is all of why."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        first = findings[0]
        said = "; ".join(finding.sentence for finding in findings[:SHOWN_FINDINGS])
        if len(findings) > SHOWN_FINDINGS:
            said += f"; and {len(findings) - SHOWN_FINDINGS} more that do not fit"
        super().__init__(f"{first.path}: {said}", hint=first.hint)
        self.findings = tuple(findings)


def refuse(findings: Iterable[Finding]) -> None:
    """Raises DoesNotFit: there is one."""
    if found := list(findings):
        raise DoesNotFit(found)


def collected(read: Callable[[], T], found: list[Finding]) -> T | None:
    """What ``read`` gives; where it does not fit, None, and why is added to ``found``."""
    try:
        return read()
    except DoesNotFit as error:
        found += error.findings
        return None


def where(lines: Sequence[int]) -> str:
    """ "line 7", "lines 7 and 9", "lines 7, 9, 12 and 40 more"."""
    if len(lines) == 1:
        return f"line {lines[0]}"
    shown = [str(line) for line in lines[:SHOWN_LINES]]
    if len(lines) > SHOWN_LINES:
        return f"lines {', '.join(shown)} and {len(lines) - SHOWN_LINES} more"
    return f"lines {', '.join(shown[:-1])} and {shown[-1]}"


def listed(names: Sequence[str]) -> str:
    """ "`a`", "`a` and `b`", "`a`, `b`, `c`, `d`, `e`, `f` and 40 more"."""
    shown = [f"`{name}`" for name in names[:SHOWN_NAMES]]
    if len(names) > SHOWN_NAMES:
        return f"{', '.join(shown)} and {len(names) - SHOWN_NAMES} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def rows_of(count: int) -> str:
    """ "1 row", "2 rows"."""
    return "1 row" if count == 1 else f"{count} rows"
