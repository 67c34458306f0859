"""The commands that have to do with patients: ``data``, ``models`` and ``predict``. They read no patient themselves.

Whatever reads patients does it in an isolated child process: the trainer's if it runs, else one that ends with its
answer. Where the trainer has a user of its own, only that user can read the models and the tables, so its listener is
asked, and writes what is asked for as that user. Importing this needs neither torch nor numpy.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from site_agent.cli.fit import fit
from site_agent.cli.listening import absolute, ask_listener, is_open
from site_agent.cli.naming import data_add, file_option
from site_agent.cli.options import State
from site_agent.cli.summary import asked_for, summaries, summary
from site_agent.trainer.data import layouts
from wardround import cli
from wardround.cli import Json, group
from wardround.errors import BadData, NeedsPerson, UsageProblem, WardroundError
from wardround.records.checkpoints import CHECKPOINT_KINDS

if TYPE_CHECKING:
    from site_agent.state.directory import SiteState
    from site_agent.trainer.data import sources
    from wardround.records import trainer as records

Study = Annotated[str, typer.Argument(metavar="STUDY", help="The study's id.")]

LISTED = {"public_data": "public data set"}  # what `data list` calls a key of data.toml, where not by its name
Force = Annotated[bool, typer.Option("--force", help="Replace what is there; never data, keys or a ledger.")]
KIND_HELP = f"{', '.join(CHECKPOINT_KINDS[:-1])} or {CHECKPOINT_KINDS[-1]}."

data_app = group("Say what data of this hospital may be trained on.")
models_app = group("The models that this hospital keeps.")


@data_app.command("public-data")
def data_public_data(
    name: Annotated[str, typer.Argument(help="What `data add` called the patients that are trained on with it.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A CSV or .npz file, or a folder of images.")],
    state: State,
) -> None:
    """Say where this site's copy of a study's public data set is: rows of nobody, which the study's digest pins."""
    from site_agent.state.directory import SiteState
    from site_agent.trainer.data import sources

    SiteState(state).require_used()
    sources.name_public_data(state, name, absolute(path))
    cli.say(f"Written to {state / 'data.toml'}; approving, and each round, compare its digest with the study's")
    cli.say(f"next: `site-agent data check {name} --study STUDY`")


@data_app.command("map")
def data_map(
    name: Annotated[str, typer.Argument(help="What `data add` called it.")],
    path: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The mapping; if absent, it is drafted.")],
    state: State,
    study: Annotated[str, typer.Option("--study", metavar="ID", help="The study to draft it for.")] = "",
    summary: Annotated[
        str, typer.Option("--request", metavar="ID", help="The coordinator's summary request to draft it for.")
    ] = "",
) -> None:
    """Say how a table's columns, codes, units and dates become a study's: draft a mapping to edit, or name one."""
    from site_agent import handoff
    from site_agent.state.directory import SiteState
    from site_agent.trainer.data import sources
    from wardround.records import trainer as records
    from wardround.records.schema import check

    if study and summary:
        raise UsageProblem("found `--study` and `--request`: a mapping is drafted for one of them")
    site_state = SiteState(state)
    site_state.require_used()
    path = absolute(path)
    named = sources.source(state, name)
    if not path.exists():
        request = _drafting(site_state, name, path, study=study, summary=summary)
        drafted = handoff.one_shot(state, request) if _may_read(state) else ask_listener(state, request)
        counted = f"{drafted.columns} columns, {drafted.as_they_are} as they are, {drafted.open} for you to fill in"
        cli.say(f"Drafted {path}: {counted}. It has codes of your table in it: keep it in the hospital")
    files = check(records.DataFiles, {**_files(named), "mapping": str(path)}, "the data")
    sources.name_mapping(state, name, path, handoff.ask(state, records.Inspect(files=files)).digest)
    cli.say("The mapping is part of the data: a study that was approved with it must be approved again")
    look = f"data summary {name} --request {summary}" if summary else f"data check {name} --study {study or 'ID'}"
    cli.say(f"next: edit {path}, then `site-agent {look}`")


