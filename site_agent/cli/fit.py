"""``data fit``: whether data fits a study that nobody approved yet, for whoever leads it to know."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State
from site_agent.cli.service import ask_or_do, joined, offered
from wardround.cli import Json, print_json, say_next

if TYPE_CHECKING:
    from site_agent.gateway.requests import Fit
    from site_agent.state.directory import SiteState
    from site_agent.state.offer import Offer


def fit(
    name: Annotated[str, typer.Argument(help="What `data add` called it.")],
    state: State,
    study: Annotated[str, typer.Option("--study", metavar="ID", help="The study, as it is offered now.")],
    send: Annotated[bool, typer.Option("--send", help="Tell the coordinator. Without it, nothing leaves.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Say in one word whether data fits a study, and how many rows; with --send, tell the coordinator exactly that."""
    here, site = joined(state)
    offer = offered(here, study)
    found = _found(here, offer, site.site, name)
    if not as_json:
        print(f"fits, {found.rows} rows" if found.fits else "does not fit")
    if send:
        from site_agent.gateway.requests import SendFit
        from site_agent.state.person import who

        if not yes and not as_json and sys.stdin.isatty():
            typer.confirm("Tell the coordinator this line?", abort=True, err=True)
        person = who()
        ask_or_do(
            here, SendFit(study, name, offer.digest, found.fits, found.rows, person),
            lambda handler: handler.fit(study, name, offer.digest, found, person),
        )  # fmt: skip
    if as_json:
        print_json({"study": study, "data": name, "fits": found.fits, "rows": found.rows, "sent": send})
        return
    if send:
        say_next("The coordinator was told this line and nothing else; the ledger has it: `site-agent audit show`")
    elif found.fits:
        say_next(f"next: `site-agent data fit {name} --study {study} --send` tells the coordinator this line")
    else:
        say_next(f"next: `site-agent data check {name} --study {study}` says why")


def _found(here: "SiteState", offer: "Offer", site: str, data: str) -> "Fit":
    """What ``CommandHandler.fit`` would tell."""
    from site_agent.gateway.fitting import fit_of
    from site_agent.gateway.policy.refusing import refuse_plugins
    from site_agent.handoff import ask
    from wardround.records.trainer import Examine

    refuse_plugins(offer.plugins, offer.study, here.policy)
    return fit_of(offer, ask(here.root, Examine(study=offer.document, site=site, data=data)))
