"""How an aggregation ended: the next model, too few updates, or a fault that a person must look at. No more than that.

Whatever goes wrong becomes an event of this one study; a failed disk alone is raised.
"""

import json
import logging
from dataclasses import dataclass

from sqlalchemy.orm import Session

from coordinator.models import public_data
from coordinator.models.aggregation import DamagedSpools, Opened, Spooled, add_up, aggregate
from coordinator.models.kept import add_model
from coordinator.storage import tables
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.events import Aggregated, Event, Halted, Unusable
from coordinator.studies.history import last_accounts
from coordinator.studies.secure_rounds import layout_for
from coordinator.studies.state import Round
from coordinator.studies.study import Study, uploads_in
from fl_algorithms.server.limits import LEFT_OUT, REMEMBERED, Account, TooFewLeft
from wardround.errors import CannotWrite, TryAgain, WardroundError
from wardround.secure import coordinator
from wardround.secure.sums import Unmasking
from wardround.tensors.manifests import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conclusion:
    """What to tell the study; and, where there is one, what became of each update, and the next model, durable."""

    event: Event
    account: Account | None = None
    manifest: Manifest | None = None

    def record(self, session: Session, study: Study, current: Round, now_s: int) -> None:
        """Write the model and the account down, in the transaction that tells the study."""
        if self.manifest is not None:
            add_model(session, self.manifest, now_s)
        if self.account is not None:
            row = session.get(tables.Round, (study.name, study.revision, current.number, current.attempt))
            assert row is not None
            row.account = json.dumps(self.account.document())


def conclude(store: Store, blobs: Blobs, study: Study, current: Round) -> Conclusion:
    """Aggregate the accepted updates of ``current``. It can be cut off anywhere and done again, to the same bits.

    Raises:
        CannotWrite: there is no room now. TryAgain: the database was away.
        StorageFailed: the process must end; the next start does it again.
    """
    made = _summed if study.rules.threshold else _aggregated
    try:
        manifest, account = made(store, blobs, study, current)
    except TooFewLeft as error:
        log.warning("%s: round %d cannot be averaged: %s", study.name, current.number, error.message)
        why = f"round {current.number} cannot be averaged: {error.message}"
        return Conclusion(Unusable(why, dict.fromkeys(error.account.left_out, LEFT_OUT)), error.account)
    except DamagedSpools as error:
        log.error("%s: round %d: %s", study.name, current.number, error.message)
        if study.rules.threshold:  # the set is chosen: no other vector can stand in its place
            return Conclusion(Halted(f"{error.message}; restore it, or `coordinator study renew {study.name}`"))
        return Conclusion(Unusable(error.message, dict.fromkeys(error.sites, "PAYLOAD_DIGEST")))
    except (CannotWrite, TryAgain):
        raise
    except WardroundError as error:
        log.error("%s: round %d: %s", study.name, current.number, error.message)
        return Conclusion(Halted(f"round {current.number} could not be aggregated: {error.message}"))
    except Exception as error:
        log.exception("%s: round %d could not be aggregated", study.name, current.number)
        kind = type(error).__name__
        return Conclusion(
            Halted(f"round {current.number} could not be aggregated ({kind}); the coordinator's log says more")
        )
    _say(study, current, account)
    return Conclusion(Aggregated(dict.fromkeys(account.left_out, LEFT_OUT)), account, manifest)


def _summed(store: Store, blobs: Blobs, study: Study, current: Round) -> tuple[Manifest | None, Account]:
    """The model of a sum that its sites have opened; of the closing validation, the metrics alone."""
    attempt = study.attempt
    assert attempt is not None
    opened, liars = coordinator.unmasking(attempt)
    if liars:
        log.warning("%s: round %d: sites gave wrong shares: %s", study.name, current.number, ", ".join(liars))
    with store.read() as session:
        spooled = [one for one in _spooled(session, current) if one.site in attempt.chosen]
    manifest, numbers = add_up(
        blobs, study.aggregator, study.newest, spooled,
        Opened(layout_for(study, closing=current.closing), Unmasking.of(opened, attempt.members, attempt.chosen)),
        current.number, _label(study, current), public_data.copy_of(study.resolved, blobs), closing=current.closing,
    )  # fmt: skip
    return manifest, Account(weight=numbers.weight, metrics=dict(numbers.metrics))


def _spooled(session: Session, current: Round) -> list[Spooled]:
    return [
        Spooled(site, upload.num_examples, upload.id, upload.manifest_sha256)
        for site, upload in uploads_in(current, session)
    ]


def _label(study: Study, current: Round) -> str:
    return f"{study.name}-{study.revision}-{current.number}"


def _aggregated(store: Store, blobs: Blobs, study: Study, current: Round) -> tuple[Manifest | None, Account]:
    with store.read() as session:
        before = last_accounts(session, study, REMEMBERED)
        spooled = _spooled(session, current)
    label = _label(study, current)
    public = public_data.copy_of(study.resolved, blobs)
    return aggregate(
        blobs, study.resolved, study.aggregator, study.newest, spooled, before, current.number, label, public
    )


def _say(study: Study, current: Round, account: Account) -> None:
    for site, why in account.left_out.items():
        log.warning("%s: round %d goes on without the update of site %s: %s", study.name, current.number, site, why)
    for site in account.capped:
        log.info(
            "%s: round %d: site %s counts for %.3f, less than its rows", study.name, current.number, site,
            account.shares[site],
        )  # fmt: skip
