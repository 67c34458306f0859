"""Tensors of torch in safetensors files: what a site keeps, and what it hands to the gateway."""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import safetensors.torch
import torch
from torch import Tensor

from fl_algorithms.engine.partition import DTYPES
from wardround.errors import BadData
from wardround.local import durable
from wardround.local.half_written import becomes
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import CHUNK, ITEM_BYTES, MODEL, Entry, Manifest, TensorSpec

Data = bytes | memoryview
Hashed = Mapping[tuple[int, int], str]  # (address, bytes) of a contiguous tensor that nobody changes -> its SHA-256
NONE: Hashed = MappingProxyType({})
UPDATE = re.compile(r"update-(?P<study>.+)-\d+-\d+\.safetensors")  # revision, round
STAGED_MODE = 0o640  # the gateway's user reads it through the group


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The tensors in the order of a file: wide dtypes first, so that each lies aligned, then by name."""
    specs = []
    for key, tensor in tensors.items():
        bundle, _, name = key.rpartition("/")
        specs.append(TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape), bundle or MODEL))
    return tuple(sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.key)))


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, little endian and C order. Shares memory where it can."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def payload(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> Iterator[memoryview]:
    """The bytes of ``tensors`` in the order of ``specs``."""
    return (raw(tensors[spec.key]) for spec in specs)


def manifest_of(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...], known: Hashed = NONE) -> Manifest:
    """What a file of these tensors in this order has as its manifest. ``known``: need not be hashed again."""
    return Manifest(tuple(Entry(spec, _sha256(tensors[spec.key], known)) for spec in specs))


def _sha256(tensor: Tensor, known: Hashed) -> str:
    found = known.get(_place(tensor)) if tensor.is_contiguous() else None
    return found or hashlib.sha256(raw(tensor)).hexdigest()


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where in memory a contiguous tensor lies, and how many bytes it has."""
    return tensor.data_ptr(), tensor.nbytes


def update_name(study: str, revision: int, number: int) -> str:
    """The file in staging that holds a round's update."""
    return f"update-{study}-{revision}-{number}.safetensors"


def write_update(path: Path, upload: Mapping[str, Mapping[str, Tensor]], specs: tuple[TensorSpec, ...]) -> str:
    """Write the deltas in the order of ``specs``, in place of the study's earlier; return the file's ``crc32``.

    Not fsynced: the gateway takes a copy and measures that, and after a loss of power the sum tells whether it is still
    the update.

    Raises:
        BadData: they are not exactly the tensors of ``specs``; the message names the first that is not.
    """
    tensors = {
        name if bundle == MODEL else f"{bundle}/{name}": tensor
        for bundle, named in upload.items()
        for name, tensor in named.items()
    }
    require_specs(specs_of(tensors), specs, "what the method would send")
    _sweep(path)
    summed = _Crc32()
    durable.write_file(path, summed.passing(_file(tensors, specs)), mode=STAGED_MODE, lasting="nothing")
    return summed.text()


def _sweep(path: Path) -> None:
    """Remove what is left of other updates than ``path``: half written by a killed worker, or of another round of the
    same study, which was called off before the gateway took it. One worker at a time writes them, and the gateway takes
    a round's before it asks for the next. What cannot be removed, as it is another user's, hinders no round.
    """
    own = UPDATE.fullmatch(path.name)
    for other in path.parent.iterdir():
        half_written = becomes(other)
        found = UPDATE.fullmatch(half_written or other.name)
        if found is None or other == path:
            continue
        if half_written or (own is not None and own["study"] == found["study"]):
            with suppress(OSError):
                other.unlink()


def crc32(path: Path) -> str:
    """Of a file's bytes, in hex; "" where it cannot be read."""
    summed = _Crc32()
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                summed.update(data)
    except OSError:
        return ""
    return summed.text()


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Data) -> None:
        self._value = zlib.crc32(data, self._value)

    def passing(self, pieces: Iterable[Data]) -> Iterator[memoryview]:
        """The same bytes in small pieces, each summed just before it is written, while the processor has it at hand.

        They end where the blocks of the file do that they make, for its writer's sake.
        """
        end = 0
        for piece in pieces:
            left = memoryview(piece)
            while left:
                first, left = left[: CHUNK - end % CHUNK], left[CHUNK - end % CHUNK :]
                end += len(first)
                self.update(first)
                yield first

    def text(self) -> str:
        return f"{self._value:08x}"


@dataclass(frozen=True)
class Download:
    """A downloaded model: its tensors in order, bundle -> name -> tensor, and the digests of these as they lie here."""

    specs: tuple[TensorSpec, ...]
    tensors: dict[str, dict[str, Tensor]]
    hashed: Hashed


def read_download(path: Path, digest: str | None = None) -> Download:
    """Read a downloaded model.

    The file is mapped, and the digest is of the memory that is used from then on: its bytes are read once.

    Args:
        digest: of its manifest (hex), as the coordinator announced it; None if the gateway's own check is enough.

    Raises:
        BadData: it is not that model.
    """
    with TensorFile(path) as file:
        specs = file.specs
    tensors = safetensors.torch.load_file(path)
    manifest = manifest_of(tensors, specs)
    own = manifest.digest()
    if digest is not None and own != digest:
        raise BadData(
            f"{path.name} is not the announced model: its digest is {own[:12]}…, {digest[:12]}… was announced",
            code="DECLINED_MODEL_MISMATCH",
        )
    download: dict[str, dict[str, Tensor]] = {}
    for spec in specs:
        download.setdefault(spec.bundle, {})[spec.name] = tensors[spec.key]
    hashed = {_place(tensors[entry.spec.key]): entry.sha256 for entry in manifest.entries}
    return Download(specs, download, hashed)


def require_specs(specs: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...], what: str) -> None:
    """Refuse tensors whose names, dtypes or shapes are not those ``expected``. The order does not matter here.

    Raises:
        BadData: the message names the first difference.
    """
    by_key = {spec.key: spec for spec in specs}
    for spec in expected:
        own = by_key.pop(spec.key, None)
        if own is None:
            raise _mismatch(f"{what} lacks `{spec.key}`")
        if own != spec:
            raise _mismatch(
                f"{what} has `{spec.key}` as {own.dtype} {list(own.shape)}, "
                f"this study's is {spec.dtype} {list(spec.shape)}"
            )
    if by_key:
        raise _mismatch(f"{what} has `{sorted(by_key)[0]}`, which this study does not share")


def file_of(tensors: Mapping[str, Tensor], beside: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """A safetensors file of any tensors under any names, in pieces that share their memory where they can.

    Args:
        beside: texts that its header holds beside the tensors.
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # wide ones first: each lies aligned
    header: dict[str, object] = {"__metadata__": dict(beside)} if beside else {}
    end = 0
    for key in order:
        begin, end = end, end + tensors[key].nbytes
        shape, dtype = list(tensors[key].shape), DTYPES[tensors[key].dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from (raw(tensors[key]) for key in order)


def from_bytes(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    return safetensors.torch.load(data)


def beside_in(data: bytes) -> dict[str, str]:
    """The texts that the header of a file which ``file_of`` made holds beside the tensors."""
    (length,) = struct.unpack_from("<Q", data)
    texts: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return texts


def _file(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> Iterator[bytes | memoryview]:
    yield file_header(specs)
    yield from payload(tensors, specs)


def _mismatch(message: str) -> BadData:
    return BadData(
        message, hint="compare the installed versions here and at the coordinator", code="DECLINED_MODEL_MISMATCH"
    )
