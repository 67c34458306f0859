"""Tensors that are uploaded or downloaded, as rows of a site's files: a ``TensorSpec`` and how many bytes it has."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from wardround.records.trainer import TensorRow
from wardround.signing.canonical import MAX_INTEGER
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

SPEC_FIELDS = {"bundle", "name", "dtype", "shape", "bytes"}
ENTRY_FIELDS = SPEC_FIELDS | {"encoding", "sha256"}


def specs_from(rows: Iterable[TensorRow]) -> tuple[TensorSpec, ...]:
    """The tensors that a trainer says are uploaded or downloaded. Raises BadData: no tensor can have such a form."""
    return tuple(TensorSpec(row.name, row.dtype, tuple(row.shape), row.bundle) for row in rows)


def spec_document(spec: TensorSpec) -> dict[str, Any]:
    """A tensor as one row of a file."""
    return {
        "bundle": spec.bundle, "name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.bytes,
    }  # fmt: skip


def spec_from_row(row: Any) -> TensorSpec:
    """The tensor of a row. Raises ValueError, BadData: it is none, or has not as many bytes as the row says."""
    _refuse_other_fields(row, SPEC_FIELDS)
    return _spec_from(row)


def tensor_rows(rows: Any) -> Any:
    """``rows`` of a consent's private tensors. Raises ValueError, TypeError, AttributeError: one is none."""
    for row in rows:
        texts, shape = [row.get(name) for name in ("name", "dtype")], row.get("shape")
        numbers = [*shape, row.get("bytes")] if isinstance(shape, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a tensor without its name or dtype")
        if not all(type(number) is int and 0 <= number <= MAX_INTEGER for number in numbers):
            raise ValueError("a tensor without its shape or bytes")
    return rows


def _spec_from(row: dict[str, Any]) -> TensorSpec:
    """The tensor that a row names, whatever else stands in it."""
    texts, shape, size = [row[name] for name in ("name", "dtype", "bundle")], row["shape"], row["bytes"]
    if not all(isinstance(text, str) for text in texts) or not isinstance(shape, list):
        raise ValueError("a tensor without its name, dtype, bundle or shape")
    if not all(type(length) is int for length in [*shape, size]):
        raise ValueError("a length that is no whole number")
    spec = TensorSpec(row["name"], row["dtype"], tuple(shape), row["bundle"])
    if spec.bytes != size:
        raise ValueError(f"a tensor of {spec.bytes} bytes with another number of bytes")
    return spec


def _specs(rows: Any) -> tuple[TensorSpec, ...]:
    return tuple(spec_from_row(row) for row in _as_list(rows))


def _manifest(rows: Any) -> Manifest:
    entries = []
    for row in _as_list(rows):
        _refuse_other_fields(row, ENTRY_FIELDS)
        if not isinstance(row["sha256"], str) or not isinstance(row["encoding"], str):
            raise ValueError("a tensor without its digest or encoding")
        entries.append(Entry(_spec_from(row), row["sha256"], row["encoding"]))
    return Manifest(tuple(entries))


def _as_list(rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise ValueError("no list of tensors")
    return rows


def _refuse_other_fields(row: Any, names: set[str]) -> None:
    if not isinstance(row, dict) or set(row) != names:
        raise ValueError(f"a tensor has the fields {', '.join(sorted(names))}")


Specs = Annotated[
    tuple[TensorSpec, ...],
    BeforeValidator(_specs),
    PlainSerializer(lambda specs: [spec_document(spec) for spec in specs]),
]
TensorManifest = Annotated[Manifest, BeforeValidator(_manifest), PlainSerializer(lambda manifest: manifest.document())]
