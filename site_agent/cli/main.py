"""``site-agent``: the commands that a hospital gives. Results on stdout, narration on stderr, `next:` last.

Importing this imports no torch, gRPC, numpy or cryptography: help answers at once; each command loads what it needs.
"""

import getpass
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fl_algorithms.hardware import MOST_WORKERS, DeviceName, Hardware
from site_agent.cli.audit import audit_app
from site_agent.cli.data import data_app, models_app, predict
from site_agent.cli.policy import policy_app
from site_agent.cli.release import leave, reject, release
from site_agent.cli.service import ask_service, joined, refresh
from site_agent.cli.study import approve, preview, print_history
from wardround.cli import print_json, run, say, say_next
from wardround.errors import BadData, UsageProblem

if TYPE_CHECKING:
    from rich.console import Console

    from site_agent.state.directory import Site, SiteState

app = typer.Typer(
    name="site-agent",
    help="Train models with other hospitals. Patient records, private modules and keys stay here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")
app.add_typer(policy_app, name="policy")
app.add_typer(audit_app, name="audit")

MEASURES = {  # of the trainer's isolation, by the names of `site_agent.trainer.isolation.kernel`
    "no_namespace": "a network namespace of its own (this system forbids it)",
    "no_system_call_filter": "the filter of system calls: it can reach into this user's processes and terminals",
    "reads_processes": "Landlock: it can read this user's other processes, where they do not hide their memory",
    "abstract_sockets": "Landlock from version 6: abstract Unix sockets of this machine are within its reach",
    "signals": "Landlock from version 6: it can send signals to this user's other processes",
    "shared_session": "a session of its own: it shares one with whoever started it",
}
INVITED = re.compile(r"(^|\s)wr1\.|wr1\.\w{64}")  # an invitation, perhaps with what stood around it

State = Annotated[Path, typer.Option(envvar="WARDROUND_STATE", help="Where this site keeps its things.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
StudyId = Annotated[str, typer.Argument(metavar="STUDY")]


@app.command()
def join(
    state: State,
    invitation: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="The invitation's file, or - for stdin. Without it: asked, unseen."),
    ] = None,
) -> None:
    """Become a site of a federation, with the invitation that its operator gave you."""
    import datetime

    from site_agent.gateway.enrolment.join import join as redeem
    from site_agent.state.directory import SiteState
    from wardround.records.invitation import stamp

    joined = redeem(SiteState(state), _invitation_text(invitation), datetime.datetime.now(datetime.UTC))
    site = joined.site
    if joined.warning:
        say(f"warning: {joined.warning}")
    print(f"Coordinator {site.address} of federation `{site.federation}` verified")
    print(f"Authority's fingerprint {site.authority_fingerprint}")
    print(f"Key written to {joined.key}, readable by this user only")
    print(f"Certificate for `{site.site}` written to {joined.certificate}, valid to {stamp(joined.expires)}")
    print(f"Ledger begun in {state / 'ledger'}")
    say_next("next: `site-agent data add NAME --table FILE.csv --label COLUMN`, then `site-agent run`")


@app.command()
def studies(
    state: State,
    history: Annotated[bool, typer.Option("--history", help="Every approval and withdrawal, oldest first.")] = False,
    json: Json = False,
) -> None:
    """The studies that the coordinator offers to this site; or what was approved and withdrawn here, and by whom."""
    here, site = joined(state)
    if history:
        print_history(here, json=json)
        return
    refresh(here)
    rows = study_rows(here, site)
    if json:
        print_json({"studies": rows})
        return
    _print_studies(rows)
    fresh = next((row["id"] for row in rows if row["state"] in ("offered", "changed")), None)
    if fresh is not None:
        say_next(f"next: `site-agent preview {fresh}`")


app.command("preview")(preview)
app.command("approve")(approve)


@app.command()
def withdraw(study: StudyId, state: State) -> None:
    """Take an approval back. Takes effect at once, mid-round too."""
    from site_agent.state.person import who

    here, _ = joined(state)
    person = who()
    answer = ask_service(here, "withdraw", study=study, by=person)
    if answer is None:
        from site_agent.gateway.commands import alone

        with alone(here) as (desk, _interrupt):
            desk.record_withdrawal(desk.withdraw(study, person), person)
        answer = {"told": False}
    print(f"Study `{study}` withdrawn: nothing more of it leaves. What left before is in the ledger")
    say_next(
        "next: `site-agent audit show`" if answer["told"] else "The coordinator hears of it at the next connection"
    )


app.command("release")(release)
app.command("reject")(reject)
app.command("leave")(leave)


@app.command(name="run")
def serve(
    state: State,
    only: Annotated[
        Literal["gateway", "trainer"] | None, typer.Option(help="One of the two, for two units with two users.")
    ] = None,
    device: Annotated[
        DeviceName,
        typer.Option(envvar="WARDROUND_DEVICE", help="Where the trainer trains; auto is CUDA where there is one."),
    ] = "cpu",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_WORKERS,
            envvar="WARDROUND_WORKERS",
            help="The trainer's processes that read images ahead, where they do not fit the study's cache.",
        ),
    ] = 0,
) -> None:
    """Serve until SIGTERM: take assignments, train, send what was approved. Prints `ready`."""
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


@app.command()
def status(state: State, json: Json = False) -> None:
    """Who this site is, what isolates its trainer, and where it stands in each study."""
    here, site = joined(state)
    shown = _status(here, site)
    if json:
        print_json(shown)
        return
    _print_status(shown)


app.command("predict")(predict)


def main() -> None:
    """The command ``site-agent``."""
    run(app)


