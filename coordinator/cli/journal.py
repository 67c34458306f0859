"""``coordinator journal``: which person gave which command here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import Force, State
from coordinator.cli.printing import print_table
from coordinator.cli.second_person import waiting as proposals
from wardround.cli import Json, group, print_json, say
from wardround.errors import BadData, UsageProblem
from wardround.terminal import escaped

if TYPE_CHECKING:
    from coordinator.journal_records import JournalCopied, JournalEntry, Known, WaitingRow

WIDTH = 160  # of a table where nobody looks at a terminal
LAST = 50
DIGEST = 64  # hex digits
app = group("Who gave which command to this coordinator, and what came of it.")


@app.command()
def show(
    state: State,
    about: Annotated[str, typer.Option(metavar="NAME", help="What concerns this study or site alone.")] = "",
    last: Annotated[int, typer.Option(min=0, metavar="N", help="The last N commands; 0 for all.")] = LAST,
    as_json: Json = False,
) -> None:
    """Show the operator's journal, and whether its lines are those that were written."""
    from coordinator.journal import entries

    lines, copied = _copied(state)
    found, head = entries(lines)
    chosen = [entry for entry in found if not about or about in _names(found, entry)]
    if as_json:
        rows = [entry.model_dump(mode="json", exclude_none=True) for entry in chosen]
        print_json({"entries": rows, "lines": copied.lines, "head": head})
        return
    begun = [entry for entry in chosen if entry.of is None]
    ends: dict[object, JournalEntry] = {entry.of: entry for entry in found if entry.of is not None}
    ends |= {number: entry for entry in found if (number := entry.about.get("proposal")) is not None}
    has_proposals = any(entry.event == "proposed" for entry in begun)
    waiting = {row.proposal: row for row in proposals(state).waiting} if has_proposals else {}
    table = [_row(one, ends, waiting) for one in (begun[-last:] if last else begun)]
    print_table(("line", "when (UTC)", "who", "command", "about", "end"), table, WIDTH)
    print(f"{copied.lines} lines, each as it was written; head {head}")


@app.command()
def export(
    state: State,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file: one JSON line for each entry, oldest first.")],
    force: Force = False,
) -> None:
    """Write the journal to a file, and last its head signed with the key of the receipts: for somebody else to keep."""
    from wardround.local import outputs

    refuse_no_coordinator(state)
    outputs.file(out, force=force, keep=[state])
    lines, copied = _copied(state)
    last = json.dumps({"signed": copied.signed, "receipt_key": copied.receipt_key})
    outputs.write(out, [line.encode() + b"\n" for line in (*lines, last)], force=force, keep=[state])
    say(f"{copied.lines:,} lines and the signed head written to {out}")
    say(f"next: give it to somebody who does not write here; `coordinator journal verify {out.name}` checks it")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `coordinator journal export` wrote.")],
    receipt_key: Annotated[
        str,
        typer.Option(metavar="FINGERPRINT", help="Of the key that must have signed it, as `coordinator sites` shows."),
    ] = "",
    earlier: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An older export, whose lines must be the first of this one."),
    ] = None,
) -> None:
    """Check an exported journal: no line changed, removed or moved, and the head signed. Needs no coordinator."""
    from wardround.signing.dsse import fingerprint

    lines, key = _verified(file)
    if receipt_key and fingerprint(key) != receipt_key:
        raise UsageProblem(f"{file} was signed with key {fingerprint(key)}, not with {receipt_key[:80]}")
    if earlier is not None:
        _refuse_other_beginning(file, lines, key, earlier)
    print(f"{len(lines)} lines, each as it was written; signed with key {fingerprint(key)}")


def _verified(file: Path) -> tuple[list[str], bytes]:
    """An export's lines, which hold together, and the key that signed their head.

    Raises:
        BadData: it is no export, or one that was changed.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from coordinator.journal import entries, refuse_other_head
    from wardround.signing.dsse import Envelope

    try:
        *lines, last = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # a name may hold other ends
        signed = json.loads(last)
        key = bytes.fromhex(signed["receipt_key"])
        envelope, public = Envelope.from_document(signed["signed"]), Ed25519PublicKey.from_public_bytes(key)
    except OSError as error:
        raise BadData(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BadData(f"{file}: its last line is no head that `coordinator journal export` wrote") from None
    found, head = entries(lines)
    refuse_other_head(envelope, public, len(found), head)
    return lines, key


def _refuse_other_beginning(file: Path, lines: list[str], key: bytes, earlier: Path) -> None:
    """Raises BadData: ``file`` is not the journal of which ``earlier`` is an older export."""
    before, older_key = _verified(earlier)
    if key != older_key:
        raise BadData(f"{file} is signed with another key than {earlier}, which was signed earlier")
    if len(lines) < len(before):
        raise BadData(
            f"{file} has {len(lines)} lines, and {earlier}, which was signed earlier, has {len(before)}",
            hint="give the newer export first; otherwise lines were removed",
        )
    for number, (now, then) in enumerate(zip(lines, before, strict=False), 1):
        if now != then:
            raise BadData(f"line {number} of {file} is not line {number} of {earlier}, which was signed earlier")


def _copied(state: Path) -> "tuple[list[str], JournalCopied]":
    from coordinator.journal_records import JournalCopied
    from coordinator.requests import CopyJournal

    lines: list[str] = []

    def keep(item: object) -> None:
        if isinstance(item, dict) and isinstance(line := item.get("line"), str):
            lines.append(line)

    return lines, ask(state, CopyJournal(), JournalCopied, progress=keep)


def _names(found: "list[JournalEntry]", entry: "JournalEntry") -> set[object]:
    """The study's or site's name that an entry, or the one that began it, has."""
    told = entry.about if entry.of is None else found[entry.of - 1].about
    return {told.get(name) for name in ("study", "site", "name")}


def _row(
    entry: "JournalEntry", ends: "Mapping[object, JournalEntry]", waiting: "dict[int, WaitingRow]"
) -> tuple[str, ...]:
    end = ends.get(entry.number)
    if entry.event == "proposed":
        came = _became(entry, end, waiting)
    elif entry.event == "done":
        came = "done"
    elif end is None:
        came = "not known: it ended in between"
    else:
        came = f"{end.event} {_told(end)}".strip()
    when = entry.at.replace("T", " ").removesuffix("Z")
    return str(entry.number), when, entry.by.text, entry.act, _told(entry), came


def _became(entry: "JournalEntry", end: "JournalEntry | None", waiting: "dict[int, WaitingRow]") -> str:
    """What became of a proposal. ``end``: the line that carries it out or takes it back."""
    if end is not None:
        return f"taken back by {end.by.text}" if end.event == "taken_back" else f"second person: line {end.number}"
    row = waiting.get(entry.number)
    return "lapsed" if row is None else f"waits for a second person until {row.until}"


def _told(entry: "JournalEntry") -> str:
    """What an entry is about; digests by their beginning."""
    return ", ".join(f"{name} {_short(name, value)}" for name, value in entry.about.items() if value != "")


def _short(name: str, value: "Known") -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == DIGEST and name.endswith(("digest", "sha256")) else escaped(text)
