"""Changes a valid example into one that is nearly valid, by what it is: bytes, frames, lines, JSON.

A mutator is ``(random, data) -> data``. It draws from ``random`` alone, so the same seed makes the same case. Protobuf
is in ``tools.fuzz.wire``, other formats are in ``tools.fuzz.formats``. What a mutator cannot read it changes as bytes.
"""

import copy
import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutator = Callable[[Random, bytes], bytes]
LARGEST = 4 * 1024 * 1024  # bytes of a case: what gRPC lets through

NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 1, 2**53 - 1, 2**53,
    2**63 - 1,
    2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 10**400,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.1, 1e-320, 1e300, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", " ", "a", "A", "0", "-", ".", "..", "../../etc/passwd", "/dev/zero", "a/b", "a\\b", "\x00", "a\x00b", "\n",
    "\r\n",
    "\x1b[2J\x1b]52;c;ZXZpbA==\x07", "=1+1", "<script>", "%s%n", "{0}", "null", "NaN", "1e999", "-1", "0x10", "é",
    "\u202e",
    "\ud800", "\udfff", "\U0001f600", "ﬀ", "٣", "²", "__metadata__", "__class__", "a" * 41, "a" * 64, "a" * 65,
    "a" * 201,
    "a" * 5000, "9" * 5000, "0" * 64, "f" * 64, "F" * 64, "g" * 64, "2026-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z",
    "2026-13-41T99:99:99Z", "accepted", "refused", "alpha", "st-olav", "trial", "model", "F32", "raw",
)  # fmt: skip


def pick(random: Random, *mutators: Mutator) -> Mutator:
    return random.choice(mutators)


def several(mutators: Sequence[Mutator]) -> Mutator:
    """One to four changes after each other, mostly one."""

    def mutate(random: Random, data: bytes) -> bytes:
        for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
            data = random.choice(mutators)(random, data)
        return data

    return mutate


# Bytes.


def flip(random: Random, data: bytes) -> bytes:
    """One to eight bits turned over."""
    changed = bytearray(data or b"\0")
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def splice(random: Random, data: bytes) -> bytes:
    """A run of bytes deleted, doubled, moved, overwritten, or one put in."""
    at, length = random.randrange(len(data) + 1), random.choice((1, 1, 2, 4, 8, 32, 200))
    run = data[at : at + length]
    made = random.choice((b"\0" * length, b"\xff" * length, random.randbytes(length), _integer_bytes(random)))
    match random.randrange(5):
        case 0:
            return data[:at] + data[at + length :]
        case 1:
            return data[:at] + run * random.choice((2, 3, 100)) + data[at + length :]
        case 2:
            rest = data[:at] + data[at + length :]
            to = random.randrange(len(rest) + 1)
            return rest[:to] + run + rest[to:]
        case 3:
            return data[:at] + made + data[at + len(made) :]
        case _:
            return data[:at] + made + data[at:]


