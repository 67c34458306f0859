"""A draft of what a study says of a table: [task] as text for a person to edit, and the columns of a summary request.

Nothing here reads a table: ``fl_algorithms.lab.schema`` drafts from one, a coordinator from what sites told of theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fl_algorithms.settings.tabular import Missing
from wardround.records.schema import toml_value

HEAD = """\
# Drafted from {source}: read it and edit it before a study has it. Only people know which unit a number is in, which
# values are plausible, what a code means, and what is to be predicted.
"""


@dataclass(frozen=True)
class DraftColumn:
    """One column, as a draft has it.

    Attributes:
        kind: of ``settings.tabular.Feature``; "" of a column that the draft leaves out.
        categories: of a categorical one; of a boolean, how no and yes are written, where that is known.
        other: the one of ``categories`` for all other texts; "" for none.
        low, high: between which its numbers plausibly lie.
        has_missing: whether rows lack it.
        note: what a person should know, on the column's line.
    """

    name: str
    kind: str = "numeric"
    categories: tuple[str, ...] = ()
    other: str = ""
    low: float | None = None
    high: float | None = None
    until: str = ""
    unit: str = ""
    has_missing: bool = False
    note: str = ""


def plausible(low: float, high: float) -> tuple[float, float]:
    """Bounds for a study, from two between which nine in ten values lie: wider by as much again on either side."""
    width = high - low
    step = 10.0 ** math.floor(math.log10(width))
    wide = math.floor((low - width) / step) * step, math.ceil((high + width) / step) * step
    places = max(0, -round(math.log10(step)))
    return round(max(wide[0], 0.0) if low >= 0 else wide[0], places), round(wide[1], places)


def task_text(
    columns: Sequence[DraftColumn], source: str, *, label: str = "", patient: str = "", tokens: Sequence[str] = ()
) -> str:
    """[task] of a study file.

    Args:
        source: from what it is drafted, in words.
        label: the one of ``columns`` that is to be predicted; "" leaves that to the person.
        tokens: what is written for a missing value beside what a study takes for one anyway.
    """
    features = [column for column in columns if column.kind and column.name not in (label, patient)]
    lines = [HEAD.format(source=source), "[task]", 'name = "tabular"', *_label(columns, label)]
    lines += [f"patient = {toml_value(patient)}"] if patient else []
    lines += ["features = [", *(f"  {line}" for line in _columns(columns, (label, patient))), "]"]
    if absent := [column.name for column in features if column.has_missing]:
        known = Missing().tokens
        written = [f"tokens = {toml_value([*known, *tokens])}"] if set(tokens) - set(known) else []
        keys = ['policy = "median"', f"indicators = {toml_value(absent)}", *written]
        lines += [f"missing = {{ {', '.join(keys)} }}  # or drop_row; docs/tables.md"]
    return "\n".join(lines) + "\n"


def request_text(columns: Sequence[DraftColumn], source: str, name: str, *, patient: str = "") -> str:
    """A summary request about the same columns."""
    lines = [HEAD.format(source=source), f"name = {toml_value(name)}", 'title = ""', "sites = []  # whom you ask"]
    asked = [replace(one, categories=tuple(text for text in one.categories if text != one.other)) for one in columns]
    return "\n".join([*lines, "columns = [", *(f"  {line}" for line in _columns(asked, (patient,), "")), "]"]) + "\n"


def _label(columns: Sequence[DraftColumn], label: str) -> list[str]:
    found = next((column for column in columns if column.name == label), None)
    if found is None:
        return ['# label = ""     # which column is to be predicted; take it out of the features', "# classes = []"]
    written = f"label = {toml_value(label)}"
    if found.categories:
        return [written, f"classes = {toml_value(list(found.categories))}"]
    if found.kind == "boolean":
        return [written, 'classes = ["0", "1"]  # no and yes, as the column has them']
    return [written, "# classes = []    # or another task, such as regression: docs/tasks.md"]


def _columns(columns: Sequence[DraftColumn], without: Sequence[str], other: str = "other") -> list[str]:
    return [_line(column, other) for column in columns if column.name not in without]


def _line(column: DraftColumn, other: str) -> str:
    """One column on a line; what cannot stand there as it is, as a comment."""
    note = f"  # {column.note}" if column.note else ""
    if not column.kind:
        return f"# {toml_value(column.name)} is left out: {column.note}"
    keys = [f"name = {toml_value(column.name)}"]
    keys += [f"kind = {toml_value(column.kind)}"] if column.kind != "numeric" else []
    words = list(column.categories) if column.kind == "categorical" else []
    keys += [f"categories = {toml_value(words)}"] if words else []
    keys += [f"{other} = {toml_value(column.other)}"] if column.other and other else []
    keys += [f"low = {_number(column.low)}"] if column.low is not None else []
    keys += [f"high = {_number(column.high)}"] if column.high is not None else []
    keys += [f"until = {toml_value(column.until)}"] if column.until else []
    keys += [f"unit = {toml_value(column.unit)}"] if column.unit else []
    is_open = (column.kind == "date" and not column.until) or (
        column.kind == "categorical" and len(column.categories) < 2
    )
    line = f"{{ {', '.join(keys)} }},"
    return f"# {line}{note}" if is_open else f"{line}{note}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
