"""``coordinator study edit``: a new revision of a study that is not over, with other settings."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.initial import has_torch, make_initial
from coordinator.cli.options import State
from wardround.cli import say
from wardround.errors import UsageProblem

if TYPE_CHECKING:
    from coordinator.answers import StudyEdited
    from fl_algorithms.study import ResolvedStudy

ROUNDS = "study.rounds"


def edit(
    study: Annotated[str, typer.Argument(metavar="ID", help="The study's name.")],
    state: State,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The study file as it should be; without it, as it is now.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a key; again for more.")
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option(metavar="FILE.safetensors", help="Begin from these tensors, not from the study's newest model."),
    ] = None,
) -> None:
    """Change a study that waits, runs or is paused: a new revision, which each site approves. The old one is stopped.

    It goes on from the newest model, with the rounds that are left; with --set study.rounds=N, with N rounds more.
    """
    from coordinator.answers import StudyEdited
    from coordinator.requests import EditStudy
    from coordinator.studies import editing
    from fl_algorithms.resolving import resolve
    from wardround.records import study as study_files

    refuse_no_coordinator(state)
    if file is None and not setting:
        raise UsageProblem(
            "nothing is to be changed", hint=f"`coordinator study edit {study} --set study.round_deadline_s=7200`"
        )
    present = _present(state, study)
    if file is None:
        after = editing.with_settings(present.document(), setting or [])
    else:
        after = resolve(study_files.load(file, setting), source=file.name)
    with tempfile.TemporaryDirectory(prefix="wardround-initial-") as folder:
        if initial is None and file is not None and editing.shares_otherwise(present, after) and has_torch():
            initial = make_initial(file, Path(folder), setting)
        request = EditStudy(
            study=study, document=after.document(), initial=None if initial is None else str(initial.resolve()),
            rounds=any(text.replace(" ", "").startswith(f"{ROUNDS}=") for text in setting or []),
        )  # fmt: skip
        made = ask(state, request, StudyEdited)
    _say_edited(made)


def _present(state: Path, study: str) -> "ResolvedStudy":
    from coordinator.requests import ShowReport
    from coordinator.study_answers import StudyReport
    from fl_algorithms.study import ResolvedStudy
    from wardround.records.study import StudyFile

    report = ask(state, ShowReport(study=study), StudyReport)
    return ResolvedStudy(StudyFile.from_document(report.study, study))


def _say_edited(made: "StudyEdited") -> None:
    print(f"{made.id} {made.study_digest}", flush=True)
    begins = f"the model of round {made.model}" if made.model else "its first model"
    say(f"Study `{made.id}`, revision {made.revision}: begins from {begins}, {made.rounds} rounds")
    for change in made.changes:
        say(f"changed: {change}")
    if made.approve_again:
        say(f"must approve again: {', '.join(made.approve_again)}")
    if made.approve_first:
        say(f"had not approved, and must now: {', '.join(made.approve_first)}")
    if made.gone:
        say(f"not in it any more: {', '.join(made.gone)}")
    say(f"next: each site runs `site-agent approve {made.id} --data NAME`, which shows what changed")
    if made.started:
        say(f"It waits for them: `coordinator study status {made.id} --follow`")
    else:
        say(f"then: `coordinator study start {made.id}`")
