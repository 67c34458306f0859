"""Whether a coordinator that takes over has the keys of the one before it: its receipts and certificates must go on."""

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.members.authority import Authority
from coordinator.storage.database import Store
from coordinator.storage.tables import Leadership
from wardround.errors import NeedsPerson
from wardround.signing import certificates

_IMPORT = "on the machine that led last: `coordinator standby export`; here: `coordinator standby import`"


def refuse_others(store: Store, receipt_key: Ed25519PublicKey, authority: Authority) -> None:
    """Compare this leader's keys with those of the last one, and put them on record.

    Raises:
        NeedsPerson: it signs receipts with another key, or does not know the newest root.
    """
    with store.read() as session:
        row = session.get(Leadership, 1)
    assert row is not None
    key = receipt_key.public_bytes_raw().hex()
    if row.receipt_key not in ("", key):
        raise NeedsPerson(
            f"{store.name} is of a coordinator with another receipt key than the one here",
            hint=_IMPORT,
        )
    roots = [certificates.fingerprint(root) for root in authority.signing.roots]
    if row.root and row.root not in roots:
        raise NeedsPerson(
            f"the coordinator that led last trusts root {row.root[:12]}…, which is not known here",
            hint=_IMPORT,
        )
    if (row.receipt_key, row.root) != (key, roots[0]):
        with store.write() as session:
            session.execute(sa.update(Leadership).values(receipt_key=key, root=roots[0]))
