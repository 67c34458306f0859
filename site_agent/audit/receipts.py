"""Compares the coordinator's copy of a site's receipts with the site's ledgers.

A ledger alone cannot show that it is all of it: whoever cuts lines and signed heads at the same place leaves a shorter
ledger that holds together. Each receipt names the ledger's head as the coordinator saw it, so a copy of the receipts
that did not come from the site shows what was cut, up to the newest of them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.audit.chain import Account, receipt_in, signed_value
from site_agent.audit.form import read
from wardround.errors import BadData, Unavailable
from wardround.records.receipt_copy import COPY_TYPE, Statement
from wardround.records.receipts import EMPTY_HEAD, NOT_RECEIVED, Receipt
from wardround.signing import dsse


@dataclass(frozen=True)
class WholeCopy:
    """A whole copy, each signature verified. ``where`` says for people which one it is."""

    where: str
    statement: Statement
    receipts: list[tuple[str, Receipt]]  # SHA-256 of its payload, and the receipt


@dataclass(frozen=True)
class Compared:
    """What the ledgers have of a copy. ``lost``: receipts of lines that stand in no ledger shown; ``open``: those of
    uploads that have no receipt in the ledger yet; all the others are in it. ``seen``: how many lines of the newest
    ledger a receipt's head covers."""

    receipts: int
    lost: int
    open: int
    seen: int


def copy_in(data: bytes, where: str, ledgers: Sequence[Account]) -> WholeCopy:
    """The copy in ``data``: one envelope a line, the last one the coordinator's statement about the others.

    Args:
        ledgers: newest first; whose `identity` lines name the keys that receipts may be signed with.

    Raises:
        Unavailable: it is not a whole copy of this site's receipts, and proves nothing.
    """
    keys = {keyid: key for account in ledgers for keyid, key in account.receipt_keys.items()}
    verified = {envelope: known for account in ledgers for envelope, known in account.verified.items()}
    if not data.endswith(b"\n"):
        raise Unavailable(f"{where}: the copy is not whole: it ends within a line")
    lines = data[:-1].split(b"\n")
    number, previous = len(lines), EMPTY_HEAD
    receipts = []
    answered: set[str] = set()
    try:
        envelope, key = _envelope(lines[-1], keys)
        statement = Statement.from_document(signed_value(envelope, COPY_TYPE, envelope.keyid, key))
        for number, line in enumerate(lines[:-1], 1):  # noqa: B007  said where a line is refused
            same = verified.get(hashlib.sha256(line).hexdigest())
            digest, receipt = same if same is not None else _receipt(line, keys)
            whose = (receipt.site, receipt.federation, receipt.ledger_key or statement.ledger_key)
            if whose != (statement.site, statement.federation, statement.ledger_key):
                raise BadData(f"it is for site `{receipt.site}` with another key or federation than the copy's")
            if receipt.upload_id in answered:
                raise BadData(f"the coordinator answered upload {receipt.upload_id[:12]}… twice")
            if receipt.previous != previous or receipt.decision == NOT_RECEIVED:
                raise BadData("it does not follow the one before it")
            previous = digest
            answered.add(receipt.upload_id)
            receipts.append((digest, receipt))
    except BadData as error:
        raise Unavailable(f"{where}: the copy is not whole: line {number}: {error.message}") from None
    if (statement.receipts, statement.last) != (len(receipts), previous):
        reason = f"it has {len(receipts)} receipts, the coordinator's statement is about {statement.receipts}"
        raise Unavailable(f"{where}: the copy is not whole: {reason}")
    for name in ("site", "federation"):
        own, stated = getattr(ledgers[0], name), getattr(statement, name)
        if own not in ("", stated):
            raise Unavailable(f"{where}: the copy is of {name} `{stated}`, this ledger is of `{own}`")
    return WholeCopy(where, statement, receipts)


