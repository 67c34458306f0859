"""Manifests and safetensors files that are read in place."""

import hashlib
import json
import os
import struct
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from wardround.errors import BadData
from wardround.tensors.files import MAX_HEADER, TensorFile, ViewFile, file_header
from wardround.tensors.manifests import CHUNK, Entry, Manifest, PayloadHasher, TensorSpec, view

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.from_regex(r"\A[A-Za-z0-9_.-]{1,12}\Z")
SPECS = st.lists(
    st.builds(TensorSpec, NAMES, st.sampled_from(["F32", "F64", "I64", "U8"]), SHAPES, st.sampled_from(["model", "c"])),
    max_size=6,
    unique_by=lambda spec: spec.key,
)
DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "U8": np.uint8}


def payload_of(specs: list[TensorSpec]) -> bytes:
    return b"".join(bytes([index + 1]) * spec.bytes for index, spec in enumerate(specs))


def a_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def row(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    arrays = {"b.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.float32(7), "e": np.zeros((0, 3), "f4")}
    specs = [TensorSpec(name, "F32", np.shape(array)) for name, array in arrays.items()]
    note = {"study": "heart", "round": "3"}
    (tmp_path / "m").write_bytes(file_header(specs, note) + b"".join(np.asarray(a).tobytes() for a in arrays.values()))
    read = safetensors.numpy.load_file(tmp_path / "m")
    assert {name: array.tolist() for name, array in read.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    with safetensors.safe_open(tmp_path / "m", "numpy") as opened:
        assert opened.metadata() == note


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(specs=SPECS, scale=st.integers(1, 100))
def test_we_read_what_the_safetensors_library_writes(tmp_path: Path, specs: list[TensorSpec], scale: int) -> None:
    arrays: dict[str, NDArray[np.generic]] = {
        spec.key: np.full(spec.shape, scale, DTYPES[spec.dtype]) for spec in specs
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m", {"by": "library"})
    with TensorFile(tmp_path / "m") as file:
        assert {spec.key: spec for spec in file.specs} == {spec.key: spec for spec in specs}
        assert file.note == {"by": "library"}
        payload = b"".join(data for _, data in file.chunks(size=7))
    assert payload == b"".join(arrays[spec.key].tobytes() for spec in file.specs)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(specs=SPECS)
def test_a_file_keeps_the_order_of_its_header(tmp_path: Path, specs: list[TensorSpec]) -> None:
    (tmp_path / "m").write_bytes(file_header(specs) + payload_of(specs))
    with TensorFile(tmp_path / "m") as file:
        assert list(file.specs) == specs
        assert file.manifest().specs == tuple(specs)


@given(SPECS, st.lists(st.integers(0, 40), max_size=8))
def test_a_payload_hashes_alike_in_whatever_pieces_it_comes(specs: list[TensorSpec], sizes: list[int]) -> None:
    payload = payload_of(specs)
    whole, pieces = PayloadHasher(specs), PayloadHasher(specs)
    whole.update(payload)
    rest = memoryview(payload)
    for size in sizes:
        pieces.update(rest[:size])
        rest = rest[size:]
    pieces.update(rest)
    assert pieces.manifest() == whole.manifest()
    assert whole.manifest().bytes == len(payload)


def test_a_payload_that_is_cut_or_too_long_is_refused() -> None:
    specs = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (1,), "control")]
    hasher = PayloadHasher(specs)
    hasher.update(bytes(11))
    with pytest.raises(BadData, match=r"^the payload ends inside `control/b`$") as caught:
        hasher.manifest()
    assert caught.value.code == "PAYLOAD_INCOMPLETE"
    with pytest.raises(BadData, match=r"^more bytes than the manifest says$") as caught:
        hasher.update(bytes(2))
    assert caught.value.code == "PAYLOAD_INCOMPLETE"


def test_an_empty_view_is_no_bytes() -> None:
    hasher = PayloadHasher([TensorSpec("a", "F32", (0, 3))])
    hasher.update(memoryview(np.zeros((0, 3), np.float32)))
    assert hasher.manifest().bytes == 0


def test_chunks_go_on_from_an_offset(tmp_path: Path) -> None:
    spec = TensorSpec("a", "U8", (CHUNK + 10,))
    data = bytes(range(256)) * (spec.bytes // 256 + 1)
    (tmp_path / "m").write_bytes(file_header([spec]) + data[: spec.bytes])
    with TensorFile(tmp_path / "m") as file:
        assert b"".join(piece for _, piece in file.chunks(CHUNK - 3)) == data[CHUNK - 3 : spec.bytes]
        assert list(file.chunks(spec.bytes)) == []


def test_a_block_is_read_in_place(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.float32)
    safetensors.numpy.save_file({"a": values[:4], "b": values[4:]}, tmp_path / "m")
    with TensorFile(tmp_path / "m") as file:
        assert file.block("b", 1, 3).tolist() == [5, 6, 7]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(specs=SPECS, data=st.data(), size=st.integers(1, 50))
def test_a_view_is_the_picked_tensors_under_their_new_names(
    tmp_path: Path, specs: list[TensorSpec], data: st.DataObject, size: int
) -> None:
    """Against a copy: any pick, any order, a tensor twice, read in any pieces and from any byte on."""
    payload = payload_of(specs)
    (tmp_path / "m").write_bytes(file_header(specs) + payload)
    picked = data.draw(st.lists(st.sampled_from(specs), max_size=8)) if specs else []
    renamed = [TensorSpec(f"t{i}", spec.dtype, spec.shape) for i, spec in enumerate(picked)]
    places = {spec.key: sum(other.bytes for other in specs[:index]) for index, spec in enumerate(specs)}
    wanted = b"".join(payload[places[spec.key] :][: spec.bytes] for spec in picked)
    copied = PayloadHasher(renamed)
    copied.update(wanted)

    with TensorFile(tmp_path / "m") as file:
        found = view(file.manifest(), [spec.key for spec in picked], renamed)
        assert found == copied.manifest()
        viewed = ViewFile(file, [spec.key for spec in picked])
        assert viewed.bytes == len(wanted)
        chunks = list(viewed.chunks(size=size))
        assert all(len(piece) <= size for _, piece in chunks)
        assert all(len(piece) == size for _, piece in chunks[1:-1])
        assert b"".join(piece for _, piece in chunks) == wanted
        begin = data.draw(st.integers(0, len(wanted)))
        later = list(viewed.chunks(begin, size))
        assert b"".join(piece for _, piece in later) == wanted[begin:]
        begins = accumulate((len(piece) for _, piece in later), initial=begin)
        assert [offset for offset, _ in later] == list(begins)[:-1]


def test_chunks_end_at_whole_blocks_of_the_file(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "U8", (CHUNK + 10,)), TensorSpec("b", "U8", (CHUNK,))]
    header = file_header(specs)
    (tmp_path / "m").write_bytes(header + bytes(2 * CHUNK + 10))
    first = CHUNK - len(header)
    with TensorFile(tmp_path / "m") as file:
        for read in (file.chunks, ViewFile(file, ["a", "b"]).chunks):
            pieces = [(offset, len(piece)) for offset, piece in read()]
            assert pieces == [(0, first), (first, CHUNK), (first + CHUNK, len(header) + 10)]
            assert [len(piece) for _, piece in read(first - 3)] == [3, CHUNK, len(header) + 10]


def test_a_view_of_a_whole_file_is_that_file(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (3,)), TensorSpec("b", "F32", (2, 2), "control")]
    (tmp_path / "m").write_bytes(file_header(specs) + bytes(range(28)))
    with TensorFile(tmp_path / "m") as file:
        keys = [spec.key for spec in specs]
        assert view(file.manifest(), keys, specs).digest() == file.manifest().digest()
        assert list(ViewFile(file, keys).chunks()) == list(file.chunks())


@pytest.mark.parametrize(
    ("source", "wanted", "said"),
    [
        ("c", TensorSpec("a", "F32", (3,)), "`a` is to be `c`, which is not kept"),
        ("a", TensorSpec("b", "F32", (3, 1)), "`b` is F32 [3, 1], and `a`, which it is to be, F32 [3]"),
        ("a", TensorSpec("a", "I32", (3,)), "`a` is I32 [3], and `a`, which it is to be, F32 [3]"),
    ],
)
def test_a_view_of_what_is_not_there_is_refused(source: str, wanted: TensorSpec, said: str) -> None:
    kept = Manifest((Entry(TensorSpec("a", "F32", (3,)), "0" * 64),))
    with pytest.raises(BadData) as caught:
        view(kept, [source], [wanted])
    assert caught.value.message == said


def test_a_file_that_shrinks_while_it_is_open_is_said(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(10, np.float32)}, tmp_path / "m")
    with TensorFile(tmp_path / "m") as file:
        os.truncate(tmp_path / "m", (tmp_path / "m").stat().st_size - 20)
        with pytest.raises(BadData, match="shorter than when it was opened"):
            list(file.chunks())
        with pytest.raises(BadData, match="shorter than when it was opened"):
            file.block("a", 0, 10)


