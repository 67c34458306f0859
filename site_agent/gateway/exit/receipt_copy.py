"""Keeps the coordinator's copy of this site's receipts, which `site-agent audit verify --ask` asks for.

It is looked at here as far as it must be to replace an older copy; ``site_agent.audit`` judges the ledger by it.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.state.directory import Site
from wardround.errors import BadData
from wardround.local import durable
from wardround.records.receipt_copy import COPY_TYPE, Statement
from wardround.records.receipts import EMPTY_HEAD
from wardround.signing import canonical, dsse
from wardround.signing.dsse import Envelope

LARGEST = 512 * 1024 * 1024  # bytes of a copy: some 400,000 receipts


def keep(envelopes: Iterable[Envelope], site: Site, path: Path) -> int:
    """Write the copy to ``path``, one envelope a line. Returns how many receipts are in it.

    Raises:
        BadData: it does not end in the coordinator's statement about exactly these receipts, or one of them is no
            text; an older copy stays.
        CannotWrite: the disk does not take it.
    """
    lines: list[bytes] = []
    size, last, before = 0, EMPTY_HEAD, EMPTY_HEAD
    final: Envelope | None = None
    for final in envelopes:
        lines.append(_line(final))
        size += len(lines[-1])
        if size > LARGEST:
            raise BadData(f"the coordinator sent more than {LARGEST} bytes of receipts; nothing was kept")
        before, last = last, hashlib.sha256(final.payload).hexdigest()
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(site.receipt_key))
    try:
        if final is None:
            raise BadData("it is empty")
        statement = Statement.from_document(dsse.verify(final, COPY_TYPE, key))
    except BadData as error:
        raise BadData(f"the coordinator's copy of the receipts cannot be believed: {error.message}") from None
    wanted = (site.site, site.federation, len(lines) - 1, before)
    if (statement.site, statement.federation, statement.receipts, statement.last) != wanted:
        raise BadData("the coordinator's copy of the receipts is not the one that its statement is about")
    durable.write_file(path, lines)
    return statement.receipts


def _line(envelope: Envelope) -> bytes:
    try:
        return canonical.dumps(envelope.document()) + b"\n"
    except BadData as error:
        raise BadData(f"the coordinator's copy of the receipts cannot be believed: {error.message}") from None
