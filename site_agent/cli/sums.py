"""``site-agent audit sum``: the check of a round's sum, at a member of the study or away from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from site_agent.cli.options import State, StudyId
from site_agent.cli.service import ask_or_do, joined
from wardround.cli import Json, print_json, say_next
from wardround.errors import NotPermitted, UsageProblem
from wardround.terminal import escaped

if TYPE_CHECKING:
    from site_agent.audit.sums import SumShown

WORDS = {
    "same": "the model is what they give, bit by bit",
    "other": "the model is NOT what they give",
    "blocks_alone": "each is what its site signed; the model was not compared with them",
}


def check_sum(
    study: StudyId,
    state: State,
    round_: Annotated[int, typer.Option("--round", metavar="N", min=1, help="The round whose sum to look at.")],
    blocks: Annotated[
        Literal["16", "all"], typer.Option(help="How many of its blocks of 1 MiB, drawn at random.")
    ] = "16",
    keep: Annotated[
        bool, typer.Option("--keep", help="Fetch every masked vector whole and keep it, with the models, for others.")
    ] = False,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="FILE", help="Check what `audit bundle` wrote: no site needed.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option("--vectors", metavar="DIR", help="A copy of what --keep kept, beside the bundle.")
    ] = None,
    json: Json = False,
) -> None:
    """Check that a round's model is what the sum of the hospitals' updates gives. Exits 77 where it is not.

    At a member of the study it asks the coordinator, which has the vectors until the next round has closed. With
    --bundle it needs nobody: it checks what is in the file, says what cannot be checked from it, and exits 4 then.
    """
    count = None if blocks == "all" else int(blocks)
    if bundle is not None:
        if keep:
            raise UsageProblem(
                "--keep goes without --bundle: a site fetches the vectors", hint="run it at the hospital"
            )
        _from_bundle(bundle, study, round_, count, vectors, json=json)
        return
    if vectors is not None:
        raise UsageProblem("--vectors goes with --bundle alone", hint="--bundle FILE --vectors DIR")
    from site_agent.gateway.connection.interrupt import Interrupt
    from site_agent.gateway.peer_requests import CheckSum

    here, _ = joined(state)
    asked = CheckSum(study, round_, count, keep)
    shown = ask_or_do(here, asked, lambda handler: handler.check_sum(asked, Interrupt()))
    if json:
        print_json(shown.document())
    else:
        print(f"round {round_} of `{study}`: the sum over {', '.join(shown.sites)}")
        print(f"{shown.looked_at} of {shown.of} blocks looked at: {WORDS[shown.result]}")
        if shown.kept:
            print(f"kept in {shown.kept}")
            say_next("next: `site-agent audit bundle --out FILE.tar` takes it, as far as there is room")
    _refuse_other(study, round_, shown.result, shown.why)


def _from_bundle(
    bundle: Path, study: str, round_: int, blocks: int | None, vectors: Path | None, *, json: bool
) -> None:
    from site_agent.audit import CONSISTENT
    from site_agent.audit.sums import check_sum

    shown = check_sum(bundle, study, round_, blocks, vectors)
    found = shown.checked
    if json:
        print_json({
            "sites": shown.agreed.sites, "known": shown.agreed.known, "signed": shown.signed,
            "result": found.result if found is not None else "", "why": found.why if found is not None else "",
            "looked_at": len(found.looked_at) if found is not None else 0, "of": found.of if found is not None else 0,
            "not_shown": shown.not_shown,
        })  # fmt: skip
    else:
        _say(shown, study, round_)
    if found is not None:
        _refuse_other(study, round_, found.result, found.why)
    if shown.not_shown:
        raise typer.Exit(CONSISTENT)


def _say(shown: "SumShown", study: str, round_: int) -> None:
    agreed, found = shown.agreed, shown.checked
    print(f"round {round_} of `{study}`: the sum over {', '.join(agreed.sites)}")
    known = f"{len(agreed.known)} of the others are known to the hospital's people"
    print(f"{shown.signed} members signed exactly this set; what was opened is what its sites had signed; {known}")
    if found is not None:
        print(f"{len(found.looked_at)} of {found.of} blocks looked at: {WORDS[found.result]}")
    for missing in shown.not_shown:
        print(f"not shown: {escaped(missing)}")


def _refuse_other(study: str, round_: int, result: str, why: str) -> None:
    from wardround.records.ledger.secure import OTHER

    if result == OTHER:
        raise NotPermitted(
            f"the model of round {round_} of `{study}` is not what its sum gives: {why}",
            hint="show this to the coordinator's operator and to the other hospitals",
        )
