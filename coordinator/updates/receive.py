"""One update's way in: opened, its payload spooled and hashed as it comes, judged, answered by a signed receipt.

A decision, its receipt and what it means for the round are one transaction, made after the payload is durable; the
receipt goes out after the commit. So whoever holds a receipt can rely on it, and the same upload opened again gets the
same receipt, byte for byte.
"""

import datetime
import hashlib
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.storage import database
from coordinator.storage.blobs import Blobs, Spool
from coordinator.storage.database import Records, Store, Upload
from coordinator.studies.engine import Engine
from coordinator.studies.lifecycle import Answer, Answered, Kind
from coordinator.updates import admission
from coordinator.updates.admission import ANSWERS_THE_ROUND, Claim, Refusal
from coordinator.updates.ledgers import HOUR_S, Allowance, Judged, Ledgers
from coordinator.updates.receipt_copies import copy_of
from wardround.errors import BadData, CannotWrite, NotPermitted, TryAgain
from wardround.records.receipts import ACCEPTED, NOT_RECEIVED, REFUSED, Receipt
from wardround.signing.dsse import Envelope
from wardround.tensors.manifests import TensorFile

ACK_BYTES = 8 * 1024 * 1024  # at most this much is sent again after the line broke
MAX_ARRIVALS = 2  # of one site at a time
MAX_REFUSED_AN_HOUR = 200  # of one site, with those that were opened and given up; each leaves a row and a receipt
MAX_REFUSED = 5000  # of one enrolment of a site; a row and a receipt are at most some 9 KB
MAX_AGAIN_AN_HOUR = 600  # openings of uploads that are known: each hashes what came again
MAX_COPIES_AN_HOUR = 30  # copies of all its receipts, of one site
ROOM_LEFT = 64 * 1024 * 1024  # bytes of the disk that an upload must leave free
log = logging.getLogger(__name__)


