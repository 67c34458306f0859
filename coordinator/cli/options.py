"""The options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from wardround.cli import state_option
from wardround.errors import BadData

State = Annotated[Path, state_option("coordinator", "The coordinator's state directory.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file; never one inside --state.")]
Database = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="An empty PostgreSQL database: postgresql://USER@HOST/NAME, no password in it. Else a file in --state.",
    ),
]
DatabasePassword = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file whose first line is the database's password. It is copied into --state."),
]

Blobs = Annotated[
    str,
    typer.Option(
        "--blobs", metavar="FOLDER|URL", help="Models and updates: a folder that a standby shares, or an object store."
    ),
]


def password_from(file: Path | None) -> str | None:
    """The first line of a file; None of no file. Raises BadData: it cannot be read, or is empty."""
    if file is None:
        return None
    try:
        line = file.read_text(encoding="utf-8").partition("\n")[0].strip("\r")
    except (OSError, UnicodeDecodeError):
        line = ""
    if not line:
        raise BadData(f"{file} has no password in its first line, or cannot be read")
    return line
