"""Models as files that need nothing of ours: one of a lab's run, or a program beside weights that were exported."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch

from fl_algorithms.engine.weights import read
from fl_algorithms.lab import api, run_folder
from fl_algorithms.portable import card as cards
from fl_algorithms.portable.card import CARD_FILE, MODEL_FILE, PAGE_FILE, PREPROCESSING_FILE, STUDY_FILE
from fl_algorithms.portable.folder import add_program, own_scale
from fl_algorithms.study import ResolvedStudy, SiteStudy
from wardround import __version__
from wardround.errors import BadData, UsageProblem
from wardround.local import outputs
from wardround.records.study import StudyFile
from wardround.signing import canonical


def write_program(folder: Path, *, onnx: bool = False, force: bool = False) -> list[Path]:
    """Write the network of the model in ``folder`` as text beside it; and, where the study itself gives the scale of
    its numbers, that scale.

    Raises:
        BadData: the folder holds no exported model, its network has no text, or part of it stays at the sites.
        CannotWrite, NotPermitted: the folder does not take it.
    """
    card = _json(folder / CARD_FILE)
    study = ResolvedStudy(StudyFile.from_document(_json(folder / STUDY_FILE), STUDY_FILE), STUDY_FILE)
    own = study.at(card.get("site", ""), card.get("network", ""))
    tensors = dict(read(folder / MODEL_FILE).tensors)
    written = []
    scale = own_scale(own)
    if scale is not None and not (folder / PREPROCESSING_FILE).exists():
        outputs.write(folder / PREPROCESSING_FILE, _text({"inputs": scale, "outputs": {}}), force=force)
        written.append(folder / PREPROCESSING_FILE)
    title = f"Study {study.study.name}, the model of round {card.get('round', 0)}"
    return [*written, *add_program(folder, own, tensors, title, onnx=onnx, force=force)]


def export(
    run: Path, site: str, checkpoint: str, seed: int | None, out: Path, *, onnx: bool = False, force: bool = False
) -> list[Path]:
    """Write a checkpoint of a run that `fl-lab run --out` kept into the folder ``out``, new or empty unless ``force``.

    Raises:
        BadData: ``run`` is no such folder, or the network has no text; the weights are written before that is known.
        UsageProblem: it has no such site, checkpoint or seed.
        CannotWrite, NotPermitted: ``out`` does not take it.
    """
    outputs.folder(out, force=force, keep=[run])
    result = api.load(run)
    if not isinstance(result, api.Result):
        raise UsageProblem(f"{run} holds a comparison", hint="a run: what `fl-lab run --out` filled")
    tensors = result.state_dict(site, checkpoint, seed)
    record = next(made.record for made in result.runs if seed is None or made.record["seed"] == seed)
    kept = record["checkpoints"][site][checkpoint]
    own = result.study.at(site)
    inputs = _json(run_folder.seed_folder(run, record["seed"]) / run_folder.MODELS / site / run_folder.PREPROCESSING)
    document = result.study.changed(study={"seed": record["seed"]}).document()
    card = {"kind": checkpoint, "study": result.study.study.name, "site": site, "made": "in the lab",
            "seed": record["seed"], "wardround": __version__, "versions": record["versions"],
            "study_digest": record["study_digest"], "data_digest": record["data"].get(site, ""),
            **{key: kept[key] for key in ("round", "score", "metric", "split", "scores", "val_loss")}}  # fmt: skip
    files = {
        CARD_FILE: _text(card),
        STUDY_FILE: canonical.dumps(document),
        PREPROCESSING_FILE: _text({"inputs": inputs, "outputs": kept["fit"]}),
        PAGE_FILE: _page(own, card).encode(),
        MODEL_FILE: safetensors.torch.save(tensors),
    }
    written = outputs.fill(out, files, force=force, keep=[run])
    title = f"Study {own.study.name}, seed {record['seed']}, site {site}, {checkpoint}, in the lab"
    return [*written, *add_program(out, own, tensors, title, onnx=onnx, force=force)]


def _page(study: SiteStudy, card: dict[str, Any]) -> str:
    facts = {
        "study": study.study.name,
        "study's digest": card["study_digest"],
        "method": study.method.name,
        "architecture": study.model.name,
        "made": f"in the lab, by wardround {__version__}, seed {card['seed']}: no federation took part",
        "checkpoint": f"{card['kind']} of site {card['site']}, of round {card['round']} of {study.study.rounds}",
        "digest of the site's data": card["data_digest"],
        "computed on": ", ".join(f"{name} {value}" for name, value in sorted(card["versions"].items())),
    }
    scores = [{"metric": name, "on": card["split"], "value": value} for name, value in sorted(card["scores"].items())]
    took_part = [f"simulated in one process: {', '.join(study.study.sites)}"]
    return cards.page(f"{study.study.title or study.study.name}: a model of the lab", facts, scores, took_part)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint="the folder that `models export` made") from None
    except ValueError:
        raise BadData(f"{path}: not JSON", hint="the folder that `models export` made") from None
    if not isinstance(found, dict):
        raise BadData(f"{path}: no JSON object", hint="the folder that `models export` made")
    return found


def _text(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False).encode() + b"\n"
