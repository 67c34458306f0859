"""The verdict on an update: decision, receipt and what it means for the round, in one transaction.

``open`` judges a header before the first byte, ``decide`` a payload when all of it is durable. A receipt goes out after
the commit, so whoever holds one can rely on it, and the same upload opened again gets the same receipt, byte for byte.
The thread that owns the studies alone decides.
"""

import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.storage.blobs import Blobs, Known
from coordinator.storage.database import Store
from coordinator.studies.engine import Engine
from coordinator.studies.events import Answered
from coordinator.studies.secure_rounds import submitted, with_attempt
from coordinator.studies.state import ENDED, Answer, Kind
from coordinator.updates import admission, rows
from coordinator.updates.admission import Admitted, Refusal
from coordinator.updates.allowance import HOUR_S, Allowance
from coordinator.updates.ledgers import Judged, Ledgers, keep_head
from coordinator.updates.receipts import Receipts, envelope_of, receipt_of
from coordinator.updates.receive import Received, Reception, Receptions
from coordinator.updates.returned import Returned
from wardround.errors import CannotWrite, NotPermitted, TryAgain
from wardround.local import traces
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.receipts import ACCEPTED, REFUSED
from wardround.records.update import UploadHeader
from wardround.secure.coordinator import Attempt
from wardround.signing.dsse import Envelope

MAX_REFUSED_AN_HOUR = 200  # of one site, with those that were opened and given up; each leaves a row and a receipt
MAX_REFUSED = 5000  # of one enrolment of a site; a row and a receipt are at most some 9 KB
MAX_AGAIN_AN_HOUR = 600  # openings of uploads that are known: each hashes what came again
MOST_NOT_RECEIVED = 64  # of one site; it has a few uploads under way at a time
ROOM_LEFT = 64 * 1024 * 1024  # bytes of the disk that an upload must leave free
log = RateLimitedLog(logging.getLogger(__name__))


@dataclass(frozen=True)
class Verdict:
    """What is to be written about an upload. ``refusal`` None: it is accepted.

    ``ledger``: the header's statement, judged and not written down yet; None where that was done before.
    """

    site: str
    header: UploadHeader
    upload: tables.Upload
    refusal: Refusal | None
    ledger: Judged | None = None

    @property
    def countersigns(self) -> bool:
        """Whether the receipt names the ledger's head: not if that itself is refused."""
        return self.ledger is None or self.ledger.refusal is None


