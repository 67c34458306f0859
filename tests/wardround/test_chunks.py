"""Chunks by hand are protobuf's chunks; what is laid out otherwise is left to protobuf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.records.chunks import chunk_bytes, chunk_from
from wardround.tensors.manifests import CHUNK
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import tensors_pb2

CHUNKS = [(0, b"a"), (7, b"abc"), (127, bytes(128)), (128, bytes(127)), (2**40 + 5, bytes(CHUNK)), (2**64 - 1, b"z")]


@pytest.mark.parametrize(("offset", "data"), [*CHUNKS, (0, b""), (9, b"")])
def test_a_chunk_has_the_bytes_that_protobuf_gives_it_in_either_direction(offset: int, data: bytes) -> None:
    chunk = tensors_pb2.Chunk(offset=offset, data=data)
    made = chunk_bytes(offset, memoryview(data))
    assert made == pb.UploadRequest(chunk=chunk).SerializeToString()
    assert made == pb.DownloadReply(chunk=chunk).SerializeToString()


@pytest.mark.parametrize(("offset", "data"), CHUNKS)
def test_a_chunk_is_read_as_it_was_made(offset: int, data: bytes) -> None:
    assert chunk_from(chunk_bytes(offset, data)) == (offset, data)


def test_other_messages_and_chunks_laid_out_otherwise_are_none() -> None:
    whole = chunk_bytes(300, b"abcdef")
    others = [
        b"", whole[:-1], whole + b"x", whole * 2, whole[1:], b"\x12", b"\x12\xff", b"\x12" + b"\x80" * 12,
        pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=b"0" * 32)).SerializeToString(),
        pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=5)).SerializeToString(),
        b"\x12\x06\x12\x02ab\x08\x07",  # the offset behind the data
        b"\x12\x0d\x08" + b"\xff" * 9 + b"\x7f\x12\x00",  # an offset beyond 64 bits
    ]  # fmt: skip
    assert [chunk_from(other) for other in others] == [None] * len(others)


@given(st.binary(max_size=40))
def test_whatever_is_read_is_what_protobuf_reads(data: bytes) -> None:
    for message in (data, b"\x12" + bytes([len(data)]) + data):
        if (found := chunk_from(message)) is not None:
            parsed = pb.UploadRequest.FromString(message)
            assert (parsed.chunk.offset, parsed.chunk.data) == found
