"""What of a message's form depends on how much of it there is: pages of studies, and the later messages of an upload.

Who sends a message is never in it: the servicers know the sender from its certificate. Whether an upload may count is
judged later, in ``coordinator.updates.admission``.
"""

from collections.abc import Sequence

from coordinator.calls import SMALL_MESSAGE, parsed
from coordinator.studies.study import Study
from wardround import rpc
from wardround.errors import BadData
from wardround.records.chunks import chunk_from
from wardround.v1 import federation_pb2 as pb

MAX_CHUNK = 1024 * 1024
MAX_OFFERS = 1024 * 1024  # bytes of a page of studies, unless it holds one study alone


def later_upload_message(data: bytes) -> pb.UploadRequest | tuple[int, memoryview]:
    """A message of an upload after the first one; offset and data of a chunk.

    One that is not small must be a chunk and nothing else, which is seen before it is parsed: parsing a long message
    with structure in it costs many times its length in memory.

    Raises:
        BadData: it is neither a chunk of at most 1 MiB nor a small message (MESSAGE_MALFORMED).
    """
    chunk = chunk_from(data)
    if chunk is None:
        if len(data) > SMALL_MESSAGE and not rpc.is_one_field(data, pb.UploadRequest.CHUNK_FIELD_NUMBER):
            raise out_of_order()
        message = parsed(pb.UploadRequest, data)
        if message.WhichOneof("kind") != "chunk":
            return message
        chunk = message.chunk.offset, memoryview(message.chunk.data)
    if len(chunk[1]) > MAX_CHUNK:
        raise out_of_order()
    return chunk


def out_of_order() -> BadData:
    """The error for a message that has no place in an upload."""
    return BadData("after `open` come chunks of at most 1 MiB and one commit", code="MESSAGE_MALFORMED")


def page_of_offers(studies: Sequence[Study]) -> tuple[list[pb.StudyOffer], bool]:
    """As many of ``studies`` as one reply may hold, at least the first; and whether some are left for the next page."""
    offers: list[pb.StudyOffer] = []
    size = 0
    for study in studies:
        offer = study.offer.to_message()
        size += offer.ByteSize()
        if offers and size > MAX_OFFERS:
            return offers, True
        offers.append(offer)
    return offers, False
