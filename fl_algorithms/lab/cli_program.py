"""`fl-lab program` and `fl-lab model`: a model as files that need nothing of ours. Importing this needs no torch."""

from pathlib import Path
from typing import Annotated

import typer

from fl_algorithms.portable.card import CARD_FILE, MODEL_FILE, STUDY_FILE
from wardround.cli import say
from wardround.errors import BadData

ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
OnnxOption = Annotated[bool, typer.Option("--onnx", help="Write it as ONNX too.")]


def program(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `models export` made.")],
    onnx: OnnxOption = False,
    force: ForceOption = False,
) -> None:
    """Write the network of an exported model as a program that needs torch alone, beside its weights."""
    for name in (CARD_FILE, STUDY_FILE, MODEL_FILE):
        if not (folder / name).is_file():
            raise BadData(f"{folder} has no {name}", hint="the folder that `models export` made")
    from fl_algorithms.lab.models import write_program

    for file in write_program(folder.resolve(), onnx=onnx, force=force):
        print(file)
    say(f"next: {folder / 'MODEL_CARD.md'} says how to load it")


def model(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="What `fl-lab run --out` filled.")],
    site: Annotated[str, typer.Option("--site", metavar="SITE", help="Whose model.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder, new or empty.")],
    checkpoint: Annotated[str, typer.Option(metavar="KIND", help="latest, best_local, best_global ...")] = "latest",
    seed: Annotated[int | None, typer.Option(help="Of which run; without it the first.")] = None,
    onnx: OnnxOption = False,
    force: ForceOption = False,
) -> None:
    """Write a model of a lab's run into a folder, as `site-agent models export` writes a hospital's."""
    from fl_algorithms.lab.models import export

    for file in export(run, site, checkpoint, seed, out.resolve(), onnx=onnx, force=force):
        print(file)
    say(f"next: {out / 'MODEL_CARD.md'} says what it is and how to load it")
