"""The two calls whose messages are long: their chunks are made and read as they are, without protobuf's copies."""

from collections.abc import Iterator
from typing import Any

import grpc

from wardround.records.chunks import chunk_from
from wardround.records.messages import manifest_from
from wardround.tensors.manifests import Manifest
from wardround.v1 import federation_pb2 as pb

SERVICE = "/wardround.v1.Federation"
Part = Manifest | tuple[int, bytes | memoryview]


class Transfers:
    """Downloads and uploads on one channel, as gRPC calls them."""

    def __init__(self, channel: grpc.Channel) -> None:
        request, reply = pb.DownloadRequest.SerializeToString, pb.UploadReply.FromString
        self.download: Any = channel.unary_stream(f"{SERVICE}/Download", request, part_from)
        self.upload: Any = channel.stream_stream(f"{SERVICE}/Upload", None, reply)


def parts(replies: Iterator[tuple[int, memoryview] | pb.DownloadReply]) -> Iterator[Part]:
    """A download's manifest, then its payload as (offset, bytes)."""
    for reply in replies:
        if isinstance(reply, tuple):
            yield reply
        elif reply.WhichOneof("kind") == "manifest":
            yield manifest_from(reply.manifest)
        else:
            yield reply.chunk.offset, reply.chunk.data


def part_from(data: bytes) -> tuple[int, memoryview] | pb.DownloadReply:
    """One message of a download: a chunk as offset and data, without a copy; whatever else as protobuf reads it."""
    return chunk_from(data) or pb.DownloadReply.FromString(data)
