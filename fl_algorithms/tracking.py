"""Learning curves for the tools that people look at curves with: MLflow's file, and TensorBoard's event files.

The lab's runs and a coordinator's studies are written the same way, into a folder. No server is asked, nothing is sent,
and no torch is needed.
"""

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.errors import CannotWrite, NeedsPerson

LONGEST = 500  # of a parameter's text in MLflow
BATCH = 1000  # metrics in one call, at most
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


@dataclass(frozen=True)
class Exported:
    """One run.

    Attributes:
        group: the row of the suite, or the study's method.
        settings: "training.learning_rate" -> as text.
        series: name -> (step, value), the learning curves; a score alone is of the last step.
    """

    group: str
    seed: int
    settings: dict[str, str]
    series: dict[str, list[tuple[int, float]]]

    @property
    def name(self) -> str:
        return f"{self.group}, seed {self.seed}"


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A study's settings, each with its whole key."""
    found: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)[:LONGEST]
    return found


def to_mlflow(runs: Sequence[Exported], out: Path) -> list[Path]:
    """Write all of them into ``out``/mlflow.db.

    Raises:
        NeedsPerson: MLflow is not installed.
        CannotWrite: there is such a file already.
    """
    os.environ.update(NO_TELEMETRY)  # before the import, which would otherwise report its use
    try:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise NeedsPerson(
            "an export to MLflow needs mlflow, which is not installed", hint="`pip install 'wardround[mlflow]'`"
        ) from None
    path = (out / "mlflow.db").absolute()
    if path.exists():
        raise CannotWrite(f"{path} exists already; MLflow would have every run twice", hint="another --out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what MLflow uses of SQLAlchemy
        client = MlflowClient(tracking_uri=f"sqlite:///{path}")
        experiments: dict[str, str] = {}
        for run in runs:
            if run.group not in experiments:
                held = client.get_experiment_by_name(run.group)
                experiments[run.group] = (
                    client.create_experiment(run.group, artifact_location=(out / "artifacts").absolute().as_uri())
                    if held is None
                    else held.experiment_id
                )
            made = client.create_run(experiments[run.group], run_name=run.name, tags={"seed": str(run.seed)})
            now = int(time.time() * 1000)
            metrics = [
                Metric(name, value, now, step) for name, values in run.series.items() for step, value in values
            ]  # fmt: skip
            client.log_batch(made.info.run_id, params=[Param(*pair) for pair in run.settings.items()])
            for start in range(0, len(metrics), BATCH):
                client.log_batch(made.info.run_id, metrics=metrics[start : start + BATCH])
            client.set_terminated(made.info.run_id)
    return [path]


def to_tensorboard(runs: Sequence[Exported], out: Path) -> list[Path]:
    """Write an event file for each run into ``out``/GROUP/seed-SEED; the folders.

    Raises:
        NeedsPerson: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise NeedsPerson(
            "an export to TensorBoard needs tensorboard, which is not installed",
            hint="`pip install 'wardround[tensorboard]'`",
        ) from None
    made = []
    for run in runs:
        path = out / run.group / f"seed-{run.seed}"
        writer, now = EventFileWriter(str(path)), time.time()
        try:
            for name, values in run.series.items():
                for step, value in values:
                    point = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                    writer.add_event(Event(wall_time=now, step=step, summary=point))
            text = "\n\n".join(f"{key} = {value}" for key, value in run.settings.items())
            settings = Summary.Value(
                tag="settings/text_summary",
                metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
                tensor=TensorProto(
                    dtype="DT_STRING", string_val=[text.encode()],
                    tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
                ),
            )  # fmt: skip
            writer.add_event(Event(wall_time=now, step=0, summary=Summary(value=[settings])))
        finally:
            writer.close()
        made.append(path)
    return made
