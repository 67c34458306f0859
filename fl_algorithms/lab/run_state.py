"""A run between two rounds as one safetensors file: its tensors, and the rest as JSON in the file's metadata.

One file, so that whatever stops the process it is the state after some whole round.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fl_algorithms.engine.session import Checkpoint, SessionState
from fl_algorithms.lab.federation import RunState
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.limits import Account
from wardround.errors import BadData

FORMAT = 1
AGAIN = "remove that file: the run begins again at its first round"


def to_document(state: RunState, note: Mapping[str, Any]) -> bytes:
    """The file. ``note``: what whoever reads it wants to know, plain JSON."""
    tensors: dict[str, Tensor] = {f"model|{name}": tensor for name, tensor in state.model.items()}
    best_is_model = state.best_model is state.model or state.best.round is None  # the initial one is never asked for
    if not best_is_model:
        tensors |= {f"best|{name}": tensor for name, tensor in state.best_model.items()}
    for site, session in state.sites.items():
        tensors |= {f"site|{site}|{name}": tensor for name, tensor in session.tensors.items()}
    kept: dict[str, dict[str, Any]] = {site: {} for site in state.kept}
    for site, kinds in state.kept.items():
        for kind, checkpoint in kinds.items():
            # safetensors takes no tensors that share memory, as those of the latest and the best checkpoint may
            tensors |= {f"kept|{site}|{kind}|{name}": tensor.clone() for name, tensor in checkpoint.tensors.items()}
            kept[site][kind] = card(checkpoint)
    meta = {
        "format": FORMAT,
        "round": state.round,
        "best": state.best.document(),
        "best_is_model": best_is_model,
        "accounts": [account.document() for account in state.accounts],
        "kept": kept,
        "sites": {site: session.meta for site, session in state.sites.items()},
        "note": dict(note),
    }
    return safetensors.torch.save(tensors, {"run": json.dumps(meta)})


def card(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint without its tensors, as plain JSON."""
    fields = {name: getattr(checkpoint, name) for name in ("round", "score", "metric", "split", "val_loss")}
    return fields | {"scores": dict(checkpoint.scores), "fit": dict(checkpoint.fit)}


def checkpoint_from(kind: str, document: Mapping[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """What ``card`` made, with its tensors."""
    return Checkpoint(kind=kind, tensors=tensors, **document)


def from_document(path: Path) -> tuple[RunState, dict[str, Any]]:
    """The state, and its note.

    Raises:
        BadData: the file is none that ``to_document`` made.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {})["run"])
            if meta["format"] != FORMAT:
                raise BadData(f"{path} is of another version", hint=AGAIN)
            parts: dict[str, dict[str, Tensor]] = {}
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                part, _, own = name.rpartition("|")
                parts.setdefault(part, {})[own] = file.get_tensor(name)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError):
        raise BadData(f"{path}: not the state of a run, or damaged", hint=AGAIN) from None
    model = parts.get("model", {})
    state = RunState(
        meta["round"],
        model,
        BestGlobal.from_document(meta["best"]),
        model if meta["best_is_model"] else parts.get("best", {}),
        tuple(Account.from_document(account) for account in meta["accounts"]),
        {
            site: {
                kind: checkpoint_from(kind, document, parts.get(f"kept|{site}|{kind}", {}))
                for kind, document in kinds.items()
            }
            for site, kinds in meta["kept"].items()
        },
        {site: SessionState(parts.get(f"site|{site}", {}), own) for site, own in meta["sites"].items()},
    )
    return state, meta["note"]
