"""Reads the lines of a ledger: canonical JSON, read fast, as typed records.

What a known field must look like is in ``wardround.records.ledger`` and, in words, in docs/auditors.md. Types and
fields of a later version pass, so that an old verifier reads a new ledger, and says what it does not know.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from site_agent.audit.files import LedgerFiles, RawLines
from wardround.errors import BadData
from wardround.records.ledger.entries import ReceiptEntry
from wardround.records.ledger.lines import Line
from wardround.signing.canonical import MAX_DEPTH, MAX_INTEGER, refuse_deep


def lines(ledger: LedgerFiles | Path) -> Iterator[Line]:
    """A ledger's lines, oldest first, for showing; not judged. The receipt in a `receipt` line can be read.

    Raises:
        Unavailable: there is no ledger.
        BadData: a line has not the form of a record; the message says which.
    """
    for number, data in enumerate(RawLines(ledger), 1):
        try:
            line = line_in(data)
            if isinstance(line.entry, ReceiptEntry):
                line.entry.refuse_no_receipt()
            yield line
        except BadData as error:
            raise BadData(
                f"ledger line {number} cannot be read: {error.message}", hint="`site-agent audit verify` says more"
            ) from None


def line_in(data: bytes) -> Line:
    """The record in a line.

    Raises:
        BadData: not canonical JSON, no record, or one of its fields has not its form.
    """
    return Line.from_document(read(data))


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of a value that ``read`` gave."""
    return hashlib.sha256(_ENCODER.encode(value).encode()).hexdigest()


def read(data: bytes) -> Any:
    """The value of canonical JSON. As ``wardround.signing.canonical.loads``, three times as fast.

    It is canonical exactly if writing what was read gives the same bytes: a double key, a space, another order or
    escape do not survive that. Only numbers must be looked at one by one, and how deep it is, where it can be deep: how
    far a parser goes depends on the Python that runs it.
    """
    try:
        text = data.decode()
        value = _DECODER.decode(text)
        written = _ENCODER.encode(value)
    except (ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {str(error)[:120]}") from None
    if written != text:
        raise BadData("JSON, but not in canonical form")
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be
        refuse_deep(value)
    return value


def _integer(text: str) -> int:
    value = int(text) if len(text) < 20 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ValueError("an integer beyond 2^53 - 1")
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text[:20]} is no integer")


_DECODER = json.JSONDecoder(parse_float=_no_number, parse_int=_integer, parse_constant=_no_number)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False)
