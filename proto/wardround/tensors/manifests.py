"""Tensors as names, shapes and bytes: manifests, digests, and safetensors files that are read in place.

No torch, and no tensor is ever held whole: a model of 1 GiB is hashed, sent, received and averaged in blocks.

A safetensors file whose tensors lie in its manifest's order is a header and then exactly the manifest's payload. So a
download or an upload is written straight into its final file, at ``header + offset``.

In a file, a tensor of the bundle "model" has its own name, and one of another bundle is "BUNDLE/NAME".
"""

import hashlib
import json
import os
import re
import stat
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.errors import BadData
from wardround.signing import canonical

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODEL = "model"  # the bundle that most methods share
CHUNK = 512 * 1024
Data = bytes  # where a class has a property of that name
MAX_HEADER = 1024 * 1024
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_BUNDLE = re.compile(r"[a-z0-9_]{1,40}")
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
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


def file_header(specs: Iterable[TensorSpec], note: dict[str, str] | None = None) -> bytes:
    """The safetensors header of a file whose data is the specs' payload; ``note`` becomes its metadata.

    Raises:
        BadData: it would be longer than what ``TensorFile`` reads.
    """
    header: dict[str, object] = {}
    if note:
        header["__metadata__"] = note
    offset = 0
    for spec in specs:
        end = offset + spec.bytes
        header[spec.key] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise BadData(f"the header of {len(header)} tensors is {len(text)} bytes, at most {MAX_HEADER} are read")
    return struct.pack("<Q", len(text)) + text


class TensorFile:
    """A safetensors file, opened and checked but not read: blocks come by ``pread``.

    ``specs`` are in the order of the data, which is the order of the payload.

    Raises:
        BadData: not a regular file, not safetensors, a header over 1 MiB, holes or overlaps, names of another form.
            Values are not looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold us
        except OSError as error:
            raise BadData(f"{path}: {error.strerror}") from error
        except ValueError as error:  # the system has no such name
            raise BadData(f"{str(path)!r}: a path cannot hold a null character") from error
        try:
            self._data, self.specs, self.note = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._offsets: dict[str, int] = {}
        offset = self._data
        for spec in self.specs:
            self._offsets[spec.key] = offset
            offset += spec.bytes

    def _read_header(self) -> tuple[int, tuple[TensorSpec, ...], dict[str, str]]:
        state = os.fstat(self._descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise BadData(f"{self.path}: not a regular file")
        size = state.st_size
        start = os.pread(self._descriptor, 8, 0)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        if length > MAX_HEADER or 8 + length > size:
            raise BadData(f"{self.path}: not a safetensors file, or cut short")
        try:
            header = json.loads(os.pread(self._descriptor, length, 8), object_pairs_hook=_no_duplicates)
            note = header.pop("__metadata__", {})
            if not all(isinstance(text, str) for text in note.values()):
                raise TypeError
            rows = sorted((_row(key, row) for key, row in header.items()), key=lambda row: row[:2])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise BadData(f"{self.path}: not a safetensors file (its header cannot be read)") from None
        specs, expected = [], 0
        for begin, end, key, dtype, shape in rows:
            bundle, _, name = key.rpartition("/")
            try:
                spec = TensorSpec(name, dtype, shape, bundle or MODEL)
            except BadData as error:
                raise BadData(f"{self.path}: {error.message}", code=error.code) from None
            if spec.key != key:  # "/x" and "model/x" would be other spellings of "x"
                raise BadData(f"{self.path}: tensor name {key[:60]!r} is written `{spec.key}`", code="MANIFEST_NAMES")
            if begin != expected or end - begin != spec.bytes:
                raise BadData(f"{self.path}: `{spec.key}` does not lie where its shape says")
            specs.append(spec)
            expected = end
        if 8 + length + expected != size:
            raise BadData(f"{self.path}: {size} bytes, its header says {8 + length + expected}")
        return 8 + length, tuple(specs), note

    @property
    def bytes(self) -> int:
        """Of the payload."""
        return sum(spec.bytes for spec in self.specs)

    def chunks(self, offset: int = 0, size: int = CHUNK) -> Iterator[tuple[int, Data]]:
        """The payload from ``offset`` on, as (offset, bytes), at most ``size`` bytes each."""
        total = self.bytes
        while offset < total:
            data = os.pread(self._descriptor, min(size, total - offset), self._data + offset)
            if not data:
                raise BadData(f"{self.path}: shorter than when it was opened")
            yield offset, data
            offset += len(data)

    def block(self, key: str, start: int, count: int) -> "NDArray[np.float32]":
        """``count`` float32 elements of one tensor from element ``start`` on, flat, a copy."""
        import numpy  # what has only names and shapes of tensors starts without it

        return numpy.frombuffer(self.read(self._offsets[key] + start * 4, count * 4), dtype="<f4")

    def place(self, key: str) -> int:
        """The byte of the file at which a tensor begins."""
        return self._offsets[key]

    def read(self, offset: int, count: int) -> Data:
        """``count`` bytes from byte ``offset`` of the file on, its header counted too."""
        data = os.pread(self._descriptor, count, offset)
        if len(data) != count:
            raise BadData(f"{self.path}: shorter than when it was opened")
        return data

    def manifest(self) -> Manifest:
        """Hash the whole payload."""
        hasher = PayloadHasher(self.specs)
        for _, data in self.chunks():
            hasher.update(data)
        return hasher.manifest()

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ViewFile:
    """The payload of a ``view``, read in place: the tensors ``sources`` of ``file``, one after the other."""

    def __init__(self, file: TensorFile, sources: Sequence[str]) -> None:
        sizes = {spec.key: spec.bytes for spec in file.specs}
        self._file = file
        self._starts: list[int] = []  # in the payload, of each run of bytes that lie together in the file
        self._places: list[int] = []  # of each run, in the file
        self.bytes = 0
        end = -1
        for key in sources:
            if not sizes[key]:
                continue
            if file.place(key) != end:
                self._starts.append(self.bytes)
                self._places.append(file.place(key))
            end = file.place(key) + sizes[key]
            self.bytes += sizes[key]

    def chunks(self, offset: int = 0, size: int = CHUNK) -> Iterator[tuple[int, Data]]:
        """The payload from ``offset`` on, as (offset, bytes), each of ``size`` bytes but the last."""
        while offset < self.bytes:
            data = b"".join(self._pieces(offset, min(offset + size, self.bytes)))
            yield offset, data
            offset += len(data)

    def _pieces(self, offset: int, stop: int) -> Iterator[Data]:
        run = bisect_right(self._starts, offset) - 1
        while offset < stop:
            ends = [*self._starts[run + 1 : run + 2], self.bytes]
            count = min(stop, ends[0]) - offset
            yield self._file.read(self._places[run] + offset - self._starts[run], count)
            offset, run = offset + count, run + 1


def _row(key: str, row: dict[str, Any]) -> tuple[int, int, str, str, tuple[int, ...]]:
    """One tensor of a header: begin, end, key, dtype, shape. Raises KeyError, TypeError or ValueError: not one.

    Sorting by begin and end alone keeps empty tensors in the header's order.
    """
    begin, end = row["data_offsets"]
    dtype, shape = row["dtype"], row["shape"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError
    if any(type(number) is not int for number in (begin, end, *shape)):
        raise TypeError
    return begin, end, key, dtype, tuple(shape)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value
