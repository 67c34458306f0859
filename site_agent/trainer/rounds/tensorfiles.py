"""Tensors of torch in safetensors files: what a site keeps, and what it hands to the gateway."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from fl_algorithms.engine.partition import DTYPES
from wardround.errors import BadData
from wardround.local import durable
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import ITEM_BYTES, MODEL, Entry, Manifest, TensorSpec

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


def manifest_of(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> Manifest:
    """What a file of these tensors in this order has as its manifest."""
    return Manifest(tuple(Entry(spec, hashlib.sha256(raw(tensors[spec.key])).hexdigest()) for spec in specs))


def write_update(path: Path, upload: Mapping[str, Mapping[str, Tensor]], specs: tuple[TensorSpec, ...]) -> str:
    """Write the deltas in the order of ``specs``, and return their manifest's digest (hex).

    Not fsynced: the gateway takes a copy and measures that, and after a loss of power the digest tells whether it is
    still the update.

    Raises:
        BadData: they are not exactly the tensors of ``specs``; the message names the first that is not.
    """
    tensors = {
        name if bundle == MODEL else f"{bundle}/{name}": tensor
        for bundle, named in upload.items()
        for name, tensor in named.items()
    }
    require_specs(specs_of(tensors), specs, "what the method would send")
    durable.write_file(path, _file(tensors, specs), mode=STAGED_MODE, lasting="nothing")
    return manifest_of(tensors, specs).digest()


def read_download(path: Path, digest: str | None = None) -> tuple[tuple[TensorSpec, ...], dict[str, dict[str, Tensor]]]:
    """A downloaded model: its tensors in order, and bundle -> name -> tensor.

    The file is mapped, and the digest is of the memory that is used from then on: its bytes are read once.

    Args:
        digest: of its manifest (hex), as the coordinator announced it; None if the gateway's own check is enough.

    Raises:
        BadData: it is not that model.
    """
    with TensorFile(path) as file:
        specs = file.specs
    tensors = safetensors.torch.load_file(path)
    own = manifest_of(tensors, specs).digest()
    if digest is not None and own != digest:
        raise BadData(
            f"{path.name} is not the announced model: its digest is {own[:12]}…, {digest[:12]}… was announced",
            code="DECLINED_MODEL_MISMATCH",
        )
    download: dict[str, dict[str, Tensor]] = {}
    for spec in specs:
        download.setdefault(spec.bundle, {})[spec.name] = tensors[spec.key]
    return specs, download


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
