"""Mappings of a hospital's table, drafted for a person to edit. Reads patients: for the trainer alone. No torch."""

from collections.abc import Callable
from pathlib import Path

from fl_algorithms.tasks.source import Draft
from fl_algorithms.tasks.tables.draft import draft
from fl_algorithms.tasks.tables.summary import blanks_of, features_of
from site_agent.trainer.data.sources import protected
from site_agent.trainer.data.summaries import table_of
from wardround.local import outputs
from wardround.records.summaries.request import SummaryRequest
from wardround.records.trainer import Drafted, DraftSummaryMapping

FILE_MODE = 0o640  # a person edits it and the trainer's user reads it, through the group
HEAD = """# How the table of data `{data}` becomes {what}: drafted by `site-agent data map`, for you to edit.
# `{look}` says what is still open.
# It has codes of your table in it: keep it in the hospital. What each key does: docs/tables.md.

"""


def for_request(state: Path, request: DraftSummaryMapping) -> Drafted:
    """Write a mapping of the data's table for a summary request.

    Raises:
        UsageProblem: there is no data of that name, or it is no table.
        BadData: the table cannot be read, or the request is none.
        CannotWrite, NotPermitted: ``out`` does not take it; see ``wardround.local.outputs``.
    """
    asked = SummaryRequest.from_document(request.request)
    named = table_of(state, request.data)
    here = {asked.label: named.label} if asked.label else {}

    def make() -> Draft:
        path, features, blanks = named.paths["table"], features_of(asked), blanks_of(asked)
        return draft(path, features, blanks, {}, None, here=here, open_ended=True)

    look = f"site-agent data summary {request.data} --request {asked.name}"
    return write(state, request.data, Path(request.out), f"summary request `{asked.name}`'s", look, make)


def write(state: Path, data: str, out: Path, what: str, look: str, make: Callable[[], Draft]) -> Drafted:
    """Write what ``make`` drafts to ``out``, which must be new.

    Args:
        what: whose the table becomes, for people.
        look: the command that says what is still open.

    Raises:
        CannotWrite, NotPermitted: ``out`` does not take it, which is looked at before a row is read.
    """
    outputs.file(out, force=False, keep=protected(state))
    made = make()
    text = HEAD.format(data=data, what=what, look=look) + made.text
    outputs.write(out, text.encode(), force=False, keep=protected(state), mode=FILE_MODE)
    return Drafted(out=str(out), columns=made.columns, as_they_are=made.as_they_are, open=made.open)