def _invitation_text(source: str | None) -> str:
    """The invitation, from a file, stdin or an unseen prompt; never from the command line."""
    if source is None:
        if not sys.stdin.isatty():
            raise UsageProblem(
                "no invitation: this is no terminal to ask at", hint="--invitation FILE, or --invitation - for stdin"
            )
        try:
            return getpass.getpass("Invitation (not shown): ")  # echo is off before the prompt appears
        except EOFError:
            raise UsageProblem("no invitation was given") from None
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


def study_rows(here: "SiteState", site: "Site") -> list[dict[str, Any]]:
    """Each study's line in `studies` and `status`."""
    from site_agent.gateway.consent.facts import row
    from site_agent.gateway.consent.hindrances import hindrances
    from site_agent.state.directory import Journal
    from wardround.signing.certificates import Name

    coordinator = Name(site.federation, "coordinator").uri
    rows = []
    for offer in here.offers():
        consent, journal = here.consent(offer.study), here.journal(offer.study)
        journal = journal if journal.study_digest == offer.digest else Journal(offer.study)
        changes = hindrances(here, coordinator, offer, consent, journal) if consent is not None else []
        rows.append(row(offer, consent, journal, changes))
    return rows


def _status(here: "SiteState", site: "Site") -> dict[str, Any]:
    from site_agent import handoff
    from site_agent.gateway.enrolment.identity import Identity
    from site_agent.gateway.exit import evidence
    from site_agent.state.person import user_name
    from wardround.signing.dsse import fingerprint, keyid

    running = ask_service(here, "status")
    gateway_uid = running["uid"] if running is not None else os.geteuid()
    trainer = handoff.ask(here.root, "status")
    own = Identity(here.identity)
    expires = own.certificate().not_valid_after_utc
    return {
        "site": site.site,
        "federation": site.federation,
        "coordinator": site.address,
        "authority_fingerprint": site.authority_fingerprint,
        "ledger_key": keyid(own.ledger_key().public_key()),
        "receipt_key": fingerprint(bytes.fromhex(site.receipt_key)),
        "certificate_expires": expires.isoformat().replace("+00:00", "Z"),
        "running": running is not None,
        "connected": running is not None and running["connected"],
        "two_lines_since": (running["two_lines_since"] if running is not None else "") or None,
        "isolation": trainer["isolation"],
        "isolation_missing": trainer["missing"],
        "device": trainer["device"],
        "users": {
            "gateway": user_name(gateway_uid),
            "trainer": trainer["user"],
            "separate": gateway_uid != trainer["uid"],
            "root": 0 in (gateway_uid, trainer["uid"]),
        },
        "studies": study_rows(here, site),
        "disputed": [
            {name: row[name] for name in ("at", "study", "round", "upload_id", "why", "file", "left_out")}
            for row in evidence.read(here.ledger)
        ],
    }


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False)


def _print_studies(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    if not rows:
        print("no study is offered to this site yet")
        return
    table = Table("study", "state", "round", "revision", "digest", "approved by", "data", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["id"], row["state"], f"{min(row['round'], row['rounds'])} of {row['rounds']}", str(row["revision"]),
            row["study_digest"][:12], row["approved_by"] or "", row["data"] or "",
        )  # fmt: skip
    _console().print(table, markup=False)
    for row in rows:
        for change in row["changes"]:
            print(f"{row['id']} changed since it was approved: {change}")
        if row["state"] == "held":
            say_next(
                f"{row['id']}: round {row['round']} waits: `site-agent release {row['id']} --round {row['round']}`"
            )


def _print_status(shown: dict[str, Any]) -> None:
    from rich.text import Text

    console = _console()
    users = shown["users"]
    print(f"Site `{shown['site']}` of federation `{shown['federation']}`")
    line = "connected" if shown["connected"] else ("not connected, trying" if shown["running"] else "not running")
    print(f"Coordinator {shown['coordinator']}: {line}")
    print(f"Certificate valid to {shown['certificate_expires']}")
    if shown["two_lines_since"]:
        said = f"SOMEBODY ELSE HOLDS THIS SITE'S KEYS, or this machine was copied: since {shown['two_lines_since']}"
        console.print(Text(said, style="bold red"))
        print("If nobody here knows of a copy, tell the coordinator's operator; then join again with a new invitation")
    print(f"Ledger key {shown['ledger_key']}")
    print(f"Coordinator's receipt key {shown['receipt_key']}")
    isolation = f"Trainer's isolation: {shown['isolation']}"
    console.print(Text(isolation, style="bold red" if shown["isolation"] == "none" else ""))
    for measure in shown["isolation_missing"]:
        print(f"  not in force: {MEASURES.get(measure, 'a measure that this version does not know')}")
    print(f"Trains on: {shown['device']}")
    console.print(f"Gateway runs as {users['gateway']}, trainer as {users['trainer']}", markup=False)
    if users["root"]:
        console.print(Text("RUNNING AS ROOT: give gateway and trainer users of their own", style="bold red"))
    elif not users["separate"]:
        print("One user for both: the kernel does not keep the gateway from the patients' files")
    _print_studies(shown["studies"])
    for row in shown["disputed"]:
        upload = f"upload {row['upload_id'][:12]}…, round {row['round']} of {row['study']}"
        text = f"THE COORDINATOR'S RECEIPT CANNOT BE BELIEVED ({row['at']}, {upload}): {row['why']}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
        more = f"; {row['left_out']} more about this upload were counted and not kept" if row["left_out"] else ""
        print(f"What it said is kept in ledger/evidence/{row['file']}; the ledger is as it was{more}")
    if not shown["running"]:
        say_next("next: `site-agent run`")


if __name__ == "__main__":
    main()
