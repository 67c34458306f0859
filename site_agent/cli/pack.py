"""``site-agent audit pack``: the evidence of a study in one signed archive."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.audit import Force, Receipts, copy_to_judge_by, in_short
from site_agent.cli.options import State, StudyId
from site_agent.cli.service import ask_service, joined, kept
from wardround.cli import Json, print_json, say

if TYPE_CHECKING:
    from site_agent.audit.pack.page import Isolation
    from site_agent.state.directory import SiteState
    from site_agent.state.site import Site


def pack(
    study: StudyId,
    state: State,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.tar", help="Where to write.")],
    receipts: Receipts = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """One signed archive of a study's evidence: what was promised, what was measured, and all that proves it.

    `audit verify --bundle` checks every file of it. Exits 1 where a promise was broken.
    """
    import dataclasses

    from site_agent.audit import VERIFIED
    from site_agent.audit.pack.assemble import make
    from site_agent.gateway.enrolment.identity import Identity
    from wardround.local import outputs

    here, site = joined(state)
    outputs.file(out, force=force, keep=[*kept(here.root), *([receipts] if receipts is not None else [])])
    copy = copy_to_judge_by(here.root, None, receipts, ask=False)
    key = Identity(here.identity).ledger_key()
    verdict, code, promises = make(here, site, study, _isolation(here, site), key, out, copy)
    broken = [one for one in promises if one.state == "broken"]
    if json:
        print_json({"promises": [dataclasses.asdict(one) for one in promises], "code": code})
    else:
        for one in promises:
            print(f"{one.state:>9}  {one.name}: promised {one.promised}; measured {one.measured}")
        print(f"pack written to {out}; begin with evidence/index.html in it")
        print(f"next: the auditor runs `site-agent audit verify --bundle {shlex.quote(out.name)} --receipts FILE`, "
              "FILE being the coordinator's")  # fmt: skip
    if code != VERIFIED:
        say(f"warning: {in_short(verdict)}")
    if broken:
        raise typer.Exit(1)


def _isolation(here: "SiteState", site: "Site") -> "Isolation":
    """What keeps the trainer apart now, by its own word."""
    from site_agent.audit.pack.page import Isolation
    from site_agent.doctor.trainer import words
    from site_agent.gateway import service_requests
    from site_agent.gateway.status import site_status
    from site_agent.state.directory import now_text

    shown = site_status(here, site, ask_service(here, service_requests.Status()))
    return Isolation(
        now_text(), shown.isolation, tuple(map(words, shown.isolation_missing)),
        shown.users.gateway, shown.users.trainer, shown.users.separate, shown.users.root, shown.trainer_problem or "",
    )  # fmt: skip
