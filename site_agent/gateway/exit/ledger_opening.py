"""Reads a ledger's files as the agent finds them at its start, and cuts off what a crash tore.

A torn last line is cut and kept in ``torn/``. Whole lines that no signed head covers are kept: their fsync may have
failed, and they are written once more by the ``ledger``. Anything else that does not hold together is refused, and
nothing is changed: it is for a person to look at.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from site_agent.gateway.exit.ledger_state import LedgerState
from wardround.errors import BadData, NeedsPerson
from wardround.local import durable
from wardround.records.ledger.entries import CitedHead
from wardround.records.ledger.lines import Line
from wardround.records.receipts import line_hash
from wardround.signing.dsse import Envelope

FIRST_SEGMENT = "000001.jsonl"
LEDGER_ID = re.compile(r"[0-9a-f]{32}")
MOST_OLDER = 100  # ledgers that continue each other
HEADS = "heads.jsonl"


@dataclass(frozen=True)
class Opened:
    """A ledger as it was read. ``torn``: how many bytes of a last line were cut off; ``signed``: how many lines the
    last signed head covers; ``unsigned_bytes``: of the lines after these."""

    state: LedgerState
    torn: int
    signed: int
    unsigned_bytes: int


def opened(folder: Path) -> Opened:
    """Read the ledger in a folder, and cut off a torn last line and a torn last signature.

    Raises:
        NeedsPerson: it is broken before its unsigned tail; nothing is changed.
    """
    segment = folder / FIRST_SEGMENT
    data = segment.read_bytes() if segment.exists() else b""
    state, sizes = _whole_lines(segment, data)
    torn = data[sum(sizes) :]
    signed = _signed(folder, state, bool(torn))
    if torn:
        _cut(folder, state.lines, torn)
    return Opened(state, len(torn), signed, sum(sizes[signed:]))


def _whole_lines(segment: Path, data: bytes, most: int = MOST_OLDER) -> tuple[LedgerState, list[int]]:
    """What the lines say that follow each other, and the bytes of each. Of the last line only what is no line at all,
    torn by a crash, is left out. What the ledgers before say is remembered with it."""
    state, sizes = LedgerState(), list[int]()
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        document = _next_document(line, state)
        if document is None and number == len(lines):
            break
        if document is None:
            raise broken(segment, f"line {number} of {len(lines)} does not continue the one before it")
        try:
            state.take(Line.from_document(document), line_hash(line))
        except BadData as error:
            raise broken(segment, f"line {number} of {len(lines)} has not its form: {error.message}") from None
        if number == 1 and state.continues is not None:
            state.remember(_before(segment, state.continues, most))
        sizes.append(len(line) + 1)
    return state, sizes


def _before(segment: Path, cited: CitedHead, most: int) -> LedgerState:
    """A ledger that another one continues, where `audit rollover` left it, and those before it."""
    older = segment.parent.parent / f"ledger-{cited.ledger_id}" / FIRST_SEGMENT
    if not LEDGER_ID.fullmatch(cited.ledger_id) or not older.exists() or most == 0:
        state = LedgerState()
        state.missing = cited.ledger_id
        return state
    state, _ = _whole_lines(older, older.read_bytes(), most - 1)
    if state.head_after(cited.lines) != cited.head:
        raise broken(older, f"its first {cited.lines} lines are not those that the next ledger continues")
    return state


def _next_document(line: bytes, state: LedgerState) -> Any:
    """The object in a line, if it continues the lines before it; else None."""
    try:
        document = json.loads(line)
        place = (document["v"], document["seq"], document["prev"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return document if place == (1, state.lines, state.head.head) else None


def _signed(folder: Path, state: LedgerState, torn: bool) -> int:
    """How many lines the last signed head covers. A torn last signature is cut: it can be made again."""
    path, segment = folder / HEADS, folder / FIRST_SEGMENT
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    if end != len(data):
        with durable.SpoolFile(path) as file:
            file.truncate(end)
            file.sync()
    signed = 0
    for line in data[:end].splitlines():
        try:
            head = json.loads(Envelope.from_document(json.loads(line)).payload)
            lines, digest = int(head["lines"]), str(head["head"])
            if lines < 0:
                raise ValueError("fewer than no lines")
        except (BadData, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise broken(segment, f"{HEADS} holds a line that is no signed head") from None
        if lines > state.lines:
            has = f"{state.lines} whole lines" + (" and a torn one" if torn else "")
            raise broken(segment, f"it has {has}, a signed head covers {lines}")
        if state.head_after(lines) != digest:
            raise broken(segment, f"its first {lines} lines are not those that the signed head covers")
        signed = max(signed, lines)
    return signed


def _cut(folder: Path, lines: int, torn: bytes) -> None:
    """Keep the torn bytes aside, then cut them off."""
    kept = folder / "torn" / f"{lines:06d}-{hashlib.sha256(torn).hexdigest()[:12]}"
    durable.make_folder(kept.parent)
    durable.write_file(kept, torn)
    with durable.SpoolFile(folder / FIRST_SEGMENT) as file:
        file.truncate(file.size() - len(torn))
        file.sync()


def broken(segment: Path, why: str) -> NeedsPerson:
    return NeedsPerson(
        f"ledger {segment} is broken: {why}; nothing was sent or changed",
        hint="keep this folder as it is and run `site-agent audit verify`; restore the last backup beside it",
    )
