"""``site-agent setup``: from an invitation to the running service, a question at a time.

    1  join the federation           `site-agent join`
    2  name the data                 `site-agent data add`
    3  say what may leave            `site-agent policy draft`, with --merge where there is a policy
    4  read the study, approve it    `site-agent approve`
    5  run the service               `site-agent run`

Each step is a command of its own, and one that is done is passed over: given again, it goes on where it stopped, or
takes the next study. Steps 3 and 4 ask a person who may decide that, and show first what they decide.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.joining import enrol
from site_agent.cli.options import State
from wardround.cli import say, say_error, say_next
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.local.directory import SYSTEM, quoted

if TYPE_CHECKING:
    from site_agent.gateway.consent.rows import StudyRow
    from site_agent.state.directory import SiteState
    from site_agent.state.offer import Offer
    from site_agent.state.site import Site

LONGEST_SHOWN = 80  # lines of a drafted policy; of a longer one the beginning
TO_DECIDE = ("offered", "changed", "withdrawn")  # states of a study that a person may approve
GOES_ON = ("approved", "running", "paused", "training", "held", "uploading")


def setup(
    state: State,
    invitation: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="The invitation's file; without it, you are asked.")
    ] = None,
    proxy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the HTTP proxy to go through, as `join` takes it.")
    ] = None,
    study: Annotated[str, typer.Option(metavar="ID", help="The study, where several are offered.")] = "",
    data: Annotated[str, typer.Option(metavar="NAME", help="The data, where several have a name here.")] = "",
) -> None:
    """Set this site up, asking what is needed: join, data, policy, approval, service. Give it again for each study."""
    from site_agent.cli.service import joined
    from site_agent.cli.study import approve
    from site_agent.state.directory import SiteState

    is_here = SiteState(state).joined()
    _refuse_no_terminal()
    _step(1, "join the federation", "site-agent join")
    if is_here:
        _, site = joined(state)
        print(f"This is site `{site.site}` of federation `{site.federation}`, at {site.address}")
    else:
        enrol(state, invitation, "", proxy)
    here, site = joined(state)
    row = _study(here, site, study)
    offer = here.offer(row.id) if row is not None else None
    _step(2, "name the data", "site-agent data add")
    name = _data(state, data, offer)
    if row is None or offer is None:
        say("No study is offered to this site yet. When one is: `site-agent setup` again, for steps 3 and 4")
    elif row.state in GOES_ON:
        say(f"Study `{row.id}` is approved already, by {row.approved_by}")
    else:
        _step(3, "say what may leave", f"site-agent policy draft {row.id}")
        _policy(here, site, row.id)
        _step(4, "read the study, and approve it", f"site-agent approve {row.id} --data {name}")
        approve(row.id, name, state)
    _step(5, "run the service", "site-agent run")
    _run(here)


def _refuse_no_terminal() -> None:
    if not sys.stdin.isatty():
        raise UsageProblem(
            "`setup` asks questions, and there is no terminal to ask at",
            hint="in a script, give the command of each step: join, data add, policy draft, preview, approve, run",
        )


def _step(number: int, what: str, command: str) -> None:
    say(f"\n[{number} of 5] {what} (`{command}`)")


def _study(here: "SiteState", site: "Site", wanted: str) -> "StudyRow | None":
    """The study that a person is to decide about, else one that goes on; None where none is offered."""
    from site_agent.cli.service import refresh
    from site_agent.gateway.consent.rows import study_rows
    from wardround.signing.certificates import Name

    refresh(here)
    rows = study_rows(here, Name(site.federation, "coordinator").uri)
    if wanted:
        here.offer(wanted)  # which says what is offered, if this is not
        return next(row for row in rows if row.id == wanted)
    open_ = [row for row in rows if row.state in TO_DECIDE]
    if len(open_) > 1:
        names = ", ".join(row.id for row in open_)
        chosen = typer.prompt(f"Several studies are offered: {names}. Which one", default=open_[0].id, err=True)
        here.offer(chosen)
        return next(row for row in rows if row.id == chosen)
    return next((row for row in [*open_, *rows] if row.state in (*TO_DECIDE, *GOES_ON)), None)


def _data(state: Path, wanted: str, offer: "Offer | None") -> str:
    """The name of the data to train on: the one that has a name here, the one that is chosen, or what is named now."""
    from site_agent.trainer.data import sources

    known = list(sources.sources(state))
    if wanted and known:
        sources.source(state, wanted)  # which says what there is, if not this
        return wanted
    if len(known) == 1:
        print(f"Data `{known[0]}` has a name here; for other data: `site-agent data add`")
        return known[0]
    if known:
        named = str(typer.prompt(f"Which data ({', '.join(known)})", default=known[0], err=True))
        sources.source(state, named)
        return named
    while True:
        try:
            return _named(state, wanted, offer)
        except (BadData, UsageProblem) as error:
            say_error(error)
            say("Once more; Ctrl-C ends this, and `site-agent setup` goes on here")


def _named(state: Path, wanted: str, offer: "Offer | None") -> str:
    from site_agent.cli.naming import name_data

    given = _files(offer)
    name = wanted or str(typer.prompt("What you will call it", default="patients", err=True))
    name_data(state, name, given)
    return name


def _files(offer: "Offer | None") -> dict[str, str]:
    """Options of `data add`. Nothing is looked at here: by its name, it is a table, arrays or a folder of images."""
    path = _path("Your data: a table (FILE.csv), arrays (FILE.npz) or a folder of images")
    ending = Path(path).suffix.lower()
    if ending == ".npz":
        return {"arrays": path}
    if ending:
        label = str(typer.prompt("The column of the class", default=_label(offer), err=True))
        return {"table": path, "label": label}
    beside = _path("What the images show: labels (FILE.csv), or a folder of masks")
    return {"images": path, "labels" if Path(beside).suffix else "masks": beside}


def _path(question: str) -> str:
    return os.path.abspath(str(typer.prompt(question, err=True)))  # noqa: PTH100  links stay, as in `data add`


def _label(offer: "Offer | None") -> str | None:
    """What the study calls the column of the class; None where it does not say."""
    task = offer.document.get("task") if offer is not None else None
    label = task.get("label") if isinstance(task, dict) else None
    return label if isinstance(label, str) and label else None


def _policy(here: "SiteState", site: "Site", study: str) -> None:
    """Have a person put a policy in force that allows the study.

    Raises:
        NotPermitted: the policy denies something that only a person may write otherwise.
    """
    from site_agent.cli.merging import proposal, show_proposal, write_proposal
    from site_agent.cli.policy import study_request
    from site_agent.cli.policy_edits import put_policy
    from site_agent.gateway.policy import text as policy_text

    request = study_request(here, site, study)
    if not here.policy.exists():
        text = policy_text.draft(request, site.site)
        lines = text.splitlines()
        print("\n".join(lines[:LONGEST_SHOWN]))
        if len(lines) > LONGEST_SHOWN:
            say(f"... and {len(lines) - LONGEST_SHOWN} lines more, which {here.policy} will have")
        typer.confirm(f"Put this in force, as {here.policy}?", abort=True, err=True)
        put_policy(here, text.encode(), "")
        say("It is yours: edit it whenever you like")
    proposed = proposal(here, request)
    if proposed.changes:
        show_proposal(proposed, study)
        typer.confirm(f"Write this to {here.policy}?", abort=True, err=True)
        write_proposal(here, proposed)
    if proposed.denied:
        raise NotPermitted(
            f"the policy blocks study `{study}`: {proposed.denied[0]}",
            hint=f"if it should leave, edit {here.policy} and give `site-agent setup` again; otherwise do nothing",
        )


def _run(here: "SiteState") -> None:
    """Say how the service is started, or become it."""
    from wardround.local import control

    if control.is_listening(here.control):
        print("The service runs already, and knows")
        return
    studies = here.root / "studies"
    if here.root.is_relative_to(SYSTEM) or (studies.exists() and studies.stat().st_uid != os.geteuid()):
        say_next("next: `sudo systemctl enable --now wardround-trainer wardround-gateway`")
        return
    if not typer.confirm("Run it now, in this terminal, until Ctrl-C?", default=True, err=True):
        say_next("next: `site-agent run`, as a service")
        return
    sys.stdout.flush()
    say(f"`site-agent run --state {quoted(here.root)}`")
    os.execv(  # noqa: S606  this process becomes the service: no torch, no keys and no question is left in it
        sys.executable, [sys.executable, "-m", "site_agent.cli.main", "run", "--state", str(here.root)]
    )
