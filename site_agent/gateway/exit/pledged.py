"""Which sums this site signed, and which of these it has not checked: what its ledger says of it, and those before it.

A ledger that continues another one (``audit rollover``) forgets nothing of this: the older ledgers beside it are read
with it. What was signed in one that is not there is not known, so nothing more is signed.
"""

import threading

from site_agent.gateway.exit.ledger_state import LedgerState
from wardround.errors import NotPermitted
from wardround.records.ledger.secure import AgreedEntry, OpenedEntry, SumCheckedEntry


class Pledged:
    """A view of a ledger's state. Safe to use from several threads."""

    def __init__(self, state: LedgerState, lock: threading.RLock) -> None:
        self._state, self._lock = state, lock

    def sets(self) -> list[tuple[AgreedEntry, bool]]:
        """Every set that this site signed, which is what it has pledged, and whether it has opened it.

        Raises:
            NotPermitted: a ledger that this one continues is not there.
        """
        with self._lock:
            if missing := self._state.missing:
                raise NotPermitted(
                    f"ledger {missing}, which this one continues, is not beside it: which sums this site signed before "
                    "is not known, and none is signed now",
                    hint=f"put the folder `ledger-{missing}` back beside `ledger`, from the last backup that has it",
                    code="DECLINED_POLICY",
                )
            return [(entry, key in self._state.opened) for key, entry in self._state.agreed.items()]

    def is_here(self, study_sha256: str, round_: int) -> bool:
        """Whether this ledger itself has the line of that round's set."""
        with self._lock:
            return (study_sha256, round_) in self._state.agreed_here

    def refuted(self, study_sha256: str) -> SumCheckedEntry | None:
        """The check that found a model of a study to be another than its sum gives; None where none did."""
        with self._lock:
            return self._state.refuted.get(study_sha256)

    def model(self, study_sha256: str, round_: int) -> str:
        """The digest of the model of a round whose sum was checked; "" where it was not."""
        with self._lock:
            return self._state.models.get((study_sha256, round_), "")

    def last_sum(self, study_sha256: str) -> tuple[OpenedEntry | None, SumCheckedEntry | None]:
        """What was opened last of a study, if its sum is not checked yet; the last check that found no other model."""
        with self._lock:
            return self._state.unchecked.get(study_sha256), self._state.checked.get(study_sha256)
