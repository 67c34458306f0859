"""`fl-lab export`. Importing this needs no torch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from wardround.cli import say
from wardround.local import outputs

AFTER = {
    "mlflow": "`mlflow ui --backend-store-uri sqlite:///{out}/mlflow.db` shows it",
    "tensorboard": "`tensorboard --logdir {out}` shows it",
    "latex": r"`\input` the files; they need the package booktabs",
    "csv": "any program of tables reads it",
}


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="What `fl-lab run --out` or `compare --out` filled.")],
    to: Annotated[Literal["csv", "latex", "mlflow", "tensorboard"], typer.Option("--to", help="For which tool.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where; without it RUN/export-TOOL.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write curves, scores and tables for other tools, into a folder; nothing is sent anywhere."""
    from fl_algorithms.lab.export import export as write

    place = outputs.folder(out or folder / f"export-{to}", force=force)
    made = write(folder, to, place)
    for path in made[:5]:
        say(f"written: {path}")
    if len(made) > 5:
        say(f"and {len(made) - 5} more")
    say(f"next: {AFTER[to].format(out=place)}")
