"""The commands of a person who decides about a study: ``preview`` shows one account of it, ``approve`` asks for it."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from site_agent.cli.service import ask_service, joined, offered
from wardround.cli import print_json, say, say_next
from wardround.errors import UsageProblem
from wardround.terminal import escaped

if TYPE_CHECKING:
    from site_agent.state.directory import SiteState

State = Annotated[Path, typer.Option(envvar="WARDROUND_STATE", help="Where this site keeps its things.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
StudyId = Annotated[str, typer.Argument(metavar="STUDY")]
NARROWEST, WIDEST, NAMES = 60, 100, 36  # columns: of a page, and of the names on its left
UNBROKEN = 1 << 20  # columns where nobody reads: a line is a line


def preview(
    study: StudyId,
    state: State,
    data: Annotated[
        str, typer.Option(metavar="NAME", help="With the network and the weights of this data; else as approved.")
    ] = "",
    json: Json = False,
) -> None:
    """All that changes what a study computes here or takes out, and what changed since it was approved or shown."""
    here, _ = joined(state)
    offered(here, study)
    shown = _shown(here, study, data)
    if json:
        print_json(shown)
        return
    _print_account(shown)
    if not shown["policy"]:
        say_next(f"next: `site-agent policy draft {study}`, to say what may leave")
        return
    say_next(f"next: `site-agent approve {study} --data {shown['data'] or 'NAME'}`, which shows it again and asks")


def approve(
    study: StudyId,
    data: Annotated[str, typer.Option(metavar="NAME", help="What to train on, as named in `data add`.")],
    state: State,
    digest: Annotated[
        str,
        typer.Option(metavar="DIGEST", help="For scripts: that of the account which `preview` showed; do not ask."),
    ] = "",
) -> None:
    """Show the account of a study and, if you say so, approve exactly that, for this data.

    If anything changes later, the agent stops and says what.
    """
    from site_agent.gateway.consent.facts import exposed
    from site_agent.state.person import text, who

    here, _ = joined(state)
    if not here.policy.exists():
        from site_agent.gateway.exit import policy

        policy.load(here.policy)  # which says what to do first
    if not digest and not sys.stdin.isatty():
        raise UsageProblem(
            "nothing was approved: there is no terminal to ask at, and no --digest says what was shown",
            hint=f"`site-agent preview {study} --data {data}`, read it, then `site-agent approve {study} --data {data} "
            "--digest DIGEST`, DIGEST being what stands at its end",
        )
    offered(here, study)
    if not digest:
        shown = _shown(here, study, data)
        _print_account(shown)
        typer.confirm(f"Approve exactly this for data `{data}`?", abort=True, err=True)
        digest = shown["digest"]
    person = who()
    answer = ask_service(here, "approve", say, study=study, data=data, digest=digest, by=person)
    if answer is None:
        from site_agent.gateway.commands import alone

        with alone(here) as (desk, _interrupt):
            consent = desk.approve(study, data, digest, person, say)
        answer = {
            "told": False, "rows": consent.rows, "study_digest": consent.study_digest, "exposure": consent.exposure,
            "apart": consent.apart,
        }  # fmt: skip
    print(f"Study `{study}`, digest {answer['study_digest']}, approved by {text(person)} for `{data}`")
    print(f"{answer['rows']} rows; what leaves is what `site-agent preview {study}` shows, and nothing else")
    if answer.get("exposure"):
        print(exposed(answer["exposure"], answer.get("apart", "")))
    if answer["told"]:
        say_next("The coordinator knows; next: `site-agent status`")
    else:
        say_next("The coordinator hears of it at the next connection; next: `site-agent run`")


def print_history(here: "SiteState", *, json: bool) -> None:
    """Each approval and withdrawal of each study, with who did it, when, and what it was."""
    from site_agent.state import person

    acts = sorted(
        ((consent.withdrawn_at or consent.approved_at, consent) for consent in here.consent_histories()),
        key=lambda act: act[0],
    )
    if json:
        from dataclasses import asdict

        print_json({"history": [asdict(consent) for _, consent in acts]})
        return
    for when, consent in acts:
        by = consent.withdrawn_by or consent.approved_by
        print(
            f"{when[:16].replace('T', ' ')} UTC  {consent.study}  {consent.state} by {person.text(by)}: revision "
            f"{consent.revision}, digest {consent.study_digest[:12]}, {consent.rounds} rounds, "
            f"data `{consent.data['name']}`"
        )
    if not acts:
        print("no study was ever approved here")


def _shown(here: "SiteState", study: str, data: str) -> dict[str, Any]:
    """The account as the running service makes it, or this process where none runs; from now on it counts as shown."""
    shown = ask_service(here, "preview", study=study, data=data)
    if shown is None:
        from site_agent.gateway.commands import alone

        with alone(here) as (desk, _interrupt):
            shown = desk.preview(study, data)
    answer: dict[str, Any] = shown
    return answer


def _print_account(shown: dict[str, Any]) -> None:
    """The account on a page as wide as the terminal; a star and the old value stand where a line changed."""
    from site_agent.gateway.consent.account import SHORT

    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else UNBROKEN
    title = f": {shown['title']}" if shown["title"] else ""
    _print_wrapped(f"Study `{shown['study']}`{title}", width)
    for group in shown["groups"]:
        print(f"\n{group['heading']}")
        _print_lines(group["lines"], width)
    if shown["since"]:
        what, when = shown["since"].split()
        print(f"\nWhat changed since it was {what}, {when[:16].replace('T', ' ')} UTC")
        changed = [line for group in shown["groups"] for line in group["lines"] if "was" in line] + shown["gone"]
        _print_lines(changed, width)
        if not changed:
            print("  nothing")
    print(f"\nStudy's digest: {shown['study_digest'][:SHORT]}, revision {shown['revision']}")
    print(f"Digest of this account: {shown['digest'][:SHORT]}")


def _print_lines(lines: list[dict[str, str]], width: int) -> None:
    for line in lines:
        name, value, was = line["name"], line["value"] or "gone", line.get("was")
        mark = " " if was is None else "*"
        if was is not None:
            value = f"{was} -> {value}" if was else f"(new) {value}"
        room = NAMES - 4 - _cells(name)
        first = f"{mark} {escaped(name)}{' ' * room}  "
        if room < 0:
            _print_wrapped(name, width, f"{mark} ", "    ")
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
    for one in word:
        if character and _cells(one):
            yield character
            character = ""
        character += one
    yield character


def _cells(text: str) -> int:
    """How many columns of a terminal it takes when it is shown."""
    from rich.cells import cell_len

    return cell_len(escaped(text))
