"""The folder of an exported model: which files it has, and its program put beside the weights.

model.safetensors    the weights
card.json            where the model comes from and how good it is; MODEL_CARD.md says the same for people
study.json           the resolved study: architecture, columns and their meaning, settings
preprocessing.json   how rows are scaled and outputs read, where that is known
model.py             the network in plain PyTorch
predict.py           from a table to predictions, for tasks of tables
model.onnx           the network and its weights, if asked for
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.beside import members_of
from fl_algorithms.engine.partition import all_tensors, build, task_of
from fl_algorithms.engine.selection import Model, restored
from fl_algorithms.portable import predict
from fl_algorithms.portable.card import MODEL_FILE, ONNX_FILE, PREDICT_FILE, PREPROCESSING_FILE, PROGRAM_FILE
from fl_algorithms.portable.program import HINT, captured, onnx_bytes, source
from fl_algorithms.rows import COLUMNS
from fl_algorithms.settings.tabular import TableSettings
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.tables.encoding import scale_of
from wardround.errors import BadData
from wardround.local import outputs

TASKS = frozenset({"tabular", "ordinal", "regression", "multilabel", "survival"})  # that predict.py knows
UNPLAIN = re.compile(r"[^A-Za-z0-9 .,:_-]")


def add_program(
    folder: Path,
    study: SiteStudy,
    tensors: Mapping[str, Tensor],
    title: str,
    *,
    onnx: bool = False,
    force: bool = False,
    keep: Sequence[Path] = (),
) -> list[Path]:
    """Write the program of a model whose weights are in ``folder``. Returns the files.

    Args:
        study: as the site trains it whose model it is; of the coordinator's, ``at("")`` or that of a site.
        tensors: all that the folder's weights hold.
        title: which study's which model.
        onnx: write ``model.onnx`` too.
        force, keep: as for ``outputs.write``.

    Raises:
        BadData: tensors that its predictions need are not among ``tensors``, or its network has no such text.
        CannotWrite, NotPermitted: the folder does not take it.
    """
    task = task_of(study)
    model, own = _model(study, tensors)
    graph = captured(model, task.input_shape)
    if missing := sorted(graph.used - own):
        raise BadData(
            f"its predictions need {len(missing)} tensors that are not in {MODEL_FILE}: `{missing[0][:80]}` is the "
            "first. They stay at each site",
            hint="a whole model is exported at a site: `site-agent models export`",
        )
    tables = _predicts(study) and (folder / PREPROCESSING_FILE).exists()
    text = source(graph, tensors, UNPLAIN.sub(" ", title), tables=tables)
    files = {PROGRAM_FILE: text.encode()}
    if tables:
        files[PREDICT_FILE] = Path(predict.__file__).read_bytes()
    if onnx:
        files[ONNX_FILE] = onnx_bytes(graph, task.input_shape)
    return outputs.fill(folder, files, force=force, keep=keep)


def own_scale(study: SiteStudy) -> dict[str, Any] | None:
    """How rows are scaled, of a study of tables that says so itself; None where each site's own statistics do."""
    settings = study.task.settings
    if not _predicts(study) or not isinstance(settings, TableSettings):
        return None
    return scale_of(settings).document() if settings.one_scale and not settings.missing.indicators else None


def _predicts(study: SiteStudy) -> bool:
    """Whether ``predict.py`` knows the study's task: one of our own, of tables."""
    return study.task.row.gives == COLUMNS and not study.task.row.reads and study.task.name in TASKS


def _model(study: SiteStudy, tensors: Mapping[str, Tensor]) -> tuple[Model, set[str]]:
    """The model of the tensors, and their names; what they lack has the values that it is built with."""
    task = task_of(study)
    if members_of(tensors):
        return restored(study, task, tensors), set(tensors)
    drawn = all_tensors(build(study, task, algorithm_of(study), site=""))
    return restored(study, task, dict(_filled(drawn, tensors))), set(tensors)


def _filled(drawn: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in drawn.items():
        found = tensors.get(name)
        if found is not None and (found.shape != tensor.shape or found.dtype != tensor.dtype):
            raise BadData(f"`{name[:80]}` is not of the shape that the study's network has", hint=HINT)
        yield name, tensor.clone() if found is None else found
