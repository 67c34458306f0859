"""Changes of TOML, CSV, DER and PEM, safetensors and tar, each by its own structure. See ``tools.fuzz.mutate``."""

import base64
import io
import re
import struct
import tarfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tools.fuzz.mutate import BYTES, NUMBERS, TEXTS, Mutator, in_json, of_lines

# TOML and other text with `key = value` lines.

_ASSIGNED = re.compile(rb"^(\s*[\w.\"-]+\s*=\s*)(.*)$")
TOML_VALUES = (
    b"", b"0", b"-1", b"1e400", b"nan", b"inf", b"-inf", b"true", b"[]", b"{}", b'""', b"''", b'"\\u0000"',
    b'"\\uD800"',
    b'"""\n"""', b"2026-01-01", b"07:32:00", b"2026-01-01T00:00:00Z", b"1_000", b"0x7fffffffffffffffff", b"9" * 400,
    b"[1,",
    b'{a=1,a=2}', b'{a.b=1,a.b.c=2}', b"[" * 300 + b"]" * 300, b"{a=" * 300 + b"1" + b"}" * 300,
    b'"' + b"a" * 5000 + b'"',
    b'["a","a"]', b'[["a"]]', b'[0,"a",{}]', b"1.5", b'"../x"', b'"*"', b'"[a-"', b'"' + b"*a" * 60 + b'"',
    b'"\\u001b[2J"',
)  # fmt: skip
TOML_LINES = (
    b"[", b"[]", b"[[study]]", b"[study]", b"[a.b.c]", b"a", b"= 1", b"a = ", b'"" = 1', b'"a\\u0000" = 1',
    b"\xff\xfe", b"a.b.c = 1",
    b"[" + b"a." * 300 + b"b]", b"a." * 300 + b"b = 1", b"\x00", b"# \x1b",
)  # fmt: skip


def _toml_line(random: Random, line: bytes) -> bytes:
    match = _ASSIGNED.match(line)
    if match is None or random.random() < 0.1:
        return random.choice((*TOML_LINES, BYTES(random, line)))
    key, value = match[1], match[2]
    match random.randrange(6):
        case 0:
            return key + BYTES(random, value)
        case 1:
            return BYTES(random, key) + value
        case 2:
            return key + b'"' + random.choice(TEXTS).encode("utf-8", "surrogatepass") + b'"'
        case 3:
            return key + b"[" + value + b", " + value + b"]"
        case _:
            return key + random.choice(TOML_VALUES)


def in_toml(random: Random, data: bytes) -> bytes:
    """A line deleted, doubled or moved, a value of another type, a strange line put in."""
    if random.random() < 0.15:
        lines = data.split(b"\n")
        lines.insert(random.randrange(len(lines) + 1), random.choice(TOML_LINES))
        return b"\n".join(lines)
    return of_lines(_toml_line)(random, data)


def in_csv(random: Random, data: bytes) -> bytes:
    """A cell, a row or the whole."""
    lines = data.split(b"\n")
    if random.random() < 0.5:
        return of_lines(BYTES)(random, data)
    at = random.randrange(len(lines))
    cells = lines[at].split(b",")
    odd = (
        *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
        b'"',
        b'""',
        b'"a\nb"',
        b"1e999",
        b"nan",
        b"1,5",
        b",,",
    )
    cells[random.randrange(len(cells))] = random.choice(odd)
    if random.random() < 0.2:
        cells += [b"1"] * random.choice((1, 2, 3000))
    lines[at] = b",".join(cells)
    return b"\n".join(lines)


# DER, and PEM around it.


