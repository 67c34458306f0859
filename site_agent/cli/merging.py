"""A policy that is widened for one study more, as a person sees it: the difference, a question, the file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from site_agent.cli.service import kept
from wardround.cli import print_json, say, say_next
from wardround.errors import UsageProblem

if TYPE_CHECKING:
    from site_agent.gateway.policy.decisions import StudyRequest
    from site_agent.state.directory import SiteState


@dataclass(frozen=True)
class Proposal:
    """The policy in force, widened for a study.

    Attributes:
        text: of the file; ``before`` is the text in force.
        changes: what it says otherwise than the policy in force, a sentence each; none where that allows all of it.
        denied: what of the study it does not allow either: that a person must write.
        commented: whether the person's own comments are still in ``text``.
    """

    text: str
    before: bytes
    changes: list[str]
    denied: list[str]
    commented: bool


def merge_into_policy(
    here: "SiteState", request: "StudyRequest", out: Path | None, *, force: bool, as_json: bool
) -> None:
    """`policy draft --merge`: show what the policy would say otherwise, ask, and write it; or write it to ``out``."""
    from wardround.local import outputs

    proposed = proposal(here, request)
    if as_json:
        print_json({"study": request.study, "changes": proposed.changes, "denied": proposed.denied})
    else:
        show_proposal(proposed, request.study)
    if out is not None:
        outputs.write(out, proposed.text.encode(), force=force, keep=kept(here.root), mode=0o640)
        say(f"written to {out}; what is in force is {here.policy}")
        return
    if as_json or not proposed.changes:
        return
    if not sys.stdin.isatty():
        raise UsageProblem(
            "nothing was changed: there is no terminal to ask at",
            hint=f"`site-agent policy draft {request.study} --merge --out FILE`, read FILE, then "
            "`site-agent policy apply FILE`",
        )
    typer.confirm(f"Write this to {here.policy}?", abort=True, err=True)
    write_proposal(here, proposed)
    say_next(f"next: `site-agent approve {request.study} --data NAME`")


def proposal(here: "SiteState", request: "StudyRequest") -> Proposal:
    """Raises NeedsPerson: there is no policy. BadData: it is none. UsageProblem: it is for another coordinator."""
    from site_agent.cli.policy_edits import in_force
    from site_agent.gateway.policy import merge, policy
    from site_agent.gateway.policy import text as policy_text

    before = in_force(here) or policy.read(here.policy, request.study)
    old = policy.parse(before, here.policy)
    new = merge.merged(old, request)
    text, commented = merge.merged_text(before.decode(), old, new)
    denied = merge.still_denied(new, request)
    return Proposal(text, before, policy_text.differences(old, new), denied, commented)


def show_proposal(proposed: Proposal, study: str) -> None:
    """What the policy would say otherwise, line by line."""
    for change in proposed.changes:
        print(f"* {change}")
    if not proposed.changes:
        print(f"the policy in force has all that a merge may add for study `{study}`; nothing is to be changed")
    for denied in proposed.denied:
        print(f"still DENIED, until you write it yourself: {denied}")
    if proposed.changes and not proposed.commented:
        say("the file is written in a way that could not be edited: it is written anew, without your comments")


def write_proposal(here: "SiteState", proposed: Proposal) -> None:
    """Put it in force, with the person's name in the ledger. `site-agent policy show` has the text before.

    Raises:
        NeedsPerson: somebody changed the policy since it was shown.
    """
    from site_agent.cli.policy_edits import digest_of, put_policy

    put_policy(here, proposed.text.encode(), digest_of(proposed.before))
    kept_as = digest_of(proposed.before)[:12]
    print(f"Written to {here.policy}; the text before is kept: `site-agent policy show {kept_as}`")
