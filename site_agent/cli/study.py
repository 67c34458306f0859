"""The commands of a person who decides about a study: ``preview``, ``approve`` and ``withdraw``."""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State, StudyId
from site_agent.cli.service import ask_or_do, joined, offered
from wardround.cli import Json, print_json, say, say_next
from wardround.errors import UsageProblem
from wardround.terminal import escaped

if TYPE_CHECKING:
    from site_agent.gateway.commands import CommandHandler
    from site_agent.gateway.consent.account import Account, Line
    from site_agent.gateway.consent.preview import Preview
    from site_agent.gateway.requests import Approved, Withdrawn
    from site_agent.state.directory import SiteState
    from site_agent.state.person import Person

NARROWEST, WIDEST, NAMES = 60, 100, 36  # columns: of a page, and of the names on its left
UNBROKEN = 1 << 20  # columns where nobody reads: a line is a line


def preview(
    study: StudyId,
    state: State,
    data: Annotated[
        str,
        typer.Option(metavar="NAME", help="The data to train on. Without it: as approved, or as the study assigns."),
    ] = "",
    json: Json = False,
) -> None:
    """Show all that a study computes here and takes out, and what changed since it was approved or shown."""
    here, _ = joined(state)
    offered(here, study)
    shown = _preview(here, study, data)
    if json:
        print_json(shown.document())
        return
    print_account(shown.account)
    if not shown.has_policy:
        say_next(f"next: `site-agent policy draft {study}`, to say what may leave")
        return
    say_next(f"next: `site-agent approve {study} --data {shown.data or 'NAME'}`, which shows it again and asks")


def approve(
    study: StudyId,
    data: Annotated[str, typer.Option(metavar="NAME", help="The data to train on, by its name in `data add`.")],
    state: State,
    digest: Annotated[
        str,
        typer.Option(metavar="DIGEST", help="For scripts: approve the account of this digest, as `preview` showed it."),
    ] = "",
) -> None:
    """Show the account of a study, ask, and approve exactly that for this data.

    If anything changes later, the agent stops and says what.
    """
    from site_agent.gateway.consent.facts import exposed
    from site_agent.state.person import who

    here, _ = joined(state)
    if not here.policy.exists():
        from site_agent.gateway.policy import policy

        policy.load(here.policy, study)  # which says what to do first
    if not digest and not sys.stdin.isatty():
        raise UsageProblem(
            "nothing was approved: there is no terminal to ask at, and no --digest says what was shown",
            hint=f"`site-agent preview {study} --data {data}`, read it, then `site-agent approve {study} --data {data} "
            "--digest DIGEST` with the digest at its end",
        )
    offered(here, study)
    if not digest:
        account = _preview(here, study, data).account
        print_account(account)
        typer.confirm(f"Approve exactly this for data `{data}`?", abort=True, err=True)
        digest = account.digest
    person = who()
    approved = _approve(here, study, data, digest, person)
    print(f"Study `{study}`, digest {approved.study_digest}, approved by {person.text} for `{data}`")
    print(f"{approved.rows} rows; what leaves is what `site-agent preview {study}` shows, and nothing else")
    if approved.exposure:
        print(exposed(approved.exposure, approved.personalized))
    if approved.reported:
        say_next("The coordinator knows; next: `site-agent status`")
    else:
        say_next("The coordinator is told at the next connection; next: `site-agent run`")


def withdraw(study: StudyId, state: State) -> None:
    """Take an approval back. It takes effect at once, also in the middle of a round."""
    from site_agent.state.person import who

    here, _ = joined(state)
    withdrawn = _withdraw(here, study, who())
    print(f"Study `{study}` withdrawn: nothing more of it leaves. What left before is in the ledger")
    say_next(
        "next: `site-agent audit show`" if withdrawn.reported else "The coordinator is told at the next connection"
    )


def print_history(here: "SiteState", *, json: bool) -> None:
    """Each approval and withdrawal of each study, with who did it, when, and what it was."""
    from site_agent.state import codec

    acts = sorted(
        ((consent.withdrawn_at or consent.approved_at, consent) for consent in here.consent_histories()),
        key=lambda act: act[0],
    )
    if json:
        print_json({"history": [codec.to_document(consent) for _, consent in acts]})
        return
    for when, consent in acts:
        by = " and ".join(one.text for one in ((consent.withdrawn_by,) if consent.withdrawn_by else consent.people))
        print(
            f"{when[:16].replace('T', ' ')} UTC  {consent.study}  {consent.state} by {by}: revision "
            f"{consent.revision}, digest {consent.study_digest[:12]}, {consent.rounds} rounds, "
            f"data `{consent.data.name}`"
        )
    if not acts:
        print("no study was ever approved here")


