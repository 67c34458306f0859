"""The network of a site's exported model as a program that needs nothing of ours."""

from pathlib import Path

from fl_algorithms.engine.device import make_deterministic
from fl_algorithms.portable.card import MODEL_FILE
from fl_algorithms.portable.folder import add_program
from site_agent.trainer.data.sources import protected
from site_agent.trainer.rounds.installing import installed
from site_agent.trainer.rounds.tensorfiles import from_bytes
from site_agent.trainer.vault import models
from wardround.errors import UsageProblem
from wardround.records.trainer import Exported, WriteProgram
from wardround.tensors.files import TensorFile


def write_program(state: Path, request: WriteProgram) -> Exported:
    """Write a checkpoint's program into the folder that its export made.

    Raises:
        UsageProblem: there is no such checkpoint, or the folder holds no export of it.
        BadData: the checkpoint is damaged, or its network has no such text.
        NeedsPerson: ONNX is asked for, and what writes it is not installed.
        CannotWrite: the folder does not take it. NotPermitted: it is, or lies in, what is never written over.
    """
    vault, kept = models.checkpoint(state, request.study, request.checkpoint)
    kept.verify_model()
    folder, card = Path(request.out), kept.card
    if not (folder / MODEL_FILE).is_file() or _digest(folder / MODEL_FILE) != card.model_digest:
        raise UsageProblem(
            f"{folder} holds no export of checkpoint `{card.kind}` of study `{card.study}`",
            hint="another round may have ended since: `site-agent models export` again, with --force",
        )
    study = installed(vault.document()).at(card.site, card.network)
    make_deterministic(study.study.threads)
    title = f"Study {card.study}, revision {card.revision}, site {card.site}: {card.kind} of round {card.round}"
    tensors = from_bytes(kept.model.read_bytes())
    files = add_program(folder, study, tensors, title, onnx=request.onnx, force=request.force, keep=protected(state))
    return Exported(files=[str(file) for file in files])


def _digest(path: Path) -> str:
    with TensorFile(path) as file:
        return file.manifest().digest()
