"""Which files nobody needs any more: spools whose round's model is durable, and models that are neither first, newest
nor best. What belongs to an update that has a receipt and no model yet always stays.
"""

import json
from collections.abc import Iterable

import sqlalchemy as sa

from coordinator.storage import tables
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.state import ENDED, Kind
from coordinator.studies.study import Study


def tidy(store: Store, blobs: Blobs, studies: Iterable[Study]) -> None:
    """At a start: remove what the last process left. ``studies``: all of them, or what is another's goes too."""
    with store.read() as session:
        undecided = session.scalars(sa.select(tables.Upload.id).where(tables.Upload.decision == ""))
        spools = {*undecided, *accepted_uploads(studies)}
        models: set[str] = set()
        for row in session.scalars(sa.select(tables.Study)):
            models |= {row.initial, row.newest, json.loads(row.best)["digest"]}
    blobs.tidy(spools, models)


def forget(blobs: Blobs, before: Study, study: Study, studies: Iterable[Study]) -> None:
    """After a step from ``before`` to ``study``: remove what it made needless."""
    over, last = before.state.round, study.state.last
    shown = {upload for one in study.state.summed for upload in one.uploads}  # any member may check that sum
    blobs.drop_spools({upload for one in before.state.summed for upload in one.uploads} - shown)
    if over and (study.state.models > before.state.models or study.state.phase in ENDED):
        blobs.drop_spools(set(over.uploads) - shown)
    if over and last and (last.number, last.attempt) == (over.number, over.attempt):  # it has just ended
        left_out = [answer for answer in last.answers.values() if answer.kind == Kind.LEFT_OUT]
        blobs.drop_spools([answer.upload for answer in left_out])  # a further attempt asks for them anew
        if study.rules.threshold and not last.waits:  # masked for that attempt alone
            blobs.drop_spools(last.uploads)
    if study.state.phase in ENDED and last:
        blobs.drop_spools(set(last.uploads) - shown)
    stale = {before.newest, before.best_digest} - {""}
    blobs.drop_models(stale - {digest for one in studies for digest in one.models})


def accepted_uploads(studies: Iterable[Study]) -> Iterable[str]:
    """The updates that a model is still to be made of, and those whose sum a member may still check."""
    for study in studies:
        for one in (study.state.round, study.state.last):
            if one and one.number > study.state.models and study.state.phase not in ENDED:
                yield from one.uploads
        for one in study.state.summed:
            yield from one.uploads
