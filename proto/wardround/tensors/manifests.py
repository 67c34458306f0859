"""Tensors as names, shapes and bytes: specs, manifests and their digests, and the hash of a payload.

No torch, and no tensor is ever held whole: a model of 1 GiB is hashed, sent, received and averaged in blocks.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from wardround.errors import BadData
from wardround.signing import canonical

if TYPE_CHECKING:
    pass

MODEL = "model"  # the bundle that most methods share
CHUNK = 512 * 1024
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_BUNDLE = re.compile(r"[a-z0-9_]{1,40}")
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values. ``dtype`` is safetensors' name for it, "F32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bundle: str = MODEL

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadData(f"tensor name {self.name[:60]!r} is not 1 to 200 of A-Z a-z 0-9 _ . -", code="MANIFEST_NAMES")
        if not _BUNDLE.fullmatch(self.bundle):
            raise BadData(f"bundle name {self.bundle[:60]!r} is not 1 to 40 of a-z 0-9 _", code="MANIFEST_NAMES")
        if self.dtype not in ITEM_BYTES:
            raise BadData(f"`{self.name}` has unknown dtype {self.dtype[:20]!r}", code="MANIFEST_DTYPE")
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape) or prod(self.shape) > 2**40:
            shown = list(self.shape[:MAX_DIMENSIONS])
            raise BadData(f"`{self.name}` has impossible shape {shown}", code="MANIFEST_SHAPE")

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """Its name in a safetensors file."""
        return self.name if self.bundle == MODEL else f"{self.bundle}/{self.name}"


@dataclass(frozen=True)
class Entry:
    """A tensor with the SHA-256 (hex) of its bytes."""

    spec: TensorSpec
    sha256: str
    encoding: str = "raw"

    def document(self) -> dict[str, object]:
        spec = self.spec
        return {
            "bundle": spec.bundle, "name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape),
            "encoding": self.encoding, "bytes": spec.bytes, "sha256": self.sha256,
        }  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """Tensors in the order in which their bytes come."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        keys = [entry.spec.key for entry in self.entries]
        if len(keys) > MAX_TENSORS:
            raise BadData(f"{len(keys)} tensors, at most {MAX_TENSORS} are taken", code="MANIFEST_NAMES")
        if len(set(keys)) != len(keys):
            twice = next(key for key, times in Counter(keys).items() if times > 1)
            raise BadData(f"tensor `{twice}` stands twice", code="MANIFEST_NAMES")

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(entry.spec for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.spec.bytes for entry in self.entries)

    def document(self) -> list[dict[str, object]]:
        """What the digest is over: one object a tensor, in order."""
        return [entry.document() for entry in self.entries]

    def digest(self) -> str:
        """SHA-256 of the canonical manifest, hex: the digest of a model or an update."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return canonical.digest(self.document())


def view(kept: Manifest, sources: Sequence[str], specs: Sequence[TensorSpec]) -> Manifest:
    """Tensors of ``kept``, picked and named anew: entry i is the tensor with key ``sources[i]`` under ``specs[i]``.

    Nothing is hashed or copied; ``ViewFile`` reads its payload out of the file that ``kept`` is the manifest of.

    Raises:
        BadData: ``kept`` has no such tensor, or one of another dtype or shape.
    """
    held = {entry.spec.key: entry for entry in kept.entries}
    entries = []
    for key, spec in zip(sources, specs, strict=True):
        found = held.get(key)
        if found is None:
            raise BadData(f"`{spec.key}` is to be `{key}`, which is not kept", code="MANIFEST_NAMES")
        if (found.spec.dtype, found.spec.shape) != (spec.dtype, spec.shape):
            raise BadData(
                f"`{spec.key}` is {spec.dtype} {list(spec.shape)}, and `{key}`, which it is to be, "
                f"{found.spec.dtype} {list(found.spec.shape)}",
                code="MANIFEST_SHAPE",
            )
        entries.append(Entry(spec, found.sha256, found.encoding))
    return Manifest(tuple(entries))


class PayloadHasher:
    """Hashes a payload as it passes, tensor by tensor, in whatever pieces it comes."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._done: list[Entry] = []
        self._hash = hashlib.sha256()
        self._left = self._specs[0].bytes if self._specs else 0
        self._skip_empty()

    def update(self, data: bytes | memoryview) -> None:
        if not memoryview(data).nbytes:
            return  # and an empty view of some shapes cannot be cast
        view = memoryview(data).cast("B")
        while view:
            if len(self._done) == len(self._specs):
                raise BadData("more bytes than the manifest says", code="PAYLOAD_INCOMPLETE")
            piece, view = view[: self._left], view[self._left :]
            self._hash.update(piece)
            self._left -= len(piece)
            if self._left == 0:
                self._finish_one()
                self._skip_empty()

    def manifest(self) -> Manifest:
        """What was hashed.

        Raises:
            BadData: bytes are missing.
        """
        if len(self._done) != len(self._specs):
            raise BadData(f"the payload ends inside `{self._specs[len(self._done)].key}`", code="PAYLOAD_INCOMPLETE")
        return Manifest(tuple(self._done))

    def _finish_one(self) -> None:
        self._done.append(Entry(self._specs[len(self._done)], self._hash.hexdigest()))
        self._hash = hashlib.sha256()
        if len(self._done) < len(self._specs):
            self._left = self._specs[len(self._done)].bytes

    def _skip_empty(self) -> None:
        while len(self._done) < len(self._specs) and self._left == 0:
            self._finish_one()