class Uploads:
    """The uploads of one coordinator. ``key`` signs receipts."""

    def __init__(
        self,
        engine: Engine,
        records: Store,
        blobs: Blobs,
        federation: str,
        key: Ed25519PrivateKey,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._store = records
        self._blobs = blobs
        self._federation = federation
        self._key = key
        self._wall = wall
        self._idle = Allowance("uploads without a result", wall)
        self._again = Allowance("uploads opened again", wall)
        self._copies = Allowance("copies of receipts", wall)
        self.ledgers = Ledgers(records, wall=wall)
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._judging: set[Arrival] = set()

    def inquire(self, site: str, upload_id: str) -> Envelope | int:
        """The receipt of a decided upload, or how much of an undecided one is durable here.

        An id that is not known gets a signed ``not_received``, which is no link of the site's chain of receipts.
        """
        with self._store.read() as records:
            upload = records.upload(upload_id)
            row = records.get(database.sites, name=site)
        assert row is not None
        if upload is None or upload.site != site:
            unknown = Upload(upload_id, site, "", 0, 0, 0, "", "", 0, (), 0, 0)
            return self._receipt(unknown, NOT_RECEIVED, Refusal("NOT_RECEIVED"), None, row)
        return _said(upload) if upload.receipt else upload.received

    def receipts(self, site: str) -> Iterator[Envelope]:
        """The copy of a site's own receipts, with the signed statement at its end.

        Raises:
            TryAgain: too many copies in an hour (TOO_BUSY).
        """
        self._copies.take(site, MAX_COPIES_AN_HOUR)
        return copy_of(self._store, site, self._federation, self._key, self._wall())

    def open(self, claim: Claim, wanted: Callable[[], bool] = lambda: True) -> "Envelope | Arrival":
        """A receipt if the upload is decided, or refused before any of its payload; else where its payload goes.

        Args:
            wanted: whether the stream that brought it is still there.

        Raises:
            NotPermitted: the id was used for another upload (UPLOAD_ID_CONFLICT).
            TryAgain: this site has enough open, or the disk has not the room.
        """
        self._make_way(claim)
        _ = claim.content, claim.manifest.digest()  # made here, so that whoever owns the studies need not
        with self.ledgers.judged(claim.site, claim.statement) as ledger:
            verdict = self._engine.call(lambda: self._opened(claim, ledger, wanted))
        if isinstance(verdict, Arrival):
            verdict.prepare()
        return verdict

    def drop_undecided(self, site: str) -> None:
        """Forget what a revoked site had begun to send."""
        with self._lock:
            live = [one for one in self._arrivals.values() if one.claim.site == site]
        for arrival in live:
            arrival.close()
        self._engine.call(lambda: self._drop(site, lambda upload: True))

    def arriving(self) -> frozenset[str]:
        """The ids of the uploads that are under way."""
        with self._lock:
            return frozenset(self._arrivals)

    def judging(self) -> frozenset[tuple[str, str]]:
        """(study, site) of the updates that are complete and not yet decided."""
        with self._lock:
            return frozenset((one.claim.study, one.claim.site) for one in self._judging)

    def _make_way(self, claim: Claim) -> None:
        """The same upload on an older stream ends: its site opened a new one, so the line broke."""
        with self._lock:
            older = self._arrivals.get(claim.upload_id)
        if older is not None and older.claim.site == claim.site:
            older.close()

    def _opened(self, claim: Claim, ledger: Judged, wanted: Callable[[], bool]) -> "Envelope | Arrival":
        """Where the studies are owned: judge what the opening says, and write it down.

        Only one arrival of an upload is on the list, and only one that is on the list can be concluded; so no stream
        touches the spool of an update that was accepted by another.
        """
        with self._store.read() as records:
            before = records.upload(claim.upload_id)
            first = records.first_counts(claim.study, claim.revision, claim.site)
            refused = records.refused_since(claim.site, self._wall() - HOUR_S)
        if before and (before.site, before.content) != (claim.site, claim.content):
            log.warning("site %s uses an upload id again for another upload", claim.site)
            raise NotPermitted(
                f"upload {claim.upload_id} was opened before with other content", code="UPLOAD_ID_CONFLICT"
            )
        if before and before.receipt:
            return _said(before)
        broken = ledger.refusal
        if not wanted() or (before and broken and broken.code == "LEDGER_ROLLBACK"):
            raise TryAgain("this opening was overtaken by a newer one of this site", code="TOO_BUSY")
        if before is None:
            self._idle.take(claim.site, MAX_REFUSED_AN_HOUR, refused)
        else:
            self._again.take(claim.site, MAX_AGAIN_AN_HOUR)
        study = self._engine.find(claim.study)
        refusal = admission.may_count(claim, study.known if study else None)
        if refusal is None and study is not None:
            refusal = admission.is_as_declared(claim, study.known, first)
        upload = before or _new(claim, self._wall())

        if refusal or broken:
            return self._decided(claim, upload, refusal or broken, ledger.remember, countersigned=not broken)
        self._refuse_full_disk(claim)
        self._refuse_crowd(claim)
        self._drop(claim.site, lambda other: other.study == claim.study and other.id != claim.upload_id)
        with self._store.write() as records:
            ledger.remember(records)
            records.put(database.uploads, **upload.row())
        assert study is not None
        arrival = Arrival(self, claim, self._blobs, upload.received, study.file.study.max_update_norm)
        with self._lock:
            self._arrivals[claim.upload_id] = arrival
        return arrival

    def conclude(self, arrival: "Arrival", refusal: Refusal | None) -> Envelope:
        """Decide on a complete upload. The round may have closed while it came."""

        def act() -> Envelope:
            with self._store.read() as records:
                upload = records.upload(arrival.claim.upload_id)
            if upload is not None and upload.receipt:
                return _said(upload)
            with self._lock:
                current = self._arrivals.get(arrival.claim.upload_id) is arrival
            if upload is None or not current:
                raise TryAgain("this upload goes on on another stream, or was given up", code="TOO_BUSY")
            study = self._engine.find(arrival.claim.study)
            verdict = admission.may_count(arrival.claim, study.known if study else None) or refusal
            received = replace(upload, received=arrival.received)
            return self._decided(arrival.claim, received, verdict, None, countersigned=True)

        return self._engine.call(act)

    def _decided(
        self,
        claim: Claim,
        upload: Upload,
        refusal: Refusal | None,
        also: Callable[[Records], None] | None,
        *,
        countersigned: bool,
    ) -> Envelope:
        """Write decision, receipt and what it means for the round; return the receipt when all that is durable.

        Raises:
            TryAgain: one more refusal of this site would be too many.
        """
        if refusal is not None:
            self._refuse_too_many_refusals(upload)
        decision = ACCEPTED if refusal is None else REFUSED
        said: list[Envelope] = []

        def record(records: Records) -> None:
            if also is not None:
                also(records)
            site = records.get(database.sites, name=claim.site)
            if site is None or site["revoked_s"] is not None:
                raise NotPermitted(f"site `{claim.site}` was revoked", code="SITE_REVOKED")
            head = claim if countersigned else None
            envelope = self._receipt(upload, decision, refusal, head, site)
            said.append(envelope)
            code, tensor = (refusal.code, refusal.tensor) if refusal else ("", "")
            decided = replace(
                upload, decision=decision, code=code, tensor=tensor, decided_s=self._wall(),
                receipt=json.dumps(envelope.document()),
            )  # fmt: skip
            records.put(database.uploads, **decided.row())
            if countersigned:
                records.keep_head(claim.site, claim.ledger, in_receipt=True)
            chained = hashlib.sha256(envelope.payload).hexdigest()
            records.change(database.sites, {"name": claim.site}, last_receipt=chained)

        if refusal is None:
            answer = Answer(Kind.ACCEPTED, upload=claim.upload_id)
        else:
            answer = Answer(Kind.REFUSED, refusal.code, claim.upload_id)
        if refusal is None or (refusal.code in ANSWERS_THE_ROUND and self._expected(claim)):
            self._engine.happened(claim.study, Answered(claim.site, answer), record)
        else:
            with self._store.write() as records:
                record(records)
        self._idle.give_back(claim.site)
        if refusal is not None:
            log.warning(
                "%s: the update of site %s for round %d is refused: %s %s", claim.study, claim.site, claim.round,
                refusal.code, refusal.tensor,
            )  # fmt: skip
            self._blobs.drop_spools([claim.upload_id])
        return said[0]

    def _refuse_too_many_refusals(self, upload: Upload) -> None:
        """Refusals are kept for good, for each is a link in the site's chain of receipts: so their number is bounded.

        What is beyond gets no receipt and leaves nothing. A new invitation begins a new enrolment.
        """
        with self._store.read() as records:
            row = records.get(database.sites, name=upload.site)
            kept = records.refused_since(upload.site, row["enrolled_s"]) if row else 0
        if kept >= MAX_REFUSED:
            self._drop(upload.site, lambda other: other.id == upload.id)
            raise TryAgain(
                f"{kept} refused uploads of site `{upload.site}` are kept, and no more are; it may send what counts",
                code="TOO_BUSY",
            )

    def _expected(self, claim: Claim) -> bool:
        study = self._engine.find(claim.study)
        return admission.may_count(claim, study.known if study else None) is None

    def _receipt(
        self, upload: Upload, decision: str, refusal: Refusal | None, claim: Claim | None, site: database.Row
    ) -> Envelope:
        now = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC)
        return Receipt(
            receipt_id=uuid.uuid4().hex, federation=self._federation, site=upload.site, study=upload.study,
            revision=upload.revision, round=upload.round, attempt=upload.attempt, upload_id=upload.id,
            manifest_sha256=upload.manifest_sha256, payload_bytes=upload.payload_bytes, decision=decision,
            code=refusal.code if refusal else "", tensor=refusal.tensor if refusal else "",
            time=now.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z", ledger=claim.ledger if claim else None,
            previous=site["last_receipt"], ledger_key=site["ledger_key"],
        ).sign(self._key)  # fmt: skip

    def _drop(self, site: str, which: Callable[[Upload], bool]) -> None:
        """Forget undecided uploads: their ids are not known here any more."""
        with self._store.read() as records:
            found = [Upload.from_row(row) for row in records.all(database.uploads, site=site, decision="")]
        stale = [upload.id for upload in found if which(upload)]
        if not stale:
            return
        with self._store.write() as records:
            for upload_id in stale:
                records.drop(database.uploads, id=upload_id)
        for upload_id in stale:
            with self._lock:
                arrival = self._arrivals.get(upload_id)
            if arrival is not None:
                arrival.close()
        self._blobs.drop_spools(stale)

    def _refuse_crowd(self, claim: Claim) -> None:
        with self._lock:
            others = [one for one in self._arrivals.values() if one.claim.site == claim.site]
            if len(others) >= MAX_ARRIVALS or claim.upload_id in self._arrivals:
                raise TryAgain(f"site `{claim.site}` has {len(others)} uploads under way", code="TOO_BUSY")

    def _refuse_full_disk(self, claim: Claim) -> None:
        free = shutil.disk_usage(self._blobs.spool(claim.upload_id).parent).free
        if free < claim.manifest.bytes + ROOM_LEFT:
            raise CannotWrite("the coordinator's disk has no room for this update now", code="TOO_BUSY")

    # What an arrival does here.

    def noted(self, claim: Claim, received: int) -> None:
        """That many bytes are durable; an upload that was dropped meanwhile stays dropped."""
        with self._store.write() as records:
            records.change(database.uploads, {"id": claim.upload_id, "decision": ""}, received=received)

    def left(self, arrival: "Arrival") -> None:
        with self._lock:
            if self._arrivals.get(arrival.claim.upload_id) is arrival:
                del self._arrivals[arrival.claim.upload_id]

    def judge(self, arrival: "Arrival", spool: Spool | None, manifest_sha256: str) -> Refusal | None:
        """Checks 13 to 16, over the payload that came. Durable when this returns."""
        claim = arrival.claim
        if manifest_sha256 != claim.manifest.digest():
            return Refusal("PAYLOAD_DIGEST")
        if spool is None:
            return None
        with self._lock:
            self._judging.add(arrival)
        try:
            spool.sync()
            try:
                sent = spool.manifest()
            except BadData:
                return Refusal("PAYLOAD_INCOMPLETE")
            if refusal := admission.is_what_was_announced(sent, claim):
                return refusal
            with TensorFile(self._blobs.spool(claim.upload_id)) as update:
                return admission.has_usable_values(update, arrival.max_norm)
        finally:
            with self._lock:
                self._judging.discard(arrival)


