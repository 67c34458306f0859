"""Checkpoints as a site's trainer keeps them, of a model of two tensors."""

import hashlib

import torch

from site_agent.trainer.rounds.tensorfiles import manifest_of, payload, specs_of
from site_agent.trainer.vault.cards import Card
from site_agent.trainer.vault.states import Vault

DIGEST = "ab" * 32


def card(number: int, model_digest: str, preprocessing: bytes, kind: str = "latest") -> Card:
    return Card(
        study="small", revision=1, study_digest=DIGEST, site="north", kind=kind, round=number, score=0.5,
        metric="accuracy", split="test", scores={"accuracy": 0.5}, val_loss=None, model_digest=model_digest,
        data_digest=DIGEST, created="2026-03-01T09:00:00+00:00", wardround="0.1", torch="2", device="cpu", threads=1,
        instruction_set="AVX2", preprocessing_sha256=hashlib.sha256(preprocessing).hexdigest(),
    )  # fmt: skip


def keep_model(vault: Vault, number: int, kind: str = "latest", preprocessing: bytes = b'{"mean": ["0.5"]}') -> None:
    model = {"w": torch.full((2,), float(number)), "count": torch.tensor(number)}
    specs = specs_of(model)
    written = card(number, manifest_of(model, specs).digest(), preprocessing, kind)
    vault.keep_checkpoint(written, specs, payload(model, specs), preprocessing)
