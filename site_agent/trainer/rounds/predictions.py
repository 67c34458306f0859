"""What a site's model says of new patients, in files: a table of classes, or a folder of masks."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_algorithms.engine.device import make_deterministic
from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.selection import Model, Together, restored
from fl_algorithms.rows import COLUMNS, FILES, IMAGES, MASKS
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import Inputs, Task
from fl_algorithms.tasks.images.reading import Origin
from fl_algorithms.tasks.images.rows import ImageRows
from fl_algorithms.tasks.images.segmentation import SegmentationTask
from fl_algorithms.tasks.tables.table import read_table
from site_agent.trainer.data import layouts
from site_agent.trainer.data.sources import protected
from site_agent.trainer.rounds.installing import installed
from site_agent.trainer.rounds.tensorfiles import from_bytes
from site_agent.trainer.vault import models
from wardround.errors import BadData, UsageProblem
from wardround.local import durable, outputs
from wardround.records.trainer import Predict, Predicted

FORMS = {COLUMNS: ("table",), IMAGES: ("images", "arrays"), MASKS: ("images", "arrays"), FILES: ("files",)}
BYTE = 255


Tell = Callable[[int, int], object]


def predict(state: Path, request: Predict, tell: Tell = lambda done, of: None) -> Predicted:
    """Write what a checkpoint says of new rows or images.

    Args:
        tell: called with how many rows or images are done, and of how many.

    Raises:
        UsageProblem: there is no such checkpoint, or ``out`` is no place for what comes of it.
        BadData: the checkpoint is damaged, or the rows or images are not what the study needs.
        CannotWrite: ``out`` does not take it. NotPermitted: it is, or lies in, what is never written over.
    """
    vault, kept = models.checkpoint(state, request.study, request.checkpoint)
    kept.verify_model()
    study = installed(vault.document()).at(kept.card.site, kept.card.network)
    given = {form: Path(path) for form in layouts.PREDICTABLE if (path := getattr(request, form))}
    out = Path(request.out)
    path = rows_for(study, given, out, force=request.force, keep=protected(state))
    make_deterministic(study.study.threads)
    task = task_of(study)
    fitted = kept.preprocessing()
    ids = ids_in(path, request.id, is_table="table" in given)
    x, names = task.read_new(path, fitted["inputs"])
    model = restored(study, task, from_bytes(kept.model.read_bytes()))
    notes = write(model, task, x, names, out, fitted["outputs"], force=request.force, ids=ids, tell=tell)
    return Predicted(rows=len(names), out=str(out), notes=list(notes))


@dataclass(frozen=True)
class Ids:
    """A column of the table that is predicted from: its name, and what stands there in the row of each line."""

    column: str
    by_line: Mapping[int, str]


def ids_in(path: Path, column: str, *, is_table: bool) -> Ids | None:
    """What is written beside each prediction; None where no column was named.

    Raises:
        UsageProblem: it is no table. BadData: there is no such column.
    """
    if not column:
        return None
    if not is_table:
        raise UsageProblem("`--id` names a column of a table; a prediction for an image has the image's name")
    table = read_table(path, [column])
    return Ids(column, dict(zip(table.lines, table.columns[column], strict=True)))


def rows_for(
    study: ResolvedStudy, given: Mapping[str, Path], out: Path, *, force: bool = False, keep: Sequence[Path] = ()
) -> Path:
    """What is to be predicted, if it is of the study's kind and ``out`` is a place for what comes of it.

    Args:
        force: replace what is at ``out``.
        keep: what is never written onto; what is predicted from is neither.

    Raises:
        UsageProblem: it is not.
        CannotWrite, NotPermitted: ``out`` is there already, or is one of ``keep``; see ``wardround.local.outputs``.
    """
    row = study.task.row
    gives, fitting = row.gives, FORMS[row.reads or row.gives]
    if len(given) != 1 or not given.keys() <= set(fitting):
        named = " and ".join(map(layouts.option, given)) or "nothing"
        raise UsageProblem(
            f"study `{study.study.name}` predicts from {' or '.join(map(layouts.option, fitting))}, found {named}"
        )
    [(form, path)] = given.items()
    if form == "images" and not path.is_dir():
        raise UsageProblem(f"{path}: not a folder", hint="one .npz file of images is given as `--arrays FILE.npz`")
    if form == "arrays" and path.suffix.lower() != ".npz":
        raise UsageProblem(f"{path}: not a .npz file by its name", hint="a folder is given as `--images DIR`")
    if form == "images" and out.resolve().is_relative_to(path.resolve()):
        raise UsageProblem(f"{out} lies among the images", hint="write the predictions elsewhere")
    if out.exists() and path.exists() and out.samefile(path):
        what = {"table": "table", "files": "file of new rows"}.get(form, "file of images")
        raise UsageProblem(f"{out} is the {what} itself", hint="give the predictions a file of their own")
    (outputs.folder if gives == MASKS else outputs.file)(out, force=force, keep=[*keep, path])
    return path


def write(
    model: Model,
    task: Task,
    x: Inputs,
    names: Sequence[int | str],
    out: Path,
    fit: Mapping[str, object],
    *,
    force: bool = False,
    ids: Ids | None = None,
    tell: Tell = lambda done, of: None,
) -> tuple[str, ...]:
    """One row of ``out`` (CSV) for each row or image, or one mask in the folder ``out`` for each image.

    A row has its line, or its image's name, and what the task predicts: the class and each probability, a number, or
    survival at each horizon. Sentences about all of them are returned: which threshold, and where it is from. A mask
    has the study's number of the likeliest class at each pixel of its image: NAME.png, of 8 or 16 bit; of a volume
    NAME.npz with the array ``mask``; of a NIfTI file or a DICOM series NAME.nii.gz, which lies where its image does.

    Args:
        fit: what was fitted to the model's outputs at this site.
        ids: stand beside the line of each row.
        tell: as ``predict``.

    Raises:
        BadData: two images would have the same mask's name.
        CannotWrite: ``out`` does not take it.
    """
    if isinstance(task, SegmentationTask):
        _write_masks(model, task, x, names, out, force, tell)
        return ()
    predictions = task.predictions(model.logits(x, _counted(model, len(names), tell)), fit)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    first = "line" if isinstance(x, torch.Tensor) else "image" if isinstance(x, ImageRows) else "row"
    beside = [outputs.inert(ids.column)] if ids is not None else []
    writer.writerow([first, *beside, *map(outputs.inert, predictions.header)])  # classes are as a study names them
    for name, row in zip(names, predictions.rows, strict=True):
        cells = [outputs.inert(cell) if isinstance(cell, str) else f"{cell:.6f}" for cell in row]
        own = [outputs.inert(ids.by_line[int(name)])] if ids is not None else []
        writer.writerow([outputs.inert(str(name)), *own, *cells])
    outputs.write(out, text.getvalue().encode(), force=force)
    return predictions.notes


def _counted(model: Model, rows: int, tell: Tell) -> Callable[[int], None]:
    """Adds up the rows of each pass, over all models that answer together."""
    total, done = rows * (len(model.members) if isinstance(model, Together) else 1), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        tell(done, total)

    return count


def _write_masks(
    model: Model,
    task: SegmentationTask,
    x: Inputs,
    names: Sequence[int | str],
    out: Path,
    force: bool,
    tell: Tell,
) -> None:
    from fl_algorithms.tasks.images.files import stem
    from fl_algorithms.tasks.images.volumes.patches import PatchRows

    assert isinstance(x, ImageRows | PatchRows)
    stems = [stem(str(name)) for name in names]
    if len(set(stems)) < len(stems):
        twice = next(name for name in stems if stems.count(name) > 1)
        raise BadData(f"{twice}: two images have this name but for the ending", hint="rename one")
    values = task.settings.mask_values
    numbers = np.array(values, dtype=np.uint8 if max(values) <= BYTE else np.uint16)
    for done, (name, (classes, origin)) in enumerate(zip(stems, task.masks(x, model.logits), strict=True), 1):
        _write_mask(out, name, numbers[classes], origin, force)
        tell(done, len(stems))


def _write_mask(out: Path, name: str, mask: NDArray[Any], origin: Origin, force: bool) -> None:
    """``origin``: of its image."""
    from PIL import Image

    from fl_algorithms.tasks.images.nifti import packed_mask

    packed, ending = io.BytesIO(), ".png" if mask.ndim == 2 else ".npz"
    if origin.places is not None and origin.affine is not None:
        ending = ".nii.gz"
        packed.write(packed_mask(mask if mask.ndim == 3 else mask[None], origin.places, origin.affine))
    elif ending == ".png":
        Image.fromarray(mask).save(packed, "PNG")
    else:
        np.savez_compressed(packed, mask=mask)
    path = out / f"{name}{ending}"
    durable.make_folder(path.parent)
    outputs.write(path, packed.getbuffer(), force=force)
