"""A run of a payload's bytes as it goes over the wire, in a ``DownloadReply`` or an ``UploadRequest``.

Both have it as their field 2, a ``Chunk``. The bytes are those that protobuf makes; made and read here they are copied
once, where protobuf copies them three times on each side.
"""

FIELD = 2 << 3 | 2  # of a length, in both messages: the chunk; in a chunk: its data
OFFSET = 1 << 3  # of a number, in a chunk
MOST_VARINT = 10  # bytes


def chunk_bytes(offset: int, data: bytes | memoryview) -> bytes:
    """A message that is a chunk and nothing else: ``data``, which begins at byte ``offset`` of the payload."""
    head = b""
    if offset:
        head += bytes([OFFSET]) + _varint(offset)
    if len(data):
        head += bytes([FIELD]) + _varint(len(data))
    return b"".join((bytes([FIELD]), _varint(len(head) + len(data)), head, data))


def chunk_from(message: bytes) -> tuple[int, memoryview] | None:
    """Offset and data of a message that ``chunk_bytes`` made. The data is no copy. None: it is laid out otherwise."""
    length, place = _length(message, 0)
    if length is None or place + length != len(message):
        return None
    offset = 0
    if message[place : place + 1] == bytes([OFFSET]):
        read = _number(message, place + 1)
        if read is None:
            return None
        offset, place = read
    length, place = _length(message, place)
    if length is None or place + length != len(message):
        return None
    return offset, memoryview(message)[place:]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _length(message: bytes, place: int) -> tuple[int | None, int]:
    """The length that follows a tag of ``FIELD``, and where it ends; None where there is none."""
    read = _number(message, place + 1) if message[place : place + 1] == bytes([FIELD]) else None
    return read or (None, place)


def _number(message: bytes, place: int) -> tuple[int, int] | None:
    number = shift = 0
    for at, byte in enumerate(message[place : place + MOST_VARINT], start=place + 1):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (number, at) if number < 2**64 else None
    return None
