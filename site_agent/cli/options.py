"""The options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from wardround.cli import state_option

State = Annotated[Path, state_option("site-agent", "The site's state directory.")]
StudyId = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name.")]
