"""What a ledger says has left, read on as it grows: for the page and the metrics, which look again and again.

Nothing here judges: ``verify`` does. An update counts from its `upload` line on, before its first byte is sent.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from site_agent.audit.files import SEGMENT
from site_agent.audit.form import line_in
from site_agent.state.directory import COUNTS
from wardround.errors import Unavailable
from wardround.records.ledger.decided import EndorsedEntry, HeldEntry, HoldEntry, ReleasedEntry
from wardround.records.ledger.entries import (
    BlockedEntry,
    ControlEntry,
    ReceiptEntry,
    ResendEntry,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.ledger.summary import SummaryEntry

Place = tuple[str, int | None]  # study, round


@dataclass(frozen=True)
class Update:
    """One update that left, or may have.

    Attributes:
        at: when, RFC 3339 in UTC. ``numbers``: metrics and counts beside the tensors.
        answer: the coordinator's; "" while there is none.
    """

    at: str
    study: str
    round: int
    attempt: int
    closing: bool
    tensors: int
    bytes: int
    numbers: int
    tries: int = 1
    answer: str = ""


@dataclass(frozen=True)
class Decision:
    """What was held, endorsed, released, rejected or blocked here, and by whom or by which rule."""

    at: str
    study: str
    round: str
    what: str
    why: str


@dataclass
class Left:
    """All of it.

    Attributes:
        summaries: of columns' figures that a person let leave: when, and for which request.
        endorsed: (study, round) of an update that waits for further people -> it, and who would have it leave.
    """

    updates: dict[str, Update] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    summaries: list[tuple[str, str]] = field(default_factory=list)
    endorsed: dict[Place, tuple[str | None, tuple[str, ...]]] = field(default_factory=dict)
    decided: Counter[tuple[str, str]] = field(default_factory=Counter)  # study, what
    control_bytes: int = 0
    lines: int = 0

    def of_day(self, day: str) -> list[Update]:
        """The updates of a day, such as "2026-01-31", newest first."""
        return [update for update in reversed(self.updates.values()) if update.at.startswith(day)]

    def take(self, line: Line) -> None:
        """The next line."""
        self.lines += 1
        match line.entry:
            case UploadEntry() as upload:
                self.updates[upload.upload_id] = Update(
                    line.ts, upload.study, upload.round, upload.attempt, upload.kind == "validate",
                    len(upload.tensors), upload.payload_bytes, len(upload.metrics) + COUNTS,
                )  # fmt: skip
            case ResendEntry() as resend if resend.upload_id in self.updates:
                self.updates[resend.upload_id] = replace(self.updates[resend.upload_id], tries=resend.try_)
            case ReceiptEntry() as answer if answer.upload_id in self.updates:
                receipt = answer.receipt
                words = " ".join(filter(None, (receipt.decision.replace("_", " "), receipt.code)))
                self.updates[answer.upload_id] = replace(self.updates[answer.upload_id], answer=words)
            case BlockedEntry() as blocked:
                why = "; ".join(filter(None, (blocked.what or "", blocked.rule or "")))
                self._decided(line.ts, blocked.study, blocked.round, "blocked", why)
            case HoldEntry() as hold:
                what = "held" if isinstance(hold, HeldEntry) else hold.type
                before = (hold.also_by or ()) if isinstance(hold, ReleasedEntry) else ()
                by = " and ".join(person.words() for person in (hold.by, *before) if person is not None)
                self._decided(line.ts, hold.study, hold.round, what, f"by {by}" if by else "")
                self._note(hold)
            case SummaryEntry() as summary:
                self.summaries.append((line.ts, summary.request))
            case ControlEntry() as control:
                self.control_bytes += control.bytes

    def _note(self, hold: HoldEntry) -> None:
        place = hold.study, hold.round
        update, people = self.endorsed.get(place, (hold.update, ()))
        if isinstance(hold, EndorsedEntry) and hold.by is not None:
            self.endorsed[place] = hold.update, (*(people if update == hold.update else ()), hold.by.words())
        elif not isinstance(hold, HeldEntry) or update != hold.update:
            self.endorsed.pop(place, None)

    def _decided(self, at: str, study: str, round_: int | None, what: str, why: str) -> None:
        self.decisions.append(Decision(at, study, "" if round_ is None else str(round_), what, why))
        self.decided[study, what] += 1


class LedgerReader:
    """Reads what was appended since the last time. Not safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = Left()
        self._begin: tuple[int, int] | None = None  # the first segment's device and inode
        self._segment, self._at = "", 0  # how far it was read

    def read(self) -> Left:
        """All that left so far.

        Raises:
            Unavailable: the ledger cannot be read.
            BadData: a line of it is no record.
        """
        try:
            for line in self._new_lines():
                self._left.take(line_in(line))
        except OSError as error:
            raise Unavailable(f"the ledger in {self._folder} cannot be read ({error.strerror})") from None
        return self._left

    def _new_lines(self) -> Iterator[bytes]:
        names = sorted(path.name for path in self._folder.iterdir() if SEGMENT.fullmatch(path.name))
        begin = (self._folder / names[0]).stat() if names else None
        key = (begin.st_dev, begin.st_ino) if begin is not None else None
        if key != self._begin:  # another ledger lies there now
            self._left, self._begin, self._segment, self._at = Left(), key, "", 0
        for name in names:
            if name < self._segment:
                continue
            if name > self._segment:
                self._segment, self._at = name, 0
            with (self._folder / name).open("rb") as file:
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._at += len(line)
                    yield line[:-1]
