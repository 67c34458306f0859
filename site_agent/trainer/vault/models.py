"""The checkpoints of a study, for people: which there are, and a copy of one in a folder."""

from pathlib import Path

from fl_algorithms.portable import card as cards
from fl_algorithms.portable.card import PAGE_FILE, STUDY_FILE
from site_agent.trainer.data.sources import protected
from site_agent.trainer.vault.cards import CARD_FILE, MODEL_FILE, PREPROCESSING_FILE, Card, CheckpointFile
from site_agent.trainer.vault.states import Vault, study_folder
from wardround.errors import UsageProblem
from wardround.local import outputs
from wardround.records.study import StudyFile
from wardround.records.trainer import CHECKPOINT_KINDS, Checkpoints, Exported
from wardround.signing import canonical


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
    """Copy a checkpoint's model, card, study and preprocessing into the folder ``out``, new or empty unless ``force``,
    and the card as a page for people.

    Raises:
        UsageProblem: there is no such checkpoint.
        BadData: it is damaged, or one of its files is not the one that was written with the others.
        CannotWrite: ``out`` does not take it. NotPermitted: it is, or lies in, what is never written over.
    """
    outputs.folder(out, force=force, keep=protected(state))
    vault, kept = checkpoint(state, study, kind)
    model, document = kept.model_data(), vault.document()
    files = {CARD_FILE: kept.card.to_text().encode() + b"\n"}  # the card inside the model, which counts
    files[PREPROCESSING_FILE] = kept.preprocessing_data()
    files[STUDY_FILE] = canonical.dumps(document)
    files[PAGE_FILE] = page(kept.card, StudyFile.from_document(document)).encode()
    files[MODEL_FILE] = model
    return Exported(files=[str(file) for file in outputs.fill(out, files, force=force, keep=protected(state))])


def page(card: Card, study: StudyFile) -> str:
    """The card of a site's checkpoint, for people."""
    network = f", network {card.network}" if card.network else ""
    facts = {
        "study": f"{card.study}, revision {card.revision}" + (f", {study.study.title}" if study.study.title else ""),
        "study's digest": card.study_digest,
        "method": study.algorithm.name,
        "architecture": study.model.name + network,
        "kept at site": card.site,
        "checkpoint": f"{card.kind}, of round {card.round} of {study.study.rounds}",
        "why this one": card.why,
        "model's digest": card.model_digest,
        "digest of the site's data": card.data_digest,
        "made": f"{card.created}, by wardround {card.wardround} with torch {card.torch}",
        "computed on": f"{card.device}, {card.threads} threads, {card.instruction_set}",
    }
    scores = [{"metric": name, "on": card.split, "value": value} for name, value in sorted(card.scores.items())]
    scores.append({"metric": "val_loss", "on": "validation", "value": card.val_loss})
    alone = card.kind == "alone"
    participation = cards.took_part(card.round, card.contributors, card.capped, card.left_out, study.study.evaluators)
    return cards.page(
        f"{study.study.title or card.study}: a model of site {card.site}",
        facts,
        scores,
        [f"{card.site}: trained beside the federation, on its own rows alone"] if alone else participation,
        limits=(
            f"Scores are of rows of {card.site} alone, of its {card.split} part.",
            "Validation rows chose the round of this model, so its loss on them is a little too low.",
            *study.bounds(),
        ),
    )
