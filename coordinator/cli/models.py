"""``coordinator models``: what a study made, out of the state directory."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.initial import LAB, has_torch, line_after
from coordinator.cli.options import Force, State
from coordinator.models import Which
from wardround.cli import Json, group, print_json, say
from wardround.errors import NeedsPerson
from wardround.local import outputs

PROGRAM_S = 600
app = group("The models that studies have made.")


@app.command("export")
def export_model(
    study: Annotated[str, typer.Argument(metavar="ID", help="The study's name.")],
    state: State,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A folder, new or empty.")],
    model: Annotated[Which, typer.Option("--model", help="The best global one, or the newest.")] = "best",
    site: Annotated[
        str, typer.Option(metavar="SITE", help="Whose, where each site downloads a model of its own.")
    ] = "",
    onnx: Annotated[bool, typer.Option("--onnx", help="Write it as ONNX too.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a study's model into a folder: weights, card, study, and a program that needs torch alone.

    Without torch here, the program is written elsewhere: `fl-lab program DIR`.
    """
    from coordinator.member_answers import Noted
    from coordinator.models.export import chosen, export
    from coordinator.requests import NoteModelExport, ShowReport
    from coordinator.state_directory import State as Place
    from coordinator.storage.blobs import Blobs
    from coordinator.study_answers import StudyReport

    refuse_no_coordinator(state)
    out = outputs.folder(out, force=force, keep=[state]).resolve()
    report = ask(state, ShowReport(study=study), StudyReport)
    number, digest = chosen(report, model)
    ask(state, NoteModelExport(study=study, round=number, model_digest=digest, site=site), Noted)
    place = Place(state)
    storage = place.config().storage
    blobs = Blobs(place.blob_folder(storage), place.objects(storage))
    files = [str(file) for file in export(report, blobs, model, site, out, force=force, keep=state)]
    written, why = _with_program(out, onnx=onnx, force=force)
    files += written
    if as_json:
        print_json({"files": files, "without_program": why})
        return
    for file in files:
        print(file)
    if why and onnx:
        raise NeedsPerson(
            f"the weights are written, and ONNX is not: {why}",
            hint="leave --onnx out, or export where torch and `wardround[onnx]` are installed",
        )
    if why:
        say(f"warning: without a program: {why}")
    say(f"next: {out / 'MODEL_CARD.md'} says what it is and how to load it")


def _with_program(folder: Path, *, onnx: bool, force: bool) -> tuple[list[str], str]:
    """The files that the lab wrote beside the weights, in a process of its own; or why there are none."""
    by_hand = f"`fl-lab program {folder.name}`"
    if not has_torch():
        return [], f"torch is not installed here; where it is: {by_hand}"
    line = [sys.executable, "-P", "-c", LAB, "program", str(folder)]
    line += ["--onnx"] * onnx + ["--force"] * force
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"{by_hand} did not end in {PROGRAM_S} s"
    if done.returncode != 0:
        return [], line_after("error: ", done.stderr) or f"{by_hand} ended with exit code {done.returncode}"
    return done.stdout.split("\n")[:-1], ""
