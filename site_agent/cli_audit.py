"""``site-agent audit``: what left, and whether the account of it is whole. All of it offline but the relay."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from site_agent.cli_reopen import reopen
from site_agent.cli_service import kept
from wardround.cli import print_json, say, say_next
from wardround.errors import BadData, UsageProblem

audit_app = typer.Typer(help="What left, and whether the account of it is whole.", no_args_is_help=True)
audit_app.command("reopen")(reopen)

State = Annotated[Path | None, typer.Option(envvar="WARDROUND_STATE", help="Where this site keeps its things.")]
Ledger = Annotated[Path | None, typer.Option("--ledger", metavar="DIR", help="A ledger folder, or a copy of one.")]
Receipts = Annotated[
    Path | None, typer.Option("--receipts", metavar="FILE", help="From `coordinator receipts SITE --out FILE`.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there; never data, keys or a ledger.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@audit_app.command("show")
def show(
    state: State = None,
    ledger: Ledger = None,
    study: Annotated[str | None, typer.Option(help="Only this study.")] = None,
    round_: Annotated[int | None, typer.Option("--round", min=0, help="Only this round.")] = None,
    tensor: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only tensors whose names match, such as 'head.*'.")
    ] = None,
    json: Json = False,
) -> None:
    """The ledger, line by line: what left, what was told, what was answered."""
    from site_agent.audit.show import chosen, tensor_words, words

    lines = list(chosen(_joined_folder(state, ledger), study, round_, tensor))
    if json:
        print_json({"records": lines})
        return
    if not lines:
        print("no line of the ledger is about that")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("line", "time", "type", "what", box=None, pad_edge=False)
    for line in lines:
        table.add_row(str(line["seq"]), line["ts"], line["type"], words(line))
        for row in line["tensors"] if tensor is not None else []:
            table.add_row("", "", "", tensor_words(row))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table, markup=False)
    where = "" if ledger is None else f" --ledger {shlex.quote(str(ledger))}"
    say_next(f"next: `site-agent audit verify{where}`")


@audit_app.command("verify")
def verify(state: State = None, ledger: Ledger = None, receipts: Receipts = None, json: Json = False) -> None:
    """Check every line, signature and receipt, offline. Exits 0 verified, 1 changed, 2 unresolved, 3 cannot verify."""
    from site_agent import audit
    from site_agent.preview import size

    folder = _joined_folder(state, ledger)
    verdict, code = audit.verify(folder, receipts)
    if json:
        print_json(verdict.document())
    elif code == audit.VERIFIED:
        copies = (
            f"; {verdict.compared} receipts of the coordinator's copy agree" if verdict.compared is not None else ""
        )
        print(
            f"verified: {verdict.lines} lines; {verdict.uploads} uploads ({verdict.accepted} accepted, "
            f"{verdict.refused} refused), {size(verdict.bytes)} in all{copies}"
        )
    elif code == audit.TAMPERED:
        print(f"CHANGED: {verdict.reason}; lines before {verdict.first_bad} verify")
        print("next: keep this folder as it is, and compare it with the last backup")
    elif code == audit.UNRESOLVED:
        print(f"unchanged, but: {verdict.reason}")
        say_next("next: `site-agent run` asks the coordinator and signs; then verify again")
    else:
        print(f"cannot verify: {verdict.reason}")
        if (inner := folder / "ledger").is_dir():
            say_next(f"next: `site-agent audit verify --ledger {shlex.quote(str(inner))}`")
    raise typer.Exit(code)


@audit_app.command("reconcile")
def reconcile(
    state: State = None,
    ledger: Ledger = None,
    receipts: Receipts = None,
    bytes_: Annotated[
        str | None,
        typer.Option("--bytes", metavar="COUNT", help="What somebody else counted: a number, or the relay's FILE."),
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="When counting began (RFC 3339, UTC); the relay's file says it itself.")
    ] = "",
    json: Json = False,
) -> None:
    """The ledger against the coordinator's receipts and a counter's bytes. Exits 0 if they agree, 1 if not."""
    from site_agent import audit
    from site_agent.audit.reconcile import count_from
    from site_agent.audit.reconcile import reconcile as compare

    if receipts is None and bytes_ is None:
        raise UsageProblem("nothing to reconcile with", hint="--receipts FILE, --bytes COUNT, or both")
    folder = _joined_folder(state, ledger)
    verdict, code = audit.verify(folder, receipts)
    if code == audit.CANNOT_VERIFY or code == audit.TAMPERED:
        print_json({"ledger": verdict.document()}) if json else print(f"the ledger does not verify: {verdict.reason}")
        raise typer.Exit(code)
    found = compare(folder, count_from(bytes_), since) if bytes_ is not None else None
    if json:
        print_json({"ledger": verdict.document(), "bytes": found.document() if found is not None else None})
    else:
        if receipts is not None:
            print(f"receipts: {verdict.compared} of the coordinator's copy are in the ledger, in order, byte for byte")
            if verdict.unresolved:
                print(f"{verdict.unresolved} uploads still have no receipt in the ledger")
        if found is not None:
            print(f"expected by the ledger  {found.expected:>14} bytes: payload {found.payload}, sent again "
                  f"{found.sent_again}, beside it {found.control} in {found.calls} calls")  # fmt: skip
            print(f"counted on the line     {found.counted:>14} bytes in {found.connections} connections")
            print(f"unexplained             {found.unexplained:>14} bytes; framing explains up to {found.allowance}")
            if found.open_session:
                print("the last connection is still open: stop the agent, then count again, for an exact comparison")
            print(f"DIFFERENT: {found.reason}" if found.reason else "reconciled")
    raise typer.Exit(0 if found is None or found.ok else 1)


@audit_app.command("export")
def export(
    out: Out,
    format_: Annotated[Literal["json", "csv", "ocsf"], typer.Option("--format", help="ocsf: one event a line.")],
    state: State = None,
    ledger: Ledger = None,
    study: Annotated[str | None, typer.Option(help="Only this study.")] = None,
    force: Force = False,
) -> None:
    """The ledger for another program: JSON, CSV safe to open in a spreadsheet, or OCSF API Activity events."""
    from site_agent.audit.export import FORMATS
    from site_agent.audit.show import chosen
    from wardround import outputs

    folder = _joined_folder(state, ledger)
    keep = kept(folder.parent) if ledger is None else [folder]
    outputs.file(out, force=force, keep=keep)
    lines = list(chosen(folder, study))
    outputs.write(out, FORMATS[format_](lines).encode(), force=force, keep=keep)
    print(f"{len(lines)} lines written to {out}")


@audit_app.command("report")
def report(out: Out, state: State = None, receipts: Receipts = None, force: Force = False) -> None:
    """One page to read and print: what left, what never left, how many bytes, receipts, how to check it."""
    from site_agent import audit
    from site_agent.audit.report import page
    from wardround import outputs

    folder = _joined_folder(state, None)
    keep = _with(kept(folder.parent), receipts)
    outputs.file(out, force=force, keep=keep)
    verdict, code = audit.verify(folder, receipts)
    if code == audit.CANNOT_VERIFY:
        raise BadData(f"there is nothing to report: {verdict.reason}", hint="`site-agent audit verify` says more")
    outputs.write(out, page(folder, folder.parent / "consents", verdict, code).encode(), force=force, keep=keep)
    print(f"report written to {out}")
    if code != audit.VERIFIED:
        say(f"warning: {verdict.reason}")


@audit_app.command("bundle")
def bundle(out: Out, state: State = None, receipts: Receipts = None, force: Force = False) -> None:
    """One signed archive for an auditor: ledger, consents, policy, receipts, report, and the verifier."""
    from site_agent.audit import VERIFIED
    from site_agent.audit.bundle import write
    from site_agent.gateway.identity import Identity
    from site_agent.state import SiteState
    from wardround import outputs

    root = _joined_folder(state, None).parent
    outputs.file(out, force=force, keep=_with(kept(root), receipts))
    code = write(root, Identity(SiteState(root).identity).ledger_key(), out, receipts)
    print(f"bundle written to {out}, signed with the ledger key")
    print(f"next: `tar xf {shlex.quote(str(out))}`, then `python VERIFY.py ledger`")
    if code != VERIFIED:
        say("warning: the ledger in it does not verify fully; the report in it says why")


@audit_app.command("relay")
def relay(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the site connects to.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")],
    count: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the count, for `audit reconcile --bytes FILE`.")
    ] = None,
) -> None:
    """Pass a site's connection on to the coordinator and count its bytes, without any key. Until SIGTERM."""
    from site_agent.gateway.relay import serve

    done = serve(listen, to, count).document()
    print(f"{done['up']} bytes up, {done['down']} down, {len(done['connections'])} connections")


def _with(keep: list[Path], given: Path | None) -> list[Path]:
    return keep if given is None else [*keep, given]


def _joined_folder(state: Path | None, ledger: Path | None) -> Path:
    """The folder of the ledger that is meant. Raises NeedsPerson: --state is no site's, as every command says it."""
    from site_agent.state import SiteState
    from wardround import statedir

    folder = _folder(state, ledger)
    if ledger is None and not (here := SiteState(folder.parent)).joined() and not statedir.exists(folder):
        raise here.not_joined()
    return folder


def _folder(state: Path | None, ledger: Path | None) -> Path:
    if ledger is not None:
        return ledger
    if state is None:
        raise UsageProblem("which ledger? neither --state nor --ledger was given", hint="--state DIR, or --ledger DIR")
    return state / "ledger"
