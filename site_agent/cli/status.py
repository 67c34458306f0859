"""``site-agent studies`` and ``status``: where this site stands in each study, who it is, what isolates its trainer."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State
from site_agent.cli.service import ask_service, joined, refresh
from site_agent.cli.study import print_history
from wardround.cli import Json, print_json, say_next

if TYPE_CHECKING:
    from rich.console import Console

    from site_agent.gateway.consent.rows import StudyRow
    from site_agent.gateway.status import DisputedUpload, SiteStatus


def studies(
    state: State,
    history: Annotated[bool, typer.Option("--history", help="Every approval and withdrawal, oldest first.")] = False,
    json: Json = False,
) -> None:
    """List the studies that the coordinator offers to this site, or (--history) each approval and withdrawal here."""
    here, site = joined(state)
    if history:
        print_history(here, json=json)
        return
    refresh(here)
    from site_agent.gateway.consent.rows import study_rows
    from site_agent.state import codec
    from wardround.signing.certificates import Name

    rows = study_rows(here, Name(site.federation, "coordinator").uri)
    if json:
        print_json({"studies": [codec.to_document(row) for row in rows]})
        return
    _print_studies(rows)
    fresh = next((row.id for row in rows if row.state in ("offered", "changed")), None)
    if fresh is not None:
        say_next(f"next: `site-agent preview {fresh}`")


def status(state: State, json: Json = False) -> None:
    """Show who this site is, what isolates its trainer, and where it stands in each study."""
    from site_agent.gateway import service_requests
    from site_agent.gateway.status import site_status
    from site_agent.state import codec

    here, site = joined(state)
    shown = site_status(here, site, ask_service(here, service_requests.Status()))
    if json:
        print_json(codec.to_document(shown))
        return
    _print_status(shown)


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False)


def _print_studies(rows: "Sequence[StudyRow]") -> None:
    from rich.table import Table

    if not rows:
        print("no study is offered to this site yet")
        return
    table = Table("study", "state", "round", "revision", "digest", "approved by", "data", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row.id, row.state, f"{min(row.round, row.rounds)} of {row.rounds}", str(row.revision),
            row.study_digest[:12], row.approved_by or "", row.data or "",
        )  # fmt: skip
    _console().print(table, markup=False)
    for row in rows:
        for plugin in row.plugins:
            print(f"{row.id} runs code of plug-in {plugin}")
        for change in row.changes:
            print(f"{row.id} changed since it was approved: {change}")
        if row.state == "held":
            say_next(f"{row.id}: round {row.round} waits: `site-agent release {row.id} --round {row.round}`")


def _print_status(shown: "SiteStatus") -> None:
    from rich.text import Text

    from site_agent.doctor.trainer import words

    console = _console()
    print(f"Site `{shown.site}` of federation `{shown.federation}`")
    away = "not connected, trying" if shown.running else "not connected: the agent does not run"
    reached = "connected" if shown.connected else away
    print(f"Coordinator {shown.coordinator}: {reached}")
    print(f"Certificate valid to {shown.certificate_expires}")
    if shown.certificate_fork_since:
        warning = (
            f"SOMEBODY ELSE HOLDS THIS SITE'S KEYS, or this machine was copied: since {shown.certificate_fork_since}"
        )
        console.print(Text(warning, style="bold red"))
        print("If nobody here knows of a copy, tell the coordinator's operator; then join again with a new invitation")
    print(f"Ledger key {shown.ledger_key}")
    print(f"Coordinator's receipt key {shown.receipt_key}")
    if shown.trainer_problem is not None:
        text = f"THE TRAINER DOES NOT ANSWER: {shown.trainer_problem}; rounds wait"
        console.print(Text(text, style="bold red"), soft_wrap=True)
    isolation = f"Trainer's isolation: {shown.isolation}"
    console.print(Text(isolation, style="bold red" if shown.isolation == "none" else ""))
    for measure in shown.isolation_missing:
        print(f"  not in force: {words(measure)}")
    print(f"Trains on: {shown.device}")
    console.print(f"Gateway runs as {shown.users.gateway}, trainer as {shown.users.trainer}", markup=False)
    if shown.users.root:
        console.print(Text("RUNNING AS ROOT: give gateway and trainer users of their own", style="bold red"))
    elif shown.trainer_problem is None and not shown.users.separate:
        print("One user for both: the kernel does not keep the gateway from the patients' files")
    _print_studies(shown.studies)
    _print_disputed(shown.disputed)
    if not shown.running:
        say_next("next: `site-agent run`")


def _print_disputed(uploads: "Sequence[DisputedUpload]") -> None:
    from rich.text import Text

    for row in uploads:
        upload = f"upload {row.upload_id[:12]}…, round {row.round} of {row.study}"
        text = f"THE COORDINATOR'S RECEIPT CANNOT BE BELIEVED ({row.at}, {upload}): {row.why}"
        _console().print(Text(text, style="bold red"), soft_wrap=True)
        more = f"; {row.left_out} more about this upload were counted and not kept" if row.left_out else ""
        print(f"What it said is kept in ledger/evidence/{row.file}; the ledger is as it was{more}")
