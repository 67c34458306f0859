"""The studies: which wait for a person, and which cannot go on as they were approved; and whether there is a policy."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from site_agent.audit.policies import agreed
from site_agent.gateway.consent.rows import StudyRow
from site_agent.gateway.policy import policy
from wardround.checkup import Finding, of_error, ok, problem, warning
from wardround.errors import NeedsPerson, WardroundError

OVER = ("finished", "stopped", "failed")


def studies(rows: Sequence[StudyRow]) -> list[Finding]:
    """A line for each study that goes on or waits."""
    findings = [finding for row in rows if row.state not in OVER for finding in _study(row)]
    return findings or [ok("studies", "none is offered, or all are over")]


def _study(row: StudyRow) -> list[Finding]:
    about = f"study {row.id}"
    again = f"`site-agent preview {row.id}`, then `site-agent approve {row.id} --data {row.data or 'NAME'}`"
    match row.state:
        case "changed":
            return [problem(about, change, again) for change in row.changes or ("it is not what was approved",)]
        case "offered" | "withdrawn":
            return [warning(about, f"{row.state}: it waits for a person here to approve it", again)]
        case "held":
            return [
                warning(
                    about,
                    f"round {row.round} waits for a person to release it",
                    f"`site-agent release {row.id} --round {row.round}`",
                )
            ]
        case "paused":
            return [warning(about, "the coordinator has paused it", "ask its operator: `coordinator study report`")]
    return [ok(about, f"{row.state}, round {min(row.round, row.rounds)} of {row.rounds}")]


def in_force(path: Path, ledger: Path) -> Finding:
    """Whether there is a policy, and it is one, and the one to which as many people agreed as had to."""
    try:
        found, last = policy.load(path), agreed(ledger)
        if last is not None and hashlib.sha256(policy.read(path)).hexdigest() != last.sha256:
            return problem(
                "policy",
                f"{path} was changed by hand, and {last.persons} different people must agree to each change: "
                "nothing leaves",
                f"each of them: `site-agent policy apply {path}`; or put back what they agreed to: "
                f"`site-agent policy show {last.sha256[:12]}`",
            )
    except NeedsPerson as error:
        return warning("policy", error.message, error.hint)
    except WardroundError as error:
        return of_error("policy", error)
    return ok("policy", f"studies {', '.join(found.study.studies)} of {found.study.coordinator}")
