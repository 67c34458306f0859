"""``coordinator second-person``: what waits for a second person, and which commands need one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask
from coordinator.cli.options import State
from coordinator.cli.printing import print_table
from wardround.cli import Json, group, print_json, say
from wardround.terminal import escaped

if TYPE_CHECKING:
    from coordinator.journal_records import WaitingList, WaitingRow

WIDTH = 160  # of a table where nobody looks at a terminal
DIGEST = 64  # hex digits
app = group("What waits for a second person, and which commands need one.")


@app.command("list")
def list_(state: State, as_json: Json = False) -> None:
    """List what one person proposed and another has not given too, and the commands that need two."""
    answer = waiting(state)
    if as_json:
        print_json(answer.document())
        return
    if not answer.waiting:
        print("no command waits for a second person")
    rows = [(str(row.proposal), row.by, row.what.replace("`", ""), row.until, said(row)) for row in answer.waiting]
    if rows:
        print_table(("line", "proposed by", "command", "until (UTC)", "what the second person agrees to"), rows, WIDTH)
    print(f"need a second person: {', '.join(answer.needed_for) or 'no commands'}")
    if fewer := sorted({*answer.needed_for} - {*answer.config}):
        say(f"config.toml does not name these any more: {', '.join(fewer)}")
        say("next: two people give `coordinator second-person apply`, or they stay")
    if answer.waiting:
        say("next: somebody with another login gives the same command; or `coordinator second-person take-back LINE`")


@app.command()
def take_back(
    number: Annotated[int, typer.Argument(metavar="LINE", help="The proposal's line in the journal.")], state: State
) -> None:
    """Let a proposal count no more. Whoever may give commands here may do so; the journal names the person."""
    from coordinator.journal_records import WaitingRow
    from coordinator.requests import TakeBack

    row = ask(state, TakeBack(number=number), WaitingRow)
    say(f"{row.what}, proposed by {row.by} in line {row.proposal}, is taken back")


@app.command()
def apply(state: State) -> None:
    """Let those commands need a second person that config.toml names, and no others. Two people give this command.

    More commands than before, or a shorter time, need no such step: they are in force when the service starts.
    """
    from coordinator.journal_records import SecondPersonApplied
    from coordinator.requests import ApplySecondPerson

    answer = ask(state, ApplySecondPerson(), SecondPersonApplied)
    say(f"need a second person from now on: {', '.join(answer.needed_for) or 'no commands'}")


def waiting(state: Path) -> "WaitingList":
    """What waits, as the coordinator says."""
    from coordinator.journal_records import WaitingList
    from coordinator.requests import ListWaiting

    return ask(state, ListWaiting(), WaitingList)


def said(row: "WaitingRow") -> str:
    """What the second person agrees to; digests by their beginning."""
    return ", ".join(f"{name} {_short(str(value))}" for name, value in row.about.items() if value != "")


def _short(text: str) -> str:
    return f"{text[:12]}…" if len(text) == DIGEST else escaped(text)
