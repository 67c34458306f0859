"""``site-agent policy``: what may leave, in a file that a person writes. See ``site_agent.gateway.policy.policy``."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.merging import merge_into_policy
from site_agent.cli.options import State, StudyId
from site_agent.cli.policy_edits import agree, apply, edit, proposed, put_policy
from site_agent.cli.service import joined, kept, offered
from wardround.cli import Json, group, print_json, say, say_next
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.local.directory import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from site_agent.gateway.policy.decisions import Decision, StudyRequest
    from site_agent.gateway.policy.policy import ModelTable
    from site_agent.state.directory import SiteState
    from site_agent.state.offer import Offer
    from site_agent.state.site import Site

policy_app = group("What may leave this hospital: a file that a person writes. Nothing else may.")


policy_app.command()(edit)
policy_app.command()(apply)
policy_app.command()(proposed)
policy_app.command()(agree)


@policy_app.command()
def draft(
    study: StudyId,
    state: State,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file instead of the policy in force.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE. A policy in force is never replaced.")] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="The policy in force and what the study asks beyond it: show the difference, and ask."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write a draft that allows what the study asks, each tensor by its name, for you to read and edit.

    With --merge, widen the policy in force by what the study asks, after showing you what changes.
    """
    from site_agent.gateway.policy import policy
    from site_agent.gateway.policy import text as policy_text
    from wardround.local import outputs

    here, site = joined(state)
    target = out or here.policy
    if out is not None:
        outputs.file(out, force=force, keep=kept(state))
    request = study_request(here, site, study)
    if merge:
        merge_into_policy(here, request, out, force=force, as_json=json)
        return
    if out is None and target.exists():
        raise UsageProblem(
            f"{target} exists, and a draft never replaces a policy",
            hint=f"`site-agent policy draft {study} --merge` shows what the study asks beyond it, and asks you",
        )
    text = policy_text.draft(request, site.site)
    policy.parse(text.encode(), target)
    if out is not None:
        outputs.write(out, text.encode(), force=force, keep=kept(state), mode=0o640)
    else:
        put_policy(here, text.encode(), "")
    if json:
        print_json({"study": study, "file": str(target)})
        return
    print(f"Draft for study `{study}` written to {target}; nothing is approved by it")
    if out is not None:
        say_next(f"next: `site-agent policy check {quoted(out)}`; what is in force is {here.policy}")
        return
    say_next(f"next: read and edit it, then `site-agent policy check`, then `site-agent approve {study} --data NAME`")


@policy_app.command("check")
def check_policy(
    state: State,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Instead of the policy in force.")] = None,
    json: Json = False,
) -> None:
    """Check that a file is a policy, and show what is wrong with it, and where."""
    import hashlib

    from site_agent.gateway.policy import policy
    from site_agent.state.directory import SiteState

    SiteState(state).require_folder()
    path = file or SiteState(state).policy
    data = policy.read(path)
    parsed = policy.parse(data, path)
    if json:
        print_json({"file": str(path), "sha256": hashlib.sha256(data).hexdigest(), "policy": parsed.model_dump()})
        return
    print(f"{path} is a policy: studies {', '.join(parsed.study.studies)} of {parsed.study.coordinator}")
    allow, deny = parsed.tensors.allow, parsed.tensors.deny
    print(f"{len(allow)} rules allow tensors and {len(deny)} deny them; the rest is denied")
    print("metrics: " + (", ".join(f"{rule.name} ({rule.digits} digits)" for rule in parsed.metrics.allow) or "none"))
    print(f"a model that is this site's alone: {_models(parsed.models)}")
    print("plug-ins that may run here: " + ("; ".join(map(str, parsed.plugins.allow)) or "none"))
    print(f"counts: {parsed.counts.form} at most; a person releases: {parsed.release.updates}")
    for persons, what in (
        (parsed.approval.persons, "a study is in force when {} different people have approved it"),
        (parsed.release.persons, "an update that waits leaves when {} different people have released it"),
        (parsed.policy.persons, "another policy is in force when {} different people have agreed to it"),
    ):
        if persons > 1:
            print(what.format(persons))
    print("quotas: " + ", ".join(f"{most:,} {name.replace('_', ' ')}" for name, most in parsed.quotas))
    say_next("next: `site-agent policy explain STUDY`")


@policy_app.command("show")
def show_policy(
    state: State,
    digest: Annotated[
        str, typer.Argument(metavar="[DIGEST]", help="The text with this SHA-256, or its beginning.")
    ] = "",
    json: Json = False,
) -> None:
    """List each policy that was in force here, with its digest and since when; or print the text of one."""
    import hashlib

    from site_agent import audit
    from wardround.records.ledger.decided import PolicyEntry, ProposalEntry

    here, _ = joined(state)
    policies = [(line.ts, line.entry) for line in audit.lines(here.ledger) if isinstance(line.entry, PolicyEntry)]
    if not digest:
        rows = [
            {
                "since": time, "event": policy.event, "sha256": policy.sha256 or "",
                "by": " and ".join(
                    person.words() for person in (*(policy.also_by or ()), policy.by) if person is not None
                ),
            }
            for time, policy in policies
        ]  # fmt: skip
        if json:
            print_json({"policies": rows})
            return
        for row in rows:
            by = f" by {row['by']}" if row["by"] else ""
            print(f"{row['since'][:16].replace('T', ' ')} UTC  {row['event']:<8} {row['sha256'] or 'no policy'}{by}")
        say_next("next: `site-agent policy show DIGEST`" if rows else "no policy was in force yet")
        return
    waits = [line.entry.policy_sha256 for line in audit.lines(here.ledger) if isinstance(line.entry, ProposalEntry)]
    known = [*waits, *(policy.sha256 for _, policy in policies if policy.sha256)]
    digests = {sha256 for sha256 in known if sha256.startswith(digest)}
    if len(digests) != 1:
        raise UsageProblem(
            f"{len(digests)} policies of this site have a SHA-256 that begins with {digest[:64]!r}",
            hint="`site-agent policy show` lists them",
        )
    (sha256,) = digests
    text = here.policy_text(sha256)
    if text is None or hashlib.sha256(text).hexdigest() != sha256:
        raise BadData(
            f"the text of policy {sha256[:12]}… is {'not kept here' if text is None else 'another than was in force'}",
            hint=f"restore {here.root / 'policies' / sha256}.toml from a backup",
        )
    if json:
        print_json({"sha256": sha256, "text": text.decode(errors="replace")})
        return
    print(text.decode(errors="replace"), end="")


