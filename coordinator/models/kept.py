"""Which models are kept here, by their manifests."""

import json
from typing import Any

from sqlalchemy.orm import Session

from coordinator.storage import tables
from wardround.tensors.manifests import Entry, Manifest, TensorSpec


def add_model(session: Session, manifest: Manifest, now_s: int) -> None:
    """Write down that a model is kept here, unless that is known."""
    digest = manifest.digest()
    if session.get(tables.Model, digest) is None:
        session.add(tables.Model(digest=digest, manifest=json.dumps(manifest.document()), made_s=now_s))
        session.flush()  # what refers to it is written after it


def manifest_of(session: Session, digest: str) -> Manifest:
    """The manifest of a model that is kept. Raises an error of any kind: what is kept of it is damaged."""
    row = session.get(tables.Model, digest)
    assert row is not None
    return manifest_from_document(json.loads(row.manifest))


def manifest_from_document(rows: list[dict[str, Any]]) -> Manifest:
    """What ``Manifest.document`` made."""
    return Manifest(
        tuple(
            Entry(TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), row["bundle"]), row["sha256"])
            for row in rows
        )
    )
