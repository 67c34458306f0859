"""Verifies a site's ledgers and gives the verdict: no network, no torch, no service, nothing but the files.

Three things can be shown, and a verdict says of each whether it was:

    consistent  the lines chain, what they say fits together, and the signed heads cover them (``chain``)
    complete    nothing was cut: the coordinator's copy of its receipts names heads that this ledger had (``receipts``)
    whose       the ledger's key is the site's: by that copy, by a fingerprint, or by receipts under a known key

In this order, and the first fault ends it: the ledger; each older one that it continues, found beside it, with the head
that was cited; the keys that were given; a bundle's manifest; the copies of the receipts. Only a copy that did not come
from the site shows completeness: the caller says which did, unless the coordinator's key was given to know it by.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from site_agent.audit import receipts as copies
from site_agent.audit.chain import Account, Changed, account_of
from site_agent.audit.files import LedgerFiles, beside, in_folder
from site_agent.audit.secure import agreed_again
from wardround.errors import Unavailable
from wardround.records.receipts import ACCEPTED, REFUSED
from wardround.signing import dsse
from wardround.terminal import escaped

VERIFIED, TAMPERED, UNRESOLVED, CANNOT_VERIFY, CONSISTENT = 0, 1, 2, 3, 4
KNOWN_OF_A_FAULT = ("ok", "consistent", "first_bad", "ledger", "reason")


@dataclass(frozen=True)
class Copy:
    """A copy of the receipts to hold a ledger against. ``independent``: it did not come from the site.

    ``where`` says for people which copy it is.
    """

    data: bytes
    where: str
    independent: bool


@dataclass
class Verdict:
    """What a verification found; ``ok`` means all three: consistent, complete, whose.

    ``first_bad`` is the first bad line, counted from 1, of the ledger in the folder ``ledger``; None if there is none,
    or if the fault is in no line. Numbers are over all ledgers shown, except ``tail``: the lines of the newest that no
    receipt of the copy speaks of. ``bytes`` is what the uploads' payloads hold, whether or not the coordinator took
    them; ``resends`` how many further tries to send them the ledger let out, and ``resent_bytes`` what these may have
    sent at most. ``summaries`` counts those of a table's columns that left. ``compared`` counts the receipts of the
    copy, made at ``copied``; None without one. ``lost`` counts those among them whose lines were lost before a ledger
    rollover, ``open`` those of uploads that have no receipt in the ledger yet. ``not_shown`` says in sentences what is
    missing.
    """

    ok: bool = False
    consistent: bool = False
    complete: bool = False
    whose: str = ""  # by what the key is pinned; "" by nothing
    first_bad: int | None = None
    ledger: str = ""
    reason: str = ""
    not_shown: list[str] = field(default_factory=list)
    site: str = ""
    federation: str = ""
    first_time: str = ""
    last_time: str = ""
    ledgers: int = 0
    lines: int = 0
    unsigned_tail: int = 0
    bytes: int = 0
    uploads: int = 0
    resends: int = 0
    resent_bytes: int = 0
    accepted: int = 0
    refused: int = 0
    unresolved: int = 0
    summaries: int = 0
    compared: int | None = None
    copied: str = ""
    lost: int = 0
    open: int = 0
    earlier: int = 0
    tail: int = 0
    ledger_id: str = ""
    head: str = ""
    ledger_key: str = ""
    receipt_key: str = ""

    def document(self) -> dict[str, Any]:
        """As JSON. Of a changed ledger no number is a fact, and none is in it."""
        names = [item.name for item in fields(self)] if self.consistent else KNOWN_OF_A_FAULT
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Pins:
    """Fingerprints from somebody else: of the site's ledger key, of the coordinator's receipt key; "" for none."""

    key: str = ""
    receipt_key: str = ""


@dataclass(frozen=True)
class Shown:
    """A ledger, how an older one is found by its id, and what else must hold of the newest before the copies count."""

    newest: LedgerFiles
    find: Callable[[str], LedgerFiles | None]
    also: Callable[[Account], None] = lambda newest: None


def verify(
    folder: Path, receipts: Path | None = None, pins: Pins = Pins(), copy: Copy | None = None
) -> tuple[Verdict, int]:
    """The verdict on a ledger folder, with the older ledgers beside it that it continues, and the exit code.

    0 consistent, complete, and whose is shown; 1 changed since it was written; 2 consistent, but with unresolved
    uploads or an unsigned tail; 3 cannot be verified (no ledger, no key, no whole copy of the receipts); 4 consistent,
    completeness not shown.

    Args:
        receipts: the coordinator's copy, as its operator handed it out.
        copy: another copy, such as the site's own.
    """

    def look(verdict: Verdict) -> int:
        given = [copy] if copy is not None else []
        given += [given_copy(receipts)] if receipts is not None else []
        return judge(verdict, Shown(in_folder(folder), beside(folder)), given, pins)

    return judged(look)


def given_copy(receipts: Path) -> Copy:
    """The coordinator's copy in a file. Raises Unavailable: it cannot be read."""
    try:
        return Copy(receipts.read_bytes(), str(receipts), independent=True)
    except OSError as error:
        raise Unavailable(f"the receipts in {receipts} cannot be read ({error.strerror})") from None


