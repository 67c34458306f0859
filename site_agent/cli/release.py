"""The commands of a person who holds the door: release or reject an update that waits, and leave for good."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from site_agent.cli.service import ask_service, joined
from wardround.cli import print_json, say, say_next

State = Annotated[Path, typer.Option(envvar="WARDROUND_STATE", help="Where this site keeps its things.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
StudyId = Annotated[str, typer.Argument(metavar="STUDY")]
Round = Annotated[int, typer.Option("--round", metavar="N", help="The round that waits, as in `status`.")]
Show = Annotated[bool, typer.Option("--show", help="Only show what waits.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask at the terminal.")]


def release(
    study: StudyId, number: Round, state: State, show: Show = False, yes: Yes = False, json: Json = False
) -> None:
    """Show the update that waits for a person, and let it leave."""
    _decide("released", study, number, state, only_show=show, yes=yes, json=json)


def reject(
    study: StudyId, number: Round, state: State, show: Show = False, yes: Yes = False, json: Json = False
) -> None:
    """Show the update that waits for a person, and do not let it leave: the round goes on without this site."""
    _decide("rejected", study, number, state, only_show=show, yes=yes, json=json)


def leave(state: State, yes: Yes = False, json: Json = False) -> None:
    """End the membership: withdraw from every study, tell the coordinator, send nothing more."""
    from site_agent.state.person import who

    here, site = joined(state)
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Leave federation `{site.federation}` for good?", abort=True, err=True)
    person = who()
    answer = ask_service(here, "leave", by=person)
    if answer is None:
        answer = {"untold": _leave_alone(here, person)}
    if json:
        print_json({"site": site.site, "federation": site.federation, "untold": answer["untold"]})
        return
    print(f"Site `{site.site}` left federation `{site.federation}`: nothing more leaves, and `site-agent run` refuses")
    print(f"What left before is in {here.ledger}; the coordinator keeps it, and the models made with it")
    print("What stays here, untouched:")
    print(f"  {here.root / 'studies'}: private modules and checkpoints")
    print(f"  {here.ledger}, {here.root / 'consents'}, {here.policy}: the account of it all; keep them")
    print(f"  {here.identity}: the keys; the certificate ends by itself, or when the operator revokes it")
    print("  the tables and images named in data.toml")
    if answer["untold"]:
        say(f"the coordinator could not be told of: {', '.join(answer['untold'])}")
    print(f"next: tell the coordinator's operator: `coordinator revoke {site.site}`")


_ASKED = {"released": "Release", "rejected": "Reject"}


def _decide(word: str, study: str, number: int, state: Path, *, only_show: bool, yes: bool, json: bool) -> None:
    from site_agent.gateway.commands import alone
    from site_agent.state.person import text, who

    here, _ = joined(state)
    waiting = ask_service(here, "waiting", study=study, round=number)
    if waiting is None:
        with alone(here) as (desk, _interrupt):
            waiting = desk.waiting(study, number)
    if json:
        print_json(waiting if only_show else {**waiting, "decision": word})
    else:
        _print_waiting(waiting)
    if only_show:
        return
    if not yes and sys.stdin.isatty():
        typer.confirm(f"{_ASKED[word]} round {number} of `{study}`?", abort=True, err=True)
    person, update = who(), waiting["update"]
    answer = ask_service(here, word, study=study, round=number, update=update, by=person)
    if answer is None:
        with alone(here) as (desk, _interrupt):
            desk.decide(study, number, word, update, person)
        answer = {"going": False}
    if json:
        return
    print(f"Round {number} of `{study}` {word} by {text(person)}")
    if answer["going"]:
        say_next("It leaves now; next: `site-agent audit show`" if word == "released" else "The coordinator is told")
    else:
        say_next("The agent does it when the coordinator asks for this round again; next: `site-agent run`")


def _leave_alone(here: Any, person: dict[str, Any]) -> list[str]:
    """Leave while no service runs. The studies whose withdrawal the coordinator could not be told."""
    from site_agent.gateway.commands import alone

    with alone(here) as (desk, _interrupt):
        return desk.withdraw_all_and_leave(person)


def _print_waiting(waiting: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from site_agent.gateway.consent.facts import size

    print(f"Round {waiting['round']} of `{waiting['study']}` waits for a person. It would take out:")
    table = Table("tensor", "type", "shape", "bytes", "L2 norm", "largest", box=None, pad_edge=False)
    for row in waiting["tensors"]:
        table.add_row(
            row["name"], row["dtype"], str(row["shape"]), str(row["bytes"]), f"{float(row['l2']):.6g}",
            f"{float(row['max_abs']):.6g}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False).print(table, markup=False)
    numbers = ", ".join(f"{name} {value}" for name, value in sorted(waiting["metrics"].items()))
    print(f"{len(waiting['tensors'])} tensors, {size(waiting['payload_bytes'])}; {numbers or 'no metrics'}")
    print(f"training rows told as {waiting['num_examples']}, validation rows as {waiting['num_validation']}")