class Uploads:
    """The uploads of one coordinator. ``key`` signs receipts."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        blobs: Blobs,
        federation: str,
        key: Ed25519PrivateKey,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._store = store
        self._blobs = blobs
        self._wall_clock = wall_clock
        self._idle = Allowance("uploads without a result", wall_clock)
        self._again = Allowance("uploads opened again", wall_clock)
        self.ledgers = Ledgers(store, wall_clock=wall_clock)
        self.receipts = Receipts(store, federation, key, wall_clock=wall_clock)
        self.receptions = Receptions()
        self._not_received: dict[str, deque[str]] = {}  # site -> the ids that it was told are not known here
        self.returned = Returned(engine, store, self.receptions, federation, key.public_key(), wall_clock)

    def open(
        self, site: str, header: UploadHeader, is_active: Callable[[], bool] = lambda: True
    ) -> Envelope | Reception:
        """A receipt if the upload is decided, or refused before any of its payload; else where its payload goes.

        Args:
            is_active: whether the stream that brought it is still there.

        Raises:
            NotPermitted: the id was used for another upload, or the site was told that it was not received
                (UPLOAD_ID_CONFLICT).
            TryAgain: this site has enough open, or the disk has not the room.
        """
        self.receptions.close_where(  # the site opened a new stream, so the connection of the older one broke
            lambda older: (older.site, older.header.upload_id) == (site, header.upload_id)
        )
        _ = header.content, header.manifest.digest()  # made here, so that whoever owns the studies need not
        with self.ledgers.judged(site, header.ledger) as ledger:
            opened = self._engine.call(lambda: self._open(site, header, ledger, is_active))
        if isinstance(opened, Reception):
            try:
                opened.prepare()
            except BaseException:
                self.receptions.close(opened)
                raise
        return opened

    def decide(self, reception: Reception, manifest_sha256: str) -> Envelope:
        """The receipt of a complete upload; decision, receipt and round are durable when this returns."""
        header = reception.header
        with (
            reception.committed(manifest_sha256) as received,
            traces.span("admission", header.study, header.round, reception.site),
        ):
            payload = admission.admit_payload(received, reception.terms)
            if received.spool is not None and isinstance(payload, Admitted):
                assert received.tag is not None  # what is not complete is refused
                self._blobs.know(received.spool, Known(manifest_sha256, received.tag, payload.norm))
                self._share(received)  # before the receipt: a standby finds what was accepted
        receipt = self._engine.call(lambda: self._conclude(reception, received, payload))
        reception.settle()
        return receipt

    def _share(self, received: Received) -> None:
        """Copy an update to the object store, if there is one. Raises TryAgain: it did not arrive there."""
        assert received.spool is not None
        try:
            self._blobs.share(received.spool)
        except TryAgain as error:  # the site hears a code and nothing of this
            log.error(
                "%s: the update of site %s for round %d is not accepted now: %s; %s", received.header.study,
                received.site, received.header.round, error.message, error.hint,
            )  # fmt: skip
            raise

    def inquire(self, site: str, upload_id: str) -> Envelope | int:
        """What became of an upload, as ``Receipts.find`` says it. One that its study's end left undecided is forgotten:
        it can never be decided, and its site would not know for good what became of it.

        Once the answer is "not received", that stands: the upload's own stream, which the site gave up, may still be
        on its way, and a receipt for it would contradict what the site's ledger has.
        """
        with self._store.read() as session:
            decided = rows.receipt(session, upload_id)
        if not decided:
            unreadable = self._engine.unreadable()
            self._engine.call(lambda: self._close_undecided(site, upload_id, unreadable))
        return self.receipts.find(site, upload_id)

    def drop_undecided(self, site: str) -> None:
        """Forget what a revoked site had begun to send."""
        self.receptions.close_where(lambda reception: reception.site == site)
        self._engine.call(lambda: self._drop(site, tables.Upload.site == site))

    # Where the studies are owned.

    def _open(
        self, site: str, header: UploadHeader, ledger: Judged, is_active: Callable[[], bool]
    ) -> Envelope | Reception:
        """Judge what the header says, and write it down.

        Only one reception of an upload is under way, and only one that is can be concluded; so no stream touches the
        spool of an update that was accepted by another.
        """
        if header.upload_id in self._not_received.get(site, ()):
            raise NotPermitted(
                f"site `{site}` was told that upload {header.upload_id} was not received", code="UPLOAD_ID_CONFLICT"
            )
        stale: Sequence[str] = ()
        with self._store.write() as session:
            seen = rows.seen(session, site, header, self._wall_clock() - HOUR_S)
            before = self._opened_before(session, site, header) if seen.known else None
            if before and before.receipt:
                return receipt_of(before)
            rolled_back = ledger.refusal is not None and ledger.refusal.code == "LEDGER_ROLLBACK"
            if not is_active() or (before and rolled_back):
                raise TryAgain("this opening was overtaken by a newer one of this site", code="TOO_BUSY")
            if before is None:
                self._idle.take(site, MAX_REFUSED_AN_HOUR, seen.refused)
            else:
                self._again.take(site, MAX_AGAIN_AN_HOUR)
            study = self._engine.find(header.study)
            verdict = admission.admit_header(site, header, study, seen.first, ledger.refusal)
            upload = before or _new_upload(site, header, self._wall_clock())
            if isinstance(verdict, Admitted):
                self._refuse_full_disk(header)
                self.receptions.refuse_crowd(site, header.upload_id)
                if seen.others:
                    stale = rows.others_undecided(session, site, header)
                    rows.forget(session, stale)
                ledger.remember(session)
                if before is None:
                    rows.save(session, upload)
        if isinstance(verdict, Refusal):
            return self._decide(Verdict(site, header, upload, verdict, ledger))
        self._dropped(stale)
        assert study is not None
        reception = Reception(site, header, self._store, self._blobs, upload, study.terms_of(site))
        self.receptions.add(reception)
        return reception

    def _opened_before(self, session: Session, site: str, header: UploadHeader) -> tables.Upload:
        """What is written down of an upload whose id is known. Raises NotPermitted: of another upload."""
        before = session.get_one(tables.Upload, header.upload_id)
        if (before.site, before.content) != (site, header.content):
            log.warning("site %s uses an upload id again for another upload", site)
            raise NotPermitted(
                f"upload {header.upload_id} was opened before with other content", code="UPLOAD_ID_CONFLICT"
            )
        return before

    def _conclude(self, reception: Reception, received: Received, payload: Admitted | Refusal) -> Envelope:
        """Decide on a complete upload. The round may have closed while it came."""
        site, header = received.site, received.header
        if not self.receptions.is_current(reception):
            with self._store.read() as session:
                kept = rows.receipt(session, header.upload_id)
            if kept:
                return envelope_of(kept)
            raise TryAgain("this upload goes on on another stream, or was given up", code="TOO_BUSY")
        verdict = admission.admit_now(site, header, self._engine.find(header.study), payload)
        upload = reception.upload
        upload.received = received.bytes
        return self._decide(Verdict(site, header, upload, verdict if isinstance(verdict, Refusal) else None))

    def _decide(self, verdict: Verdict) -> Envelope:
        """Write decision, receipt and what it means for the round; return the receipt when all that is durable.

        Raises:
            TryAgain: one more refusal of this site would be too many.
        """
        site, header, refusal = verdict.site, verdict.header, verdict.refusal
        if refusal is not None:
            self._refuse_too_many_refusals(site, header.upload_id)
        if refusal is None:
            answer = Answer(self._kind(site, header), upload=header.upload_id)
        else:
            answer = Answer(Kind.REFUSED, refusal.code, header.upload_id)
        if refusal is None or (refusal.answers_the_round and self._is_expected(site, header)):
            attempt = self._submitted(site, header) if refusal is None else None
            receipt = self._engine.happened_with(
                header.study, Answered(site, answer), lambda session: self._write(session, verdict),
                with_attempt(attempt),
            )  # fmt: skip
        else:
            with self._store.write() as session:
                receipt = self._write(session, verdict)
        self._idle.give_back(site)
        if refusal is not None:
            log.warning(
                "%s: the update of site %s for round %d is refused: %s %s", header.study, site, header.round,
                refusal.code, refusal.tensor,
            )  # fmt: skip
            self._blobs.drop_spools([header.upload_id])
        return receipt

    def _write(self, session: Session, verdict: Verdict) -> Envelope:
        """Write a decision and its receipt down, each where the next one needs it. Returns the receipt.

        Raises:
            NotPermitted: the site was revoked meanwhile.
            TryAgain: it was enrolled again meanwhile, or took another ledger.
        """
        refusal = verdict.refusal
        if verdict.ledger is not None:
            verdict.ledger.remember(session)
        site = rows.chain_of(session, verdict.site)
        if site is None or site.revoked_s is not None:
            raise NotPermitted(f"site `{verdict.site}` was revoked", code="SITE_REVOKED")
        head = verdict.header.ledger.head if verdict.countersigns else None
        envelope = self.receipts.sign(verdict.upload, site, refusal, head)
        upload = verdict.upload
        upload.decision = ACCEPTED if refusal is None else REFUSED
        upload.code, upload.tensor = (refusal.code, refusal.tensor) if refusal else ("", "")
        upload.decided_s = self._wall_clock()
        upload.receipt = json.dumps(envelope.document())
        if head is not None:
            keep_head(session, verdict.site, head, in_receipt=True)
        rows.save(session, upload)
        rows.link(session, verdict.site, envelope)
        return envelope

    def _refuse_too_many_refusals(self, site: str, upload_id: str) -> None:
        """Refusals are kept for good, for each is a link in the site's chain of receipts: so their number is bounded.

        One beyond the bound gets no receipt and leaves nothing. A new invitation begins a new enrolment.
        """
        with self._store.read() as session:
            row = session.get(tables.Site, site)
            kept = rows.refused_since(session, site, row.enrolled_s) if row is not None else 0
        if kept >= MAX_REFUSED:
            self._drop(site, tables.Upload.id == upload_id)
            raise TryAgain(
                f"{kept} refused uploads of site `{site}` are kept, and no more are; it may send what counts",
                code="TOO_BUSY",
            )

    def _kind(self, site: str, header: UploadHeader) -> Kind:
        """What an accepted upload of this site is."""
        study = self._engine.find(header.study)
        return Kind.EVALUATED if study is not None and site in study.rules.evaluators else Kind.ACCEPTED

    def _submitted(self, site: str, header: UploadHeader) -> Attempt | None:
        study = self._engine.find(header.study)
        return submitted(study, site, header) if study is not None else None

    def _is_expected(self, site: str, header: UploadHeader) -> bool:
        return admission.state_refusal(site, header, self._engine.find(header.study)) is None

    def _close_undecided(self, site: str, upload_id: str, unreadable: Collection[str]) -> None:
        """Forget an undecided upload if it can never be decided; take none of an id that is not known."""
        with self._store.read() as session:
            upload = session.get(tables.Upload, upload_id)
        if upload is not None and upload.site == site:
            if upload.receipt or upload.study in unreadable:  # whether that one has ended is not known
                return
            study = self._engine.find(upload.study)
            if study is not None and study.revision == upload.revision and study.state.phase not in ENDED:
                return
            self._drop(site, tables.Upload.id == upload_id)
        self._not_received.setdefault(site, deque(maxlen=MOST_NOT_RECEIVED)).append(upload_id)

    def _drop(self, site: str, which: sa.ColumnElement[bool]) -> None:
        """Forget undecided uploads of a site: their ids are not known here any more."""
        table = tables.Upload
        undecided = sa.and_(table.site == site, table.decision == "", which)
        with self._store.read() as session:
            stale = session.scalars(sa.select(table.id).where(undecided).order_by(table.id)).all()
        self._forget(stale)

    def _forget(self, stale: Sequence[str]) -> None:
        """Forget these undecided uploads."""
        if stale:
            with self._store.write() as session:
                rows.forget(session, stale)
            self._dropped(stale)

    def _dropped(self, stale: Sequence[str]) -> None:
        """These uploads are known no more, and that is durable: nothing of them may come any more, or stay."""
        if not stale:
            return
        self.receptions.close_where(lambda reception: reception.header.upload_id in stale)
        self._blobs.drop_spools(stale)

    def _refuse_full_disk(self, header: UploadHeader) -> None:
        free = shutil.disk_usage(self._blobs.spool(header.upload_id).parent).free
        if free < header.manifest.bytes + ROOM_LEFT:
            log.warning(
                "the disk has no room for an update of %d bytes to `%s`: %d bytes are free, and %d must stay free; "
                "free some space, the sites try again", header.manifest.bytes, header.study, free, ROOM_LEFT,
            )  # fmt: skip
            raise CannotWrite("the coordinator's disk has no room for this update now", code="TOO_BUSY")


def _new_upload(site: str, header: UploadHeader, now: float) -> tables.Upload:
    return tables.Upload(
        id=header.upload_id, site=site, study=header.study, revision=header.revision, round=header.round,
        attempt=header.attempt, content=header.content, manifest_sha256=header.manifest.digest(),
        payload_bytes=header.manifest.bytes, metrics=json.dumps(header.metrics), num_examples=header.num_examples,
        num_validation=header.num_validation, received=0, decision="", code="", tensor="", opened_s=now,
    )  # fmt: skip