class Arrival:
    """One upload on one stream. A second stream for the same upload closes the first."""

    def __init__(self, uploads: Uploads, claim: Claim, blobs: Blobs, durable: int, max_norm: float | None) -> None:
        """``durable``: bytes of the payload that are here. ``max_norm``: the study's limit."""
        self.claim = claim
        self.max_norm = max_norm
        self._uploads = uploads
        self._blobs = blobs
        self._noted = durable
        self._spool: Spool | None = None  # and stays None for a closing validation, which has no payload
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self) -> None:
        """Open the spool, and hash what is in it."""
        try:
            with self._lock:
                self._refuse_closed()
                if self.claim.manifest.entries:
                    path = self._blobs.spool(self.claim.upload_id)
                    self._spool = Spool(path, self.claim.manifest.specs, self._noted)
                    self._noted = self._spool.received
        except BaseException:
            self.close()
            raise

    @property
    def received(self) -> int:
        return self._spool.received if self._spool else 0

    def take(self, offset: int, data: bytes) -> int | None:
        """Write a chunk. Returns how much is durable, when that is worth telling.

        Raises:
            BadData: not the next bytes, or more than the manifest says.
            TryAgain: the upload goes on on another stream.
        """
        with self._lock:
            self._refuse_closed()
            if self._spool is None:
                raise BadData("more bytes than the manifest says", code="PAYLOAD_INCOMPLETE")
            self._spool.take(offset, data)
            if self._spool.received - self._noted < ACK_BYTES:
                return None
            self._note(self._spool)
            return self._noted

    def commit(self, manifest_sha256: str) -> Envelope:
        """Judge what came and return the receipt."""
        with self._lock:
            self._refuse_closed()
            refusal = self._uploads.judge(self, self._spool, manifest_sha256)
        receipt = self._uploads.conclude(self, refusal)
        self._noted = self.received  # decided, and durable: nothing is left to note
        return receipt

    def close(self) -> None:
        """The stream ended. What came stays, for the next one."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._spool is not None:
                    if self._spool.received > self._noted:
                        self._note(self._spool)
                    self._spool.close()
            finally:
                self._uploads.left(self)

    def _note(self, spool: Spool) -> None:
        self._noted = spool.sync()
        self._uploads.noted(self.claim, self._noted)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise TryAgain("this upload goes on on another stream", code="TOO_BUSY")


def _new(claim: Claim, now: float) -> Upload:
    return Upload(
        id=claim.upload_id, site=claim.site, study=claim.study, revision=claim.revision, round=claim.round,
        attempt=claim.attempt, content=claim.content, manifest_sha256=claim.manifest.digest(),
        payload_bytes=claim.manifest.bytes, metrics=claim.metrics, num_examples=claim.num_examples,
        num_validation=claim.num_validation, opened_s=now,
    )  # fmt: skip


def _said(upload: Upload) -> Envelope:
    assert upload.receipt is not None
    return Envelope.from_document(json.loads(upload.receipt))
