"""Messages of JSON on a stream, one a line; a long one comes in pieces. What a service answers, and how it fails.

An answer is ``{"progress": ...}``, ``{"result": ...}`` or ``{"error": {"message", "hint", "exit_code", "code"}}``. A
long one is sent as lines ``{"piece": "..."}``, the last ``{"last_piece": "..."}``, whose texts make the line.
"""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from wardround.errors import BY_EXIT_CODE, BadData, UsageProblem, WardroundError

MAX_LINE = 8 * 1024 * 1024
PIECE = 1024 * 1024  # characters of a long answer that go into one line
Document = dict[str, Any]  # a JSON object, before its reader makes a record of it
_PIECES = (b'{"piece":', b'{"last_piece":')


class Garbled(BadData):
    """What came is no answer: not one JSON object on a line, or not of an answer's form."""


def request_from(line: bytes) -> Document:
    """A request out of its line. Raises UsageProblem: it is no JSON object."""
    try:
        request = json.loads(line)
        json.dumps(request, ensure_ascii=False).encode()  # half a character has no place in a name or a database
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        request = None
    if not isinstance(request, dict):
        raise UsageProblem("not a request: one JSON object on one line was wanted")
    return request


def parsed(line: bytes, parts: int | None = None) -> Document:
    """One line as the object that it is.

    Args:
        parts: how many values it may hold, if that is bounded; each takes some 60 bytes of memory or more.

    Raises:
        Garbled: it is cut, no JSON, no object, nested too deep, or holds nan, infinity or too many values.
    """
    if parts is not None and sum(line.count(mark) for mark in (b",", b"[", b"{")) > parts:
        raise Garbled(f"more than {parts} values in one answer")
    try:
        document = json.loads(line, parse_constant=_no_number) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Garbled("not an answer: one JSON object on one line was wanted")
    return document


def texts(stream: BinaryIO, most: int | None = None) -> Iterator[bytes]:
    """The text of each answer on ``stream``, for ``parsed``: put together from its pieces, with its newline.

    Raises:
        Garbled: a piece that is none, or one answer of more than ``most`` bytes.
    """
    pieces: list[str] = []
    size = 0
    while line := stream.readline(MAX_LINE):
        size += len(line)
        if most is not None and size > most:
            raise Garbled("the service's answer is longer than is taken here")
        if not line.startswith(_PIECES):
            yield line
        else:
            (kind, text), *more = parsed(line).items()
            if more or not isinstance(text, str):
                raise Garbled("not an answer: a piece without its text")
            pieces.append(text)
            if kind == "piece":
                continue
            yield "".join(pieces).encode() + b"\n"
        pieces, size = [], 0


def lines_of(item: Any) -> Iterator[bytes]:
    """The lines of one answer."""
    text = json.dumps(item, separators=(",", ":"))
    if len(text) <= PIECE:
        yield text.encode() + b"\n"
        return
    for start in range(0, len(text), PIECE):
        kind = "piece" if start + PIECE < len(text) else "last_piece"
        yield json.dumps({kind: text[start : start + PIECE]}, separators=(",", ":")).encode() + b"\n"


def failure_of(error: WardroundError) -> Document:
    """The answer that tells a caller of ``error``."""
    fields = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code, "code": error.code}
    return {"error": fields}


def failure_from(document: Any) -> WardroundError:
    """The error that a service's failure stands for; ``Garbled`` if it has another form."""
    texts = ("message", "hint", "code")
    if not isinstance(document, dict) or not all(isinstance(document.get(name), str) for name in texts):
        return Garbled("not an answer: an error without its words")
    exit_code = document.get("exit_code")
    if type(exit_code) is not int or not document["message"].strip():
        return Garbled("not an answer: an error without its words")
    kind = BY_EXIT_CODE.get(exit_code, WardroundError)
    return kind(document["message"], hint=document["hint"], code=document["code"])


def _no_number(text: str) -> None:
    raise ValueError(text)