def der_tree(data: bytes, depth: int = 0) -> list[tuple[int, Any]] | None:
    """(tag, children or bytes) of each element, None where it is no DER."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        if at + 2 > len(data):
            return None
        tag, length, start = data[at], data[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, start = int.from_bytes(data[start : start + count], "big"), start + count
        if start + length > len(data):
            return None
        content = data[start : start + length]
        inner = der_tree(content, depth + 1) if tag & 0x20 and depth < 40 else None
        found.append((tag, inner if inner is not None else content))
        at = start + length
    return found


def der_bytes(tree: list[tuple[int, Any]], lie: tuple[Any, int] | None = None) -> bytes:
    """``lie``: (an element, what its length is said to be)."""
    out = b""
    for element in tree:
        tag, held = element
        content = der_bytes(held, lie) if isinstance(held, list) else held
        length = lie[1] if lie is not None and lie[0] is element else len(content)
        if length < 128:
            out += bytes((tag & 0xFF, length))
        else:
            size = length.to_bytes((length.bit_length() + 7) // 8, "big")
            out += bytes((tag & 0xFF, 0x80 | min(len(size), 126))) + size
        out += content
    return out


def in_der(random: Random, data: bytes) -> bytes:
    """An element deleted, doubled, given another tag, length or content."""
    tree = der_tree(data)
    if tree is None or not tree or random.random() < 0.1:
        return BYTES(random, data)
    places: list[tuple[list[tuple[int, Any]], int]] = []

    def walk(level: list[tuple[int, Any]]) -> None:
        for index, (_, held) in enumerate(level):
            places.append((level, index))
            if isinstance(held, list):
                walk(held)

    walk(tree)
    level, index = random.choice(places)
    tag, held = level[index]
    match random.randrange(8):
        case 0:
            del level[index]
        case 1:
            level.insert(index, level[index])
        case 2:
            level[index] = (random.choice((0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x0C, 0x13, 0x16, 0x17, 0x18, 0x30, 0x31,
                                           0x80, 0x82, 0x86, 0xA0, 0xA3, random.randrange(256))), held)  # fmt: skip
        case 3:
            return der_bytes(tree, (level[index], random.choice((0, 1, 127, 128, 255, 65535, 2**31, 2**32 - 1, 2**63))))
        case 4:
            level[index] = (tag, [(tag, held)])
        case 5:
            for _ in range(random.choice((5, 100))):
                level[index] = (0x30, [level[index]])
        case _:
            content = held if isinstance(held, bytes) else der_bytes(held)
            text = random.choice(TEXTS).encode("utf-8", "surrogatepass")
            level[index] = (tag, random.choice((BYTES(random, content), b"", text, content + content)))
    try:
        return der_bytes(tree)
    except RecursionError:
        return data


_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s+([A-Za-z0-9+/=\s]+?)-----END \1-----", re.DOTALL)


def in_pem(random: Random, data: bytes) -> bytes:
    """A change of the DER inside, of the armour, or of the text."""
    match = _PEM.search(data)
    if match is None or random.random() < 0.15:
        return of_lines(BYTES)(random, data)
    label, der = match[1], base64.b64decode(match[2])
    if random.random() < 0.1:
        label = random.choice(
            (b"CERTIFICATE", b"PRIVATE KEY", b"EC PRIVATE KEY", b"PUBLIC KEY", b"X509 CRL", b"RSA PRIVATE KEY")
        )
    body = base64.encodebytes(in_der(random, der))
    made = b"-----BEGIN " + label + b"-----\n" + body + b"-----END " + label + b"-----\n"
    return data[: match.start()] + made + (data[match.end() :] if random.random() < 0.9 else data)


# safetensors.


def in_safetensors(random: Random, data: bytes) -> bytes:
    """A change of the header with its length set right; a length that lies; bytes more or fewer."""
    if len(data) < 8 or random.random() < 0.1:
        return BYTES(random, data)
    (length,) = struct.unpack_from("<Q", data)
    header, payload = data[8 : 8 + length], data[8 + length :]
    match random.randrange(8):
        case 0:
            return struct.pack("<Q", random.choice(NUMBERS) % 2**64) + header + payload
        case 1:
            return struct.pack("<Q", max(0, length + random.choice((-8, -1, 1, 8, 1000)))) + header + payload
        case 2:
            return data[:8] + header + random.choice((b"", payload + b"\0", payload[:-1], payload * 2))
        case 3:
            names = ",".join(
                f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
                for i in range(random.choice((10, 10, 100, 100, 100, 2000)))
            )
            header = ("{" + names + "}").encode()
        case _:
            header = in_json(random, header.rstrip())
    return struct.pack("<Q", len(header)) + header + payload


# tar.


def tar_of(files: Sequence[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in files:
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 0
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


TAR_NAMES = (
    "../../etc/passwd", "/etc/passwd", "", ".", "..", "ledger", "ledger/", "a" * 100, "a/" * 200, "MANIFEST.json",
    "VERIFY.py",
    "ledger/000001.jsonl", "ledger/../ledger/000001.jsonl", "./MANIFEST.json", "x\x00y", "é", "consents/\n.json",
    "manifest.JSON",
)  # fmt: skip
TAR_TYPES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
             tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, b"\xff")  # fmt: skip


def of_tar(inner: Callable[[str], Mutator]) -> Mutator:
    """Entries deleted, doubled, renamed, of another kind; headers that lie; a file changed by ``inner(its name)``."""

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.15:
            return BYTES(random, data)
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                files = [
                    (entry, (archive.extractfile(entry) or io.BytesIO()).read()) for entry in archive if entry.isreg()
                ]
        except (tarfile.TarError, OSError, ValueError, UnicodeError):
            return BYTES(random, data)
        if not files:
            return BYTES(random, data)
        at = random.randrange(len(files))
        entry, content = files[at]
        lie = None
        match random.randrange(9):
            case 0:
                del files[at]
            case 1:
                files.insert(random.randrange(len(files) + 1), files[at])
            case 2:
                entry.name = random.choice(TAR_NAMES)
            case 3:
                entry.type, entry.linkname = (
                    random.choice(TAR_TYPES),
                    random.choice(("/etc/passwd", "../x", "", entry.name)),
                )
            case 4:
                lie = random.choice((0, 1, len(content) + 1, 2**31, 2**33 - 1))
            case 5:
                random.shuffle(files)
            case _:
                files[at] = (entry, inner(entry.name)(random, content))
        out = io.BytesIO()
        try:
            with tarfile.open(
                fileobj=out,
                mode="w",
                format=random.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)),
            ) as made:
                for one, held in files:
                    one.size = lie if lie is not None and one is entry else len(held)
                    out.write(one.tobuf(made.format or tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
                    out.write(held + b"\0" * (-len(held) % 512))
                    made.offset = out.tell()
        except (ValueError, UnicodeError):
            return BYTES(random, data)
        return out.getvalue()

    return mutate
