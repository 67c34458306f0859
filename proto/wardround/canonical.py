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

MAX_INTEGER = 2**53 - 1  # what every JSON reader keeps exactly


def dumps(value: Any) -> bytes:
    """The canonical JSON of ``value``: sorted keys, no spaces, UTF-8.

    Raises:
        BadData: a float, a non-string key, an integer that some reader would round, or text that is not Unicode.
    """
    _check(value, "$")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadData("a text holds half a character (a lone surrogate), which has no UTF-8") from None


def loads(data: bytes) -> Any:
    """The value of canonical JSON.

    Raises:
        BadData: not JSON, a duplicate key, or not the canonical form of what it says.
    """
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates)
        canonical = dumps(value)
    except (ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {error}") from None
    if canonical != data:
        raise BadData("JSON, but not in canonical form")
    return value


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


def _check(value: Any, where: str) -> None:
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise BadData(f"{where}: an integer beyond 2^53 - 1, which JSON readers may round")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadData(f"{where}: key {key!r} is not a string")
            _check(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    else:
        raise BadData(f"{where}: {type(value).__name__} has no canonical form")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value
