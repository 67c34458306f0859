"""``site-agent audit rollover``: a new ledger that cites the old one."""

from site_agent.cli.options import State
from wardround.cli import Json, print_json


def rollover(state: State, json: Json = False) -> None:
    """A ledger rollover: begin a new ledger that cites this one, after a restore from a backup, when the coordinator
    refuses the old one."""
    from dataclasses import asdict

    from site_agent.gateway.enrolment.rollover import roll_over
    from site_agent.state.directory import SiteState

    done = roll_over(SiteState(state))
    before = done.continues
    if json:
        print_json({"ledger_id": done.ledger_id, "continues": asdict(before)})
        return
    print(
        f"Ledger {done.ledger_id} begun; its first line cites {before.ledger_id}, {before.lines} lines, {before.head}"
    )
    print(f"The old one is kept in {state / f'ledger-{before.ledger_id}'}, unchanged")
    print("Uploads are refused (LEDGER_FORK) until the coordinator's operator confirms the new one:")
    print(f"next: read them the id; there, `coordinator rollover SITE --ledger {done.ledger_id}`")
