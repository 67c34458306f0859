"""The commands that have to do with patients: ``data``, ``models`` and ``predict``. They read no patient themselves.

Whatever reads patients does it in an isolated child process: the trainer's if it runs, else one that ends with its
answer. Where the trainer has a user of its own, only that user can read the models and the tables, so its listener is
asked, and writes what is asked for as that user. Importing this needs neither torch nor numpy.
"""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from site_agent import handoff
from site_agent.gateway.consent.facts import begins_with
from site_agent.state.directory import SiteState
from site_agent.trainer import KINDS
from site_agent.trainer.data import kinds, sources
from wardround import cli
from wardround.errors import NeedsPerson, UsageProblem
from wardround.local import outputs

State = Annotated[
    Path, typer.Option("--state", envvar="WARDROUND_STATE", show_envvar=True, help="Where this site keeps its things.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Study = Annotated[str, typer.Argument(metavar="STUDY", help="The study's id.")]

LISTED = {"public_data": "public data set"}  # what `data list` calls a key of data.toml, where not by its name
Force = Annotated[bool, typer.Option("--force", help="Replace what is there; never data, keys or a ledger.")]
NETWORK = re.compile(r"[a-z0-9-]{1,40}")
KIND_HELP = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}."

data_app = typer.Typer(no_args_is_help=True, help="Say what data of this hospital may be trained on.")
models_app = typer.Typer(no_args_is_help=True, help="The models that this hospital keeps.")


def _file(text: str, metavar: str = "FILE.csv") -> Any:
    return typer.Option(help=text, metavar=metavar)


def _column(text: str) -> Any:
    return typer.Option(help=text, metavar="COLUMN")


@data_app.command("add")
def data_add(
    name: Annotated[str, typer.Argument(help="What you will call it.")],
    state: State,
    table: Annotated[Path | None, _file("A CSV file with a header.")] = None,
    test: Annotated[Path | None, _file("Patients kept apart, for the models' scores: a table as --table.")] = None,
    images: Annotated[Path | None, _file("A folder of images.", "DIR")] = None,
    labels: Annotated[Path | None, _file("What the images show, one row each; beside masks, who it is.")] = None,
    masks: Annotated[Path | None, _file("A folder with a mask for each image, of its name.", "DIR")] = None,
    test_images: Annotated[Path | None, _file("Images kept apart, for the models' scores.", "DIR")] = None,
    test_labels: Annotated[Path | None, _file("Their labels.")] = None,
    test_masks: Annotated[Path | None, _file("Their masks.", "DIR")] = None,
    arrays: Annotated[Path | None, _file("Images, and labels or masks, as arrays of one file.", "FILE.npz")] = None,
    test_arrays: Annotated[Path | None, _file("Such a file kept apart, for scores.", "FILE.npz")] = None,
    label: Annotated[str, _column("The column of the class; of images, where it is not the study's own.")] = "",
    image: Annotated[str, _column("The column of the image's name, where it is not the study's own.")] = "",
    patient: Annotated[str, _column("The column that says who it is, where it is not the study's own.")] = "",
    network: Annotated[
        str, typer.Option(metavar="LABEL", help="Train this one of the networks that a study allows.")
    ] = "",
    weights: Annotated[
        Path | None, _file("Weights that the tensors which stay here begin with.", "FILE.safetensors")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Name other data under the same name.")] = False,
) -> None:
    """Name a table or images, after looking at them in an isolated process. Nothing is copied; no path ever leaves."""
    SiteState(state).require_folder()
    paths = {
        "table": table, "test": test, "arrays": arrays, "test_arrays": test_arrays, "images": images, "labels": labels,
        "masks": masks, "test_images": test_images, "test_labels": test_labels, "test_masks": test_masks,
    }  # fmt: skip
    named: dict[str, Any] = {key: str(_absolute(path)) for key, path in paths.items() if path is not None}
    named |= {key: text for key, text in {"label": label, "image": image, "patient": patient}.items() if text}
    kinds.kind_of(named)
    if network and not NETWORK.fullmatch(network):
        raise UsageProblem(f"{network[:80]!r} is not a network's label of 1 to 40 of a-z, 0-9 and -")
    if weights is not None:
        named["weights"] = str(_absolute(weights))
    found = handoff.ask(state, "inspect", **named)
    source = sources.DataSource.model_validate({**named, "network": network, "digest": found["digest"]})
    sources.add(state, name, source, replace=replace)
    cli.say(f"Data `{name}`: {_counted(found)}")
    if found["weights"]:
        cli.say(f"Weights: SHA-256 {found['weights']}; `site-agent data check {name} --study ID` fits them to a study")
    cli.say(f"Written to {state / 'data.toml'}; digest {found['digest'][:12]}…")
    cli.say("next: `site-agent studies`, then `site-agent preview STUDY --data " + name + "`")


def _counted(found: dict[str, Any]) -> str:
    """What an inspection counted, as a person reads it."""
    what = "images" if found["columns"] is None else "rows"
    counted = f"{found['rows']} {what}"
    if found["columns"] is not None:
        counted += f", {found['columns']} columns"
    if found["patients"] is not None:
        counted += f" of {found['patients']} patients"
    return counted + ("" if found["test_rows"] is None else f", and {found['test_rows']} {what} kept apart for scores")


@data_app.command("public-data")
def data_public_data(
    name: Annotated[str, typer.Argument(help="What `data add` called the patients that are trained on with it.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A CSV or .npz file, or a folder of images.")],
    state: State,
) -> None:
    """Say where this site's copy of a study's public data set is: rows of nobody, which the study's digest pins."""
    SiteState(state).require_used()
    sources.name_public_data(state, name, _absolute(path))
    cli.say(f"Written to {state / 'data.toml'}; approving, and each round, compare its digest with the study's")
    cli.say(f"next: `site-agent data check {name} --study STUDY`")


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="What `data add` called it.")],
    state: State,
    study: Annotated[str, typer.Option("--study", metavar="ID", help="The study to read it for.")],
    as_json: Json = False,
) -> None:
    """Read data as a study would, in an isolated process, and say what the study would make of it."""
    site_state = SiteState(state)
    site = site_state.site().site
    offer = site_state.offer(study)
    found = handoff.ask(state, "check", study=offer.document, site=site, data=name)
    if as_json:
        cli.print_json({"study": study, "data": name, **found})
        return
    what = "rows" if found["gives"] == "columns" else "images"
    rows = f"{found['rows']} {what}: {found['train_rows']} to train, {found['validation_rows']} to validate"
    print(rows + ("" if found["test_rows"] is None else f"; {found['test_rows']} kept apart for scores"))
    classes = ", ".join(f"{label}: {count}" for label, count in found["classes"].items())
    print(f"masks with: {classes}" if found["gives"] == "masks" else f"classes: {classes}")
    if found["weights"] is not None:
        print(begins_with(found["weights"]))
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    cli.say(f"next: `site-agent approve {study} --data {name}`")


