"""`fl-lab data`: example data, one folder for each site. Importing this needs no torch."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from wardround.cli import group, say
from wardround.errors import UsageProblem
from wardround.local import outputs

data_app = group("Make example data: one folder for each site, with a train and a test file.")

OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to make the folders.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Make them in a folder that is not empty.")]


def _raw(what: str) -> typer.models.ArgumentInfo:
    argument: typer.models.ArgumentInfo = typer.Argument(metavar="RAW", help=f"The folder of {what}.")
    return argument


@data_app.command("breast-cancer")
def breast_cancer(out: OutOption, force: ForceOption = False) -> None:
    """Wisconsin breast cancer patients, divided into four unlike hospitals. Comes with scikit-learn."""
    from fl_algorithms.lab.data import breast_cancer as make

    outputs.folder(out, force=force)
    _say_rows(make(out), out, "rows")


@data_app.command("heart-disease")
def heart_disease(
    raw: Annotated[Path, _raw("the four processed.*.data files of UCI")], out: OutOption, force: ForceOption = False
) -> None:
    """The four hospitals of the UCI heart disease study, divided as the papers do."""
    from fl_algorithms.lab.data import heart_disease as make

    outputs.folder(out, force=force, keep=[raw])
    _say_rows(make(raw, out), out, "rows")


@data_app.command("survival")
def survival(out: OutOption, force: ForceOption = False) -> None:
    """Made-up patients of six unlike hospitals, with times to death: a stand-in for a registry."""
    from fl_algorithms.lab.made_up import survival as make

    outputs.folder(out, force=force)
    _say_rows(make(out), out, "rows")


@data_app.command("skin")
def skin(
    raw: Annotated[Path, _raw("skin_32.npz and skin_64.npz")],
    out: OutOption,
    size: Annotated[Literal["32", "64"], typer.Option(help="Pixels a side.")] = "32",
    hospitals: Annotated[int, typer.Option(min=1, max=9, help="How many each source becomes.")] = 1,
    at_most: Annotated[int, typer.Option(min=0, help="Images each has to train; 0 for all.", show_default=False)] = 0,
    public_data: Annotated[int, typer.Option(min=0, help="Images of a public data set, of what these leave.")] = 0,
    force: ForceOption = False,
) -> None:
    """Dermoscopy of the four sources of HAM10000, at 32 pixels with ISIC 2017; no lesion is in both parts."""
    if public_data and not at_most:
        raise UsageProblem("--public-data takes what the hospitals leave: nothing", hint="with --at-most N")
    from fl_algorithms.lab.image_data import skin as make

    outputs.folder(out, force=force, keep=[raw])
    made = make(raw, out, 32 if size == "32" else 64, hospitals=hospitals, at_most=at_most, public_data=public_data)
    if public_data:
        say(f"public data set: {public_data} images of no hospital, {out / 'public_data' / 'public_data.npz'}")
    _say_rows(made, out, "images")


@data_app.command("wbc")
def wbc(raw: Annotated[Path, _raw("wbc_128.npz")], out: OutOption, force: ForceOption = False) -> None:
    """White blood cells of two laboratories, with their kind and their masks."""
    from fl_algorithms.lab.image_data import wbc as make

    outputs.folder(out, force=force, keep=[raw])
    _say_rows(make(raw, out), out, "images")


@data_app.command("nuclei")
def nuclei(
    raw: Annotated[Path, _raw("nuclei_128.npz")],
    out: OutOption,
    by: Annotated[Literal["organ", "hospital"], typer.Option(help="What a site is.")] = "organ",
    force: ForceOption = False,
) -> None:
    """Tiles of stained slides with masks of their nuclei; no slide is in both parts."""
    from fl_algorithms.lab.image_data import nuclei as make

    outputs.folder(out, force=force, keep=[raw])
    _say_rows(make(raw, out, by), out, "images")


def _say_rows(made: list[tuple[str, int, int]], out: Path, what: str) -> None:
    for site, train, test in made:
        say(f"{site}: {train} {what} to train, {test} to test")
    say(f"written to {out}")
    say(f"next: `fl-lab run STUDY.toml --data {shlex.quote(str(out))}`")
