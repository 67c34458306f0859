"""Gives the coordinator back the receipts that it signed for this site and lost: it was restored from an older copy.

They are the coordinator's own words, and it had the site's ledger's heads in them: nothing leaves that it did not know.
Their bytes stand in the ledger's next `control` line. Without them no further receipt could follow the last one here.
"""

import hashlib
import logging

from site_agent.gateway.connection.client import Connection
from site_agent.gateway.exit.ledger import Ledger
from wardround.records.ledger.entries import ReceiptEntry
from wardround.records.receipts import EMPTY_HEAD, NOT_RECEIVED
from wardround.signing.dsse import Envelope

PAGE = 40  # receipts in a message, as many as the coordinator takes
log = logging.getLogger(__name__)


def give_back_lost(connection: Connection, ledger: Ledger) -> int:
    """Give back the receipts after the last one that the coordinator knows. Returns how many it took.

    Raises:
        Unavailable, TryAgain, Refused: as every call does; the next connection goes on.
    """
    known = connection.last_receipt
    if known in ("", ledger.last_receipt):
        return 0  # a coordinator of an older version, or one that lost nothing
    receipts = _receipts(ledger)
    places = {EMPTY_HEAD: 0} | {digest: place for place, (digest, _) in enumerate(receipts, 1)}
    start = place = places.get(known)
    while place is not None and place < len(receipts):
        ledger.show_again()  # what it saw of the ledger without a receipt is lost too
        known = connection.give_back([envelope for _, envelope in receipts[place : place + PAGE]])
        before, place = place, places.get(known)
        if place is None or place <= before:
            break
    count = (place or 0) - (start or 0)
    if count > 0:
        log.warning(
            "the coordinator was restored from an older copy: it has back the %d receipts that it lost; its studies "
            "begin a new revision, which is to be approved here",
            count,
        )
    return max(0, count)


def _receipts(ledger: Ledger) -> list[tuple[str, Envelope]]:
    """The receipts of decided uploads in this ledger, oldest first, each with its digest."""
    found = []
    for entry in ledger.entries(ReceiptEntry):
        if entry.receipt.decision != NOT_RECEIVED:
            envelope = entry.envelope.envelope()
            found.append((hashlib.sha256(envelope.payload).hexdigest(), envelope))
    return found
