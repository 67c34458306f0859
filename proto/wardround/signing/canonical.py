"""One byte string for one value: the JSON that is hashed and signed.

RFC 8785 restricted to what needs no float formatting: objects, arrays, strings, integers, booleans, null. Two programs
disagree about how to write 1e-07, so a float is refused; ``with_text_floats`` turns floats into their shortest
round-trip strings first, where a document has them.
"""

import hashlib
import json
import math
from typing import Any

from wardround.errors import BadData
from wardround.terminal import escaped

MAX_INTEGER = 2**53 - 1  # what every JSON reader keeps exactly
MAX_DEPTH = 64  # levels of objects and lists; what reads or writes them recursively must not come to its end
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_PLAIN = frozenset({str, bool, type(None)})  # types of which each value has its one form
_Place = tuple["_Place | None", str | int]  # where in a document: the place above, and a key or an index there


def dumps(value: Any) -> bytes:
    """The canonical JSON of ``value``: sorted keys, no spaces, UTF-8.

    Raises:
        BadData: a float, a non-string key, an integer that some reader would round, text that is not Unicode, or more
            than 64 levels.
    """
    _check(value, None, MAX_DEPTH)
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        raise BadData("a text holds half a character (a lone surrogate), which has no UTF-8") from None


def loads(data: bytes) -> Any:
    """The value of canonical JSON.

    Raises:
        BadData: not JSON, a duplicate key, or not the canonical form of what it says.
    """
    try:
        value = _DECODER.decode(data.decode(json.detect_encoding(data), "surrogatepass"))
        canonical = dumps(value)
    except (ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {error}") from None
    if canonical != data:
        raise BadData("JSON, but not in canonical form")
    return value


def read(data: bytes | str) -> Any:
    """The value of JSON of any form, as people and other programs write it.

    Raises:
        BadData: not JSON, or more than 64 levels.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {str(error)[:200]}") from None
    refuse_deep(value)
    return value


def refuse_deep(value: Any) -> None:
    """Raises BadData: more than 64 levels of objects and lists."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        if depth == MAX_DEPTH:
            raise BadData(f"nested more than {MAX_DEPTH} levels deep")
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level, depth = [item for items in inner for item in items if isinstance(item, dict | list)], depth + 1


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(dumps(value)).hexdigest()


def with_text_floats(value: Any) -> Any:
    """``value`` with every float as its shortest round-trip string: 0.001 becomes "0.001"."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadData(f"{value} has no place in a document")
        return repr(value)
    if isinstance(value, dict):
        return {key: with_text_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_text_floats(item) for item in value]
    return value


def _check(value: Any, place: "_Place | None", levels: int) -> None:
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise BadData(f"{_shown(place)}: an integer beyond 2^53 - 1, which JSON readers may round")
    elif levels == 0:
        raise BadData(f"nested more than {MAX_DEPTH} levels deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadData(f"{_shown(place)}: key {key!r} is not a string")
            if type(item) not in _PLAIN:  # most are, and a call for each is most of what this takes
                _check(item, (place, key), levels - 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if type(item) not in _PLAIN:
                _check(item, (place, index), levels - 1)
    else:
        raise BadData(f"{_shown(place)}: {type(value).__name__} has no canonical form")


def _shown(place: "_Place | None") -> str:
    """A place, whose keys may be a peer's words: what is raised is logged, and stands in ledgers."""
    steps = list[str]()
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return escaped("".join(["$", *reversed(steps)]), 80)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)
