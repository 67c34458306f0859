"""The options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from wardround.local.directory import default_state, described_default

State = Annotated[
    Path,
    typer.Option(
        "--state",
        envvar="WARDROUND_STATE",
        metavar="DIR",
        default_factory=lambda: default_state("site-agent"),
        show_default=described_default("site-agent"),
        help="The site's state directory.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
StudyId = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name.")]
