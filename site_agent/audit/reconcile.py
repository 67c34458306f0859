"""Compares the ledger with somebody else's count of the bytes on the line.

What the ledger accounts for is every byte of every message: the payloads (`bytes_up` of each `session`, which also
counts what was sent twice after a broken line) and everything beside them (`control`). A session's payload must lie
within what the `upload` and `resend` lines until then let out. What a counter on the
line sees on top is framing: TLS records, HTTP/2 frames and headers, acknowledgements of downloads, keep-alives. That is
allowed for by the constants below, which were measured (docs/evidence.md), and no more.
"""

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from site_agent.audit.form import lines
from wardround.errors import BadData, Unavailable
from wardround.records.ledger.entries import ControlEntry, ResendEntry, SessionEntry, UploadEntry
from wardround.signing import canonical

SHARE = 0.005  # of what the ledger accounts for: TLS and HTTP/2 framing
CONNECTION = 16 * 1024  # bytes: handshake, certificates, settings, the first headers
CALL = 256  # bytes: headers of a call and its end
KEEPALIVE = 64  # bytes each 20 s
KEEPALIVE_S = 20
DOWN_SHARE = 0.0005  # of what came down: HTTP/2 window updates that acknowledge it
DIGITS = 18  # of a number of bytes; more is none


@dataclass
class Reconciled:
    """``expected``: bytes of all messages by the ledger; ``allowance``: framing at most; ``counted``: by the other;
    ``unexplained``: counted less expected, all of which must lie within the allowance. ``ok``: it does."""

    ok: bool
    expected: int
    payload: int
    sent_again: int
    control: int
    calls: int
    connections: int
    allowance: int
    counted: int
    unexplained: int
    open_session: bool
    reason: str

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Count:
    """Somebody else's count of bytes from the site. ``seconds``: how long connections were open, together."""

    up: int
    down: int = 0
    connections: int | None = None
    seconds: float = 0.0
    began: str = ""


def count_from(text: str) -> Count:
    """A count: a plain number of bytes, or the name of a file with one, or with what `site-agent audit relay` writes.

    Raises:
        Unavailable: there is no such file.
        BadData: it is no count.
    """
    if text.isascii() and text.isdigit() and len(text) <= DIGITS:
        return Count(int(text))
    path = Path(text)
    try:
        counted = canonical.read(path.read_bytes())
    except OSError as error:
        raise Unavailable(
            f"the count {path} cannot be read ({error.strerror})", hint="--bytes FILE or NUMBER"
        ) from None
    except BadData:
        raise BadData(f"{path} is no count: neither a number nor what `site-agent audit relay` writes") from None
    try:
        if isinstance(counted, int) and not isinstance(counted, bool):
            return Count(_size(counted))
        seconds = sum(_seconds(row["opened"], row["closed"] or counted["until"]) for row in counted["connections"])
        return Count(
            _size(counted["up"]), _size(counted["down"]), len(counted["connections"]), seconds, str(counted["began"])
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise BadData(f"{path} is no count: it lacks what `site-agent audit relay` writes") from None


def reconcile(folder: Path, count: Count, since: str = "") -> Reconciled:
    """Hold a count of bytes against the ledger's records from ``since`` on (RFC 3339; as a rule: when counting began).

    Fewer bytes than the ledger says are unexplained too, beyond what was recorded and not sent.
    """
    since = since or count.began
    payload = again = control = calls = sessions = 0
    recorded = 0  # in the session that is open
    let_out = sent_in_all = 0  # from the first line on, whenever counting began
    more = 0
    open_session = False
    for line in lines(folder):
        entry = line.entry
        if isinstance(entry, UploadEntry | ResendEntry):
            let_out += entry.payload_bytes
        elif isinstance(entry, SessionEntry):
            sent_in_all += entry.bytes_up or 0
            more = max(more, sent_in_all - let_out)
        if line.ts < since:
            continue
        match entry:
            case UploadEntry():
                recorded += entry.payload_bytes
            case SessionEntry():
                # a line that says what was left out is of one connection and of those
                sessions += (entry.left_out or 0) + (entry.event == "opened" or entry.left_out is not None)
                open_session = entry.event == "opened"
                if not open_session:
                    sent = entry.bytes_up or 0
                    payload, again = payload + min(sent, recorded), again + max(0, sent - recorded)
                    recorded = 0
            case ControlEntry():
                control += entry.bytes
                calls += sum(row.count for row in entry.methods or ())
    payload += recorded
    expected = payload + again + control
    connections = count.connections if count.connections is not None else max(1, sessions)
    allowance = int(
        SHARE * expected + CONNECTION * connections + CALL * calls
        + KEEPALIVE * (count.seconds / KEEPALIVE_S) + DOWN_SHARE * count.down
    )  # fmt: skip
    unexplained = count.up - expected
    reason = ""
    if unexplained > allowance:
        reason = f"{unexplained} bytes more left than the ledger accounts for; framing explains at most {allowance}"
    elif more:
        reason = f"{more} payload bytes more left than the ledger's `upload` and `resend` lines let out"
    elif unexplained < -(SHARE * expected + CONNECTION * connections):
        reason = f"{-unexplained} bytes fewer were counted than the ledger says left: not everything passed the counter"
    return Reconciled(
        not reason, expected, payload, again, control, calls, connections, allowance, count.up, unexplained,
        open_session, reason,
    )  # fmt: skip


def _size(value: Any) -> int:
    """Raises ValueError: more bytes than anybody counts, or fewer than none."""
    size = int(value)
    if not 0 <= size < 10**DIGITS:
        raise ValueError(size)
    return size


def _seconds(opened: str, closed: str) -> float:
    first, last = (datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (opened, closed))
    return max(0.0, (last - first).total_seconds())