UNREADABLE = "not a safetensors file (its header cannot be read)"


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        pytest.param({"a": row([1], 4, 8)}, bytes(8), "`a` does not lie where its shape says", id="hole at the start"),
        pytest.param(
            {"a": row([1], 0, 4), "b": row([1], 8, 12)}, bytes(12), "`b` does not lie where its shape says", id="hole"
        ),
        pytest.param(
            {"a": row([2], 0, 8), "b": row([1], 4, 8)}, bytes(8), "`b` does not lie where its shape says", id="overlap"
        ),
        pytest.param({"a": row([2], 0, 4)}, bytes(4), "`a` does not lie where its shape says", id="shape"),
        pytest.param({"a": row([1], 0, -4)}, bytes(4), "`a` does not lie where its shape says", id="backwards"),
        pytest.param({"a": row([1], 0, 4)}, bytes(5), "bytes, its header says", id="bytes after the end"),
        pytest.param({"a": row([2], 0, 8)}, bytes(5), "bytes, its header says", id="cut data"),
        pytest.param({"a": row([1], 0, 4, "F8_E4M3")}, bytes(4), "`a` has unknown dtype 'F8_E4M3'", id="dtype"),
        pytest.param({"a": row([-1, -1], 0, 4)}, bytes(4), "`a` has impossible shape [-1, -1]", id="negative"),
        pytest.param({"a": row([2**41], 0, 4)}, bytes(4), f"`a` has impossible shape [{2**41}]", id="enormous"),
        pytest.param({"a": row([1] * 17, 0, 4)}, bytes(4), f"`a` has impossible shape {[1] * 16}", id="dimensions"),
        pytest.param({"a": row([1.0], 0, 4)}, bytes(4), UNREADABLE, id="a shape of floats"),
        pytest.param({"a": row([True], 0, 4)}, bytes(4), UNREADABLE, id="a shape of truth values"),
        pytest.param({"a": {**row([1], 0, 4), "shape": "1"}}, bytes(4), UNREADABLE, id="a shape of letters"),
        pytest.param({"a": {**row([1], 0, 4), "dtype": ["F32"]}}, bytes(4), UNREADABLE, id="a list of dtypes"),
        pytest.param({"a": {**row([1], 0, 4), "data_offsets": [0]}}, bytes(4), UNREADABLE, id="one offset"),
        pytest.param({"a": {**row([1], 0, 4), "data_offsets": [0.0, 4.0]}}, bytes(4), UNREADABLE, id="float offsets"),
        pytest.param({"a": {"dtype": "F32"}}, b"", UNREADABLE, id="no shape"),
        pytest.param({"__metadata__": {"a": 1}}, b"", UNREADABLE, id="a note that is no text"),
        pytest.param({"__metadata__": 5}, b"", UNREADABLE, id="a note that is a number"),
        pytest.param(b'{"a":1,"a":2}', b"", UNREADABLE, id="duplicate key"),
        pytest.param(b"[]", b"", UNREADABLE, id="no object"),
        pytest.param(b"\xff\xff", b"", UNREADABLE, id="not UTF-8"),
        pytest.param(b'{"a":' * 5000, b"", UNREADABLE, id="deep"),
        pytest.param({"a\nb": row([1], 0, 4)}, bytes(4), r"tensor name 'a\nb' is not", id="newline"),
        pytest.param({"a\0": row([1], 0, 4)}, bytes(4), r"tensor name 'a\x00' is not", id="NUL"),
        pytest.param({"../a": row([1], 0, 4)}, bytes(4), "bundle name '..' is not", id="dots and slash"),
        pytest.param({"x" * 10_000: row([1], 0, 4)}, bytes(4), f"tensor name '{'x' * 60}' is not", id="10 kB"),
        pytest.param({"model/a": row([1], 0, 4)}, bytes(4), "'model/a' is written `a`", id="another spelling"),
        pytest.param({"/a": row([1], 0, 4)}, bytes(4), "'/a' is written `a`", id="slash first"),
        pytest.param({"": row([1], 0, 4)}, bytes(4), "tensor name '' is not", id="no name"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path, header: object, data: bytes, said: str) -> None:
    path = a_file(tmp_path / "m", header, data)
    with pytest.raises(BadData) as caught:
        TensorFile(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert said in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 160


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x02\0\0", id="cut in the length"),
        pytest.param(struct.pack("<Q", 100) + b"{}", id="cut in the header"),
        pytest.param(struct.pack("<Q", 2**63) + b"{}", id="header of 2^63 bytes"),
        pytest.param(struct.pack("<Q", MAX_HEADER + 1) + bytes(MAX_HEADER + 1), id="header of more than 1 MiB"),
        pytest.param(b"\x80\x04\x95\x0b\0\0\0\0\0\0\0}\x94.", id="a pickle"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(BadData, match="not a safetensors file, or cut short"):
        TensorFile(tmp_path / "m")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", ())]
    whole = file_header(specs) + payload_of(specs)
    for size in range(len(whole)):
        (tmp_path / "m").write_bytes(whole[:size])
        with pytest.raises(BadData):
            TensorFile(tmp_path / "m")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(BadData, match="not a regular file"):
            TensorFile(path)
    with pytest.raises(BadData, match="No such file or directory"):
        TensorFile(tmp_path / "nothing")
    with pytest.raises(BadData, match="a path cannot hold a null character"):
        TensorFile(Path("model\0.safetensors"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.binary(max_size=80), shift=st.integers(0, 70))
def test_foreign_bytes_raise_only_our_error(tmp_path: Path, data: bytes, shift: int) -> None:
    specs = [TensorSpec("a", "F32", (2,))]
    whole = bytearray(file_header(specs) + payload_of(specs))
    whole[shift : shift + len(data)] = data
    (tmp_path / "m").write_bytes(whole)
    try:
        TensorFile(tmp_path / "m").close()
    except BadData:
        pass


def test_a_manifest_names_each_tensor_once() -> None:
    entry = Entry(TensorSpec("a", "F32", (1,)), "0" * 64)
    other = Entry(TensorSpec("a", "F32", (1,), "control"), "0" * 64)
    assert Manifest((entry, other)).bytes == 8
    with pytest.raises(BadData, match=r"^tensor `a` stands twice$") as caught:
        Manifest((entry, other, entry))
    assert caught.value.code == "MANIFEST_NAMES"
    with pytest.raises(BadData, match=r"^20001 tensors, at most 20000 are taken$"):
        Manifest((entry,) * 20_001)


def test_a_header_that_nobody_would_read_is_not_written() -> None:
    specs = [TensorSpec(f"{index:0200}", "F32", ()) for index in range(5000)]
    with pytest.raises(BadData, match=rf"^the header of 5000 tensors is \d+ bytes, at most {MAX_HEADER} are read$"):
        file_header(specs)


def test_the_digest_of_a_manifest_does_not_change_between_releases() -> None:
    """Golden: every study's digest and every receipt rests on it."""
    hasher = PayloadHasher([TensorSpec("w", "F32", (2, 1)), TensorSpec("b", "F32", ())])
    hasher.update(np.array([1, 2, 3], "<f4").tobytes())
    w, b = hashlib.sha256(struct.pack("<2f", 1, 2)).hexdigest(), hashlib.sha256(struct.pack("<f", 3)).hexdigest()
    spelt = (
        f'[{{"bundle":"model","bytes":8,"dtype":"F32","encoding":"raw","name":"w","sha256":"{w}","shape":[2,1]}},'
        f'{{"bundle":"model","bytes":4,"dtype":"F32","encoding":"raw","name":"b","sha256":"{b}","shape":[]}}]'
    )
    assert hasher.manifest().digest() == hashlib.sha256(spelt.encode()).hexdigest()
    assert hasher.manifest().digest() == "c3fe4ed4872e4e23f31d76a8cbcd8c4e567a148dc32239b284fae2a84a6ebadc"