def truncate(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _integer_bytes(random: Random) -> bytes:
    number = random.choice(NUMBERS) % 2**64
    size = random.choice((1, 2, 4, 8))
    return (number % 256**size).to_bytes(size, random.choice(("little", "big")))


BYTES = several((flip, flip, splice, splice, truncate))


# Frames: several byte strings as one case, for the messages of a stream and the files of a folder.


def frames(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def parts(data: bytes) -> list[bytes]:
    """What ``frames`` joined; of anything else, what can be read of it."""
    found, at = [], 0
    while at + 4 <= len(data) and len(found) < 1000:
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def of_frames(*inner: Mutator, order: bool = True) -> Mutator:
    """Changes of one frame, by the mutator at its place (the last for all after it); with ``order``, of their order."""

    def mutate(random: Random, data: bytes) -> bytes:
        found = parts(data)
        if order and found and random.random() < 0.25:
            at, other = random.randrange(len(found)), random.randrange(len(found))
            match random.randrange(4):
                case 0:
                    del found[at]
                case 1:
                    found.insert(other, found[at])
                case 2:
                    found[at], found[other] = found[other], found[at]
                case _:
                    found[at : at + 1] = [found[at]] * random.choice((2, 3, 50))
        if found and (not order or random.random() < 0.85):
            at = random.randrange(len(found))
            found[at] = inner[min(at, len(inner) - 1)](random, found[at])
        return frames(found)

    return mutate


# Lines.


def of_lines(inner: Mutator) -> Mutator:
    """Lines deleted, doubled, exchanged, cut or joined; or one of them changed by ``inner``."""

    def mutate(random: Random, data: bytes) -> bytes:
        lines = data.split(b"\n")
        at, other = random.randrange(len(lines)), random.randrange(len(lines))
        match random.randrange(12):
            case 0:
                del lines[at]
            case 1:
                lines.insert(other, lines[at])
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                return b"\n".join(lines)[: random.randrange(len(data) + 1)]
            case 4:
                return random.choice((b"\r\n", b"\n\n", b"", b"\x85", "\u2028".encode(), b"\x0b")).join(lines)
            case 5:
                return BYTES(random, data)
            case _:
                lines[at] = inner(random, lines[at])
        return b"\n".join(lines)

    return mutate


# JSON.


class Pairs(list[tuple[Any, Any]]):
    """An object as its pairs, so that a key may stand twice."""


def read_json(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=Pairs)


def write_json(random: Random, value: Any) -> bytes:
    """Mostly in canonical form; sometimes with escapes, spaces or another encoding."""
    style = random.random()
    text = _json(value, ", " if style > 0.95 else ",", ": " if style > 0.95 else ":", ascii_only=style > 0.85)
    if style < 0.01:
        return text.encode("utf-16", "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any, comma: str, colon: str, *, ascii_only: bool) -> str:
    if isinstance(value, Pairs):
        inside = (
            json.dumps(str(key), ensure_ascii=ascii_only) + colon + _json(item, comma, colon, ascii_only=ascii_only)
            for key, item in value
        )
        return "{" + comma.join(inside) + "}"
    if isinstance(value, list):
        return "[" + comma.join(_json(item, comma, colon, ascii_only=ascii_only) for item in value) + "]"
    if isinstance(value, Raw):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return "1" + "0" * 400  # Python refuses to write very long integers
    return json.dumps(value, ensure_ascii=ascii_only)


class Raw(str):
    """Text that is put into the JSON as it stands."""


def odd_value(random: Random) -> Any:
    """A value of any type, most of them at some border."""
    match random.randrange(9):
        case 0:
            return random.choice((None, True, False))
        case 1 | 2:
            return random.choice(NUMBERS)
        case 3:
            return random.choice(FLOATS)
        case 4 | 5:
            return random.choice(TEXTS)
        case 6:
            return random.choice(([], Pairs(), [None], [[]], Pairs([("", 0)]), Pairs([("a", Pairs([("a", [])]))])))
        case 7:
            return [random.choice(NUMBERS) for _ in range(random.choice((1, 3, 17, 300)))]
        case _:
            depth = random.choice((10, 70, 100, 900, 900, 5000))
            return random.choice((Raw("[" * depth + "]" * depth), Raw('{"a":' * depth + "0" + "}" * depth)))


def odd_like(random: Random, value: Any) -> Any:
    """A value near ``value``: of its type, or of one that is easily taken for it."""
    if isinstance(value, bool) or value is None:
        return random.choice((True, False, None, 0, 1, "true"))
    if isinstance(value, int):
        near = (
            value + 1,
            value - 1,
            -value,
            value * 2,
            float(min(abs(value), 2**60)),
            str(value)[:300],
            value % 2 == 1,
        )
        return random.choice((*near, *NUMBERS))
    if isinstance(value, float):
        return random.choice((*FLOATS, int(value) if abs(value) < 1e18 else 0, str(value)))
    if isinstance(value, str):
        near_text = (value[:-1], value + "a", value + value, value.upper(), value.swapcase(), value[::-1], f" {value}",
                     value + "\n", value + "\x00", value[:1], [value], Pairs([(value, value)]))  # fmt: skip
        return random.choice((*near_text, *random.sample(TEXTS, 8)))
    return odd_value(random)


def change_json(random: Random, value: Any) -> Any:
    """One change somewhere in a value."""
    holder = Pairs([("", value)])
    places: list[tuple[list[Any], int]] = []
    _places(holder, places)
    at, index = random.choice(places)
    pair = at[index] if isinstance(at, Pairs) else None
    held = pair[1] if pair is not None else at[index]

    def put(item: Any) -> None:
        at[index] = (pair[0], item) if pair is not None else item

    what = random.randrange(12)
    if what < 4:
        put(odd_like(random, held))
    elif what < 6:
        put(odd_value(random))
    elif what == 6 and at is not holder:
        del at[index]
    elif what == 7 and at is not holder:
        at.insert(random.randrange(len(at) + 1), at[index])  # a key twice, or an item
    elif what == 8 and pair is not None and at is not holder:
        at[index] = (random.choice((*random.sample(TEXTS, 4), pair[0] + "x", pair[0].upper())), held)
    elif what == 9 and isinstance(held, Pairs):
        held.append((random.choice(("extra", "", "v", "type", "name", *random.sample(TEXTS, 2))), odd_value(random)))
    elif what == 10 and isinstance(held, list) and held:
        if random.random() < 0.5:
            random.shuffle(held)
        else:
            held.extend([held[0]] * random.choice((1, 2, 100)))
    elif what == 11 and len(places) > 2:
        other, place = random.choice(places)  # what stands elsewhere in the document
        put(copy.deepcopy(other[place][1] if isinstance(other, Pairs) else other[place]))
    else:
        put(odd_value(random))
    return holder[0][1] if holder else None


def _places(value: Any, found: list[tuple[list[Any], int]]) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            found.append((value, index))
            _places(item[1] if isinstance(value, Pairs) else item, found)


def in_json(random: Random, data: bytes) -> bytes:
    """A change of the value that JSON text holds; of its bytes where it is none."""
    if random.random() < 0.1:
        return BYTES(random, data)
    try:
        value = read_json(data)
    except (ValueError, RecursionError):
        return BYTES(random, data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        try:
            value = change_json(random, value)
        except RecursionError:
            break
    try:
        return write_json(random, value)
    except RecursionError:
        return BYTES(random, data)


JSON_LINES = of_lines(in_json)


def inside_text(key: str, inner: Mutator) -> Mutator:
    """For JSON that holds other JSON as the text of ``key``, as an envelope holds its payload."""

    def mutate(random: Random, data: bytes) -> bytes:
        try:
            value = read_json(data)
            place = _find(value, key)
        except (ValueError, RecursionError):
            return BYTES(random, data)
        if place is None or random.random() < 0.3:
            return in_json(random, data)
        holder, index = place
        changed = inner(random, str(holder[index][1]).encode("utf-8", "surrogatepass"))
        holder[index] = (key, changed.decode("utf-8", "replace"))
        return write_json(random, value)

    return mutate


def _find(value: Any, key: str) -> tuple[list[Any], int] | None:
    places: list[tuple[list[Any], int]] = []
    _places(value, places)
    return next(((at, i) for at, i in places if isinstance(at, Pairs) and at[i][0] == key), None)
