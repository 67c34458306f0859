"""An upload as a row: written down, and what is asked about it and its site, with statements that are made once."""

import hashlib
import json
from collections.abc import Callable, Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.storage.database import changed
from coordinator.updates.receipts import Chained
from wardround.records.receipts import ACCEPTED, REFUSED
from wardround.records.update import UploadHeader
from wardround.signing.dsse import Envelope


def new_upload(site: str, header: UploadHeader, now: float) -> tables.Upload:
    return tables.Upload(
        id=header.upload_id, site=site, study=header.study, revision=header.revision, round=header.round,
        attempt=header.attempt, content=header.content, manifest_sha256=header.manifest.digest(),
        payload_bytes=header.manifest.bytes, metrics=json.dumps(header.metrics), num_examples=header.num_examples,
        num_validation=header.num_validation, received=0, decision="", code="", tensor="", opened_s=now,
    )  # fmt: skip


def save(session: Session, upload: tables.Upload) -> None:
    """Write an upload down, or what was decided about it. Through the session's own books it takes twice as long."""
    values = {f"its_{name}": getattr(upload, name) for name in _COLUMNS}
    changed(session, _SAVE[session.get_bind().dialect.name], **values)


def first_counts(session: Session, site: str, header: UploadHeader) -> tuple[int, int] | None:
    """The training and validation rows that a site reported with its first accepted update of a revision."""
    values = {"of_study": header.study, "of_revision": header.revision, "of_site": site}
    row = session.connection().execute(_FIRST_ACCEPTED, values).first()
    return (row.num_examples, row.num_validation) if row else None


def refused_since(session: Session, site: str, since_s: float) -> int:
    """How many uploads of a site were refused."""
    return int(session.connection().execute(_REFUSED_SINCE, {"of_site": site, "since_s": since_s}).scalar_one())


def others_undecided(session: Session, site: str, header: UploadHeader) -> Sequence[str]:
    """The site's other uploads of the same study that nothing was decided about."""
    others = {"of_site": site, "of_study": header.study, "this": header.upload_id}
    return session.connection().execute(_OTHERS_UNDECIDED, others).scalars().all()


def receipt_kept(session: Session, upload_id: str) -> str | None:
    """The receipt of an upload as it is kept, "" of one that nothing was decided about; None where there is none."""
    row = session.connection().execute(_RECEIPT, {"this": upload_id}).first()
    return None if row is None else row.receipt or ""


def chain_of(session: Session, site: str) -> Chained | None:
    """What a site's next receipt follows from; None of one that is not here, or was revoked."""
    row = session.connection().execute(_CHAIN_OF_SITE, {"of_site": site}).first()
    return row if row is not None and row.revoked_s is None else None


def link(session: Session, site: str, receipt: Envelope) -> None:
    """From now on this is the site's last receipt."""
    changed(session, _LINK, of_site=site, digest=hashlib.sha256(receipt.payload).hexdigest())


def _first_accepted() -> sa.Select[int, int]:
    table = tables.Upload
    chosen = sa.select(table.num_examples, table.num_validation).where(
        table.study == sa.bindparam("of_study"), table.revision == sa.bindparam("of_revision"),
        table.site == sa.bindparam("of_site"), table.decision == ACCEPTED,
    )  # fmt: skip
    return chosen.order_by(table.decided_s).limit(1)


def _count_refused() -> sa.Select[int]:
    table = tables.Upload
    return sa.select(sa.func.count()).where(
        table.site == sa.bindparam("of_site"), table.decision == REFUSED,
        table.decided_s >= sa.bindparam("since_s"),
    )  # fmt: skip


def _others_undecided() -> sa.Select[str]:
    table = tables.Upload
    return sa.select(table.id).where(
        table.site == sa.bindparam("of_site"), table.decision == "", table.study == sa.bindparam("of_study"),
        table.id != sa.bindparam("this"),
    ).order_by(table.id)  # fmt: skip


def _saving(insert: Callable[[type[tables.Upload]], sqlite.Insert | postgresql.Insert]) -> sa.Insert:
    new = insert(tables.Upload).values({name: sa.bindparam(f"its_{name}") for name in _COLUMNS})
    decided = {name: new.excluded[name] for name in ("received", "decision", "code", "tensor", "decided_s", "receipt")}
    return new.on_conflict_do_update(index_elements=(tables.Upload.id,), set_=decided)


def _chain_of_site() -> sa.Select[int | None, str, str]:
    table = tables.Site
    return sa.select(table.revoked_s, table.last_receipt, table.ledger_key).where(table.name == sa.bindparam("of_site"))


def _link() -> sa.Update:
    table = tables.Site
    return sa.update(table).where(table.name == sa.bindparam("of_site")).values(last_receipt=sa.bindparam("digest"))


_COLUMNS = tuple(column.name for column in tables.Upload.__table__.columns)
_FIRST_ACCEPTED, _REFUSED_SINCE, _OTHERS_UNDECIDED = _first_accepted(), _count_refused(), _others_undecided()
_RECEIPT = sa.select(tables.Upload.receipt).where(tables.Upload.id == sa.bindparam("this"))
_SAVE = {"sqlite": _saving(sqlite.insert), "postgresql": _saving(postgresql.insert)}
_CHAIN_OF_SITE, _LINK = _chain_of_site(), _link()
