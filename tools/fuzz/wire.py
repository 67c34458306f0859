"""Changes protobuf messages field by field, as bytes on the wire: what a peer's own encoder would never write, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tools.fuzz.mutate import BYTES, LARGEST, NUMBERS, TEXTS, Mutator

VARINT, FIXED64, BYTES_OF, START, END, FIXED32 = range(6)


@dataclass
class Field:
    """One field on the wire. ``held``: an int, bytes, or the list of a message's fields; ``length`` lies where set."""

    number: int
    wire: int
    held: Any
    about: FieldDescriptor | None = None
    length: int | None = None


def read(data: bytes, about: Descriptor | None) -> list[Field] | None:
    """The fields of a message, nested where ``about`` says that they are messages; None: it is none."""
    fields: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if at < 0:
            return None
        number, wire = tag >> 3, tag & 7
        known = about.fields_by_number.get(number) if about is not None else None
        if wire == VARINT:
            value, at = _varint(data, at)
            if at < 0:
                return None
            fields.append(Field(number, wire, value, known))
        elif wire == BYTES_OF:
            size, at = _varint(data, at)
            if at < 0 or at + size > len(data):
                return None
            held: Any = data[at : at + size]
            if known is not None and known.message_type is not None:
                inner = read(held, known.message_type)
                held = inner if inner is not None else held
            fields.append(Field(number, wire, held, known))
            at += size
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
            fields.append(Field(number, wire, data[at : at + size], known))
            at += size
        else:
            return None
    return fields


def write(fields: Sequence[Field]) -> bytes:
    out = bytearray()
    for field in fields:
        out += varint(field.number << 3 | field.wire)
        if field.wire == VARINT and isinstance(field.held, int):
            out += varint(field.held)
            continue
        held = write(field.held) if isinstance(field.held, list) else field.held
        held = varint(held) if isinstance(held, int) else held
        if field.wire == BYTES_OF:
            out += varint(len(held) if field.length is None else field.length)
        out += held
    return bytes(out)


def varint(value: int, pad: int = 0) -> bytes:
    value %= 2**64
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    if pad:
        out[-1] |= 128
        out += b"\x80" * (pad - 1) + b"\0"
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            return value, at
        shift += 7
    return 0, -1


def in_message(about: Descriptor) -> Mutator:
    """A mutator of messages of that type."""

    def mutate(random: Random, data: bytes) -> bytes:
        fields = read(data, about)
        if fields is None or random.random() < 0.08:
            return BYTES(random, data)
        for _ in range(random.choice((1, 1, 1, 1, 2, 3))):
            _change(random, fields)
        return write(fields)

    return mutate


def _change(random: Random, fields: list[Field]) -> None:
    levels = _levels(fields)
    level = random.choice(levels)
    if not level or random.random() < 0.06:
        level.insert(random.randrange(len(level) + 1), _unknown(random))
        return
    at = random.randrange(len(level))
    field = level[at]
    what = random.randrange(12)
    if what == 0:
        del level[at]
    elif what == 1:
        size = len(write([field]))
        level[at : at + 1] = [field] * min(random.choice((2, 2, 3, 100, 2000)), 2 + LARGEST // 4 // size)
    elif what == 2:
        other = random.randrange(len(level))
        level[at], level[other] = level[other], level[at]
    elif what == 3:
        _retype(random, field)
    elif what == 4:
        field.length = random.choice((0, 1, 127, 128, 2**20, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
    elif what == 5 and field.wire == BYTES_OF:
        held = write(field.held) if isinstance(field.held, list) else field.held
        for _ in range(random.choice((1, 20, 99, 101, 3000))):  # deeper, in a field of its own number
            held = varint(field.number << 3 | BYTES_OF) + varint(len(held)) + held
        field.held = held
    elif what == 6:
        donor = random.choice(random.choice([one for one in levels if one]))
        field.held = write(donor.held) if isinstance(donor.held, list) else donor.held
        field.wire = donor.wire
    else:
        _other_value(random, field)


def _levels(fields: list[Field]) -> list[list[Field]]:
    found = [fields]
    for field in fields:
        if isinstance(field.held, list):
            found += _levels(field.held)
    return found


def _unknown(random: Random) -> Field:
    number = random.choice((1, 2, 15, 16, 99, 1000, 19000, 2**29 - 1, 0))
    match random.randrange(4):
        case 0:
            return Field(number, VARINT, random.choice(NUMBERS) % 2**64)
        case 1:
            return Field(number, START, b"\x0b" * random.choice((0, 50, 200, 5000)))
        case 2:
            return Field(number, random.choice((END, FIXED32, 6, 7)), random.randbytes(4))
        case _:
            return Field(number, BYTES_OF, random.randbytes(random.choice((0, 1, 100, 70_000))))


def _retype(random: Random, field: Field) -> None:
    field.wire = random.choice((VARINT, FIXED64, BYTES_OF, START, END, FIXED32))
    if field.wire == VARINT and not isinstance(field.held, int):
        field.held = random.choice(NUMBERS) % 2**64
    elif field.wire != VARINT and isinstance(field.held, int):
        field.held = varint(field.held)


def _other_value(random: Random, field: Field) -> None:
    held = field.held
    if isinstance(held, int):
        near = (held + 1, held - 1, held * 2, 0)
        field.held = random.choice((*near, *NUMBERS)) % 2**64
        if random.random() < 0.05:
            field.wire, field.held = VARINT, field.held
    elif isinstance(held, list):
        field.held = random.choice((b"", write(held) + b"\x07", BYTES(random, write(held))))
    elif field.about is not None and field.about.type == FieldDescriptor.TYPE_STRING:
        text = random.choice(TEXTS).encode("utf-8", "surrogatepass")
        field.held = random.choice(
            (text, text, text, held + text, held[:-1], b"\xff\xfe", held.upper(), BYTES(random, held))
        )
    else:
        sizes = (held[:-1], held + b"\0", b"", held * 2, held * 1000, bytes(len(held)), b"\xff" * len(held))
        field.held = random.choice((*sizes, BYTES(random, held), BYTES(random, held)))