@policy_app.command()
def explain(study: StudyId, state: State, json: Json = False) -> None:
    """Show for each tensor and number of a study whether it may leave, and by which rule. Exits 77 if one may not."""
    from site_agent.gateway.policy import decisions, policy

    here, site = joined(state)
    request = study_request(here, site, study)
    in_force = policy.load(here.policy, study)
    made = decisions.decide(in_force, request)
    size = sum(spec.bytes for spec in request.tensors)
    bytes_today, numbers_today = _sent_today(here)
    made.append(decisions.quotas(in_force, size, 0, bytes_today)[1])
    made.append(decisions.number_quotas(in_force, request.numbers, 0, numbers_today)[1])
    denial = decisions.first_denial(made)
    release = in_force.release.updates
    if json:
        rows = [{"what": decision.what, "allowed": decision.allowed, "rule": decision.rule} for decision in made]
        print_json({"study": study, "allowed": denial is None, "decisions": rows, "release": release})
    else:
        _print_decisions(made)
        if request.records is None:
            say("how many records a metric is taken over is checked when data is approved")
    if denial is not None:
        raise NotPermitted(
            f"the policy blocks study `{study}`: {denial.what}: {denial.rule}",
            hint=f"if it should leave, edit {here.policy}; otherwise do nothing: nothing of this study leaves",
        )
    if not json:
        print(f"all of it may leave; a person releases: {release}")
        say_next(f"next: `site-agent approve {study} --data NAME`")


@policy_app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD")],
    new: Annotated[Path, typer.Argument(metavar="NEW")],
    json: Json = False,
) -> None:
    """Show what policy NEW says otherwise than policy OLD, in sentences."""
    from site_agent.gateway.policy import policy
    from site_agent.gateway.policy import text as policy_text

    changes = policy_text.differences(policy.load(old), policy.load(new))
    if json:
        print_json({"same": not changes, "changes": changes})
        return
    for change in changes:
        print(change)
    if not changes:
        print("the two say the same")


def study_request(here: "SiteState", site: "Site", study: str) -> "StudyRequest":
    """What the study asks: as it was approved, or as this site's trainer describes it."""
    from site_agent import handoff
    from site_agent.gateway.consent import approvals
    from wardround.records.trainer import Describe
    from wardround.signing.certificates import Name

    offer = offered(here, study)
    consent = here.consent(study)
    records = consent.validation_rows if consent is not None else None
    exposure: str | None
    if consent is not None and consent.study_digest == offer.digest:
        exposure, personalized = consent.exposure, consent.personalized
    elif not _may_run(here, offer):
        exposure, personalized = None, ""
    else:
        described = handoff.ask(here.root, Describe(study=offer.document, site=site.site))
        exposure, personalized = described.exposure, described.personalized
    return approvals.study_request(offer, Name(site.federation, "coordinator").uri, records, exposure, personalized)


def _may_run(here: "SiteState", offer: "Offer") -> bool:
    """Whether the trainer may be asked about a study: it has no plug-ins, or the policy in force allows them."""
    from site_agent.gateway.policy import decisions, policy

    if not offer.plugins:
        return True
    if not here.policy.exists():
        return False
    return decisions.first_denial(decisions.plugin_decisions(policy.load(here.policy), offer.plugins)) is None


def _models(table: "ModelTable") -> str:
    if not table.kept_by_coordinator:
        return "stays here"
    return "the coordinator may keep it" + (", and send it to other sites" if table.sent_to_other_sites else "")


def _sent_today(here: "SiteState") -> tuple[int, int]:
    """How many bytes and how many numbers left today (UTC), as the ledger has it."""
    from site_agent import audit
    from site_agent.state.directory import COUNTS
    from wardround.records.ledger.entries import UploadEntry

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entries = [line.entry for line in audit.lines(here.ledger) if line.ts.startswith(today)]
    uploads = [entry for entry in entries if isinstance(entry, UploadEntry)]
    return sum(upload.payload_bytes for upload in uploads), sum(len(upload.metrics) + COUNTS for upload in uploads)


def _print_decisions(decisions: "Sequence[Decision]") -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table("what", "", "rule", box=None, pad_edge=False)
    for decision in decisions:
        table.add_row(decision.what, "may leave" if decision.allowed else "DENIED", decision.rule)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, emoji=False).print(table, markup=False)
