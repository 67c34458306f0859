"""``site-agent audit``: what left, and whether the account of it is whole. All of it offline but the relay."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from site_agent.cli.options import State
from site_agent.cli.rollover import rollover
from site_agent.cli.service import kept
from wardround.cli import Json, group, print_json, say, say_next
from wardround.errors import UsageProblem
from wardround.terminal import escaped, many

if TYPE_CHECKING:
    from site_agent.audit import Copy, Verdict

audit_app = group("What left, and whether the account of it is whole.")
audit_app.command("rollover")(rollover)

Ledger = Annotated[Path | None, typer.Option("--ledger", metavar="DIR", help="A ledger folder, or a copy of one.")]
Receipts = Annotated[
    Path | None, typer.Option("--receipts", metavar="FILE", help="From `coordinator receipts SITE --out FILE`.")
]
Fingerprint = "FINGERPRINT"
Key = Annotated[
    str, typer.Option("--key", metavar=Fingerprint, help="Of the ledger key, as `site-agent status` at the site shows.")
]
ReceiptKey = Annotated[
    str, typer.Option("--receipt-key", metavar=Fingerprint, help="Of the receipt key, as `coordinator sites` shows.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there; never data, keys or a ledger.")]


@audit_app.command("show")
def show(
    state: State,
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
    from wardround.records.ledger.entries import UploadEntry

    lines = list(chosen(_joined_folder(state, ledger), study, round_, tensor))
    if json:
        print_json({"records": [line.document() for line in lines]})
        return
    if not lines:
        print("no line of the ledger is about that")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("line", "time", "type", "what", box=None, pad_edge=False)
    for line in lines:
        table.add_row(str(line.seq + 1), escaped(line.ts, 40), escaped(line.type, 40), words(line))
        for row in line.entry.tensors if tensor is not None and isinstance(line.entry, UploadEntry) else ():
            table.add_row("", "", "", tensor_words(row))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False).print(table, markup=False)
    where = "" if ledger is None else f" --ledger {shlex.quote(str(ledger))}"
    say_next(f"next: `site-agent audit verify{where}`")


@audit_app.command("verify")
def verify(
    state: State,
    ledger: Ledger = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="FILE", help="What `audit bundle` wrote, every file of it.")
    ] = None,
    receipts: Receipts = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask the coordinator for its receipts, and keep them.")] = False,
    key: Key = "",
    receipt_key: ReceiptKey = "",
    json: Json = False,
) -> None:
    """Check every line, signature and receipt. Three things can be shown: consistent, complete, whose.

    Exits 0 if all three were; 1 changed since it was written; 2 consistent, but with uploads without a receipt or lines
    that no signed head covers; 3 cannot verify; 4 consistent, completeness not shown. Without a copy of the
    coordinator's receipts (--receipts, --ask) nobody can tell whether the end was cut off.
    """
    from site_agent import audit
    from site_agent.audit.bundle import verify_bundle

    pins = audit.Pins(_fingerprint(key, "--key"), _fingerprint(receipt_key, "--receipt-key"))
    if bundle is not None:
        if ask or ledger is not None:
            raise UsageProblem("--bundle goes with neither --ledger nor --ask", hint="--bundle FILE, or --state DIR")
        verdict, code = verify_bundle(bundle, receipts, pins)
    else:
        folder = _joined_folder(state, ledger)
        verdict, code = audit.verify(folder, None, pins, copy_to_judge_by(state, ledger, receipts, ask))
    if json:
        print_json({"code": code, **verdict.document()})
    else:
        _print_verdict(verdict, code, bundle is not None)
        inner = folder / "ledger" if bundle is None else None
        if code == audit.CANNOT_VERIFY and inner is not None and inner.is_dir():
            say_next(f"next: `site-agent audit verify --ledger {shlex.quote(str(inner))}`")
    raise typer.Exit(code)


@audit_app.command("reconcile")
def reconcile(
    state: State,
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
    count = compare(folder, count_from(bytes_), since) if bytes_ is not None else None
    if json:
        print_json({"ledger": verdict.document(), "bytes": count.document() if count is not None else None})
    else:
        if receipts is not None:
            print(_of_copy(verdict))
            if verdict.unresolved:
                print(f"{verdict.unresolved} uploads still have no receipt in the ledger")
        if count is not None:
            print(f"expected by the ledger  {count.expected:>14} bytes: payload {count.payload}, sent again "
                  f"{count.sent_again}, beside it {count.control} in {count.calls} calls")  # fmt: skip
            print(f"counted on the line     {count.counted:>14} bytes in {count.connections} connections")
            print(f"unexplained             {count.unexplained:>14} bytes; framing explains up to {count.allowance}")
            if count.open_session:
                print("the last connection is still open: stop the agent, then count again, for an exact comparison")
            print(f"DIFFERENT: {count.reason}" if count.reason else "reconciled")
    raise typer.Exit(0 if count is None or count.ok else 1)


@audit_app.command("export")
def export(
    out: Out,
    format_: Annotated[Literal["json", "csv", "ocsf"], typer.Option("--format", help="ocsf: one event a line.")],
    state: State,
    ledger: Ledger = None,
    study: Annotated[str | None, typer.Option(help="Only this study.")] = None,
    force: Force = False,
) -> None:
    """The ledger for another program: JSON, CSV safe to open in a spreadsheet, or OCSF API Activity events."""
    from site_agent.audit.export import FORMATS
    from site_agent.audit.show import chosen
    from wardround.local import outputs

    folder = _joined_folder(state, ledger)
    keep = kept(folder.parent) if ledger is None else [folder]
    outputs.file(out, force=force, keep=keep)
    lines = list(chosen(folder, study))
    outputs.write(out, FORMATS[format_](lines).encode(), force=force, keep=keep)
    print(f"{len(lines)} lines written to {out}")


@audit_app.command("report")
def report(out: Out, state: State, receipts: Receipts = None, force: Force = False) -> None:
    """One page to read and print: what left, what never left, how many bytes, receipts, how to check it."""
    from site_agent import audit
    from site_agent.audit.bundle import look
    from wardround.local import outputs

    root = _joined_folder(state, None).parent
    keep = _with(kept(root), receipts)
    outputs.file(out, force=force, keep=keep)
    looked = look(root, copy_to_judge_by(root, None, receipts, ask=False))
    outputs.write(out, looked.page().encode(), force=force, keep=keep)
    print(f"report written to {out}")
    if looked.code != audit.VERIFIED:
        say(f"warning: {in_short(looked.verdict)}")


@audit_app.command("bundle")
def bundle(out: Out, state: State, receipts: Receipts = None, force: Force = False) -> None:
    """One signed archive for an auditor: ledgers, consents, policies, receipts, report."""
    from site_agent.audit import VERIFIED
    from site_agent.audit.bundle import make
    from site_agent.gateway.enrolment.identity import Identity
    from site_agent.state.directory import SiteState
    from wardround.local import outputs

    root = _joined_folder(state, None).parent
    outputs.file(out, force=force, keep=_with(kept(root), receipts))
    key = Identity(SiteState(root).identity).ledger_key()
    verdict, code = make(root, key, out, copy_to_judge_by(root, None, receipts, ask=False))
    print(f"bundle written to {out}, signed with the ledger key {verdict.ledger_key}".rstrip())
    name = shlex.quote(out.name)
    print(f"next: the auditor runs `site-agent audit verify --bundle {name} --receipts FILE`, FILE being "
          "the coordinator's")  # fmt: skip
    if code != VERIFIED:
        say(f"warning: {in_short(verdict)}")


@audit_app.command("verifier")
def verifier(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the program here.")] = None,
    force: Force = False,
) -> None:
    """The second verifier of this release, for an auditor's own machine: its SHA-256, and with --out the program."""
    import hashlib

    from site_agent.audit.second_verifier import program
    from wardround import __version__
    from wardround.local import outputs

    data = program()
    if out is not None:
        outputs.write(out, data, force=force)
    print(f"{hashlib.sha256(data).hexdigest()}  verify_ledger.py of wardround {__version__}")


