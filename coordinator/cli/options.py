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
        default_factory=lambda: default_state("coordinator"),
        show_default=described_default("coordinator"),
        help="The coordinator's state directory.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file; never one inside --state.")]
