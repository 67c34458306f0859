"""``coordinator backup`` and ``restore``: a copy of the state while it serves, and the way back for all sites."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator, waits
from coordinator.cli.options import Blobs, Database, DatabasePassword, State, password_from
from wardround.cli import say

if TYPE_CHECKING:
    from coordinator.answers import StudyRenewed

SNAPSHOT_S = 600  # it copies the database, and nothing else


def backup(
    state: State,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The new folder to make, on another disk.")],
) -> None:
    """Copy the whole state to a new folder, while the service runs or not. It holds the keys: encrypt the copy."""
    from coordinator.answers import SnapshotMade
    from coordinator.requests import MakeSnapshot

    refuse_no_coordinator(state)
    from coordinator import backups
    from coordinator.state_directory import State as Place
    from coordinator.storage.tables import utc_text

    place, target = Place(state), out.resolve()
    backups.refuse_unfit(place, target)
    contents = backups.make(place, ask(state, MakeSnapshot(), SnapshotMade, timeout_s=SNAPSHOT_S), target)
    say(f"{len(contents.files)} files, as they were at {utc_text(contents.made_s)}, written to {target}")
    say("it holds the federation's keys: encrypt it, and keep it where nobody else reads")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="What `coordinator backup` made.")],
    state: State,
    database: Database = "",
    database_password: DatabasePassword = None,
    blobs: Blobs = "",
) -> None:
    """Make a state directory of a backup, and a new revision of each study that went on. Give a new --state."""
    from coordinator import backups, restores
    from coordinator.journal_records import Proposed
    from coordinator.state_directory import State as Place
    from coordinator.state_directory import storage_from
    from coordinator.storage.tables import utc_text
    from wardround.local import directory
    from wardround.local.person import who

    directory.refuse_other(state, "coordinator")
    place, by = Place(state), who()
    if restores.is_unfinished(place):
        contents = backups.whole_contents(folder)
    else:
        password = password_from(database_password)
        restores.refuse_unfit(folder, place, by)
        contents = backups.put_back(folder, place, storage_from(database, blobs), password)
    made = restores.finish(folder, place, contents, by)
    if isinstance(made, Proposed):
        raise waits(made)
    say(f"restored what was backed up at {utc_text(contents.made_s)}, {len(contents.files)} files, all whole")
    for study in made:
        _say_renewed(study)
    say("sites that were invited or revoked since then: invite or revoke them again")
    say("next: `coordinator serve`")
    for study in made:
        name = study.id
        say(f"then: each site runs `site-agent approve {name} --data NAME`, and `coordinator study start {name}`")


def renew_one(state: Path, study: str) -> None:
    """Begin a new revision of one study, and say what it is."""
    from coordinator.answers import StudyRenewed
    from coordinator.requests import RenewStudy

    _say_renewed(ask(state, RenewStudy(study=study), StudyRenewed))


def _say_renewed(made: "StudyRenewed") -> None:
    begins = f"the model of round {made.model}" if made.model else "its first model"
    say(f"Study `{made.id}`, revision {made.revision}: begins from {begins}, {made.rounds} rounds")
    print(f"{made.id} {made.study_digest}", flush=True)
