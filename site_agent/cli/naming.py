"""``site-agent data add``: data gets a name, after an isolated process has looked at it."""

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from site_agent.cli.listening import absolute, ask_listener, is_open
from site_agent.cli.options import State
from site_agent.trainer.data import layouts
from wardround import cli
from wardround.errors import BadData, UsageProblem

if TYPE_CHECKING:
    from wardround.records import trainer as records

NETWORK = re.compile(r"[a-z0-9-]{1,40}")
SHOWN = 5  # different sizes, or the like
UNREADABLE = (
    "the user who looked may not read it. With two users, let the trainer look: start it (`site-agent run --only "
    "trainer` as its user) before `data add`, and give its group the right to read the files and to enter their folders"
)


def file_option(text: str, metavar: str = "FILE.csv") -> Any:
    """An option that is a path."""
    return typer.Option(help=text, metavar=metavar)


def column_option(text: str) -> Any:
    """An option that is the name of a column."""
    return typer.Option(help=text, metavar="COLUMN")


def data_add(
    name: Annotated[str, typer.Argument(help="What you will call it.")],
    state: State,
    table: Annotated[Path | None, file_option("A CSV file with a header.")] = None,
    test: Annotated[Path | None, file_option("Patients held out, for the models' scores: a table as --table.")] = None,
    images: Annotated[Path | None, file_option("A folder of images.", "DIR")] = None,
    labels: Annotated[Path | None, file_option("What the images show, one row each; beside masks, who it is.")] = None,
    masks: Annotated[Path | None, file_option("A folder with a mask for each image, of its name.", "DIR")] = None,
    test_images: Annotated[Path | None, file_option("Images held out, for the models' scores.", "DIR")] = None,
    test_labels: Annotated[Path | None, file_option("Their labels.")] = None,
    test_masks: Annotated[Path | None, file_option("Their masks.", "DIR")] = None,
    arrays: Annotated[Path | None, file_option("Images with labels or masks, as arrays of a file.", "FILE.npz")] = None,
    test_arrays: Annotated[Path | None, file_option("Such a file held out, for scores.", "FILE.npz")] = None,
    files: Annotated[Path | None, file_option("What a plug-in's own code reads: a file or a folder.", "PATH")] = None,
    test_files: Annotated[Path | None, file_option("The same held out, for scores.", "PATH")] = None,
    mapping: Annotated[
        Path | None, file_option("How the table becomes a study's; `data map` drafts one.", "FILE.toml")
    ] = None,
    label: Annotated[str, column_option("The column of the class; of images, where it is not the study's own.")] = "",
    image: Annotated[str, column_option("The column of the image's name, where it is not the study's own.")] = "",
    patient: Annotated[str, column_option("The column that says who it is, where it is not the study's own.")] = "",
    network: Annotated[
        str, typer.Option(metavar="LABEL", help="Train this one of the networks that a study allows.")
    ] = "",
    weights: Annotated[
        Path | None, file_option("Weights that the tensors which stay here begin with.", "FILE.safetensors")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Name other data under the same name.")] = False,
) -> None:
    """Name a table or images, after looking at them in an isolated process. Nothing is copied; no path ever leaves."""
    paths = {
        "table": table, "test": test, "arrays": arrays, "test_arrays": test_arrays, "images": images, "labels": labels,
        "masks": masks, "test_images": test_images, "test_labels": test_labels, "test_masks": test_masks,
        "files": files, "test_files": test_files,
        "mapping": mapping,
    }  # fmt: skip
    named = {key: str(absolute(path)) for key, path in paths.items() if path is not None}
    named |= {key: text for key, text in {"label": label, "image": image, "patient": patient}.items() if text}
    if weights is not None:
        named["weights"] = str(absolute(weights))
    name_data(state, name, named, network=network, replace=replace)
    cli.say("next: `site-agent studies`, then `site-agent preview STUDY --data " + name + "`")


def name_data(state: Path, name: str, named: dict[str, str], *, network: str = "", replace: bool = False) -> None:
    """Have data looked at, keep it under ``name``, and say what was found.

    Args:
        named: absolute paths and columns, by the keys of data.toml.
    """
    from site_agent.state.directory import SiteState
    from site_agent.trainer.data import sources
    from wardround.records import trainer as records
    from wardround.records.schema import check

    SiteState(state).require_folder()
    layouts.layout_of({key for key in named if key != "weights"})
    if network and not NETWORK.fullmatch(network):
        raise UsageProblem(f"{network[:80]!r} is not a network's label of 1 to 40 of a-z, 0-9 and -")
    inspected = _look(state, records.Inspect(files=check(records.DataFiles, named, "the data")))
    source = sources.DataSource.model_validate({**named, "network": network, "digest": inspected.digest})
    sources.add(state, name, source, replace=replace)
    cli.say(f"Data `{name}`: {_counted(inspected)}")
    for what, counts in inspected.forms.items():
        cli.say(f"  {what}: {_commonest(counts)}")
    if inspected.weights:
        cli.say(f"Weights: SHA-256 {inspected.weights}; `site-agent data check {name} --study ID` fits them to a study")
    cli.say(f"Written to {state / 'data.toml'}; digest {inspected.digest[:12]}…")


def _look(state: Path, request: "records.Inspect") -> "records.Inspected":
    """What an inspection finds.

    Raises:
        NeedsPerson: only the trainer's user may read the data, and the trainer does not run.
        BadData: as the trainer says it.
    """
    from site_agent import handoff
    from site_agent.cli.progress import shown

    if not is_open(state) and not handoff.Trainer(state).available():
        return ask_listener(state, request)  # which says what to start
    try:
        with shown("looking at the data") as progress:
            return handoff.ask(state, request, progress)
    except BadData as error:
        if os.strerror(errno.EACCES) not in error.message:
            raise
        raise BadData(error.message, hint=UNREADABLE) from None


def _counted(inspected: "records.Inspected") -> str:
    """What an inspection counted, as a person reads it."""
    if inspected.rows is None:
        return "files that a plug-in reads; `site-agent data check` says what is in them"
    what = "images" if inspected.columns is None else "rows"
    counted = f"{inspected.rows} {what}"
    if inspected.columns is not None:
        counted += f", {inspected.columns} columns"
    if inspected.patients is not None:
        counted += f" of {inspected.patients} patients"
    return counted + ("" if inspected.test_rows is None else f", and {inspected.test_rows} {what} held out for scores")


def _commonest(counts: dict[str, int]) -> str:
    """How often each is there; of many, the commonest."""
    shown = [f"{text} ({count})" for text, count in list(counts.items())[:SHOWN]]
    rest = sum(list(counts.values())[SHOWN:])
    return ", ".join([*shown, *([f"{len(counts) - SHOWN} others ({rest})"] if rest else [])])
