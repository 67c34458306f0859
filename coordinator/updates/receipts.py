"""The coordinator's receipts: signed, found again, and copied for whoever holds them against the site's ledger."""

import datetime
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.storage.database import Store
from coordinator.updates.admission import Refusal
from coordinator.updates.allowance import Allowance
from wardround.errors import BadData
from wardround.records.receipt_copy import Statement
from wardround.records.receipts import ACCEPTED, EMPTY_HEAD, NOT_RECEIVED, REFUSED, LedgerHead, Receipt
from wardround.signing.dsse import Envelope

MAX_COPIES_AN_HOUR = 30  # copies of all its receipts, of one site
PAGE = 100  # receipts that are in memory at a time
Chained = tables.Site | sa.Row[int | None, str, str]  # a site's record, or that of its chain: last receipt, ledger key


class Receipts:
    """The receipts of one coordinator. ``key`` signs them."""

    def __init__(
        self, store: Store, federation: str, key: Ed25519PrivateKey, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._federation = federation
        self._key = key
        self._wall_clock = wall_clock
        self._copies = Allowance("copies of receipts", wall_clock)

    def sign(
        self, upload: tables.Upload, site: Chained, refusal: Refusal | None, ledger: LedgerHead | None
    ) -> Envelope:
        """The receipt of an upload that is decided now; it follows the last one of ``site``.

        Args:
            ledger: the head that it countersigns.
        """
        return self._signed(upload, site, ACCEPTED if refusal is None else REFUSED, refusal, ledger)

    def find(self, site: str, upload_id: str) -> Envelope | int:
        """The receipt of a decided upload, or how much of an undecided one is durable here.

        An id that is not known gets a signed ``not_received``, which is no link of the site's chain of receipts.
        """
        with self._store.read() as session:
            upload = session.get(tables.Upload, upload_id)
            row = session.get(tables.Site, site)
        assert row is not None
        if upload is None or upload.site != site:
            unknown = tables.Upload(
                id=upload_id, site=site, study="", revision=0, round=0, attempt=0, manifest_sha256="", payload_bytes=0
            )
            return self._signed(unknown, row, NOT_RECEIVED, Refusal("NOT_RECEIVED"), None)
        return receipt_of(upload) if upload.receipt else upload.received

    def copy(self, site: str) -> Iterator[Envelope]:
        """The copy of a site's own receipts, with the signed statement at its end.

        Raises:
            TryAgain: too many copies in an hour (TOO_BUSY).
        """
        self._copies.take(site, MAX_COPIES_AN_HOUR)
        return copy_of(self._store, site, self._federation, self._key, self._wall_clock())

    def _signed(
        self,
        upload: tables.Upload,
        site: Chained,
        decision: str,
        refusal: Refusal | None,
        ledger: LedgerHead | None,
    ) -> Envelope:
        now = datetime.datetime.fromtimestamp(self._wall_clock(), datetime.UTC)
        return Receipt(
            receipt_id=uuid.uuid4().hex, federation=self._federation, site=upload.site, study=upload.study,
            revision=upload.revision, round=upload.round, attempt=upload.attempt, upload_id=upload.id,
            manifest_sha256=upload.manifest_sha256, payload_bytes=upload.payload_bytes, decision=decision,
            code=refusal.code if refusal else "", tensor=refusal.tensor if refusal else "",
            time=now.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z", ledger=ledger,
            previous=site.last_receipt, ledger_key=site.ledger_key,
        ).sign(self._key)  # fmt: skip


def receipt_of(upload: tables.Upload) -> Envelope:
    """The receipt of a decided upload, byte for byte as it was signed."""
    assert upload.receipt is not None
    return envelope_of(upload.receipt)


def envelope_of(receipt: str) -> Envelope:
    """A receipt as it is kept."""
    return Envelope.from_document(json.loads(receipt))


def copy_of(store: Store, site: str, federation: str, key: Ed25519PrivateKey, now: float) -> Iterator[Envelope]:
    """The receipts of a site's present enrolment, oldest first, and last the signed statement about them.

    What is decided while this is read is not in it. The statement counts the receipts of earlier enrolments.

    Raises:
        BadData: no such site has ever enrolled.
    """
    with store.read() as session:
        row = session.get(tables.Site, site)
        if row is None:
            raise BadData(f"no site `{site[:64]}` has enrolled here", hint="`coordinator sites` lists them")
        uploads, earlier = _chain(session, site, row.last_receipt)
    for start in range(0, len(uploads), PAGE):
        page = uploads[start : start + PAGE]
        with store.read() as session:
            texts = _texts(session, page)
        for upload in page:
            yield Envelope.from_document(json.loads(texts[upload]))
    time = tables.utc_text(now)
    yield Statement(federation, site, row.ledger_key, len(uploads), row.last_receipt, earlier, time).sign(key)


def _chain(session: Session, site: str, last: str) -> tuple[list[str], int]:
    """The uploads whose receipts lead to ``last``, oldest first; and how many other receipts the site has.

    A site that enrolled again begins a new chain; the others are of the chains before. ``last`` is the SHA-256 of
    a receipt's payload, or EMPTY_HEAD.
    """
    table = tables.Upload
    chosen = sa.select(table.id, table.receipt).where(table.site == site, table.receipt.is_not(None))
    before: dict[str, tuple[str, str]] = {}  # digest of a receipt -> (its upload, the digest of the one before it)
    for upload_id, text in session.execute(chosen):
        payload = json.loads(text or "")["payload"]
        before[hashlib.sha256(payload.encode()).hexdigest()] = (upload_id, json.loads(payload)["previous"])
    chain = []
    while last != EMPTY_HEAD:
        upload_id, last = before[last]
        chain.append(upload_id)
    return chain[::-1], len(before) - len(chain)


def _texts(session: Session, ids: Sequence[str]) -> dict[str, str]:
    """The receipts of these uploads, as they were signed."""
    chosen = sa.select(tables.Upload.id, tables.Upload.receipt).where(tables.Upload.id.in_(ids))
    return {upload_id: str(text) for upload_id, text in session.execute(chosen)}