def judged(look: Callable[[Verdict], int]) -> tuple[Verdict, int]:
    """The verdict that ``look`` fills in; a fault or a file that cannot be read is one too."""
    verdict = Verdict()
    try:
        return verdict, look(verdict)
    except Changed as bad:
        return Verdict(first_bad=bad.line, reason=bad.reason, ledger=bad.ledger), TAMPERED
    except Unavailable as error:
        return Verdict(reason=error.message), CANNOT_VERIFY


def judge(verdict: Verdict, shown: Shown, given: list[Copy], pins: Pins) -> int:
    """Fill in a verdict; returns its exit code.

    Raises:
        Changed: something was changed since it was written.
        Unavailable: there is too little to judge.
    """
    ledgers, missing = _ledgers(shown)
    verdict.whose = _pinned(ledgers, pins)
    shown.also(ledgers[0])
    _say(verdict, ledgers)
    unknown = sorted(set[str]().union(*(account.unknown for account in ledgers)))
    if unknown:
        verdict.not_shown.append(f"what lines of type {', '.join(unknown)} say: a newer version wrote them")
    if missing is not None:
        verdict.not_shown.append(f"ledger {escaped(missing, 80)}, which this one continues")
    for shown_copy in given:
        copy = copies.copy_in(shown_copy.data, shown_copy.where, ledgers)
        compared = copies.compare(copy, ledgers, missing)
        verdict.tail = ledgers[0].lines - compared.seen
        _take_copy(verdict, copy, compared, shown_copy.independent or bool(pins.receipt_key), missing)
    if not verdict.complete:
        verdict.not_shown.insert(0, f"that this is all of it: {_why_incomplete(verdict, given)}")
    if not verdict.whose:
        verdict.not_shown.append(f"that ledger key {verdict.ledger_key} is the site's")
    left = _left_over(verdict, any(account.torn for account in ledgers))
    verdict.reason = "; ".join(left)
    verdict.ok = verdict.complete and bool(verdict.whose) and not left
    return UNRESOLVED if left else VERIFIED if verdict.ok else CONSISTENT


def _ledgers(shown: Shown) -> tuple[list[Account], str | None]:
    """The ledger and those that it continues, newest first; and the id of the first that is not shown, or None.

    Raises:
        Changed: one of them was, or they do not follow each other.
    """
    ledgers = [account_of(shown.newest)]
    while (cited := ledgers[-1].cited) is not None:
        older_files = shown.find(cited.ledger_id)
        if older_files is None:
            return ledgers, cited.ledger_id
        older = account_of(older_files)
        if older.key != ledgers[0].key or not older.had(cited):
            reason = f"its first line continues ledger {cited.ledger_id} at a head, or with a key, that it never had"
            raise ledgers[-1].changed(1, reason)
        if older.lines > cited.lines:
            reason = f"line {cited.lines + 1} and those after it stand behind the head that the next ledger continues"
            raise older.changed(cited.lines + 1, reason)
        for newer in ledgers:
            if (line := agreed_again(older.secure, newer.secure)) is not None:
                raise newer.changed(line, f"line {line}: a round was agreed twice, with another set in {older.name}")
        ledgers.append(older)
    return ledgers, None


