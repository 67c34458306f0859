"""`fl-lab partition`: one data set becomes many sites. Importing this needs no torch."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from wardround.cli import say
from wardround.errors import UsageProblem
from wardround.local import outputs

MOST_SITES = 256


def partition(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV table with a header, or an .npz of arrays.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to make a folder for each site.")],
    by: Annotated[
        Literal["iid", "dirichlet", "labels", "quantity", "column"], typer.Option(help="The rule that divides.")
    ] = "dirichlet",
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES, help="How many; of a column, its values say.")] = 4,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="What is to be predicted; dirichlet and labels.")] = "",
    column: Annotated[str, typer.Option(metavar="COLUMN", help="Whose values are the sites, with --by column.")] = "",
    patient: Annotated[str, typer.Option(metavar="COLUMN", help="Rows of one patient stay together.")] = "",
    alpha: Annotated[float, typer.Option(min=0.001, max=1e6, help="Of dirichlet and quantity; small: unlike.")] = 0.5,
    classes: Annotated[int, typer.Option(min=1, max=1000, help="Of labels: classes a site has, about.")] = 2,
    test_fraction: Annotated[float, typer.Option(min=0, max=0.9, help="Of each site's rows, for testing.")] = 0.2,
    at_least: Annotated[int, typer.Option(min=1, help="Rows, or patients, that each site must have.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Another one divides otherwise.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Make them in a folder that is not empty.")] = False,
) -> None:
    """Divide one data set into sites: alike, by class (Dirichlet or shards), by size, or by a column."""
    import numpy as np

    from fl_algorithms.lab import partition_files, partitioning

    if by in ("dirichlet", "labels") and not label:
        raise UsageProblem(f"--by {by} divides by class", hint="`--label COLUMN` says which column that is")
    if (by == "column") is not bool(column):
        raise UsageProblem("--by column and --column NAME go together", hint="`fl-lab partition --help`")
    outputs.folder(out, force=force, keep=[source])
    rows = partition_files.read(source)
    labels = rows.column(label) if label else [""] * len(rows)
    units = partitioning.Units.of(labels, rows.column(patient) if patient else None)
    if by == "column":
        names, place = partition_files.by_column(rows, column)
        if patient:
            place = place[np.unique(units.of_row, return_index=True)[1]][units.of_row]  # of a patient's first row
    else:
        names = [f"site-{number:0{len(str(sites))}}" for number in range(1, sites + 1)]
        place = partitioning.divided(
            units, sites, by, seed=seed, alpha=alpha, classes=classes, at_least=at_least
        )  # fmt: skip
    made = partition_files.write(rows, units, names, place, out, test_fraction=test_fraction, seed=seed)
    for number, (site, train, test) in enumerate(made):
        say(f"{site}: {train} rows to train, {test} to test{_mix(labels, place == number) if label else ''}")
    say(f"written to {out}")
    shown = ", ".join(f'"{site}"' for site in names)
    say(f"next: `sites = [{shown}]` in [study], then `fl-lab run STUDY.toml --data {shlex.quote(str(out))}`")


def _mix(labels: list[str], mine: "object") -> str:
    from collections import Counter

    import numpy as np

    counts = Counter(labels[place] for place in np.flatnonzero(np.asarray(mine)).tolist())
    known = sorted(set(labels))
    if len(known) > 12:
        return f"; {len(counts)} of {len(known)} classes"
    return "; " + ", ".join(f"{name} {counts[name]}" for name in known)