@audit_app.command("relay")
def relay(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the site connects to.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")],
    count: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the count, for `audit reconcile --bytes FILE`.")
    ] = None,
) -> None:
    """Pass a site's connection on to the coordinator and count its bytes, without any key. Until SIGTERM."""
    from site_agent.gateway.connection.relay import serve

    done = serve(listen, to, count).document()
    print(f"{done['up']} bytes up, {done['down']} down, {len(done['connections'])} connections")


def _with(keep: list[Path], given: Path | None) -> list[Path]:
    return keep if given is None else [*keep, given]


def _joined_folder(state: Path, ledger: Path | None) -> Path:
    """The folder of the ledger that is meant. Raises NeedsPerson: --state is no site's, as every command says it."""
    from site_agent.state.directory import SiteState
    from wardround.local import directory

    folder = state / "ledger" if ledger is None else ledger
    if ledger is None and not (here := SiteState(folder.parent)).joined() and not directory.exists(folder):
        raise here.not_joined()
    return folder


def copy_to_judge_by(state: Path, ledger: Path | None, receipts: Path | None, ask: bool) -> "Copy | None":
    """The copy of the receipts to judge by: given, asked for now, or, of a site's state, the one kept when it was asked
    last, which shows less: it lies where the ledger lies."""
    from site_agent.audit.verify import Copy, given_copy
    from site_agent.state.directory import SiteState

    if ask and (receipts is not None or ledger is not None):
        raise UsageProblem("--ask goes with --state alone", hint="the site's state directory has the key to ask with")
    if receipts is not None:
        return given_copy(receipts)
    if ledger is not None:
        return None
    if ask:
        _ask(state)
        return Copy(SiteState(state).receipts.read_bytes(), "the coordinator's receipts, asked for now", True)
    kept = SiteState(state).receipts
    return Copy(kept.read_bytes(), "the receipts kept here", False) if kept.exists() else None


