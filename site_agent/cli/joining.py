"""``site-agent join``: from an invitation to a certificate, as a person types it."""

import getpass
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from site_agent.cli.options import State
from wardround.cli import say, say_next
from wardround.errors import BadData, UsageProblem

INVITED = re.compile(r"(^|\s)wr1\.|wr1\.\w{64}")  # an invitation, perhaps with what stood around it


def join(
    state: State,
    invitation: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="The invitation's file, or - for stdin. Without this option, paste it; it is not shown.",
        ),
    ] = None,
    authority: Annotated[
        str,
        typer.Option(
            metavar="FINGERPRINT",
            help="For a site that joined before, if the invitation names another authority: its fingerprint, as the "
            "operator read it to you.",
        ),
    ] = "",
    proxy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the HTTP proxy to go through, one line: http://[USER:PASSWORD@]HOST:PORT.",
        ),
    ] = None,
) -> None:
    """Join a federation, with the invitation that its operator gave you; again too, with all that is here kept."""
    if enrol(state, invitation, authority, proxy):
        say_next("next: `site-agent run`")
    else:
        say_next("next: `site-agent data add NAME --table FILE.csv --label COLUMN`, then `site-agent run`")


def enrol(state: Path, invitation: str | None, authority: str, proxy: Path | None) -> bool:
    """Redeem an invitation, and say what was written. Returns whether this site had joined before."""

    from site_agent.gateway.connection.proxy import proxy_from
    from site_agent.gateway.enrolment.join import join as redeem
    from site_agent.state.directory import SiteState
    from wardround.records.invitation import stamp

    way = proxy_from(_line_of(proxy), str(proxy)) if proxy is not None else None
    joined = redeem(SiteState(state), _invitation_text(invitation), way, authority)
    site = joined.site
    if joined.warning:
        say(f"warning: {joined.warning}")
    print(f"Coordinator {site.address} of federation `{site.federation}` verified")
    print(f"Authority's fingerprint {site.authority_fingerprint}")
    print(f"Key written to {joined.key}, readable by this user only")
    print(f"Certificate for `{site.site}` written to {joined.certificate}, valid to {stamp(joined.expires)}")
    if joined.again:
        print("Ledger, consents, private modules and data are kept as they were")
    else:
        print(f"Ledger begun in {state / 'ledger'}")
    return joined.again


def _line_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:4096]
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint="--proxy FILE") from None


def _invitation_text(source: str | None) -> str:
    """The invitation, from a file, stdin or an unseen prompt; never from the command line."""
    if source is None:
        if not sys.stdin.isatty():
            raise UsageProblem(
                "no invitation was given, and there is no terminal to ask at",
                hint="give --invitation FILE, or --invitation - for stdin",
            )
        try:
            return getpass.getpass("Invitation (not shown): ")  # echo is off before the prompt appears
        except EOFError:
            raise UsageProblem("no invitation was given", hint="give --invitation FILE") from None
    if source == "-":
        return sys.stdin.read(64 * 1024)
    if INVITED.search(source):
        raise UsageProblem(
            "the invitation is a secret and must not be an argument: other users see it in the process list",
            hint="put it into a file (--invitation FILE), or leave the option out and paste it; ask for a new one",
        )
    try:
        return Path(source).read_text()[: 64 * 1024]
    except OSError as error:
        raise BadData(f"{source}: {error.strerror}", hint="--invitation FILE, or - for stdin") from None
    except UnicodeDecodeError:
        raise BadData(f"{source}: this is not an invitation: it is no text") from None
