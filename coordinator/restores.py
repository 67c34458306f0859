"""What follows when a backup was put back: the journal's line, a second person where one is needed, and new revisions.

Until all of that is done, the restored state directory serves nothing: whoever opens it is refused, and giving the
command again goes on. The first person's proposal lies in the journal that was restored.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator import backups
from coordinator.administration import Administration
from coordinator.answers import StudyRenewed
from coordinator.context import Context, leading_store, raise_fatal
from coordinator.creation import RUNS
from coordinator.journal import Journal, Waits
from coordinator.journal_records import Known, Proposed
from coordinator.second_person import Terms, refuse_nobody
from coordinator.state_directory import State
from coordinator.storage.tables import utc_text
from wardround.errors import UsageProblem
from wardround.local import directory
from wardround.local.durable import StateLock
from wardround.local.person import Person

ACT = "restore"


def is_unfinished(state: State) -> bool:
    """Whether there is a restored state directory that waits for a second person, or was cut off before its end."""
    if not directory.exists(state.config_file):
        return False
    with _journal(state) as journal:
        return journal.unfinished_restore() is not None


def refuse_unfit(backup: Path, state: State, by: Person) -> None:
    """Raises NotPermitted: the backup's configuration wants two people, and nobody can tell which person ``by`` is."""
    if Terms.of(backups.settings(backup).second_person).need(ACT):
        refuse_nobody(by, ACT, _owner(state))


def finish(backup: Path, state: State, contents: backups.Contents, by: Person) -> list[StudyRenewed] | Proposed:
    """Write down that a backup was put back, and begin a new revision of each study that went on.

    Returns:
        The new revisions. Or, where a second person must give the command too, what waits for that.

    Raises:
        UsageProblem: this person is the one who put it back; or that was another backup.
        NotPermitted: it needs two people, and nobody can tell which person this is.
    """
    about: dict[str, Known] = {
        "backup": utc_text(contents.made_s), "files": len(contents.files),
        "list_sha256": hashlib.sha256((backup / backups.LIST).read_bytes()).hexdigest(),
    }  # fmt: skip
    with _journal(state) as journal:
        unfinished = journal.unfinished_restore()
        if unfinished is not None and unfinished["list_sha256"] != about["list_sha256"]:
            raise UsageProblem(
                f"{state.root} was made of another backup, of {unfinished['backup']}",
                hint="give that one, or another --state",
            )
        terms = journal.keep_terms(by, Terms.of(state.config().second_person))
        begun = journal.begin(by, ACT, about, terms if terms.need(ACT) else None)
    if isinstance(begun, Waits):
        refuse_nobody(by, ACT, _owner(state))
        return begun.answer
    renewed = _renewed(state, by)
    with _journal(state) as journal:
        journal.ended(by, ACT, begun)
    return renewed


def going_on(context: Context) -> list[str]:
    """The studies of a state directory that have begun and not ended."""
    return [study.name for study in context.engine.studies() if study.state.phase in RUNS]


@contextmanager
def opened(state: State) -> Iterator[Context]:
    """A restored state directory, before its restore is finished."""
    with StateLock(state.root, "coordinator restore"):
        context = Context(
            state, wall_clock=time.time, monotonic=time.monotonic, fatal=raise_fatal, finishes_restore=True
        )
        try:
            yield context
        finally:
            context.close()


def _renewed(state: State, by: Person) -> list[StudyRenewed]:
    with opened(state) as context:
        administration = Administration(context)
        return [administration.renew_restored(study, by) for study in going_on(context)]


@contextmanager
def _journal(state: State) -> Iterator[Journal]:
    with StateLock(state.root, "coordinator restore"):
        store = leading_store(state)
        try:
            yield Journal(store, time.time)
        finally:
            store.close()


def _owner(state: State) -> int:
    """The uid of the account that a coordinator here runs as."""
    place = state.root
    while not place.exists():
        place = place.parent
    return place.stat().st_uid
