"""All of a hospital's data that does not fit a study, and a draft of what would make it fit."""

from pathlib import Path

from fl_algorithms.tasks.base import TakesMapping
from fl_algorithms.tasks.findings import DoesNotFit, Finding
from site_agent.trainer.data import drafting
from site_agent.trainer.data.sources import source as source_of
from site_agent.trainer.rounds import describing
from site_agent.trainer.rounds.installing import Installed, Studies
from wardround.errors import UsageProblem
from wardround.records import trainer as records
from wardround.records.trainer.answers import MOST_FINDINGS, SHOWN_LINES


def examined(state: Path, studies: Studies, request: records.Examine) -> records.Examined:
    """Everything that does not fit; if it is nothing, what the study makes of the data.

    Raises:
        UsageProblem: there is no data of that name.
        BadData: a file cannot be read at all, or the task names its first fault alone; code DECLINED_DATA_INVALID.
            Or as ``describing.checked``.
    """
    try:
        checked = describing.checked(state, studies, as_check(request))
    except DoesNotFit as error:
        return records.Examined(
            findings=[_finding(finding) for finding in error.findings[:MOST_FINDINGS]],
            more=max(0, len(error.findings) - MOST_FINDINGS),
            checked=None,
        )
    return records.Examined(findings=[], more=0, checked=checked)


def as_check(request: records.Examine) -> records.Check:
    """The same question, whose answer is an error where the data does not fit."""
    return records.Check(study=request.study, site=request.site, data=request.data)


def drafted(state: Path, studies: Studies, request: records.DraftMapping) -> records.Drafted:
    """Write a mapping of the data's table, for a person to edit.

    Raises:
        UsageProblem: there is no data of that name, or the study takes no mapping.
        BadData: the table cannot be read.
        CannotWrite, NotPermitted: ``out`` does not take it; see ``wardround.local.outputs``.
    """
    source = source_of(state, request.data)
    study = studies.at(request.study, request.site, source.network)
    look = f"site-agent data check {request.data} --study {study.name}"
    return drafting.write(
        state, request.data, Path(request.out), f"study `{study.name}`'s", look,
        lambda: _drafting(study).draft_mapping(source.source),
    )  # fmt: skip


def _drafting(study: Installed) -> TakesMapping:
    if not isinstance(study.task, TakesMapping):
        raise UsageProblem(f"study `{study.name}` reads no table of columns, so there is nothing to map")
    return study.task


def _finding(finding: Finding) -> records.Finding:
    return records.Finding(
        file=finding.path.name, column=finding.column, here=finding.here, what=finding.what, rows=finding.rows,
        lines=list(finding.lines[:SHOWN_LINES]), hint=finding.hint,
    )  # fmt: skip