@data_app.command("list")
def data_list(state: State, as_json: Json = False) -> None:
    """The data that has a name here."""
    SiteState(state).require_folder()
    known = sources.sources(state)
    if as_json:
        cli.print_json({"data": [{"name": name, **source.told()} for name, source in known.items()]})
        return
    for name, source in known.items():
        said = {LISTED.get(key, key.replace("_", " ")): text for key, text in source.told().items() if key != "digest"}
        first, *more = (f"{key} {text}" for key, text in said.items())
        print(f"{name}: {', '.join([first.removeprefix('table '), *more])}, digest {source.digest[:12]}…")
    if not known:
        cli.say(f"next: `site-agent data add NAME` with {kinds.EXAMPLES}")


@models_app.command("list")
def models_list(study: Study, state: State, as_json: Json = False) -> None:
    """The checkpoints of a study, with their scores on this hospital's own patients."""
    from site_agent.trainer import vault

    found = vault.listing(state, study) if _may_read(state) else _trainer(state, "checkpoints", study=study)
    if as_json:
        cli.print_json(found)
        return
    _print_checkpoints(found["checkpoints"])
    cli.say(f"next: `site-agent predict {study} --checkpoint best_local --table NEW.csv --out PREDICTIONS.csv`")


@models_app.command("export")
def models_export(
    study: Study,
    state: State,
    kind: Annotated[str, typer.Option("--checkpoint", metavar="KIND", help=KIND_HELP)],
    out: Annotated[Path, typer.Option(help="A folder, new or empty.", metavar="DIR")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint's model, card and preprocessing into a folder."""
    _check_kind(kind)
    out = _absolute(out)
    if _may_read(state):
        from site_agent.trainer import vault

        found = vault.export(state, study, kind, out, force=force)
    else:
        found = _trainer(state, "export", study=study, checkpoint=kind, out=str(out), force=force)
    if as_json:
        cli.print_json(found)
        return
    for file in found["files"]:
        print(file)
    cli.say("preprocessing.json was computed from patients: handle it as what it is")


def predict(
    study: Study,
    state: State,
    checkpoint: Annotated[str, typer.Option(metavar="KIND", help=KIND_HELP)],
    out: Annotated[
        Path, typer.Option(help="Where to write: a CSV file; for masks a new folder.", metavar="PREDICTIONS.csv|DIR")
    ],
    table: Annotated[Path | None, _file("Patients, with the study's columns.", "NEW.csv")] = None,
    images: Annotated[Path | None, _file("A folder of images.", "DIR")] = None,
    arrays: Annotated[Path | None, _file("Images as the array `images` of a file.", "NEW.npz")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict classes or masks of new patients with one of this hospital's models, in an isolated process."""
    _check_kind(checkpoint)
    given = {"table": table, "images": images, "arrays": arrays}
    fields: dict[str, Any] = {key: str(_absolute(path)) for key, path in given.items() if path is not None}
    if len(fields) != 1:
        found = " and ".join(map(kinds.option, fields)) or "none"
        raise UsageProblem(f"one of `--table`, `--images` and `--arrays` is needed, found {found}")
    if _may_read(state):
        outputs.either(out, force=force, keep=sources.protected(state))  # and once more by whoever writes
    fields |= {"study": study, "checkpoint": checkpoint, "out": str(_absolute(out)), "force": force}
    found = handoff.one_shot(state, "predict", **fields) if _may_read(state) else _trainer(state, "predict", **fields)
    if as_json:
        cli.print_json(found)
        return
    cli.say(f"{found['rows']} predictions written to {found['out']}")


def _print_checkpoints(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("checkpoint", "round", "score", "metric", "on", "validation loss", "digest", box=None, pad_edge=False)
    for row in rows:
        score = "-" if row["score"] is None else f"{row['score']:.4f}"
        loss = "-" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
        shown.add_row(
            row["kind"], str(row["round"]), score, row["metric"], row["split"], loss, row["digest"][:12] + "…"
        )
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False).print(shown, markup=False)
    for row in rows:
        print(row["path"])


def _may_read(state: Path) -> bool:
    """Whether this user may read the models. False: they belong to the trainer's user."""
    SiteState(state).require_used()
    folder = state / "studies"
    return not folder.exists() or os.access(folder, os.R_OK | os.X_OK)


def _trainer(state: Path, command: str, **fields: Any) -> Any:
    trainer = handoff.Trainer(state)
    if not trainer.available():
        raise NeedsPerson(
            f"{state / 'studies'} belongs to the trainer's user, and the trainer does not run",
            hint="start it: `site-agent run --only trainer`; or give this command as that user",
        )
    return trainer.ask(command, **fields)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UsageProblem(f"there is no checkpoint `{kind[:40]}`", hint=f"there are: {', '.join(KINDS)}")


def _absolute(path: Path) -> Path:
    """From the root on; symbolic links stay, so that a link may be pointed at next month's table."""
    return Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve would follow links


__all__ = ["data_app", "models_app", "predict"]