def _pinned(ledgers: list[Account], pins: Pins) -> str:
    """By what the ledger's key is known to be the site's, before any copy of the receipts is looked at.

    A copy may be signed with a receipt key that any of the ledgers names, so each of them must be the one given.
    """
    newest = ledgers[0]
    mine = dsse.fingerprint(bytes.fromhex(newest.key))
    if pins.key not in ("", mine):
        raise newest.changed(1, f"the ledger's key is {mine}, wanted {pins.key}")
    for account in ledgers:
        for keyid, line in account.receipt_key_lines.items():
            if pins.receipt_key not in ("", keyid):
                raise account.changed(line, f"line {line} names receipt key {keyid}, wanted {pins.receipt_key}")
    if pins.key:
        return "the fingerprint given"
    return "receipts under the fingerprint given" if pins.receipt_key and newest.key_named else ""


def _say(verdict: Verdict, ledgers: list[Account]) -> None:
    newest = ledgers[0]
    verdict.consistent = True
    verdict.site, verdict.federation = newest.site, newest.federation
    verdict.first_time, verdict.last_time = ledgers[-1].first_time, newest.last_time
    verdict.ledger_id, verdict.head = newest.ledger_id, newest.heads[-1].hex()
    verdict.ledger_key = dsse.fingerprint(bytes.fromhex(newest.key))
    verdict.receipt_key = ", ".join(newest.receipt_keys)
    verdict.ledgers, verdict.tail = len(ledgers), newest.lines
    for account in ledgers:
        verdict.lines += account.lines
        verdict.uploads, verdict.bytes = verdict.uploads + account.uploads, verdict.bytes + account.bytes
        verdict.resends, verdict.resent_bytes = (
            verdict.resends + account.resends,
            verdict.resent_bytes + account.resent_bytes,
        )
        verdict.accepted += account.decisions[ACCEPTED]
        verdict.refused += account.decisions[REFUSED]
        verdict.unresolved += len(account.open)
        verdict.summaries += account.summaries
        verdict.unsigned_tail += account.lines - account.signed


def _take_copy(
    verdict: Verdict, copy: copies.WholeCopy, compared: copies.Compared, independent: bool, missing: str | None
) -> None:
    """What a copy that agrees shows, and what it does not."""
    verdict.compared, verdict.copied, verdict.lost = compared.receipts, copy.statement.time, compared.lost
    verdict.open = compared.open
    verdict.earlier = copy.statement.earlier
    if independent:
        verdict.complete = not compared.lost and missing is None
        verdict.whose = verdict.whose or "the coordinator's receipts"
    if compared.lost:
        verdict.not_shown.append(f"the lines of {compared.lost} receipts: they were lost before a ledger rollover")
    if copy.statement.earlier:
        verdict.not_shown.append(f"{copy.statement.earlier} receipts of earlier enrolments of this site")


def _why_incomplete(verdict: Verdict, given: list[Copy]) -> str:
    if not given:
        return "no copy of the coordinator's receipts was given"
    if not any(copy.independent for copy in given):
        return f"{given[-1].where}, copied at {verdict.copied}, agree, but came from the site"
    return "lines are missing that the coordinator's receipts are about, or that the first line cites"


def _left_over(verdict: Verdict, torn: bool) -> list[str]:
    reasons = []
    if verdict.unresolved:
        reasons.append(f"{verdict.unresolved} uploads have no receipt and may have left")
    if verdict.unsigned_tail or torn:
        half = " and a torn one" if torn else ""
        reasons.append(f"no signed head covers the last {verdict.unsigned_tail} lines{half}")
    return reasons
