"""Safetensors files that are read in place: opened and checked from the header alone, then block by block.

A safetensors file whose tensors lie in its manifest's order is a header and then exactly the manifest's payload. So a
download or an upload is written straight into its final file, at ``header + offset``.

In a file, a tensor of the bundle "model" has its own name, and one of another bundle is "BUNDLE/NAME".
"""

import json
import os
import stat
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.errors import BadData
from wardround.tensors.manifests import CHUNK, MODEL, Manifest, PayloadHasher, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Data = bytes  # where a class has a property of that name
MAX_HEADER = 1024 * 1024
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip


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
        BadData: not a regular file, not safetensors, a header over 1 MiB, holes or overlaps, names of another form; or
            the disk does not give it, also when it is read later. Values are not looked at.
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
        self._dtypes = {spec.key: spec.dtype for spec in self.specs}
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
        start = self._pread(8, 0)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        if length > MAX_HEADER or 8 + length > size:
            raise BadData(f"{self.path}: not a safetensors file, or cut short")
        try:
            header = json.loads(self._pread(length, 8), object_pairs_hook=_no_duplicates)
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
        """The payload from ``offset`` on, as (offset, bytes), at most ``size`` bytes each.

        Each but the last ends at a multiple of ``size`` in the file: what is read, and written elsewhere in a file of
        the same header, lies in whole blocks, which costs the kernel a fifth less.
        """
        total = self.bytes
        while offset < total:
            data = self._pread(min(_to_boundary(self._data + offset, size), total - offset), self._data + offset)
            if not data:
                raise BadData(f"{self.path}: shorter than when it was opened")
            yield offset, data
            offset += len(data)

    def everything(self) -> Iterator[Data]:
        """All bytes of the file, its header's too."""
        end = self._data + self.bytes
        for offset in range(0, end, CHUNK):
            yield self.read(offset, min(CHUNK, end - offset))

    def block(self, key: str, start: int, count: int) -> "NDArray[np.float32]":
        """``count`` float32 elements of one tensor from element ``start`` on, flat, a copy."""
        import numpy  # what has only names and shapes of tensors starts without it

        return numpy.frombuffer(self.read(self._offsets[key] + start * 4, count * 4), dtype="<f4")

    def numbers(self, key: str, start: int, count: int) -> "NDArray[np.generic]":
        """As ``block``, of a tensor of any dtype and in that; of bfloat16 its bits, which numpy has no dtype for."""
        import numpy

        dtype = numpy.dtype(NUMPY[self._dtypes[key]])
        size = dtype.itemsize
        return numpy.frombuffer(self.read(self._offsets[key] + start * size, count * size), dtype=dtype)

    def place(self, key: str) -> int:
        """The byte of the file at which a tensor begins."""
        return self._offsets[key]

    def read(self, offset: int, count: int) -> Data:
        """``count`` bytes from byte ``offset`` of the file on, its header counted too."""
        data = self._pread(count, offset)
        if len(data) != count:
            raise BadData(f"{self.path}: shorter than when it was opened")
        return data

    def _pread(self, count: int, offset: int) -> Data:
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:  # a bad sector
            raise BadData(
                f"{self.path} cannot be read: {error.strerror}", hint="check the disk that it is on"
            ) from error

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
        """The payload from ``offset`` on, as (offset, bytes). Of a view of a whole file, that file's chunks."""
        while offset < self.bytes:
            end = offset + _to_boundary(self._places[0] + offset, size)
            data = b"".join(self._pieces(offset, min(end, self.bytes)))
            yield offset, data
            offset += len(data)

    def _pieces(self, offset: int, stop: int) -> Iterator[Data]:
        run = bisect_right(self._starts, offset) - 1
        while offset < stop:
            ends = [*self._starts[run + 1 : run + 2], self.bytes]
            count = min(stop, ends[0]) - offset
            yield self._file.read(self._places[run] + offset - self._starts[run], count)
            offset, run = offset + count, run + 1


def _to_boundary(place: int, size: int) -> int:
    """How many bytes from ``place`` on end at the next multiple of ``size``."""
    return size - place % size


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