def _preview(here: "SiteState", study: str, data: str) -> "Preview":
    """As the running service makes it, or this process where none runs; from now on it counts as shown."""
    from site_agent.gateway.requests import GetPreview

    return ask_or_do(here, GetPreview(study, data), lambda handler: handler.preview(study, data))


def _approve(here: "SiteState", study: str, data: str, digest: str, person: "Person") -> "Approved":
    from site_agent.gateway.requests import Approve, Approved

    def alone(handler: "CommandHandler") -> Approved:
        consent = handler.approve(study, data, digest, person, say)
        return Approved(False, consent.rows, consent.study_digest, consent.exposure, consent.personalized)

    return ask_or_do(here, Approve(study, data, digest, person), alone, say)


def _withdraw(here: "SiteState", study: str, person: "Person") -> "Withdrawn":
    from site_agent.gateway.requests import Withdraw, Withdrawn

    def alone(handler: "CommandHandler") -> Withdrawn:
        handler.record_withdrawal(handler.withdraw(study, person), person)
        return Withdrawn(False)

    return ask_or_do(here, Withdraw(study, person), alone)


def print_account(account: "Account") -> None:
    """The account on a page as wide as the terminal; a star and the old value stand where a line changed."""
    from site_agent.gateway.consent.account import SHORT

    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else UNBROKEN
    title = f": {account.title}" if account.title else ""
    _print_wrapped(f"Study `{account.study}`{title}", width)
    for group in account.groups:
        print(f"\n{group.heading}")
        _print_lines(group.lines, width)
    if account.since:
        what, when = account.since.split()
        print(f"\nWhat changed since it was {what}, {when[:16].replace('T', ' ')} UTC")
        changed = [*account.changed, *account.gone]
        _print_lines(changed, width)
        if not changed:
            print("  nothing")
    print(f"\nStudy's digest: {account.study_digest[:SHORT]}, revision {account.revision}")
    print(f"Digest of this account: {account.digest[:SHORT]}")


def _print_lines(lines: "Iterable[Line]", width: int) -> None:
    for line in lines:
        value = line.value or "gone"
        mark = " " if line.was is None else "*"
        if line.was is not None:
            value = f"{line.was} -> {value}" if line.was else f"(new) {value}"
        room = NAMES - 4 - _cells(line.name)
        first = f"{mark} {escaped(line.name)}{' ' * room}  "
        if room < 0:
            _print_wrapped(line.name, width, f"{mark} ", "    ")
            first = " " * NAMES
        _print_wrapped(value, width, first, " " * NAMES)


def _print_wrapped(text: str, width: int, first: str = "", rest: str = "") -> None:
    print("\n".join(wrapped(text, width, first, rest)))


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> Iterator[str]:
    """The lines of ``text``, escaped, of at most ``width`` columns of a terminal, in which a character of Chinese or an
    emoji takes two and an accent none. Broken at spaces, and where a word is wider than a line, in it.

    Args:
        first: stands before the first line, ``rest`` before each other.
    """
    line, used, bare = first, _cells(first), True
    for piece in re.findall(" +|[^ ]+", escaped(text)):
        if used + _cells(piece) > width and not bare:
            yield line.rstrip(" ")
            line, used, bare = rest, _cells(rest), True
        if bare and piece.startswith(" "):
            continue
        for part in _characters(piece) if used + _cells(piece) > width else (piece,):
            if used + _cells(part) > width and not bare:
                yield line
                line, used, bare = rest, _cells(rest), True
            line, used, bare = line + part, used + _cells(part), False
    yield line.rstrip(" ") if bare else line


def _characters(word: str) -> Iterator[str]:
    """Each character of a word, with the accents that stand on it."""
    character = ""
    for mark in word:
        if character and _cells(mark):
            yield character
            character = ""
        character += mark
    yield character


def _cells(text: str) -> int:
    """How many columns of a terminal it takes when it is shown."""
    from rich.cells import cell_len

    return cell_len(escaped(text))