def _drafting(
    state: "SiteState", name: str, path: Path, *, study: str, summary: str
) -> "records.DraftMapping | records.DraftSummaryMapping":
    """What the trainer is asked for a draft.

    Raises:
        UsageProblem: there is nothing to draft it for.
    """
    from wardround.records import trainer as records

    if summary:
        return records.DraftSummaryMapping(request=asked_for(state, summary), data=name, out=str(path))
    if not study:
        hint = "add `--study ID` to draft it for a study, or `--request ID` for a summary request"
        raise UsageProblem(f"there is no {path}", hint=hint)
    from site_agent.gateway.policy.refusing import refuse_plugins

    offer = state.offer(study)
    refuse_plugins(offer.plugins, study, state.policy)
    return records.DraftMapping(study=offer.document, site=state.site().site, data=name, out=str(path))


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="What `data add` called it.")],
    state: State,
    study: Annotated[str, typer.Option("--study", metavar="ID", help="The study to read it for.")],
    as_json: Json = False,
) -> None:
    """Read data as a study would, in an isolated process, and say all that does not fit, or what it makes of it."""
    from site_agent import handoff
    from site_agent.gateway.consent.facts import begins_with
    from site_agent.gateway.policy.refusing import refuse_plugins
    from site_agent.state.directory import SiteState
    from wardround.records import trainer as records

    site_state = SiteState(state)
    site = site_state.site().site
    offer = site_state.offer(study)
    refuse_plugins(offer.plugins, study, site_state.policy)
    examined = handoff.ask(state, records.Examine(study=offer.document, site=site, data=name))
    checked = examined.checked
    if checked is None:
        _print_misfits(study, name, examined, as_json=as_json)
    if as_json:
        cli.print_json({"study": study, "data": name, "fits": True, **checked.to_document()})
        return
    what = "images" if checked.gives in ("images", "masks") else "rows"
    rows = f"{checked.rows} {what}: {checked.train_rows} to train, {checked.validation_rows} to validate"
    print(rows + ("" if checked.test_rows is None else f"; {checked.test_rows} held out for scores"))
    counts = ", ".join(f"{label}: {count}" for label, count in checked.classes.items())
    if counts:
        print(f"{'masks with' if checked.gives == 'masks' else 'classes'}: {counts}")
    if checked.weights is not None:
        print(begins_with(checked.weights))
    for warning in checked.warnings:
        print(f"warning: {warning}")
    cli.say(f"next: `site-agent approve {study} --data {name}`")


def _print_misfits(study: str, name: str, examined: "records.Examined", *, as_json: bool) -> NoReturn:
    """Raises BadData, after what does not fit was printed."""
    from site_agent.cli import findings

    if as_json:
        cli.print_json({"study": study, "data": name, "fits": False, **examined.to_document()})
    else:
        findings.show(examined.findings)
        if examined.more:
            print(f"and {examined.more} more")
    things = len(examined.findings) + examined.more
    raise BadData(
        f"data `{name}` does not fit study `{study}`: {things} thing{'s' if things > 1 else ''}",
        hint=f"correct the table, or say in a mapping what is meant: `site-agent data map {name} FILE --study {study}`",
    )


def _files(named: "sources.DataSource") -> dict[str, str]:
    """What a request says of where data lies."""
    from wardround.records import trainer as records

    return {key: text for key, text in named.entry().items() if key in records.DataFiles.model_fields}


data_app.command("add")(data_add)
data_app.command("fit")(fit)
data_app.command("summaries")(summaries)
data_app.command("summary")(summary)


@data_app.command("list")
def data_list(state: State, as_json: Json = False) -> None:
    """The data that has a name here."""
    from site_agent.state.directory import SiteState
    from site_agent.trainer.data import sources

    SiteState(state).require_folder()
    known = sources.sources(state)
    if as_json:
        cli.print_json({"data": [{"name": name, **source.entry()} for name, source in known.items()]})
        return
    for name, source in known.items():
        entry = {key: text for key, text in source.entry().items() if key != "digest"}
        first, *more = (f"{LISTED.get(key, key.replace('_', ' '))} {text}" for key, text in entry.items())
        print(f"{name}: {', '.join([first.removeprefix('table '), *more])}, digest {source.digest[:12]}…")
    if not known:
        cli.say(f"next: `site-agent data add NAME` with {layouts.EXAMPLES}")


@models_app.command("list")
def models_list(study: Study, state: State, as_json: Json = False) -> None:
    """The checkpoints of a study, with their scores on this hospital's own patients."""
    from site_agent.trainer.vault import models
    from wardround.records import trainer as records

    request = records.ListCheckpoints(study=study)
    kept = models.listing(state, study) if _may_read(state) else ask_listener(state, request)
    if as_json:
        cli.print_json(kept.to_document())
        return
    _print_checkpoints(kept.checkpoints)
    chosen = "" if any(row.kind == "selected" for row in kept.checkpoints) else " --checkpoint best_local"
    cli.say(f"next: `site-agent predict {study}{chosen} --table NEW.csv --out PREDICTIONS.csv`")


