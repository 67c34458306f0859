"""The commands that have to do with patients: ``data``, ``models`` and ``predict``. They read no table themselves.

Whatever reads patients does it in an isolated child process: the trainer's if it runs, else one that ends with its
answer. Where the trainer has a user of its own, only that user can read the models and the tables, so its listener is
asked, and writes what is asked for as that user. Importing this needs neither torch nor numpy.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from site_agent import handoff
from site_agent.state import SiteState
from site_agent.trainer import KINDS
from site_agent.trainer import data as tables
from wardround import cli
from wardround.errors import NeedsPerson, UsageProblem

State = Annotated[
    Path, typer.Option("--state", envvar="WARDROUND_STATE", show_envvar=True, help="Where this site keeps its things.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Study = Annotated[str, typer.Argument(metavar="STUDY", help="The study's id.")]

KIND_HELP = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}."

data_app = typer.Typer(no_args_is_help=True, help="Say which tables of this hospital may be trained on.")
models_app = typer.Typer(no_args_is_help=True, help="The models that this hospital keeps.")


@data_app.command("add")
def data_add(
    name: Annotated[str, typer.Argument(help="What you will call it.")],
    state: State,
    table: Annotated[Path, typer.Option(help="A CSV file with a header.", metavar="FILE.csv")],
    label: Annotated[str, typer.Option(help="The column that holds the class.", metavar="COLUMN")],
    test: Annotated[
        Path | None, typer.Option(help="Patients kept apart, for the models' scores.", metavar="FILE.csv")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Name another table under the same name.")] = False,
) -> None:
    """Name a table, after looking at it in an isolated process. Nothing is copied, and its path never leaves."""
    _must_exist(state)
    found = handoff.ask(
        state, "inspect", table=str(_absolute(table)), test=None if test is None else str(_absolute(test)), label=label
    )
    source = tables.DataSource(
        table=str(_absolute(table)),
        label=label,
        test=None if test is None else str(_absolute(test)),
        digest=found["digest"],
    )
    tables.add(state, name, source, replace=replace)
    tested = "" if found["test_rows"] is None else f", and {found['test_rows']} rows kept apart for scores"
    cli.say(f"Data `{name}`: {found['rows']} rows, {found['columns']} columns{tested}")
    cli.say(f"Written to {state / 'data.toml'}; digest {found['digest'][:12]}…")
    cli.say("next: `site-agent studies`, then `site-agent approve STUDY --data " + name + "`")


@data_app.command("common")
def data_common(
    name: Annotated[str, typer.Argument(help="What `data add` called the patients that are trained on with it.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A CSV or .npz file, or a folder of images.")],
    state: State,
) -> None:
    """Say where this site's copy of a study's common set is: rows of nobody, which the study's digest pins."""
    _must_exist(state)
    tables.name_common(state, name, _absolute(path))
    cli.say(f"Written to {state / 'data.toml'}; approving, and each round, compare its digest with the study's")
    cli.say(f"next: `site-agent data check {name} --study STUDY`")


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="What `data add` called it.")],
    state: State,
    study: Annotated[str, typer.Option("--study", metavar="ID", help="The study to read it for.")],
    as_json: Json = False,
) -> None:
    """Read a table as a study would, in an isolated process, and say what the study would make of it."""
    site_state = SiteState(state)
    offer = site_state.offer(study)
    found = handoff.ask(state, "check", study=offer.document, site=site_state.site().site, data=name)
    if as_json:
        cli.print_json({"study": study, "data": name, **found})
        return
    rows = f"{found['rows']} rows: {found['train_rows']} to train, {found['validation_rows']} to validate"
    print(rows + ("" if found["test_rows"] is None else f"; {found['test_rows']} kept apart for scores"))
    print("classes: " + ", ".join(f"{label}: {count}" for label, count in found["classes"].items()))
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    cli.say(f"next: `site-agent approve {study} --data {name}`")


@data_app.command("list")
def data_list(state: State, as_json: Json = False) -> None:
    """The tables that have a name here."""
    known = tables.sources(state)
    if as_json:
        cli.print_json({"data": [{"name": name, **source.model_dump()} for name, source in known.items()]})
        return
    for name, source in known.items():
        tested = "" if source.test is None else f", test {source.test}"
        print(f"{name}: {source.table}, label {source.label}{tested}, digest {source.digest[:12]}…")
    if not known:
        cli.say("next: `site-agent data add NAME --table FILE.csv --label COLUMN`")


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
    out: Annotated[Path, typer.Option(help="A folder, made if need be.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Copy a checkpoint's model, card and preprocessing into a folder."""
    _check_kind(kind)
    out = _absolute(out)
    if _may_read(state):
        from site_agent.trainer import vault

        found = vault.export(state, study, kind, out)
    else:
        found = _trainer(state, "export", study=study, checkpoint=kind, out=str(out))
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
    table: Annotated[Path, typer.Option(help="Patients, with the study's columns.", metavar="NEW.csv")],
    out: Annotated[Path, typer.Option(help="Where to write.", metavar="PREDICTIONS.csv")],
    as_json: Json = False,
) -> None:
    """Predict the class of each row of a table with one of this hospital's models, in an isolated process."""
    _check_kind(checkpoint)
    fields: dict[str, Any] = {
        "study": study,
        "checkpoint": checkpoint,
        "table": str(_absolute(table)),
        "out": str(_absolute(out)),
    }
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
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(shown, markup=False)
    for row in rows:
        print(row["path"])


def _may_read(state: Path) -> bool:
    """Whether this user may read the models. False: they belong to the trainer's user."""
    _must_exist(state)
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


def _must_exist(state: Path) -> None:
    if not state.is_dir() or (state / "authority").exists():  # a coordinator's has one
        raise UsageProblem(f"{state} is not a site's state directory", hint="`site-agent join --state DIR` makes one")


def _absolute(path: Path) -> Path:
    """From the root on; symbolic links stay, so that a link may be pointed at next month's table."""
    return Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve would follow links


__all__ = ["data_app", "models_app", "predict"]
