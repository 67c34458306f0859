"""Records as JSON: one strict codec for the dataclasses that a site keeps in files or passes over its control socket.

A class says what each field is by its type; ``STRICT`` refuses unknown fields and converts nothing. A field whose name
in the file is another has it as its ``Field(alias=...)``.
"""

import errno
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter

from wardround.errors import BadData, TryAgain
from wardround.local import descriptors, durable
from wardround.signing import canonical

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Record = TypeVar("Record")
REMEMBERED_BYTES = 256 * 1024
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EBUSY})  # nothing is wrong with it
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def to_document(record: Any) -> dict[str, Any]:
    """The record as a JSON object."""
    document: dict[str, Any] = _adapter(type(record)).dump_python(record, mode="json", by_alias=True)
    return document


def from_document(kind: type[Record], document: Any) -> Record:
    """The record that ``document`` is.

    Raises:
        ValueError, BadData: it is not a ``kind``.
    """
    try:
        text = json.dumps(document)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return _adapter(kind).validate_json(text)


def to_bytes(record: Any) -> bytes:
    """The bytes of the record's file: canonical JSON."""
    return canonical.dumps(to_document(record))


def from_bytes(kind: type[Record], data: bytes) -> Record:
    """The record in the bytes of a file, which holds every field and nothing else. Raises as ``from_document``."""
    document = canonical.read(data)
    record = _adapter(kind).validate_json(data)
    if to_document(record) != document:
        raise ValueError("a field is missing, or stands there otherwise than it is written")
    return record


def read(path: Path, kind: type[Record]) -> Record:
    """The record at ``path``. Raises as ``parsed``."""
    return parsed(path, kind, content(path, kind))


def content(path: Path, kind: type[Record]) -> bytes:
    """The bytes of a record's file.

    Raises:
        StorageFailed: the disk does not give them.
        TryAgain: the system has no room, memory or file descriptor for it now.
        BadData: as ``parsed``.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        if descriptors.ran_out(error):
            raise TryAgain(f"{path} cannot be read now: no file descriptor is left") from None
        if error.errno in PASSING:
            raise TryAgain(
                f"{path} cannot be read now ({error.strerror})", hint="free some, or wait; the file is whole"
            ) from None
        if error.errno in durable.BROKEN_DISK:
            raise durable.unread(path, error) from None
        raise _damaged(path, kind) from None


def parsed(path: Path, kind: type[Record], data: bytes) -> Record:
    """The record whose bytes were read at ``path``.

    Raises:
        BadData: the file is damaged; it says which, and that nothing was changed.
        TryAgain: there is no file descriptor for it now.
    """
    try:
        if len(data) <= REMEMBERED_BYTES and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return cast(Record, _remembered(kind, data))  # type: ignore[arg-type]
        return from_bytes(kind, data)
    except (BadData, ValueError):  # pydantic's is a ValueError
        raise _damaged(path, kind) from None


@lru_cache(maxsize=8)
def _remembered(kind: Any, data: bytes) -> object:
    """The record in ``data``, which is read many times in a round and changes between studies."""
    return from_bytes(kind, data)


def _damaged(path: Path, kind: type[Any]) -> BadData:
    return BadData(
        f"{path} is damaged or of another version: it does not hold the fields of {kind.__name__.lower()}",
        hint="restore it from a backup; the ledger and the models beside it are untouched",
    )


def _adapter(kind: type[Record]) -> TypeAdapter[Record]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
