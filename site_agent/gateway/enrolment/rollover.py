"""The ledger rollover: a new ledger that cites the old one, for a site whose ledger the coordinator no longer takes.

A machine restored from a backup has a shorter ledger than the one the coordinator saw, and the lines between are lost.
They cannot be made again, so the old ledger stays as it is, in ``ledger-ID``, and a new one begins whose first line
names it, its number of lines and its head. The coordinator refuses it until its operator confirmed it.

    1. the new ledger is made, whole, in ``ledger-new``
    2. ``ledger`` becomes ``ledger-ID``
    3. ``ledger-new`` becomes ``ledger``

Run again after a crash at 1, it begins anew; at 2 or 3, it goes on.
"""

import shutil
from dataclasses import dataclass, replace

from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import SiteState
from wardround.errors import NeedsPerson
from wardround.local import durable
from wardround.local.state_lock import StateLock
from wardround.records.ledger.entries import GenesisEntry, IdentityEntry
from wardround.records.receipts import LedgerHead


@dataclass(frozen=True)
class Rollover:
    """The new ledger, and the head of the old one that its first line cites."""

    ledger_id: str
    continues: LedgerHead


def roll_over(state: SiteState) -> Rollover:
    """Set the ledger of ``state`` aside and begin a new one that cites it.

    Raises:
        NeedsPerson: not a site, or its ledger is gone or broken: restore a whole copy of it first.
        TryAgain: the agent runs.
    """
    state.site()
    with StateLock(state.root, "site-agent audit rollover"):
        key = Identity(state.identity).ledger_key()
        fresh = state.root / "ledger-new"
        if state.ledger.exists():
            shutil.rmtree(fresh, ignore_errors=True)
            old = Ledger(state.ledger, key)
            try:
                old.refuse_unbegun()
                old.sign()
                cited = old.head
                identities = list(old.entries(IdentityEntry))
                if not identities:
                    raise NeedsPerson(
                        f"the ledger in {state.ledger} has no `identity` line, so nobody's receipts can stand in one "
                        "that cites it; nothing was changed",
                        hint="restore the folder from the last backup, then `site-agent audit rollover`",
                    )
            finally:
                old.close()
            new = Ledger(fresh, key)
            try:
                new.begin(cited)  # 1
                new.append(replace(identities[-1], event="reopened"))
            finally:
                new.close()
            durable.move(state.ledger, state.root / f"ledger-{cited.ledger_id}")  # 2
        elif not fresh.exists():
            raise NeedsPerson(
                f"there is no ledger in {state.ledger} to cite",
                hint="restore the folder from the last backup, then `site-agent audit rollover`",
            )
        durable.move(fresh, state.ledger)  # 3
        ledger = Ledger(state.ledger, key)
        try:
            (genesis,) = ledger.entries(GenesisEntry)
            if genesis.continues is None:
                raise NeedsPerson(
                    f"the ledger in {state.ledger} continues no other; the rollover was not finished",
                    hint="restore the folder from the last backup, then `site-agent audit rollover`",
                )
            return Rollover(genesis.ledger_id, genesis.continues.ledger_head())
        finally:
            ledger.close()
