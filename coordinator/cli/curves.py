"""``coordinator study export``: a study's learning curves for TensorBoard or MLflow."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from coordinator.cli.asking import ask
from coordinator.cli.options import State
from wardround.cli import say
from wardround.errors import BadData

AFTER = {
    "mlflow": "`mlflow ui --backend-store-uri sqlite:///{out}/mlflow.db`", "tensorboard": "`tensorboard --logdir {out}`"
}  # fmt: skip


def export(
    study: Annotated[str, typer.Argument(metavar="ID", help="The study's name.")],
    state: State,
    to: Annotated[Literal["tensorboard", "mlflow"], typer.Option(help="The tool that shows the curves.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write into.")],
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write a study's learning curves for another tool: each site's metrics by round. Nothing is sent anywhere."""
    from coordinator.requests import ShowReport
    from coordinator.studies.curves import curves
    from coordinator.studies.metrics import metrics_of
    from coordinator.study_answers import StudyReport
    from fl_algorithms.tracking import to_mlflow, to_tensorboard
    from wardround.local import durable, outputs

    place = outputs.folder(out, force=force, keep=[state])
    report = ask(state, ShowReport(study=study), StudyReport)
    run = curves(report, metrics_of(report))
    if not run.series:
        raise BadData(
            f"no site has reported a number of study `{study}` yet",
            hint=f"`coordinator study status {study}` says how far it is",
        )
    durable.make_folder(place)
    for path in to_mlflow([run], place) if to == "mlflow" else to_tensorboard([run], place):
        print(path)
    say(f"{len(run.series)} curves; to see them: {AFTER[to].format(out=place)}")
