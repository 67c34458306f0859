"""The checkpoints of a study, for people: which there are, and a copy of one in a folder."""

from pathlib import Path

from site_agent.trainer.data.sources import protected
from site_agent.trainer.vault.cards import CARD_FILE, MODEL_FILE, PREPROCESSING_FILE, CheckpointFile, read
from site_agent.trainer.vault.states import Vault, study_folder
from wardround.errors import UsageProblem
from wardround.local import durable, outputs
from wardround.records.trainer import CHECKPOINT_KINDS, Checkpoints, Exported


def newest(state: Path, study: str) -> Vault:
    """The newest revision of ``study`` that has a checkpoint.

    Raises:
        UsageProblem: there is none yet.
    """
    folder = study_folder(state, study)
    revisions = sorted((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), reverse=True)
    for revision in revisions:
        if any((folder / str(revision) / "checkpoints" / kind / MODEL_FILE).exists() for kind in CHECKPOINT_KINDS):
            return Vault(state, study, revision)
    raise UsageProblem(
        f"study `{study}` has no models here yet",
        hint="the first ones are kept in its second round; `site-agent status`",
    )


def checkpoint(state: Path, study: str, kind: str) -> tuple[Vault, CheckpointFile]:
    """The checkpoint of ``kind`` in the newest revision that has any.

    Raises:
        UsageProblem: there is none of that kind; the hint says which there are.
        BadData: it is damaged.
    """
    vault = newest(state, study)
    by_kind: dict[str, CheckpointFile] = {kept.folder.name: kept for kept in vault.checkpoints()}
    if kind not in by_kind:
        hint = f"it has: {', '.join(by_kind)}"
        if kind == "selected":
            hint += "; `--checkpoint` says which. A site selects one when a study that asks for it ends"
        raise UsageProblem(f"study `{study}` has no checkpoint `{kind[:40]}`", hint=hint)
    return vault, by_kind[kind]


def listing(state: Path, study: str) -> Checkpoints:
    """What ``models list`` prints. Raises as ``newest``."""
    return Checkpoints(checkpoints=[kept.row() for kept in newest(state, study).checkpoints()])


def export(state: Path, study: str, kind: str, out: Path, *, force: bool = False) -> Exported:
    """Copy a checkpoint's model, card and preprocessing into the folder ``out``, new or empty unless ``force``.

    Raises:
        UsageProblem: there is no such checkpoint.
        BadData: it is damaged.
        CannotWrite: ``out`` does not take it. NotPermitted: it is, or lies in, what is never written over.
    """
    outputs.folder(out, force=force, keep=protected(state))
    _, kept = checkpoint(state, study, kind)
    kept.verify_model()
    durable.make_folder(out)
    files = []
    for name in (MODEL_FILE, CARD_FILE, PREPROCESSING_FILE):
        outputs.write(out / name, read(kept.folder / name), force=force, keep=protected(state))
        files.append(str(out / name))
    return Exported(files=files)
