"""``coordinator invite``, ``sites`` and ``revoke``: who may take part."""

import re
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.asking import Waits, ask
from coordinator.cli.options import State
from coordinator.cli.printing import print_table
from wardround.cli import Json, print_json, say
from wardround.errors import UsageProblem
from wardround.local.durable import make_folder

_SPAN = re.compile(r"(\d{1,6})(s|m|min|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def invite(
    sites: Annotated[list[str], typer.Argument(metavar="SITE...", help="The hospitals' names in this federation.")],
    state: State,
    expires: Annotated[str, typer.Option(metavar="SPAN", help="How long it can be used: 30m, 24h, 7d.")] = "24h",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write each one to FOLDER/SITE.invitation, and print none."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Print an invitation for each site, to be used once. It is a secret: send it by a way that you trust."""
    from coordinator.answers import InvitationMade
    from coordinator.requests import Invite
    from wardround.local import outputs

    seconds = _seconds(expires)
    if out is not None:
        outputs.folder(out, force=force, keep=[state])
    waiting: list[Waits] = []
    for site in dict.fromkeys(sites):
        try:
            answer = ask(state, Invite(site=site, expires_s=seconds), InvitationMade)
        except Waits as error:  # for a second person; each site's invitation is a proposal of its own
            waiting.append(error)
            continue
        if answer.replaces:
            say(f"Site `{site}` is already enrolled: whoever uses this invitation replaces its identity")
        once = f"It can be used once, until {answer.expires}; an older one for `{site}` that nobody used is void"
        if out is None:
            say(once)
            print(answer.invitation, flush=True)
            continue
        make_folder(out)
        outputs.write(out / f"{site}.invitation", answer.invitation.encode() + b"\n", force=force, keep=[state])
        say(f"Invitation written to {out / f'{site}.invitation'}: send it to `{site}` alone, then delete it")
        say(once)
    if len(waiting) < len(dict.fromkeys(sites)):
        say("next: at the hospital, `site-agent setup` asks for the invitation")
    for other in waiting[:-1]:
        say(other.message)
    if waiting:
        raise waiting[-1]


def sites(state: State, as_json: Json = False) -> None:
    """List the sites: invited, enrolled, connected, ready or revoked."""
    from coordinator.answers import SiteList
    from coordinator.requests import ListSites

    answer = ask(state, ListSites(), SiteList)
    if as_json:
        print_json(answer.document())
        return
    print_table(
        ("site", "state", "certificate until", "last seen"),
        [(row.site, row.state, row.certificate_expires or "", row.last_seen or "") for row in answer.sites],
    )
    for row in answer.sites:
        if row.certificate_fork_since:
            say(
                f"Site `{row.site}`: two machines hold its keys since {row.certificate_fork_since} (a copy, or a theft)"
            )
            say(f"next: ask its people; if nobody there knows of a copy, `coordinator revoke {row.site}`")
        if row.copied_since:
            say(f"Site `{row.site}`: two programs run with its identity, seen since {row.copied_since}")
            say("next: ask its people which of the two machines goes on, and have the other one stopped")
        if row.ledger_key:
            print(f"ledger key of {row.site}: {row.ledger_key}")
    print(f"receipt key: {answer.receipt_key}")


def revoke(site: Annotated[str, typer.Argument(help="The site to refuse from now on.")], state: State) -> None:
    """Refuse a site from its next call on, and end the calls that it has under way."""
    from coordinator.answers import Revoked
    from coordinator.requests import Revoke

    answer = ask(state, Revoke(site=site), Revoked)
    if answer.was_enrolled:
        say(f"Site `{site}` is revoked")
    else:
        say(f"Site `{site}` was not enrolled; an unused invitation for it no longer works")
    say(f"next: its studies go on without it; to let it in again, `coordinator invite {site}`")


def _seconds(span: str) -> int:
    """Raises UsageProblem: ``span`` is not a number with a unit."""
    match = _SPAN.fullmatch(span)
    if not match:
        raise UsageProblem(f"`--expires {span[:40]}` is not a span of time", hint="as in 30m, 24h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
