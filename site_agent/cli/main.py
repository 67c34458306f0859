"""``site-agent``: the commands that a hospital gives. Results on stdout, narration on stderr, `next:` last.

Importing this imports no torch, gRPC, numpy or cryptography: help answers at once; each command loads what it needs.
"""

import getpass
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fl_algorithms.engine.hardware import MOST_WORKERS, DeviceName, Hardware
from site_agent.cli.audit import audit_app
from site_agent.cli.data import data_app, models_app, predict
from site_agent.cli.options import State
from site_agent.cli.pack import pack
from site_agent.cli.policy import policy_app
from site_agent.cli.release import leave, reject, release
from site_agent.cli.service import joined
from site_agent.cli.status import status, studies
from site_agent.cli.study import approve, preview, withdraw
from wardround.cli import application, run, say, say_next
from wardround.errors import BadData, UsageProblem

app = application(
    "site-agent", "Train models with other hospitals. Patient records, private modules and keys stay here."
)
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")
app.add_typer(policy_app, name="policy")
app.add_typer(audit_app, name="audit")
audit_app.command("pack")(pack)

INVITED = re.compile(r"(^|\s)wr1\.|wr1\.\w{64}")  # an invitation, perhaps with what stood around it


@app.command()
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
    import datetime

    from site_agent.gateway.connection.proxy import proxy_from
    from site_agent.gateway.enrolment.join import join as redeem
    from site_agent.state.directory import SiteState
    from wardround.records.invitation import stamp

    way = proxy_from(_line_of(proxy), str(proxy)) if proxy is not None else None
    now = datetime.datetime.now(datetime.UTC)
    joined = redeem(SiteState(state), _invitation_text(invitation), now, way, authority)
    site = joined.site
    if joined.warning:
        say(f"warning: {joined.warning}")
    print(f"Coordinator {site.address} of federation `{site.federation}` verified")
    print(f"Authority's fingerprint {site.authority_fingerprint}")
    print(f"Key written to {joined.key}, readable by this user only")
    print(f"Certificate for `{site.site}` written to {joined.certificate}, valid to {stamp(joined.expires)}")
    if joined.again:
        print("Ledger, consents, private modules and data are kept as they were")
        say_next("next: `site-agent run`")
        return
    print(f"Ledger begun in {state / 'ledger'}")
    say_next("next: `site-agent data add NAME --table FILE.csv --label COLUMN`, then `site-agent run`")


app.command("studies")(studies)
app.command("preview")(preview)
app.command("approve")(approve)


app.command("withdraw")(withdraw)
app.command("release")(release)
app.command("reject")(reject)
app.command("leave")(leave)


@app.command(name="run")
def serve(
    state: State,
    only: Annotated[
        Literal["gateway", "trainer"] | None,
        typer.Option(help="Run one of the two processes, where each has a user of its own."),
    ] = None,
    device: Annotated[
        DeviceName,
        typer.Option(envvar="WARDROUND_DEVICE", help="What the trainer trains on; auto is CUDA where there is a GPU."),
    ] = "cpu",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_WORKERS,
            envvar="WARDROUND_WORKERS",
            help="How many processes of the trainer read images ahead, where they do not fit the study's cache.",
        ),
    ] = 0,
) -> None:
    """Run the service until SIGTERM: it takes assignments, trains, and sends what was approved. Prints `ready`."""
    hardware = Hardware(device, workers)
    if only == "trainer":
        from site_agent.trainer.listener import listen_forever

        listen_forever(state, hardware)
        return
    from site_agent.gateway.service import run as run_service

    here, _ = joined(state)
    if only is None:
        say("gateway and trainer run as one user; use --only gateway and --only trainer to keep them apart")
    run_service(here, with_trainer=only is None, options=hardware.options)


app.command("status")(status)
app.command("predict")(predict)


def main() -> None:
    """The command ``site-agent``."""
    run(app)


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


if __name__ == "__main__":
    main()
