"""Receipts that sites give back to a coordinator that was restored from an older copy and lost them.

Each is signed by the coordinator's own key and names the one before it, so that nothing else can be put in their place.
With them the site's chain of receipts and its ledger's heads are here again, and its next upload follows from them.
A study whose rounds they are of cannot go on by itself: this coordinator has not the updates.
"""

import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.storage.database import Store
from coordinator.studies.engine import Engine
from coordinator.studies.events import Halted
from coordinator.studies.state import ENDED
from coordinator.updates.allowance import Allowance
from coordinator.updates.ledgers import keep_head
from coordinator.updates.receive import Receptions
from wardround.errors import BadData
from wardround.records.receipts import ACCEPTED, NOT_RECEIVED, Receipt
from wardround.signing.dsse import Envelope

MAX_RETURNED = 40  # receipts in a message
MAX_RETURNS_AN_HOUR = 2000  # messages of one site
log = logging.getLogger(__name__)


class Returned:
    """Takes receipts back. ``key`` is the coordinator's own: it signed them."""

    def __init__(
        self, engine: Engine, store: Store, receptions: Receptions, federation: str, key: Ed25519PublicKey,
        wall_clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._engine, self._store, self._receptions = engine, store, receptions
        self._federation, self._key = federation, key
        self._taken = Allowance("messages with returned receipts", wall_clock)

    def last(self, site: str) -> str:
        """SHA-256 of the payload of a site's last receipt here."""
        with self._store.read() as session:
            row = session.get(tables.Site, site)
        assert row is not None
        return row.last_receipt

    def take(self, site: str, envelopes: Sequence[Envelope]) -> str:
        """Keep the receipts that follow the last one here, up to the first that does not. What is the last one then.

        Raises:
            TryAgain: too many messages in an hour (TOO_BUSY).
        """
        self._taken.take(site, MAX_RETURNS_AN_HOUR)
        return self._engine.call(lambda: self._take(site, envelopes))

    def _take(self, site: str, envelopes: Sequence[Envelope]) -> str:
        taken: list[Receipt] = []
        with self._store.write() as session:
            row = session.get(tables.Site, site)
            assert row is not None
            for envelope in envelopes:
                receipt = self._following(row, envelope)
                if receipt is None:
                    break
                if _keep(session, row, receipt, envelope):
                    taken.append(receipt)
            last = row.last_receipt
        if taken:
            decided = {receipt.upload_id for receipt in taken}  # and on their way again, some of them perhaps
            self._receptions.close_where(lambda reception: reception.header.upload_id in decided)
            log.warning(
                "site %s gave back %d receipts that are not here: this state is older than what was acknowledged",
                site, len(taken),
            )  # fmt: skip
            self._pause_what_is_behind(site, taken)
        return last

    def _following(self, row: tables.Site, envelope: Envelope) -> Receipt | None:
        """The receipt, if this coordinator signed it for this site as the next one."""
        try:
            receipt = Receipt.verified(envelope, self._key)
        except BadData as error:
            log.warning("site %s gave back what is no receipt of ours: %s", row.name, error.message)
            return None
        wanted = (row.name, self._federation, row.last_receipt)
        if (receipt.site, receipt.federation, receipt.previous) != wanted or receipt.decision == NOT_RECEIVED:
            return None
        return receipt if receipt.ledger_key == row.ledger_key else None

    def _pause_what_is_behind(self, site: str, taken: Sequence[Receipt]) -> None:
        """Pause each study whose round a site holds a receipt of that was given after this state was copied."""
        for name in sorted({receipt.study for receipt in taken if receipt.decision == ACCEPTED}):
            study = self._engine.find(name)
            if study is None or study.state.phase in ENDED:
                continue
            rounds = [receipt.round for receipt in taken if (receipt.study, receipt.revision) == (name, study.revision)]
            if rounds:
                why = (
                    f"this coordinator was restored from an older copy: site {site} holds a receipt of round "
                    f"{max(rounds)}, and the newest model here is of round {study.state.models}; "
                    f"`coordinator study renew {name}` begins a new revision from it"
                )
                self._engine.happened(name, Halted(why))


def _keep(session: Session, site: tables.Site, receipt: Receipt, envelope: Envelope) -> bool:
    """Write a receipt down as it was decided, as far as it says; the update itself is lost. Whether it was not here."""
    if receipt.ledger is not None:
        keep_head(session, receipt.site, receipt.ledger, in_receipt=True)
        site.ledger_id = receipt.ledger.ledger_id
    site.last_receipt = hashlib.sha256(envelope.payload).hexdigest()
    known = session.get(tables.Upload, receipt.upload_id)
    if known is not None and known.receipt:
        return False
    upload = tables.Upload(
        id=receipt.upload_id, site=receipt.site, study=receipt.study, revision=receipt.revision, round=receipt.round,
        attempt=receipt.attempt, content="", manifest_sha256=receipt.manifest_sha256,
        payload_bytes=receipt.payload_bytes, metrics="[]", num_examples=0, num_validation=0,
        received=receipt.payload_bytes, decision=receipt.decision, code=receipt.code, tensor=receipt.tensor,
        opened_s=_seconds(receipt), decided_s=_seconds(receipt), receipt=json.dumps(envelope.document()),
    )  # fmt: skip
    session.merge(upload)
    return True


def _seconds(receipt: Receipt) -> float:
    try:
        return datetime.datetime.fromisoformat(receipt.time).timestamp()
    except ValueError:
        return 0.0
