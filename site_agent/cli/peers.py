"""``site-agent peers``: whom this hospital's people know among a study's members."""

from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State, StudyId
from site_agent.cli.service import ask_or_do, joined, offered
from wardround.cli import Json, group, print_json, say, say_next

if TYPE_CHECKING:
    from site_agent.gateway.commands import CommandHandler

peers_app = group("Whom people here know among a study's members: behind strangers nobody hides.")
SiteName = Annotated[str, typer.Argument(metavar="SITE", help="The other hospital's name.")]


@peers_app.command("list")
def list_peers(study: StudyId, state: State, json: Json = False) -> None:
    """List every member of a study with the fingerprint of its ledger key, and who here compared it."""
    from site_agent.gateway.peer_requests import GetPeers

    here, _ = joined(state)
    offered(here, study)
    shown = ask_or_do(here, GetPeers(study), lambda handler: handler.peers.of_study(study))
    if json:
        print_json(shown.document())
        return
    strangers = 0
    for row in shown.members:
        who = "this site" if row.here else f"known since {row.at[:10]}, by {row.by}" if row.by else "nobody knows it"
        strangers += not row.here and not row.by
        print(f"{row.site:<24} {row.fingerprint}  {who}")
    say(
        f"{shown.threshold} of {len(shown.members)} must sign before a sum is opened: that stands {shown.colluding} "
        "who work with the coordinator, and whom nobody knows counts among them"
    )
    if strangers:
        say_next(
            "next: have each of the others read its fingerprint to you (`site-agent status` there), then `site-agent "
            "peers know SITE FINGERPRINT`"
        )


@peers_app.command()
def know(
    site: SiteName,
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="As its people read it to you by telephone.")
    ],
    state: State,
) -> None:
    """Record that you compared a member's fingerprint with its people; your name is in the ledger."""
    from site_agent.gateway.peer_requests import KnowPeer
    from site_agent.gateway.request_form import Done
    from site_agent.state.person import who

    here, _ = joined(state)
    person = who()

    def alone(handler: "CommandHandler") -> Done:
        handler.peers.know(site, fingerprint, person)
        return Done()

    ask_or_do(here, KnowPeer(site, fingerprint, person), alone)
    print(f"`{site}` is known here, by {person.text}")
    say_next("next: `site-agent peers list STUDY`")


@peers_app.command()
def forget(site: SiteName, state: State) -> None:
    """Take it back: from here on that member counts as a stranger."""
    from site_agent.gateway.peer_requests import ForgetPeer
    from site_agent.gateway.request_form import Done
    from site_agent.state.person import who

    here, _ = joined(state)
    person = who()

    def alone(handler: "CommandHandler") -> Done:
        handler.peers.forget(site, person)
        return Done()

    ask_or_do(here, ForgetPeer(site, person), alone)
    print(f"`{site}` is a stranger here from now on")
