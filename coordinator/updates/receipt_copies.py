"""The coordinator's copy of one site's receipts, for whoever holds it against the site's ledger."""

import datetime
import json
from collections.abc import Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.storage import database
from coordinator.storage.database import Store
from wardround.errors import BadData
from wardround.records.receipt_copy import Statement
from wardround.signing.dsse import Envelope

PAGE = 100  # receipts that are in memory at a time


def copy_of(records: Store, site: str, federation: str, key: Ed25519PrivateKey, now: float) -> Iterator[Envelope]:
    """The receipts of a site's present enrolment, oldest first, and last the signed statement about them.

    What is decided while this is read is not in it. The statement counts the receipts of earlier enrolments.

    Raises:
        BadData: no such site has ever enrolled.
    """
    with records.read() as reading:
        row = reading.get(database.sites, name=site)
        if row is None:
            raise BadData(f"no site `{site[:64]}` has enrolled here", hint="`coordinator sites` lists them")
        uploads, earlier = reading.receipt_chain(site, row["last_receipt"])
    for start in range(0, len(uploads), PAGE):
        page = uploads[start : start + PAGE]
        with records.read() as reading:
            texts = reading.receipt_texts(page)
        for upload in page:
            yield Envelope.from_document(json.loads(texts[upload]))
    time = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    yield Statement(federation, site, row["ledger_key"], len(uploads), row["last_receipt"], earlier, time).sign(key)