def compare(copy: WholeCopy, ledgers: Sequence[Account], missing: str | None) -> Compared:
    """Hold a copy against the ledgers of its site, newest first.

    Each receipt must be in them, in its order, byte for byte. A receipt for an upload that waits for one there is no
    fault: it stays unresolved until the site has asked. Receipts that the ledger has beyond the copy's end are newer.

    Where a ledger ends that another one continues, receipts of lines that it does not have are counted: these lines
    were lost before the ledger rollover.

    Args:
        missing: the id of a ledger that the oldest one continues and that is not shown, or None.

    Raises:
        Changed: the ledgers and the copy disagree.
        Unavailable: some receipts are of the ledger that is missing.
    """
    newest = ledgers[0]
    if copy.statement.ledger_key != newest.key:
        raise newest.changed(1, "the ledger's key is not the one with which the coordinator enrolled this site")
    order: list[str] = []
    ends: dict[str, int] = {}
    for account in reversed(ledgers):
        order += account.receipts
        ends[account.name] = len(order)
    seams = {ends[account.name] for account in ledgers[1:]} | ({0} if missing is not None else set())
    place = lost = waiting = seen = 0
    for number, (digest, receipt) in enumerate(copy.receipts, 1):
        if receipt.ledger is not None and receipt.ledger.ledger_id == newest.ledger_id:
            seen = max(seen, receipt.ledger.lines)
        if place < len(order) and order[place] == digest:
            place += 1
        elif place in seams and _of_lost_lines(receipt, ledgers):
            lost += 1
        else:
            _refuse_misplaced(number, receipt, ledgers, place, ends)
            waiting += 1
    if lost and missing is not None:
        raise Unavailable(
            f"{lost} of the {len(copy.receipts)} receipts are not of the ledgers shown: ledger {missing}, which this "
            "one continues, is missing",
            hint=f"put it beside this one, as ledger-{missing}",
        )
    return Compared(len(copy.receipts), lost, waiting, seen)


def _owner(receipt: Receipt, ledgers: Sequence[Account]) -> Account | None:
    """The ledger that a receipt is about: the one it names, else the one in which its upload is open."""
    head = receipt.ledger
    for account in ledgers:
        if account.ledger_id == head.ledger_id if head is not None else receipt.upload_id in account.open:
            return account
    return None


def _of_lost_lines(receipt: Receipt, ledgers: Sequence[Account]) -> bool:
    owner, head = _owner(receipt, ledgers), receipt.ledger
    if owner is None:
        return True
    return owner is not ledgers[0] and head is not None and not owner.had(head)


def _refuse_misplaced(
    number: int, receipt: Receipt, ledgers: Sequence[Account], place: int, ends: dict[str, int]
) -> None:
    """Raises Changed: the copy has a receipt that the ledger does not, and its upload does not wait for one."""
    account, head = _owner(receipt, ledgers) or ledgers[0], receipt.ledger
    at = 1 + (min(head.lines, account.lines) if head is not None else account.lines)
    what = f"receipt {number} of the coordinator's copy ({receipt.study} round {receipt.round}, {receipt.decision})"
    if head is not None and head.ledger_id == account.ledger_id and head.lines > account.lines:
        reason = f"{what} names a ledger of {head.lines} lines, this one has {account.lines}: it was cut short"
        raise account.changed(at, reason)
    if receipt.upload_id not in account.open or place != ends[account.name]:
        raise account.changed(at, f"{what} is not in the ledger at its place")
    try:
        account.fits(receipt)
    except BadData as error:
        raise account.changed(at, f"{what}: {error.message}") from None


def _receipt(line: bytes, keys: dict[str, Ed25519PublicKey]) -> tuple[str, Receipt]:
    """A receipt that is not, byte for byte, in the ledger. Raises BadData: it is none, or not the coordinator's."""
    envelope, key = _envelope(line, keys)
    return hashlib.sha256(envelope.payload).hexdigest(), receipt_in(envelope, key)


def _envelope(line: bytes, keys: dict[str, Ed25519PublicKey]) -> tuple[dsse.Envelope, Ed25519PublicKey]:
    """Raises BadData: no envelope, or one of a key that is none of the coordinator's."""
    envelope = dsse.Envelope.from_document(read(line))
    if envelope.keyid not in keys:
        raise BadData("it is signed by a key that no `identity` line of this ledger names")
    return envelope, keys[envelope.keyid]
