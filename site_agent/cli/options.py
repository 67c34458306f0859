"""The options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

State = Annotated[Path, typer.Option(envvar="WARDROUND_STATE", help="The site's state directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
StudyId = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name.")]