@models_app.command("export")
def models_export(
    study: Study,
    state: State,
    kind: Annotated[str, typer.Option("--checkpoint", metavar="KIND", help=KIND_HELP)],
    out: Annotated[Path, typer.Option(help="A folder, new or empty.", metavar="DIR")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write it as ONNX too.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint into a folder: weights, card, study, preprocessing, and a program that needs torch alone."""
    from site_agent import handoff
    from wardround.records import trainer as records

    _check_kind(kind)
    out = absolute(out)
    if _may_read(state):
        from site_agent.trainer.vault import models

        exported = models.export(state, study, kind, out, force=force)
    else:
        request = records.Export(study=study, checkpoint=kind, out=str(out), force=force)
        exported = ask_listener(state, request)
    program = records.WriteProgram(study=study, checkpoint=kind, out=str(out), onnx=onnx, force=force)
    without: WardroundError | None = None
    files = list(exported.files)
    try:
        written = handoff.one_shot(state, program) if _may_read(state) else ask_listener(state, program)
        files += written.files
    except (BadData, NeedsPerson) as error:  # no text for this network, or no torch here
        without = error
    if as_json:
        cli.print_json({"files": files, "without_program": without.message if without else ""})
        return
    for file in files:
        print(file)
    cli.say("preprocessing.json was computed from patients: handle it as what it is")
    if without is not None and onnx:
        raise NeedsPerson(f"the weights are written, and ONNX is not: {without.message}", hint=without.hint)
    if without is not None:
        cli.say(f"warning: without a program: {without.message}")
        cli.say(f"hint: {without.hint}")
    else:
        cli.say(f"next: {out / 'MODEL_CARD.md'} says what it is and how to load it")


def predict(
    study: Study,
    state: State,
    out: Annotated[
        Path, typer.Option(help="Where to write: a CSV file; for masks a new folder.", metavar="PREDICTIONS.csv|DIR")
    ],
    table: Annotated[Path | None, file_option("Patients, with the study's columns.", "NEW.csv")] = None,
    images: Annotated[Path | None, file_option("A folder of images.", "DIR")] = None,
    arrays: Annotated[Path | None, file_option("Images as the array `images` of a file.", "NEW.npz")] = None,
    files: Annotated[Path | None, file_option("What the study's plug-in reads: a file or a folder.", "PATH")] = None,
    id_column: Annotated[
        str, typer.Option("--id", metavar="COLUMN", help="Write this column of the table beside each prediction.")
    ] = "",
    checkpoint: Annotated[str, typer.Option(metavar="KIND", help=KIND_HELP)] = "selected",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict for new patients with one of this hospital's models, in an isolated process."""
    from site_agent import handoff
    from site_agent.cli.progress import shown
    from site_agent.trainer.data import sources
    from wardround.local import outputs
    from wardround.records import trainer as records

    _check_kind(checkpoint)
    given = {"table": table, "images": images, "arrays": arrays, "files": files}
    paths = {key: str(absolute(path)) for key, path in given.items() if path is not None}
    if len(paths) != 1:
        named = " and ".join(map(layouts.option, paths)) or "none"
        raise UsageProblem(f"one of `--table`, `--images`, `--arrays` and `--files` is needed, found {named}")
    if _may_read(state):
        outputs.either(out, force=force, keep=sources.protected(state))  # and once more by whoever writes
    request = records.Predict(
        study=study, checkpoint=checkpoint, table=paths.get("table"), images=paths.get("images"),
        arrays=paths.get("arrays"), files=paths.get("files"), id=id_column, out=str(absolute(out)), force=force,
    )  # fmt: skip
    with shown("predicting") as progress:
        ask = handoff.one_shot if _may_read(state) else ask_listener
        predicted = ask(state, request, progress)
    if as_json:
        cli.print_json(predicted.to_document())
        return
    cli.say(f"{predicted.rows} predictions written to {predicted.out}")
    for note in predicted.notes:
        cli.say(note)


def _print_checkpoints(rows: list["records.Checkpoint"]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("checkpoint", "round", "score", "metric", "on", "validation loss", "digest", box=None, pad_edge=False)
    for row in rows:
        score = "-" if row.score is None else f"{row.score:.4f}"
        loss = "-" if row.val_loss is None else f"{row.val_loss:.4f}"
        shown.add_row(row.kind, str(row.round), score, row.metric, row.split, loss, row.digest[:12] + "…")
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False).print(shown, markup=False)
    for row in rows:
        print(row.path)
    for row in rows:
        if row.why:
            print(f"{row.kind}: {row.why}")


def _may_read(state: Path) -> bool:
    """Whether this user may read the models. False: they belong to the trainer's user."""
    from site_agent.state.directory import SiteState

    SiteState(state).require_used()
    return is_open(state)


def _check_kind(kind: str) -> None:
    if kind not in CHECKPOINT_KINDS:
        raise UsageProblem(f"there is no checkpoint `{kind[:40]}`", hint=f"there are: {', '.join(CHECKPOINT_KINDS)}")


__all__ = ["data_app", "models_app", "predict"]
