"""``coordinator receipts`` and ``rollover``: the coordinator's side of a site's ledger."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import Force, State
from wardround.cli import say


def receipts(
    site: Annotated[str, typer.Argument(help="The site whose receipts to write.")],
    state: State,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file: one JSON line for each receipt, oldest first.")],
    force: Force = False,
) -> None:
    """Write every receipt of a site to a file, for an auditor to compare with the site's ledger."""
    from coordinator.member_answers import ReceiptsCopied
    from coordinator.requests import CopyReceipts
    from wardround.local import outputs
    from wardround.signing import canonical

    refuse_no_coordinator(state)
    outputs.file(out, force=force, keep=[state])
    lines: list[bytes] = []
    answer = ask(
        state, CopyReceipts(site=site), ReceiptsCopied,
        progress=lambda envelope: lines.append(canonical.dumps(envelope) + b"\n"),
    )  # fmt: skip
    outputs.write(out, lines, force=force, keep=[state])
    say(f"{answer.receipts:,} receipts of site `{site}`, and a signed statement of their number, written to {out}")
    say(f"next: at the site, `site-agent audit verify --receipts {out.name}`")


def rollover(
    site: Annotated[str, typer.Argument(help="The site that began a new ledger.")],
    ledger: Annotated[str, typer.Option(metavar="ID", help="The new ledger's id, as the site's people read it out.")],
    state: State,
) -> None:
    """Accept the new ledger of a site in place of the old one. First ask its people why, by a way that you trust."""
    from coordinator.member_answers import RolledOver
    from coordinator.requests import RollOver

    answer = ask(state, RollOver(site=site, ledger=ledger), RolledOver)
    say(f"Site `{site}` keeps ledger {answer.ledger} from now on")
    if answer.before:
        say(f"Its ledger before, {answer.before}, is refused from now on")
    say("next: at the site, `site-agent run` again")
