"""The commands of a person who decides about updates: ``release`` or ``reject`` one that waits; ``leave`` for good."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State, StudyId
from site_agent.cli.service import ask_or_do, joined
from wardround.cli import Json, print_json, say, say_next

if TYPE_CHECKING:
    from site_agent.gateway.commands import CommandHandler
    from site_agent.gateway.requests import Decide, Decided, Left, ReleaseDecision, Waiting
    from site_agent.state.directory import SiteState
    from site_agent.state.person import Person

Round = Annotated[int, typer.Option("--round", metavar="N", help="The round that waits, as `status` shows it.")]
Show = Annotated[bool, typer.Option("--show", help="Only show what waits.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def release(
    study: StudyId, number: Round, state: State, show: Show = False, yes: Yes = False, json: Json = False
) -> None:
    """Show the update that waits for a person, and let it leave."""
    _decide("released", study, number, state, only_show=show, yes=yes, json=json)


def reject(
    study: StudyId, number: Round, state: State, show: Show = False, yes: Yes = False, json: Json = False
) -> None:
    """Show the update that waits for a person, and keep it here: the round goes on without this site."""
    _decide("rejected", study, number, state, only_show=show, yes=yes, json=json)


def leave(state: State, yes: Yes = False, json: Json = False) -> None:
    """End the membership: withdraw from every study, tell the coordinator, send nothing more."""
    from site_agent.state.person import who

    here, site = joined(state)
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Leave federation `{site.federation}` for good?", abort=True, err=True)
    unreported = _leave(here, who()).unreported
    if json:
        print_json({"site": site.site, "federation": site.federation, "unreported": list(unreported)})
        return
    print(f"Site `{site.site}` left federation `{site.federation}`: nothing more leaves, and `site-agent run` refuses")
    print(f"What left before is in {here.ledger}; the coordinator keeps it, and the models made with it")
    print("What stays here, untouched:")
    print(f"  {here.root / 'studies'}: private modules and checkpoints")
    print(f"  {here.ledger}, {here.root / 'consents'}, {here.policy}: the record of what left and why; keep them")
    print(f"  {here.identity}: the keys; the certificate expires, or the operator revokes it before")
    print("  the tables and images named in data.toml")
    if unreported:
        say(f"the coordinator could not be told of: {', '.join(unreported)}")
    print(f"next: tell the coordinator's operator: `coordinator revoke {site.site}`")


_QUESTION = {"released": "Release", "rejected": "Reject"}


def _decide(
    decision: "ReleaseDecision", study: str, number: int, state: Path, *, only_show: bool, yes: bool, json: bool
) -> None:
    from site_agent.gateway import requests
    from site_agent.state.person import who

    here, _ = joined(state)
    waiting = _waiting(here, study, number)
    if json:
        print_json(waiting.document() if only_show else {**waiting.document(), "decision": decision})
    else:
        _print_waiting(waiting)
    if only_show:
        return
    if not yes and sys.stdin.isatty():
        typer.confirm(f"{_QUESTION[decision]} round {number} of `{study}`?", abort=True, err=True)
    person = who()
    decided = _send_decision(here, requests.Decide(study, number, decision, waiting.update, person))
    if json:
        return
    print(f"Round {number} of `{study}` {decision} by {person.text}")
    if not decided.goes_on:
        say_next("The agent does it when the coordinator asks for this round again; next: `site-agent run`")
    elif decision == "released":
        say_next("It leaves now; next: `site-agent audit show`")
    else:
        say_next("The coordinator is told")


def _waiting(here: "SiteState", study: str, number: int) -> "Waiting":
    from site_agent.gateway.requests import GetWaiting

    return ask_or_do(here, GetWaiting(study, number), lambda handler: handler.releases.waiting(study, number))


def _send_decision(here: "SiteState", request: "Decide") -> "Decided":
    from site_agent.gateway.requests import Decided

    def alone(handler: "CommandHandler") -> Decided:
        handler.releases.decide(request.study, request.round, request.decision, request.update, request.by)
        return Decided(goes_on=False)

    return ask_or_do(here, request, alone)


def _leave(here: "SiteState", person: "Person") -> "Left":
    from site_agent.gateway.requests import Leave, Left
    from site_agent.gateway.setup import withdraw_all_and_leave

    return ask_or_do(here, Leave(person), lambda handler: Left(tuple(withdraw_all_and_leave(handler, person))))


def _print_waiting(waiting: "Waiting") -> None:
    from rich.console import Console
    from rich.table import Table

    from site_agent.gateway.consent.facts import size

    print(f"Round {waiting.round} of `{waiting.study}` waits for a person. It would take out:")
    table = Table("tensor", "type", "shape", "bytes", "L2 norm", "largest", box=None, pad_edge=False)
    for row in waiting.tensors:
        table.add_row(
            row.name, row.dtype, str(list(row.shape)), str(row.bytes), _rounded(row.l2),
            _rounded(row.max_abs),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False).print(table, markup=False)
    numbers = ", ".join(f"{name} {value}" for name, value in sorted(waiting.metrics.items()))
    print(f"{len(waiting.tensors)} tensors, {size(waiting.payload_bytes)}; {numbers or 'no metrics'}")
    print(f"training rows reported as {waiting.num_examples}, validation rows as {waiting.num_validation}")
    if waiting.persons > 1:
        so_far = f", so far {' and '.join(waiting.endorsed)}" if waiting.endorsed else ""
        print(f"{waiting.persons} different people must release it{so_far}")


def _rounded(decimal: str | None) -> str:
    return f"{float(decimal):.6g}" if decimal is not None else ""