def _ask(state: Path) -> None:
    """Raises Unavailable: the coordinator cannot be asked now."""
    from site_agent.cli.service import ask_service, joined
    from site_agent.gateway.service_requests import FetchReceipts

    here, _ = joined(state)
    if ask_service(here, FetchReceipts()) is None:
        from site_agent.gateway.setup import handler_alone

        with handler_alone(here) as (handler, interrupt):
            handler.fetch_receipts(interrupt)


def _fingerprint(text: str, option: str) -> str:
    plain = text.replace(":", "").lower()
    if plain and (len(plain) != 64 or set(plain) - set("0123456789abcdef")):
        raise UsageProblem(f"{option} {text[:80]!r} is no fingerprint: 64 hexadecimal digits")
    return plain


def _print_verdict(verdict: "Verdict", code: int, bundled: bool) -> None:
    """What was shown and what was not, the dates and the key first."""
    from site_agent import audit
    from site_agent.gateway.consent.facts import size

    reason = escaped(verdict.reason)  # which may cite what stands in the ledger
    if code == audit.TAMPERED:
        where = f", in folder {verdict.ledger}" if verdict.ledger else ""
        print(f"CHANGED: {reason}{where}")
        start = f"line {verdict.first_bad}" if verdict.first_bad else "there"
        print(f"What it says from {start} on is not known to be true, and nothing of it is told here")
        print("next: keep it as it is, and compare it with the last backup")
        return
    if code == audit.CANNOT_VERIFY:
        print(f"cannot verify: {reason}")
        return
    words = {
        audit.VERIFIED: "verified", audit.UNRESOLVED: f"consistent, but: {reason}",
        audit.CONSISTENT: "consistent; completeness NOT SHOWN",
    }  # fmt: skip
    of = f"site {escaped(verdict.site or 'unknown', 80)} of {escaped(verdict.federation or 'unknown', 80)}"
    print(f"{words[code]}: {of}, {_when(verdict.first_time)} to {_when(verdict.last_time)}")
    more = f" in {verdict.ledgers} ledgers" if verdict.ledgers > 1 else ""
    again = f", and {verdict.resends} times again" if verdict.resends else ""
    summaries = f"; and {verdict.summaries} summaries of columns" if verdict.summaries else ""
    print(
        f"consistent: yes: {verdict.lines} lines{more}; {verdict.uploads} uploads ({verdict.accepted} accepted, "
        f"{verdict.refused} refused), {size(verdict.bytes)} in all{again}{summaries}"
    )
    if verdict.complete:
        newer = f"{many(verdict.tail, 'line')} at its end {'is' if verdict.tail == 1 else 'are'} newer than the newest"
        print(
            f"complete: as of {_when(verdict.copied)}, when the copy of the coordinator's "
            f"{many(verdict.compared or 0, 'receipt')} was made; they agree, and {newer}"
        )
    else:
        print("complete: NOT SHOWN")
    if bundled:
        print("files: each is the one that MANIFEST.json names, no other is there; the ledger's key signed it")
    print(f"whose: {'by ' + verdict.whose if verdict.whose else 'NOT SHOWN'}: ledger key {verdict.ledger_key}")
    for missing in verdict.not_shown:
        print(f"not shown: {escaped(missing)}")
    if code == audit.UNRESOLVED:
        say_next("next: `site-agent run` asks the coordinator and signs; then verify again")
    elif code == audit.CONSISTENT and bundled:
        print("next: verify with `--receipts FILE`, from the coordinator's operator: `coordinator receipts SITE`")
    elif code == audit.CONSISTENT:
        say_next("next: `site-agent audit verify --ask` at the site; elsewhere, `--receipts FILE` from the coordinator")


def _of_copy(verdict: "Verdict") -> str:
    """How many receipts of a copy the ledger has, and where the others belong."""
    copied = verdict.compared or 0
    there = copied - verdict.lost - verdict.open
    which = "of the coordinator's copy" if there == copied else f"of the {copied} in the coordinator's copy"
    text = f"receipts: {there} {which} are in the ledger, in order, byte for byte"
    if verdict.open:
        text += f"; not yet, for the site has not asked for them: {verdict.open}"
    if verdict.lost:
        text += f"; of lines that were lost before a ledger rollover: {verdict.lost}"
    return text


def in_short(verdict: "Verdict") -> str:
    return verdict.reason or "not shown: " + "; ".join(verdict.not_shown)


def _when(text: str) -> str:
    """A time as a ledger or a copy says it, which need not be one."""
    return escaped(f"{text[:10]} {text[11:19]} UTC")
